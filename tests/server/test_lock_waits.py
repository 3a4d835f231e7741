"""Commands that need a lock of another transaction wait in a separate queue, each with its own reply.

Rules: W26, W29, W30.
"""

import asyncio
import json
import threading
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
from django.db import connection, transaction

from django_faktory.brokers.orm import OrmBroker
from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import Ack, NewBatch, TrackUpdate
from django_faktory.errors import BrokerUnavailable, LockTimeout, NotUnique, UnknownBatch
from django_faktory.models import Batch, Job
from django_faktory.server.lock_waits import LockWaits
from django_faktory.server.may_block import MayBlock, execute_set, execute_waiting
from django_faktory.store import transactions
from django_faktory.store.dialects.postgresql.prepared import Command
from django_faktory.store.statistics import counts
from tests.bouncer import needs_session
from tests.server.raw import RawClient, worker
from tests.waiting import LONGEST_WAIT_S, wait_until

pytestmark = pytest.mark.django_db(transaction=True)
with_locks = pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer at a time")

SUCCESS = {"success": {"jobtype": "Success", "args": []}}
WAITS = b"-ERR database unavailable: another transaction holds a lock"


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """Give each test its own jids and keys, because on MariaDB inserting a recently deleted row
    locks its neighbours.
    """
    monkeypatch.setattr(f"{__name__}.SUFFIX", f"-{next(_numbers)}")


_numbers = count()
SUFFIX = ""


def push_line(jid, *, key="", bid=""):
    return "PUSH " + json.dumps(job(jid, key=key, bid=bid))


def job(jid, *, key="", bid=""):
    custom = {"bid": bid} if bid else {"unique_for": 600}
    return {"jid": jid + SUFFIX, "jobtype": "T", "args": [(key or jid) + SUFFIX], "custom": custom}


def about(verb, jid, **fields):
    return f"{verb} " + json.dumps({"jid": jid + SUFFIX} | fields)


@contextmanager
def key_taken(key):
    """Enqueue a unique job in a transaction of the project that stays open."""
    with transaction.atomic():
        assert OrmBroker("default").push([parse_job(json.dumps(job("of-project", key=key)))]) == [None]
        yield


@contextmanager
def batch_taken(bid):
    with transaction.atomic():
        Batch.objects.select_for_update().get(bid=bid)
        yield


def new_batch(client, **more):
    return client.ask("BATCH NEW " + json.dumps(SUCCESS | more)).decode()


def open_workers(connect, client, bid, many):
    """Return workers that have each fetched a member of the batch."""
    workers = []
    for number in range(many):
        workers.append(connect(**worker(f"wid-{number}")))
        assert client.ask(push_line(f"member-{number:04d}", bid=bid)) == b"+OK"
        assert json.loads(workers[-1].ask("FETCH default"))["jid"] == f"member-{number:04d}{SUFFIX}"
    return workers


def waits(server, many):
    wait_until(lambda: len(server.lock_waits) == many, what="the commands wait for their lock")


@with_locks
class TestOtherCommandsProceed:
    """Other commands are answered before the transaction of the project ends."""

    def test_pushes_and_batches_proceed_while_commands_wait_for_a_unique_key(self, server, connect):
        client, member_bid = connect(), new_batch(connect())
        [one] = open_workers(connect, client, member_bid, 1)
        blocked = [connect() for _ in range(8)]
        with key_taken("k"):
            for number, other in enumerate(blocked):
                other.send(push_line(f"blocked-{number:04d}", key="k"))
            waits(server, len(blocked))
            for number in range(20):
                assert client.ask(push_line(f"free-{number:04d}")) == b"+OK"
            bid = new_batch(client)
            assert bid.startswith("b-")
            assert client.ask(f"BATCH COMMIT {bid}") == b"+OK"
            assert client.ask(about("TRACK SET", "free-0000", percent=3)) == b"+OK"
            assert one.ask(about("ACK", "member-0000")) == b"+OK"
            assert len(server.lock_waits) == len(blocked)
        assert {other.reply() for other in blocked} == {b"-NOTUNIQUE Job not unique"}

    def test_other_batches_proceed_while_commands_wait_for_a_locked_batch(self, server, connect):
        client = connect()
        taken, free = new_batch(client), new_batch(client)
        blocked = {line: connect() for line in (f"BATCH COMMIT {taken}", push_line("blocked-0001", bid=taken))}
        with batch_taken(taken):
            for line, other in blocked.items():
                other.send(line)
            waits(server, 2)
            for number in range(10):
                assert client.ask(push_line(f"free-{number:04d}", bid=free)) == b"+OK"
            assert client.ask(f"BATCH COMMIT {free}") == b"+OK"
        assert [other.reply()[:3] for other in blocked.values()] in ([b"+OK", b"+OK"], [b"+OK", b"-ER"])

    def test_many_locked_keys_do_not_block_pushes_with_free_keys(self, server, connect):
        client = connect()
        blocked = [connect() for _ in range(12)]
        with transaction.atomic():
            held = [parse_job(json.dumps(job(f"of-project-{number}", key=f"k{number}"))) for number in range(12)]
            assert OrmBroker("default").push(held) == [None] * 12
            for number, other in enumerate(blocked):
                other.send(push_line(f"blocked-{number:04d}", key=f"k{number}"))
            waits(server, 12)
            for number in range(5):
                assert client.ask(push_line(f"free-{number:04d}")) == b"+OK"
            transaction.set_rollback(True)
        assert {other.reply() for other in blocked} == {b"+OK"}
        assert Job.objects.count() == 17

    def test_beat_and_info_are_answered_while_track_set_waits_for_a_lock(self, server, connect):
        beats, tracks = connect(**worker("wid-1")), connect()
        assert beats.ask(push_line("locked-0001")) == b"+OK"
        with transaction.atomic():
            Job.objects.select_for_update().get(jid="locked-0001" + SUFFIX)
            tracks.send(about("TRACK SET", "locked-0001", percent=3))
            waits(server, 1)
            assert beats.ask('BEAT {"wid":"wid-1"}') == b"+OK"
            assert beats.ask("INFO")
        assert tracks.reply() == b"+OK"


def stored_jobs():
    """Return all job rows after the node has confirmed the deliveries, which writes `claim` and two times."""
    wait_until(lambda: not Job.objects.filter(claim__lt=0).exists(), what="the deliveries are confirmed")
    return list(Job.objects.order_by("jid").values())


@with_locks
class TestTheDeadline:
    """A command that waits for a lock beyond the deadline is refused and changes nothing."""

    @pytest.fixture
    def server(self, serve, settings):
        settings.FAKTORY = {"DATABASE_TIMEOUT": 1}
        return serve()

    def test_every_blocked_batch_command_is_refused_and_changes_nothing(self, connect):
        client = connect()
        bid = new_batch(client)
        first, second = open_workers(connect, client, bid, 2)
        before = Batch.objects.values().get(), stored_jobs()
        lines = [
            f"BATCH COMMIT {bid}",
            f"BATCH OPEN {bid}",
            "BATCH NEW " + json.dumps(SUCCESS | {"parent_bid": bid}),
            push_line("blocked-0001", bid=bid),
        ]
        with batch_taken(bid):
            others = [connect() for _ in lines]
            for other, line in zip(others, lines, strict=True):
                other.send(line)
            first.send(about("ACK", "member-0000"))
            second.send(about("FAIL", "member-0001"))
            for other in (*others, first, second):
                assert other.reply().startswith(WAITS)
        assert (Batch.objects.values().get(), stored_jobs()) == before
        assert first.ask(about("ACK", "member-0000")) == b"+OK"
        assert second.ask(about("FAIL", "member-0001")) == b"+OK"
        assert client.ask(f"BATCH COMMIT {bid}") == b"+OK"
        batch = Batch.objects.get()
        assert (batch.total, batch.pending, batch.failed, batch.children) == (2, 1, 1, 0)
        assert counts.read(using="default").totals["late"] == 0

    @pytest.mark.parametrize("free", [3, 60])
    def test_pushb_refuses_only_the_jobs_that_need_the_lock(self, connect, free):
        """W12; a bulk of more than fifty jobs takes another code path."""
        client = connect()
        jobs = [job(f"free-{number:04d}") for number in range(free)] + [job("blocked-0001", key="k")]
        with key_taken("k"):
            refused = json.loads(client.ask("PUSHB " + json.dumps(jobs)))
            transaction.set_rollback(True)
        assert list(refused) == ["blocked-0001" + SUFFIX]
        assert refused["blocked-0001" + SUFFIX].startswith("database unavailable: another transaction")
        assert Job.objects.count() == free
        assert json.loads(client.ask("PUSHB " + json.dumps(jobs))) == {}
        assert Job.objects.count() == free + 1


@with_locks
def test_a_stopping_server_answers_commands_that_wait_for_a_lock(serve):
    server = serve()
    client = RawClient.identified(server.address)
    with key_taken("k"):
        client.send(push_line("blocked-0001", key="k"))
        waits(server, 1)
        server.stop()
        assert client.reply().startswith(WAITS)
    client.close()
    assert not Job.objects.filter(jid="blocked-0001" + SUFFIX).exists()


@needs_session("a session has its lock timeout")
@with_locks
def test_the_lock_timeout_of_a_session_is_reset_after_a_limited_wait():
    """The limit is set on the session, and must not apply to later statements of the same thread."""
    broker, bid = OrmBroker("default"), ""
    try:
        with broker.limited_lock_wait(0.05):
            bid = broker.new_batch(NewBatch(success=parse_job('{"jid":"callback","jobtype":"S","args":[]}')))
        broker.commit_batch(bid)
        assert lock_limit() == default_limit()
        with broker.limited_lock_wait(0.05):
            broker.batch_status(bid)
            assert lock_limit() != default_limit()
        broker.batch_status(bid)
        assert lock_limit() == default_limit()
    finally:
        broker.close()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="about PostgreSQL")
def test_the_lock_timeout_is_set_per_transaction_behind_a_pooler(monkeypatch):
    """Without prepared statements, as behind a pooler that assigns each transaction another session."""
    connection.close()  # an earlier test may have left its limit on the session
    monkeypatch.setattr(Command, "works", False)
    broker = OrmBroker("default")
    with broker.limited_lock_wait(0.05):
        for is_atomic in (False, True):
            assert transactions.run("default", lambda _: lock_limit(), atomic=is_atomic) == "50ms"
            assert lock_limit() == default_limit()


def lock_limit():
    sql = "SHOW lock_timeout" if connection.vendor == "postgresql" else "SELECT @@SESSION.innodb_lock_wait_timeout"
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


def default_limit():
    if connection.vendor == "postgresql":
        return "0"
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@GLOBAL.innodb_lock_wait_timeout")
        return cursor.fetchone()[0]


class TestASet:
    """Commands that run in one set each get their own reply."""

    def test_a_lost_connection_fails_only_its_own_command(self):
        broker = OrmBroker("default")
        made = NewBatch(success=parse_job('{"jid":"callback","jobtype":"S","args":[]}'))

        def lose_the_connection():
            raise BrokerUnavailable("the connection was lost")

        commands = [
            MayBlock(partial(broker.new_batch, made)),
            MayBlock(lose_the_connection),
            MayBlock([parse_job(json.dumps(job("unique-0001")))]),
            MayBlock(partial(broker.commit_batch, "b-unknown")),
            MayBlock(Ack(jid="unknown-0001")),
            MayBlock(partial(broker.track_set, [TrackUpdate(jid="unknown-0001")])),
        ]
        bid, lost, pushed, unknown, acked, tracked = execute_set(broker, commands)
        assert Batch.objects.get().bid == bid
        assert isinstance(lost, BrokerUnavailable)
        assert pushed == [None]
        assert isinstance(unknown, UnknownBatch)
        assert (acked, tracked) == (False, None)
        assert Job.objects.count() == 1

    def test_an_exception_in_one_push_does_not_refuse_the_others(self, caplog):
        broker = OrmBroker("default")
        good, bad = parse_job(json.dumps(job("unique-0001"))), parse_job(json.dumps(job("unique-0002")))

        class Poisoned(OrmBroker):
            def push(self, jobs):
                if bad in jobs:
                    raise ValueError("poison")
                return super().push(jobs)

        answers = execute_set(Poisoned("default"), [MayBlock([good]), MayBlock([bad]), MayBlock([good])])
        assert [answers[0], str(answers[1]), answers[2]] == [[None], "internal error", [None]]
        assert Job.objects.count() == 1
        assert "command failed" in caplog.text
        broker.close()

    def test_an_unavailable_database_is_tried_only_twice_for_a_set(self):
        tried = []

        def lose_the_connection(number):
            tried.append(number)
            raise BrokerUnavailable("no route to host")

        commands = [MayBlock(partial(lose_the_connection, number)) for number in range(5)]
        answers = execute_set(OrmBroker("default"), commands)
        assert [type(answer) for answer in answers] == [BrokerUnavailable] * 5
        assert tried == [0, 1]

    @with_locks
    def test_commands_that_need_no_locked_key_are_executed(self):
        broker, taken = OrmBroker("default"), []

        def in_a_thread_of_the_server():
            commands = [MayBlock([parse_job(json.dumps(job(f"job-{key}-0001", key=key)))]) for key in "akb"]
            taken.extend(execute_set(broker, commands))
            broker.close()

        with key_taken("k"):
            run_in_thread(in_a_thread_of_the_server)
        assert [taken[0], type(taken[1]), taken[2]] == [[None], LockTimeout, [None]]
        [refusal] = broker.push([parse_job(json.dumps(job("job-k-0001", key="k")))])
        assert isinstance(refusal, NotUnique)


class AlwaysLocked:
    """A commit queue in which each command meets a lock, after `delay_s`."""

    def __init__(self, loop, delay_s):
        self._loop, self._delay_s = loop, delay_s

    def submit(self, command, answer):
        self._loop.call_later(self._delay_s, answer, LockTimeout("locked"))


def test_clients_that_pipeline_are_answered_when_several_commands_end_together():
    answered, errors = [], []

    async def run():
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        queues = {"may-block": AlwaysLocked(loop, 0.0), "lock-wait": AlwaysLocked(loop, 0.05)}
        waits = LockWaits(queues, give_up_after_s=0.3, loop=loop)

        def submit(client, left):
            def answer(_):
                answered.append(client)
                if left:
                    submit(client, left - 1)
                elif len(answered) == 6:
                    is_over.set()

            waits.submit(MayBlock(lambda: None, ["bid:x"]), answer)

        for client in "abc":
            submit(client, 1)
        await is_over.wait()

    asyncio.run(asyncio.wait_for(run(), LONGEST_WAIT_S))
    assert errors == []


def test_the_last_attempt_of_a_pushb_hides_the_message_of_the_driver():
    class Lost(OrmBroker):
        def push(self, jobs):
            raise LockTimeout("locked") if len(jobs) > 1 else BrokerUnavailable("database unavailable: host 10.0.0.5")

    command = MayBlock([parse_job(json.dumps(job(f"job-{number:05}"))) for number in (1, 2)])
    command.is_last = True
    [answers] = execute_waiting(Lost("default"), [command])
    assert [str(answer) for answer in answers] == ["database unavailable"] * 2


def run_in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


class LosesAnswers(OrmBroker):
    """OrmBroker that loses its connection after BATCH NEW has committed, `losses` times."""

    losses = 1

    def new_batch(self, batch, *, caller_wid=""):
        bid = super().new_batch(batch, caller_wid=caller_wid)
        if self.losses:
            self.losses -= 1
            raise BrokerUnavailable("the connection was lost while it committed")
        return bid


class TestABatchWithALostAnswer:
    @pytest.mark.parametrize("has_parent", [False, True])
    def test_the_batch_is_stored_once_after_a_retry(self, serve, has_parent):
        broker = LosesAnswers("default")
        client = RawClient.identified(serve(broker).address)
        broker.losses = 0
        parent = new_batch(client) if has_parent else ""
        broker.losses = 1
        bid = new_batch(client, **({"parent_bid": parent} if parent else {}))
        assert bid.startswith("b-")
        assert Batch.objects.exclude(bid=parent).get().bid == bid
        assert not parent or Batch.objects.get(bid=parent).children == 1
        client.close()

    def test_the_batch_is_removed_if_its_client_got_an_error(self, serve):
        broker = LosesAnswers("default")
        client = RawClient.identified(serve(broker).address)
        broker.losses = 0
        parent = new_batch(client)
        broker.losses = 2
        assert new_batch(client, parent_bid=parent) == "-ERR database unavailable"
        wait_until(lambda: Batch.objects.count() == 1, what="the orphan is removed")
        assert Batch.objects.get().children == 0
        assert client.ask(f"BATCH COMMIT {parent}") == b"+OK"
        assert Job.objects.get().jobtype == "Success"
        client.close()
