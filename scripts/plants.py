"""The defects that `scripts/planted.py` plants, each an exact replacement of text in one module, and who must notice.

A plant whose text is not there exactly once is an error: mend it together with the code it was for.
"""

from typing import NamedTuple

STORE, DIALECTS = "django_faktory/store", "django_faktory/store/dialects"
CONTRACT = "tests/contract/test_orm.py"


class Plant(NamedTuple):
    """`old` becomes `new` in `path`; `tests` are pytest's arguments, run on `database`."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    database: str = "sqlite"


PLANTS = (
    Plant(
        "the end of a job asks for no holder, in PostgreSQL's statement",
        f"{DIALECTS}/postgresql_verbs.py",
        """  WHERE j.state = 'working' AND (r.wid = '' OR j.wid = '' OR j.wid = r.wid)
    AND (r.attempt IS NULL OR r.attempt = j.attempt)),
gone AS (""",
        """  WHERE j.state = 'working'),
gone AS (""",
        (CONTRACT, "-k", "late_report or answers_of_ack"),
        "postgresql",
    ),
    Plant(
        "the end of a job asks for no holder, on the other databases",
        f"{DIALECTS}/portable.py",
        "                if holder and ack.jid not in held and holds(ack.wid, ack.attempt, holder.wid, holder.attempt):",
        "                if holder and ack.jid not in held:",
        (CONTRACT, "-k", "late_report or answers_of_ack"),
    ),
    Plant(
        "the COMMIT that comes along with an end comes to pass without it",
        f"{DIALECTS}/postgresql_verbs.py",
        "THEN '1' ELSE '{NOT_HELD}' END)::int, now",
        "THEN '1' ELSE '0' END)::int, now",
        ("tests/tasks/test_atomic_commit.py", "-k", "lost_the_job or earlier_attempt or concern_others"),
        "postgresql",
    ),
    Plant(
        "an end with its COMMIT leaves the batch of its job waiting",
        "django_faktory/payloads.py",
        "        return self.is_batchless and self.lock_token is None and self.passes is None",
        "        return self.lock_token is None and self.passes is None",
        ("tests/tasks/test_atomic_commit.py", "-k", "members_and_callbacks"),
        "postgresql",
    ),
    Plant(
        "a transaction that its task gave up passes for a success",
        f"{STORE}/jobs.py",
        "    connection.validate_no_broken_transaction()\n",
        "",
        ("tests/tasks/test_atomic_commit.py", "-k", "gave_up"),
        "postgresql",
    ),
    Plant(
        "a relay asks for no holder",
        f"{DIALECTS}/postgresql_relay.py",
        "  WHERE j.state = 'working' AND ($4 = '' OR j.wid = '' OR j.wid = $4) AND ($5 IS NULL OR j.attempt = $5)",
        "  WHERE j.state = 'working'",
        ("tests/locks/test_handing_over.py", "-k", "comes_too_late"),
        "postgresql",
    ),
    Plant(
        "a relay passes over what is ready before the next of the key",
        f"{DIALECTS}/postgresql_relay.py",
        "        AND (q.place, ready.weight",
        "        AND FALSE AND (q.place, ready.weight",
        ("tests/locks/test_handing_over.py", "-k", "comes_before_the_next"),
        "postgresql",
    ),
    Plant(
        "PUSH is answered before the commit",
        "django_faktory/server/verbs.py",
        "    server.push([_sent_by(connection, command.job)], answer)\n    return None",
        "    server.push([_sent_by(connection, command.job)], lambda _: None)\n    return resp.OK",
        ("tests/server/test_life.py", "-k", "database_is_away"),
    ),
    Plant(
        "ACK is answered before the commit",
        "django_faktory/server/verbs.py",
        "attempt=server.handed_out.attempt_of(jid, wid)), _ended(server, connection, jid))\n    return None",
        "attempt=server.handed_out.attempt_of(jid, wid)), lambda _: None)\n    return resp.OK",
        ("tests/server/test_life.py", "-k", "database_is_away"),
    ),
    Plant(
        "a report of failure may come from anybody",
        f"{STORE}/failures.py",
        "    return job.state == State.WORKING and holds(failure.wid, failure.attempt, job.wid, job.attempt)",
        "    return job.state == State.WORKING",
        (CONTRACT, "-k", "late_report"),
    ),
    Plant(
        "a job that fails keeps its lock",
        f"{STORE}/failures.py",
        "        locks.release(connection, held)\n        gates.release(connection, passes)\n        dialect.save(",
        "        gates.release(connection, passes)\n        dialect.save(",
        ("tests/locks/test_exclusion.py", "-k", "has_failed"),
    ),
    Plant(
        "a job that succeeds keeps its lock",
        f"{STORE}/members.py",
        "    locks.release(connection, [rows[jid] for jid in held])\n",
        "",
        ("tests/locks/test_exclusion.py", "-k", "is_acknowledged"),
    ),
    Plant(
        "one retry too many",
        "django_faktory/lifecycle.py",
        "    if retry < 0 or failures >= retry:",
        "    if retry < 0 or failures > retry:",
        ("tests/core/test_lifecycle.py", CONTRACT, "-k", "once_more_than or retries_are_used_up"),
    ),
    Plant(
        "the third lost worker is forgiven",
        "django_faktory/lifecycle.py",
        "    return State.DEAD if losses >= MAX_LOSSES else State.ENQUEUED",
        "    return State.DEAD if losses > MAX_LOSSES else State.ENQUEUED",
        ("tests/core/test_lifecycle.py", "-k", "poison"),
    ),
    Plant(
        "a reservation that ran out is never given back",
        "django_faktory/maintenance.py",
        '            Step("reservations", WHEN_SEEN, self._reap),\n',
        "",
        ("tests/test_maintenance.py", "-k", "every_step or what_a_look_sees"),
    ),
    Plant(
        "a job is not given back whose client was gone",
        "django_faktory/server/verbs.py",
        "on_unsent=lambda: server.release([told])",
        "on_unsent=lambda: None",
        ("tests/server/test_going_away.py", "-k", "could_not_be_written or only_a_part"),
    ),
    Plant(
        "a unique job that succeeds keeps its lock, on PostgreSQL",
        f"{DIALECTS}/postgresql_verbs.py",
        "    unique_key = NULL, purge_at = now + make_interval(secs => j.result_ttl)\n  FROM held, clock\n"
        "  WHERE j.id = held.id AND held.result_ttl IS NOT NULL AND NOT held.is_apart",
        "    purge_at = now + make_interval(secs => j.result_ttl)\n  FROM held, clock\n"
        "  WHERE j.id = held.id AND held.result_ttl IS NOT NULL AND NOT held.is_apart",
        ("tests/store/test_optioned.py", "-k", "lock_is_free"),
        "postgresql",
    ),
    Plant(
        "a unique job that succeeds keeps its lock where its COMMIT comes along",
        f"{DIALECTS}/postgresql_verbs.py",
        "    unique_key = NULL, purge_at = now + make_interval(secs => j.result_ttl)\n  FROM held, clock\n"
        "  WHERE j.id = held.id AND held.result_ttl IS NOT NULL\n",
        "    purge_at = now + make_interval(secs => j.result_ttl)\n  FROM held, clock\n"
        "  WHERE j.id = held.id AND held.result_ttl IS NOT NULL\n",
        ("tests/tasks/test_atomic_commit.py", "-k", "unique_job"),
        "postgresql",
    ),
    Plant(
        "a unique job that succeeds keeps its lock, on the other databases",
        f"{DIALECTS}/portable.py",
        '            f" reserved_until = NULL, unique_key = NULL, lock_token = NULL, passes = NULL,"',
        '            f" reserved_until = NULL, lock_token = NULL, passes = NULL,"',
        ("tests/store/test_optioned.py", "-k", "lock_is_free"),
    ),
    Plant(
        "a place of a limit is never given back",
        f"{STORE}/gates.py",
        "            gate.in_use = max(0, gate.in_use - counts[gate.id])",
        "            gate.in_use = max(0, gate.in_use)",
        ("tests/limits/test_passing.py", "-k", "makes_room_for_the_next"),
    ),
    Plant(
        "a bucket of a rate is not refilled",
        "django_faktory/gating.py",
        "        self.tokens = min(self.tokens + came_s * self.allows.per_second, most)",
        "        self.tokens = min(self.tokens, most)",
        ("tests/core/test_gating.py", "-k", "tokens_come"),
    ),
    Plant(
        "who is refused by one limit takes a place of the others",
        "django_faktory/gating.py",
        "        if not shut:\n            for gate in gates:\n                gate.take()\n        else:",
        "        for gate in gates:\n            if gate not in shut:\n                gate.take()\n        if shut:",
        ("tests/core/test_gating.py", "-k", "none_is_taken"),
    ),
    Plant(
        "the end of a member is not counted in its batch",
        f"{STORE}/members.py",
        "        self.pending += counted.pending\n",
        "",
        ("tests/store/test_batches.py", "-k", "one_after_the_other"),
    ),
    Plant(
        "callbacks come before COMMIT",
        "django_faktory/batching.py",
        "    if batch.is_committed:\n        _fire(batch, steps)",
        "    if not batch.is_expired:\n        _fire(batch, steps)",
        ("tests/core/test_batching.py", "-k", "before_commit"),
    ),
    Plant(
        "what a log line hides is written out",
        "django_faktory/redaction.py",
        '    return HIDDEN if is_on() else f"{value!r:.80}"',
        '    return f"{value!r:.80}"',
        ("tests/security/test_redaction.py", "-k", "log_line"),
    ),
    Plant(
        "the admin asks for no permission",
        "django_faktory/look_only.py",
        "        return bool(request.user.has_perm(permissions.needs(codename)))",
        "        return bool(request.user.is_staff)",
        ("tests/admin/test_access.py", "-k", "may_only_look or all_but_that"),
    ),
    Plant(
        "the API asks for no permission",
        "django_faktory/api/access.py",
        "        return asked is not None and request.user.has_perm(needs(asked))",
        "        return asked is not None and bool(needs(asked))",
        ("tests/api/test_access.py", "-k", "may_only_look or every_other"),
    ),
    Plant(
        "who gives no password is let in",
        "django_faktory/protocol/connection.py",
        "        if self._password:\n            expected",
        "        if self._password and hello.pwdhash:\n            expected",
        ("tests/core/test_connection.py", "-k", "no_other_hash"),
    ),
    Plant(
        "any number of wrong passwords may be tried",
        "django_faktory/server/guard.py",
        "        return over * PERIOD_S / self._most if over > 0 else 0.0",
        "        return 0.0 if over > 0 else 0.0",
        ("tests/security/test_guard.py", "-k", "waits_for_the_time"),
    ),
    Plant(
        "FLUSH is for everybody",
        "django_faktory/conf.py",
        "    return bool(settings.DEBUG if allowed is None else allowed)",
        "    return bool(allowed is None or allowed)",
        ("tests/server/test_management.py", "-k", "flush_needs_leave"),
    ),
    Plant(
        "the hint of a push is sent before its commit",
        "django_faktory/brokers/orm.py",
        "            transaction.on_commit(lambda: self._after_push(queues), using=self.alias)",
        "            self._after_push(queues)",
        ("tests/brokers/test_hints.py",),
    ),
    Plant(
        "a claim takes what another is just taking, on SQLite",
        f"{STORE}/claiming.py",
        "            atomic=not (dialect.one_statement and joined),\n        )\n\n    def locked",
        "            atomic=False,\n        )\n\n    def locked",
        ("tests/store/test_claims.py", "-k", "share_two_hundred"),
    ),
    Plant(
        "a claim takes what another is just taking, on PostgreSQL",
        f"{DIALECTS}/postgresql_verbs.py",
        '  ORDER BY weight, enqueued_at, id LIMIT q.room FOR UPDATE SKIP LOCKED"""',
        '  ORDER BY weight, enqueued_at, id LIMIT q.room"""',
        ("tests/store/test_claims.py", "-k", "share_two_hundred"),
        "postgresql",
    ),
    Plant(
        "a quiet worker is given jobs",
        f"{DIALECTS}/portable.py",
        "                if room > 0 and slot.queue not in held.queues and slot.wid not in held.wids:",
        "                if room > 0 and slot.queue not in held.queues:",
        (CONTRACT, "-k", "quiet_worker_gets"),
    ),
    Plant(
        "an atomic task writes although its job is another's by now",
        "django_faktory/worker/execute.py",
        "        if broker.ack_last(report, job):",
        "        if broker.ack_last(report, job) in (True, False):",
        ("tests/tasks/test_atomic.py", "-k", "lost_the_job"),
    ),
    Plant(
        "a process that is replaced cuts off what it runs",
        "django_faktory/worker/runner.py",
        '        return not self._loops["fetch"].is_alive() and is_told',
        '        return not self._loops["fetch"].is_alive()',
        ("tests/commands/test_recycling.py", "-k", "waited_for"),
    ),
    Plant(
        "a line may be of any length",
        "django_faktory/protocol/connection.py",
        "        if end - self._start > limit:",
        "        if end - self._start > limit and newline >= 0:",
        ("tests/core/test_connection.py", "-k", "before_it_ends"),
    ),
    Plant(
        "a migration waits for a long transaction, and everybody behind it",
        "django_faktory/migrations/_in_use.py",
        "                _lock(connection, tables)\n",
        "                pass\n",
        ("tests/deploys/test_two_versions.py",),
        "postgresql",
    ),
    Plant(
        "after a migration a lock gets a token that another one had",
        "django_faktory/migrations/_in_use.py",
        "        for name, highest in before:",
        "        for name, highest in ():",
        ("tests/deploys/test_tables_in_use.py", "-k", "tokens"),
    ),
    Plant(
        "a statement takes whatever columns a table has",
        f"{DIALECTS}/base.py",
        'f"SELECT id, lock_key, queue, weight FROM {JOB} WHERE lock_key',
        'f"SELECT * FROM {JOB} WHERE lock_key',
        ("tests/deploys/test_statements.py",),
    ),
    Plant(
        "a job on the event loop's way is given out before it has its lock",
        f"{STORE}/jobs.py",
        "        if not all(has_all_it_needs(job) for job in claimed):\n            return False\n",
        "",
        ("tests/server/test_lent.py", "-k", "needs_a_lock"),
        "postgresql",
    ),
    Plant(
        "a claim is forgotten whose connection was lost on the event loop's way",
        f"{STORE}/lent.py",
        "        self._expect()\n\n        def tell()",
        "        def tell()",
        ("tests/server/test_lent.py", "-k", "lost_on_the_way"),
        "postgresql",
    ),
    Plant(
        "what is read ahead goes past a job that is to hold a lock",
        f"{DIALECTS}/postgresql_ahead.py",
        "  WHERE line.goes))",
        "  ))",
        ("tests/server/test_shelf.py", "-k", "must_not_wait_here"),
        "postgresql",
    ),
    Plant(
        "a job that a crashed server had read ahead fails",
        f"{STORE}/failures.py",
        "        nobodys = {job.pk for job in rows if ahead.is_nobodys(job)}",
        "        nobodys: set[int] = set()",
        ("tests/store/test_ahead.py", "-k", "crashed_server"),
        "postgresql",
    ),
    Plant(
        "a job of priority does not send back what was read ahead",
        "django_faktory/server/shelf.py",
        "        self._shy_until.update(dict.fromkeys(queues, until))\n        self.clear()\n",
        "        self._shy_until.update(dict.fromkeys(queues, until))\n",
        ("tests/server/test_shelf.py", "-k", "priority_that_is_pushed"),
        "postgresql",
    ),
    Plant(
        "jobs that differ in a number are stored as if they were alike",
        f"{DIALECTS}/postgresql_verbs.py",
        "    return all(_numbers(job) == first for job in jobs)\n",
        "    return bool(first)\n",
        ("tests/store/test_sets.py",),
        "postgresql",
    ),
    Plant(
        "a connection that was reset behind an answer is used again",
        "django_faktory/server/committer.py",
        "        if flight.is_last:\n",
        "        if False:\n",
        ("tests/server/test_committer.py", "-k", "loses_no_set"),
        "sqlite",
    ),
    Plant(
        "a FETCH waits for ever for jobs that are on their way",
        "django_faktory/server/fetchers.py",
        "fetcher.untried or now >= until",
        "fetcher.untried",
        ("tests/server/test_shelf.py", "-k", "not_for_ever"),
        "postgresql",
    ),
    Plant(
        "an answer of which the event loop does not tell is never looked for",
        "django_faktory/server/committer.py",
        "            if hand.since <= before:\n",
        "            if False:\n",
        ("tests/server/test_committer.py", "-k", "does_not_tell"),
        "sqlite",
    ),
)
