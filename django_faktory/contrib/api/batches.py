"""Batches over the REST API: their trees and members, and a retry of the failed members."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from ...models import Batch, Job
from ...operations import bulk
from ...operations.rows import SHORT, BatchTreeItem
from ...store.batches import tree as batch_tree
from . import answers, inputs
from .base import Resource, get_alias
from .described import describe, describe_action
from .filters import BatchFilter
from .paging import LatestFirst, NewestFirst


class Batches(Resource):
    """Batches: jobs that belong together, and the callbacks that follow them."""

    queryset = Batch.objects.none()
    serializer_class = answers.Batch
    pagination_class = NewestFirst
    filterset_class = BatchFilter
    lookup_field = "bid"
    resource = "batch"
    docs: ClassVar = {"list": "List batches, the newest first.", "retrieve": "Show a batch."}
    needs: ClassVar = {
        # Members are jobs, although their address is that of a batch (ADR 0034).
        "members": "job.view",
        "children": "batch.view",
        "tree": "batch.view",
    }

    def get_queryset(self) -> Any:
        """Return all stored batches, without the long texts of the callbacks."""
        # A callback is a job, so it may be as long as one, and its arguments need `view_job` (ADR 0034).
        return super().get_queryset().defer("complete", "success")

    @describe(responses=answers.JobSummary(many=True), filters=False)
    @action(detail=True, serializer_class=answers.JobSummary, filterset_class=None, pagination_class=LatestFirst)
    def members(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """List the members of a batch.

        Only members with a row: a member that succeeded without a result to keep has none.
        """
        jobs = Job.objects.using(get_alias()).batch(self.get_object().bid).only(*SHORT)
        return self.respond_with_page(jobs)

    @describe(responses=answers.Batch(many=True), filters=False)
    @action(detail=True, filterset_class=None)
    def children(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """List the children of a batch.

        The direct children, the newest first.
        """
        return self.respond_with_page(self.get_queryset().filter(parent_bid=self.get_object().bid))

    @describe(responses=answers.BatchTree)
    @action(detail=True, filterset_class=None, pagination_class=None)
    def tree(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Show the tree of a batch.

        Depth first, at most about 200 batches, with the path to this batch.
        """
        # One statement per level, and bounded: a client can create trees of any size.
        batches = batch_tree.tree_of(self.get_object())
        items = [BatchTreeItem.read(batch) for batch in batches]
        return Response({"batches": items, "is_more": len(batches) >= batch_tree.MAX_BATCHES})

    @describe_action(answers.ChangeCount)
    def retry(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Retry the failed jobs of a batch.

        Members and callbacks that are dead or wait for a retry, of nested batches too; at most 5000 at once.
        """
        batch = self.read_action()
        # Bounded, so that the request ends in time; the client repeats it.
        changed = bulk.retry_batches([batch.bid], using=get_alias(), limit=inputs.MAX_AT_ONCE)
        self.record(batch, f"Retried {changed} failed jobs")
        return Response({"changed": changed})
