"""Fill the table of jobs like a large installation: half of them finished, half with an expiry.

The database itself generates the rows.
"""

from django.db import connection

COLUMNS = (
    "jid, jobtype, queue, state, sort_priority, payload, retry, reserve_for, backtrace, result_ttl, created_at, run_at,"
    " enqueued_at, started_at, reserved_until, finished_at, purge_at, failed_at, wid, attempt, failures, losses,"
    " errtype, failure, history, result, expires_at, lock_key, lock_token, limiter, permits, bid, limit_key,"
    " unique_until_start, has_run, counts_failed"
)

# Of a hundred rows: 46 succeeded, 2 dead, 1 discarded, 1 expired; 30 enqueued, 10 scheduled, 3 retries, 7 blocked. Of
# all rows, one in two thousand is working. Live rows lie among finished ones: the worst case for reading pages.
_STATES = """
CASE WHEN n % 2000 = 50 THEN 'working' WHEN p < 46 THEN 'succeeded' WHEN p < 48 THEN 'dead' WHEN p < 49 THEN 'discarded'
  WHEN p < 50 THEN 'expired' WHEN p < 80 THEN 'enqueued' WHEN p < 90 THEN 'scheduled' WHEN p < 93 THEN 'retries'
  ELSE 'blocked' END"""

_FILL = f"""
INSERT INTO django_faktory_job ({COLUMNS})
SELECT 'big-' || n, 'shop.tasks.task' || n % 7, 'queue' || n % 20, state, n % 3 - 1,
  '{{"jid":"big-' || n || '","jobtype":"shop.tasks.task' || n % 7 || '","args":[' || n || ',"somebody@example.org"]}}',
  25, 1800, 0, CASE WHEN n % 2 = 0 THEN 86400 END, now - age,
  CASE WHEN state IN ('scheduled', 'retries') THEN now + CASE WHEN n <= dues * 100 THEN -age ELSE age END END,
  CASE WHEN state NOT IN ('scheduled', 'retries') THEN now - age END,
  CASE WHEN state = 'working' OR is_over THEN now - age END,
  CASE WHEN state = 'working' THEN now + CASE WHEN n <= dues * 100 THEN -age ELSE age END END,
  CASE WHEN is_over THEN now - age END,
  CASE WHEN is_over THEN now + CASE WHEN n <= dues * 100 THEN -age ELSE age END END,
  CASE WHEN state IN ('retries', 'dead') THEN now - age END,
  CASE WHEN state = 'working' OR is_over THEN 'wid' || n / 1000 % 200 ELSE '' END,
  CASE WHEN state = 'working' OR is_over THEN 1 ELSE 0 END, 0, 0,
  CASE WHEN state = 'dead' THEN 'ValueError' ELSE '' END, '', '', CASE WHEN state = 'succeeded' THEN '"done"' END,
  CASE WHEN n % 2 = 0 THEN now + CASE WHEN is_over OR n <= dues * 50 THEN -age ELSE age END END,
  CASE WHEN state = 'blocked' THEN 'key' || n / 7 % 1000 END, NULL, NULL, NULL,
  CASE WHEN n % 10 = 1 THEN 'bid' || n / 2000 END, NULL, FALSE, FALSE, FALSE
FROM (
  SELECT n, p, state, state IN ('succeeded', 'dead', 'discarded', 'expired') AS is_over, now, dues,
    make_interval(secs => 60 + (total - n) * 80000.0 / total + (n * 7919::bigint) %% 1000 / 1e3) AS age
  FROM (
    SELECT n, p, {_STATES} AS state, STATEMENT_TIMESTAMP() AS now, %(dues)s::int AS dues, %(total)s::int AS total
    FROM (SELECT n, n %% 100 AS p FROM generate_series(%(first)s::int, %(last)s::int) AS n) AS numbers
  ) AS chosen
) AS rows""".replace(" % ", " %% ")

_ID = "nextval(pg_get_serial_sequence('django_faktory_job', 'id'))"
_ENDED = "state IN ('succeeded', 'discarded', 'expired')"

_AROUND = (
    "INSERT INTO django_faktory_queue (name) SELECT 'queue' || n FROM generate_series(0, 19) AS n",
    """INSERT INTO django_faktory_workerprocess (wid, hostname, pid, labels, state, rss_kb, beat_at)
    SELECT 'wid' || n, 'host', n, '[]', 'running', 0, now() + interval '1 day' FROM generate_series(0, 199) AS n""",
    """INSERT INTO django_faktory_joblock (lock_key, jid, attempt, wid, lease, acquired_at, expires_at, is_lapsed)
    SELECT 'key' || n, 'holder' || n, 1, 'wid' || n % 200, interval '1 day', now(), now() + interval '1 day', FALSE
    FROM generate_series(0, 999) AS n""",
    """INSERT INTO django_faktory_batch (bid, depth, children, open_children, unsucceeded_children, description, total,
      pending, unrun, committed_at)
    SELECT DISTINCT bid, 0, 0, 0, 0, 'big', 200, 200, 200, now() FROM django_faktory_job WHERE bid IS NOT NULL""",
)


def fill(first, last, *, total, dues=60):
    """Write the jobs from `first` to `last` of `total`, the oldest first, as if they had been pushed during one day.

    More rows are due than one step of maintenance handles: 10 * `dues` scheduled jobs, as many expired ones, and
    50 * `dues` to purge.
    """
    # Those that have ended for good are in a table of their own.
    ended = _FILL.replace(
        f"django_faktory_job ({COLUMNS})\nSELECT",
        f"django_faktory_history (id, day, {COLUMNS})\nSELECT {_ID}, '1970-01-01',",
    )
    with connection.cursor() as cursor:
        for text in (f"{_FILL} WHERE NOT {_ENDED}", f"{ended} WHERE {_ENDED}"):
            cursor.execute(text, {"first": first, "last": last, "total": total, "dues": dues})


def fill_around():
    """Write the rows that belong to the jobs: queues, workers, locks and batches."""
    with connection.cursor() as cursor:
        for statement in _AROUND:
            cursor.execute(statement)
