"""Defects that `scripts/planted.py` inserts, each with the tests that must detect it.

Each breaks a promise of docs/explanation/guarantees.md; `make mutants` inserts others by itself.

A plant replaces exact text in one module. It is an error if the text does not occur exactly once: update the plant when
you change that code.
"""

from typing import NamedTuple

STORE, DIALECTS = "django_faktory/store", "django_faktory/store/dialects"
SERVER_TESTS = "tests/server"
CONTRACT = "tests/contract/test_orm.py"
OUTSIDE = "tests/outside/test_outside.py"


class Plant(NamedTuple):
    """A replacement of `old` by `new` in `path`; `tests` are pytest's arguments, run on `database`."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    database: str = "sqlite"


PLANTS = (
    Plant(
        "the end of a job does not check the holder, in PostgreSQL's statement",
        f"{DIALECTS}/postgresql/functions/end.sql",
        "    WHERE j.is_plain AND j.state = 'working' AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid)\n"
        "      AND (r.attempt IS NULL OR r.attempt = j.attempt)),",
        "    WHERE j.is_plain AND j.state = 'working'),",
        (CONTRACT, "-k", "late_report or ack_returns_whether_each_report_had_an_effect"),
        "postgresql",
    ),
    Plant(
        "the end of a job does not check the holder, on the other databases",
        f"{STORE}/jobs/endings.py",
        "            if job and ack.jid not in ended and holds(ack.wid, ack.attempt, job.wid, job.attempt):",
        "            if job and ack.jid not in ended:",
        (CONTRACT, "-k", "late_report or ack_returns_whether_each_report_had_an_effect"),
    ),
    Plant(
        "a COMMIT that is sent with an end is executed without the end",
        f"{DIALECTS}/postgresql/functions/end.sql",
        "    IF is_last AND ended < reported THEN",
        "    IF FALSE THEN",
        (
            "tests/tasks/test_atomic_commit.py",
            "-k",
            "lost_the_job or earlier_attempt or a_job_that_gained_a_batch_while_running_commits_nothing",
        ),
        "postgresql",
    ),
    Plant(
        "a transaction that its task marked for rollback counts as a success",
        f"{STORE}/jobs/acknowledgements.py",
        "    connection.validate_no_broken_transaction()\n",
        "",
        ("tests/tasks/test_atomic_commit.py", "-k", "a_transaction_marked_for_rollback_fails_the_attempt"),
        "postgresql",
    ),
    Plant(
        "a lock handoff does not check the holder",
        f"{DIALECTS}/postgresql/functions/end.sql",
        "    WHERE j.state = 'working' AND (holder = '' OR j.wid = '' OR j.wid = holder)\n"
        "      AND (held_attempt IS NULL OR j.attempt = held_attempt)\n",
        "    WHERE j.state = 'working'\n",
        ("tests/store/locks/test_handing_over.py", "-k", "a_late_ack_does_not_hand_the_lock_over"),
        "postgresql",
    ),
    Plant(
        "PUSH is answered before the commit",
        "django_faktory/server/handlers/jobs.py",
        "    server.push([_with_sender(connection, command.job)], answer)\n    return None",
        "    server.push([_with_sender(connection, command.job)], lambda _: None)\n    return resp.OK",
        ("tests/server/test_life.py", "-k", "commands_fail_while_the_database_is_unavailable_and_work_afterwards"),
    ),
    Plant(
        "ACK is answered before the commit",
        "django_faktory/server/handlers/jobs.py",
        "attempt=server.deliveries.attempt_of(jid, wid)), _on_job_ended(server, connection, jid)\n    )\n    return None",
        "attempt=server.deliveries.attempt_of(jid, wid)), lambda _: None\n    )\n    return resp.OK",
        ("tests/server/test_life.py", "-k", "commands_fail_while_the_database_is_unavailable_and_work_afterwards"),
    ),
    Plant(
        "a report of failure is accepted from any worker",
        f"{STORE}/jobs/endings.py",
        "    return job.state == State.WORKING and holds(failure.wid, failure.attempt, job.wid, job.attempt)",
        "    return job.state == State.WORKING",
        (CONTRACT, "-k", "late_report"),
    ),
    Plant(
        "a step commits although another worker has its job now",
        f"{DIALECTS}/postgresql/functions/steps.sql",
        "  IF is_held IS NOT TRUE THEN",
        "  IF FALSE THEN",
        (CONTRACT, "-k", "a_step_of_an_ended_reservation"),
        "postgresql",
    ),
    Plant(
        "a step is recorded in another transaction than its block",
        "django_faktory/tasks/steps.py",
        "                self._broker.record_step(self._job, record)\n",
        "            with self._broker.atomic():\n                self._broker.record_step(self._job, record)\n",
        ("tests/tasks/test_steps.py", "-k", "a_worker_that_lost_the_job_commits_nothing"),
    ),
    Plant(
        "losses count on although a run has committed a step",
        f"{STORE}/jobs/endings.py",
        "            if job.pk in progressed:\n                _count_anew(job)\n            job.losses += 1\n",
        "            job.losses += 1\n",
        ("tests/store/jobs/test_progress_counts.py", "-k", "any_number_of_losses"),
    ),
    Plant(
        "a job that ends keeps its lock",
        f"{STORE}/jobs/endings.py",
        "            locks.release(self._connection, self._holders)\n",
        "",
        ("tests/store/locks/test_exclusion.py", "-k", "unblocks_the_next_job_of_the_key"),
    ),
    Plant(
        "the third lost worker does not make a job dead",
        "django_faktory/core/lifecycle.py",
        "    return State.DEAD if losses >= MAX_LOSSES else State.ENQUEUED",
        "    return State.DEAD if losses > MAX_LOSSES else State.ENQUEUED",
        ("tests/core/test_lifecycle.py", "-k", "a_job_is_dead_after_losing_its_worker_three_times"),
    ),
    Plant(
        "an expired reservation is never released",
        "django_faktory/runtime/maintenance.py",
        '                "reservations", ON_DEMAND, self._reap_reservations, lambda found: found.has_expired_reservations\n',
        '                "reservations", ON_DEMAND, lambda: None\n',
        (
            "tests/runtime/test_maintenance.py",
            "-k",
            "one_run_executes_every_maintenance_step or overdue_work_found_by_a_look_is_handled_in_the_same_round",
        ),
    ),
    Plant(
        "a job whose client has disconnected is not released",
        "django_faktory/server/connection.py",
        "            self.server.release(unsent)\n",
        "            pass\n",
        (
            "tests/server/test_going_away.py",
            "-k",
            "a_job_is_released_if_its_reply_cannot_be_written or a_job_is_released_if_only_part_of_its_reply_was_sent",
        ),
    ),
    Plant(
        "a new limiter is open before running jobs are counted",
        f"{STORE}/limits/limiters.py",
        "    is_paused = limit.paused_at is not None or limit.concurrency is not None\n",
        "    is_paused = limit.paused_at is not None\n",
        ("tests/store/limits/test_exact.py", "-k", "sweep_opens_a_limiter_left_shut_by_a_crash_before_counting"),
    ),
    Plant(
        "callbacks come before COMMIT",
        "django_faktory/core/batch_rules.py",
        "    if batch.is_committed:\n        _fire_callbacks(batch, steps)",
        "    if not batch.is_expired:\n        _fire_callbacks(batch, steps)",
        ("tests/core/test_batch_rules.py", "-k", "an_uncommitted_batch_takes_no_step"),
    ),
    Plant(
        "a claim takes jobs of a concurrent claim, on SQLite",
        f"{STORE}/jobs/claims.py",
        "            atomic=not (dialect.one_statement and is_joined),\n        )\n\n    def acquire_locks_and_permits",
        "            atomic=False,\n        )\n\n    def acquire_locks_and_permits",
        ("tests/store/jobs/test_claims.py", "-k", "six_concurrent_workers_claim_each_of_200_jobs_exactly_once"),
    ),
    Plant(
        "a claim takes jobs of a concurrent claim, on PostgreSQL",
        f"{DIALECTS}/postgresql/functions/claim.sql",
        "\n          ORDER BY sort_priority, enqueued_at, id LIMIT slot.room FOR UPDATE SKIP LOCKED) AS others",
        "\n          ORDER BY sort_priority, enqueued_at, id LIMIT slot.room) AS others",
        ("tests/store/jobs/test_claims.py", "-k", "six_concurrent_workers_claim_each_of_200_jobs_exactly_once"),
        "postgresql",
    ),
    Plant(
        "a claim does not look for a push that commits late",
        f"{DIALECTS}/bounds.py",
        "late = [xid for xid in xids if xid < mark.xid]",
        "late = []",
        ("tests/store/jobs/test_bounds.py", "-k", "commits_late"),
        "postgresql",
    ),
    Plant(
        "a bound passes jobs that another session has locked",
        f"{DIALECTS}/postgresql/functions/claim.sql",
        "ORDER BY enqueued_at, id LIMIT 1)",
        "ORDER BY enqueued_at, id LIMIT 1 FOR UPDATE SKIP LOCKED)",
        ("tests/store/jobs/test_bounds.py", "-k", "rolled_back_are_claimed"),
        "postgresql",
    ),
    Plant(
        "a released job is not marked as returned",
        f"{STORE}/jobs/endings.py",
        '    "is_returned": True,\n',
        "",
        ("tests/store/jobs/test_bounds.py", "-k", "released"),
        "postgresql",
    ),
    Plant(
        "an atomic task commits although another worker has its job now",
        "django_faktory/worker/execution.py",
        "        if broker.ack_last(report, job):",
        "        if broker.ack_last(report, job) in (True, False):",
        ("tests/tasks/test_atomic.py", "-k", "lost_the_job"),
    ),
    Plant(
        "a job that a crashed server had prefetched fails",
        f"{STORE}/jobs/failures.py",
        "        unconfirmed = [job for job in rows if prefetch.is_unconfirmed(job)]",
        "        unconfirmed: list[Job] = []",
        ("tests/store/jobs/test_prefetch.py", "-k", "crashed_server"),
        "postgresql",
    ),
    Plant(
        "a heartbeat extends no reservation",
        "django_faktory/worker/heartbeat.py",
        "rss_kb=rss_kb(), held=still_held)",
        "rss_kb=rss_kb())",
        ("tests/runtime/processes/test_leases.py", "-k", "much_longer"),
    ),
    Plant(
        "a heartbeat extends a job that the worker has as another attempt",
        f"{DIALECTS}/portable.py",
        "            row_ids = [row_id for row_id, jid, *holder in cursor.fetchall() if holders[jid] == tuple(holder)]\n"
        "            if row_ids and self.skip_lock:",
        "            row_ids = [row_id for row_id, *_ in cursor.fetchall()]\n            if row_ids and self.skip_lock:",
        ("tests/store/jobs/test_leases.py", "-k", "does_not_name"),
    ),
    Plant(
        "a node that has not listened yet ends reservations of living workers",
        "django_faktory/runtime/maintenance.py",
        "skip_extendable=not may_judge)",
        "skip_extendable=not may_judge and False)",
        ("tests/store/jobs/test_leases.py", "-k", "maintenance_listens_for_beats_before_it_reaps"),
    ),
    Plant(
        "a claim for a client is reserved in full before it is delivered",
        "django_faktory/server/handlers/jobs.py",
        "FetchRequest(queues=command.queues, wid=wid, lease=Lease.DELIVERY)",
        "FetchRequest(queues=command.queues, wid=wid)",
        ("tests/runtime/processes/test_leases.py", "-k", "a_claimed_but_undelivered_job_becomes_available_again"),
        "postgresql",
    ),
    Plant(
        "a delivery is not confirmed",
        "django_faktory/server/handlers/jobs.py",
        "                server.deliveries.add(result)\n",
        "                pass\n",
        ("tests/server/test_deliveries.py", "-k", "a_long_job_is_confirmed_and_gets_its_full_reservation"),
    ),
    Plant(
        "the lock of a client's job expires before its BEAT is due",
        f"{STORE}/jobs/claims.py",
        "            lock_lease_s = max(store.lock_lease_s, store.worker_timeout_s)\n",
        "            lock_lease_s = store.lock_lease_s\n",
        ("tests/store/jobs/test_leases.py", "-k", "the_lock_lease_of_a_client_job_equals_the_worker_timeout"),
    ),
    Plant(
        "a job with a priority does not return prefetched jobs",
        "django_faktory/server/prefetch_buffer.py",
        "            self._all_paused_until = max(self._all_paused_until, ended)\n        self.clear()\n",
        "            self._all_paused_until = max(self._all_paused_until, ended)\n",
        ("tests/server/test_prefetch_buffer.py", "-k", "a_pushed_priority_job_is_delivered_before_prefetched_jobs"),
        "postgresql",
    ),
    Plant(
        "a worker that stops reports unfinished jobs as failed",
        "django_faktory/brokers/orm.py",
        "    interrupt = failures.interrupt\n",
        "    interrupt = Broker.interrupt\n",
        ("tests/worker/test_worker.py", "-k", "a_job_past_the_shutdown_timeout_is_requeued_without_a_failure"),
    ),
    Plant(
        "a job is given back before its task was interrupted",
        "django_faktory/worker/worker.py",
        "            self._thread_pool.interrupt(self._interruption_reason())",
        "            pass",
        ("tests/worker/test_worker.py", "-k", "an_interrupted_task_ends_before_its_job_is_released"),
    ),
    Plant(
        "an interrupted run counts as a failed attempt in results",
        "django_faktory/tasks/results.py",
        "        return self.kind not in (INTERRUPTED, LOGGED)",
        "        return self.kind != LOGGED",
        ("tests/store/jobs/test_interruptions.py", "-k", "attempt_is_counted"),
    ),
    Plant(
        "an interruption takes a job from another worker",
        f"{STORE}/jobs/failures.py",
        "held_jobs = [job for job in rows.select_for_update() if _is_sender(chunk[job.jid], job)]",
        "held_jobs = list(rows.select_for_update())",
        ("tests/store/jobs/test_interruptions.py", "-k", "only_the_worker"),
    ),
    Plant(
        "a batch that was opened again fires its callbacks",
        "django_faktory/core/batch_rules.py",
        "    if batch.is_committed and batch.is_reopened:\n        return steps\n",
        "",
        (
            "tests/core/test_batch_rules.py",
            f"{SERVER_TESTS}/handlers/test_batches.py",
            "-k",
            "a_reopened_batch_takes_no_step_until_it_is_closed or no_callback_is_enqueued_between_batch_open_and_commit",
        ),
    ),
    Plant(
        "a heartbeat extends no reservation, seen from the outside",
        "django_faktory/worker/heartbeat.py",
        "rss_kb=rss_kb(), held=still_held)",
        "rss_kb=rss_kb())",
        (OUTSIDE, "-k", "a_job_longer_than_its_reservation_runs_once_on_a_living_worker"),
        "postgresql",
    ),
    Plant(
        "permits are given back twice when a lock is lost, seen from the outside",
        f"{STORE}/jobs/acquire.py",
        "    tokens, acquired = limiters.run_with_limiters(store, verb)\n",
        "    tokens, acquired = limiters.run_with_limiters(store, verb)\n"
        "    if len(tokens) < len(keyed):\n"
        "        from ..transactions import run\n\n"
        '        held = store.jobs.filter(state="working", permits__gt="").values_list("permits", flat=True)\n'
        "        run(store.alias, lambda connection: limiters.release(connection, list(held[:1])))\n",
        (OUTSIDE, "-k", "a_limit_is_enforced_while_locks_reject_jobs"),
        "postgresql",
    ),
)
