"""The contract of brokers for batches, a mixin for the contract's test classes. Rules: W26."""

import pytest

from django_faktory.core.job_parser import parse_job
from django_faktory.core.payloads import Ack, NewBatch
from django_faktory.errors import FaktoryError, UnknownBatch
from django_faktory.models import Batch


def member(bid, number):
    return parse_job(f'{{"jid":"member-{number:04d}","jobtype":"M","args":[],"custom":{{"bid":"{bid}"}}}}')


def callback(kind):
    return parse_job(f'{{"jid":"callback-{kind}","jobtype":"{kind}","args":[1]}}')


@pytest.mark.django_db(transaction=True)
class BatchContract:
    """Mixin: the subclass provides the `broker` fixture, as for BrokerContract."""

    @staticmethod
    def do_next(broker, me, cls):
        [job] = cls.fetch(broker, wid=me)
        broker.ack([Ack(jid=job.jid, wid=me)])
        return job

    def test_a_batch_runs_its_members_and_then_its_callbacks(self, broker, me):
        bid = broker.new_batch(
            NewBatch(description="ü", complete=callback("complete"), success=callback("success")), caller_wid=me
        )
        assert broker.push([member(bid, 1), member(bid, 2)]) == [None, None]
        broker.commit_batch(bid)
        status = broker.batch_status(bid)
        assert (status.bid, status.description, status.total, status.pending, status.failed) == (bid, "ü", 2, 2, 0)
        assert status.created_at
        ran = [self.do_next(broker, me, type(self)).jid for _ in range(4)]
        assert ran == ["member-0001", "member-0002", "callback-complete", "callback-success"]
        status = broker.batch_status(bid)
        assert (status.pending, status.complete_st, status.success_st, status.is_broken) == (0, "2", "2", False)

    def test_a_parent_batch_waits_for_its_child_batch(self, broker, me):
        parent = broker.new_batch(NewBatch(success=callback("parents")), caller_wid=me)
        child = broker.new_batch(NewBatch(parent_bid=parent, success=callback("childs")), caller_wid=me)
        for bid in (parent, child):
            broker.commit_batch(bid)
        assert broker.batch_status(child).parent_bid == parent
        assert [self.do_next(broker, me, type(self)).jid for _ in range(2)] == ["callback-childs", "callback-parents"]

    def test_a_committed_batch_accepts_members_only_while_one_runs(self, broker, me):
        bid = broker.new_batch(NewBatch(success=callback("success")), caller_wid=me)
        broker.push([member(bid, 1)])
        broker.commit_batch(bid)
        with pytest.raises(FaktoryError, match="it is committed"):
            broker.open_batch(bid, caller_wid=me)
        [refusal] = broker.push([member(bid, 2)])
        assert bid in str(refusal)
        self.fetch(broker, wid=me)
        assert broker.open_batch(bid, caller_wid=me) == bid
        assert broker.push([member(bid, 3)]) == [None]
        assert broker.batch_status(bid).total == 2

    def test_no_callback_is_enqueued_between_open_and_commit(self, broker, me):
        bid = broker.new_batch(NewBatch(success=callback("success")), caller_wid=me)
        broker.push([member(bid, 1)])
        broker.commit_batch(bid)
        [one] = self.fetch(broker, wid=me)
        assert broker.open_batch(bid, caller_wid=me) == bid
        broker.ack([Ack(jid=one.jid, wid=me)])
        assert broker.push([member(bid, 2)]) == [None]
        broker.commit_batch(bid)
        assert [self.do_next(broker, me, type(self)).jid for _ in range(2)] == ["member-0002", "callback-success"]

    def test_check_batch_fails_after_a_callback_is_enqueued_and_changes_nothing(self, broker, me):
        bid = broker.new_batch(NewBatch(success=callback("success")), caller_wid=me)
        broker.push([member(bid, 1)])
        broker.commit_batch(bid)
        [one] = self.fetch(broker, wid=me)
        broker.check_batch(bid, caller_wid=me)
        broker.ack([Ack(jid=one.jid, wid=me)])
        with pytest.raises(FaktoryError, match="a callback of it was enqueued already"):
            broker.check_batch(bid, caller_wid=me)
        assert self.do_next(broker, me, type(self)).jid == "callback-success"

    def test_every_batch_verb_names_an_unknown_batch(self, broker, me):
        for verb in (broker.check_batch, broker.open_batch, broker.commit_batch, broker.batch_status):
            with pytest.raises(UnknownBatch, match="no such batch b-nowhere"):
                verb("b-nowhere")
        with pytest.raises(UnknownBatch, match="no such batch b-nowhere"):
            broker.new_batch(NewBatch(parent_bid="b-nowhere", success=callback("success")), caller_wid=me)
        [refusal] = broker.push([member("b-nowhere", 1)])
        assert "no such batch b-nowhere" in str(refusal)
        assert not Batch.objects.exists()

    def test_batch_members_can_be_pushed_and_acknowledged_by_an_exchange(self, broker, me):
        bid = broker.new_batch(NewBatch(success=callback("success")), caller_wid=me)
        broker.exchange([member(bid, 1)], [], [])
        broker.commit_batch(bid)
        [one] = self.fetch(broker, wid=me)
        exchanged = broker.exchange([], [Ack(jid=one.jid, wid=me), Ack(jid="member-none", wid=me)], [])
        assert exchanged.acked[0] is True
        assert self.do_next(broker, me, type(self)).jid == "callback-success"
