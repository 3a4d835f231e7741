"""Batches over the REST API: their trees and members, and a retry of the failed members."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_view
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
from .journal import record_change
from .paging import LatestFirst, NewestFirst


@extend_schema_view(
    list=describe(summary="List batches, the newest first"),
    retrieve=describe(summary="Show a batch"),
)
class Batches(Resource):
    """Batches: jobs that belong together, and the callbacks that follow them."""

    queryset = Batch.objects.none()
    serializer_class = answers.Batch
    pagination_class = NewestFirst
    filterset_class = BatchFilter
    lookup_field = "bid"
    resource = "batch"
    needs: ClassVar = {
        # Members are jobs, although their address is that of a batch (ADR 0034).
        "members": "job.view",
        "children": "batch.view",
        "tree": "batch.view",
    }

    def get_queryset(self) -> Any:
        """Return all stored batches, without the long texts of the callbacks."""
        # A callback is a job, so it may be as long as one, and its arguments need `view_job` (ADR 0034).
        return Batch.objects.using(get_alias()).defer("complete", "success")

    @describe(
        summary="List the members of a batch",
        description="Only members with a row: a member that succeeded without a result to keep has none.",
        responses=answers.JobSummary(many=True),
        filters=False,
    )
    @action(detail=True, serializer_class=answers.JobSummary, filterset_class=None, pagination_class=LatestFirst)
    def members(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Return the members of the batch, newest first. Needs permission to view jobs."""
        jobs = Job.objects.using(get_alias()).batch(self.get_object().bid).only(*SHORT)
        return self.respond_with_page(jobs)

    @describe(summary="List the children of a batch", responses=answers.Batch(many=True), filters=False)
    @action(detail=True, filterset_class=None)
    def children(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Return the direct children of the batch, newest first."""
        return self.respond_with_page(self.get_queryset().filter(parent_bid=self.get_object().bid))

    @describe(
        summary="Show the tree of a batch",
        description=f"Depth first, at most about {batch_tree.MAX_BATCHES} batches, with the path to this batch.",
        responses=answers.BatchTree,
    )
    @action(detail=True, filterset_class=None, pagination_class=None)
    def tree(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Return the tree that contains the batch, depth first."""
        # One statement per level, and bounded: a client can create trees of any size.
        batches = batch_tree.tree_of(self.get_object())
        items = [BatchTreeItem.read(batch) for batch in batches]
        return Response({"batches": items, "is_more": len(batches) >= batch_tree.MAX_BATCHES})

    @describe_action(
        "Retry the failed jobs of a batch",
        "Members and callbacks that are dead or wait for a retry, of nested batches too; at most "
        f"{inputs.MAX_AT_ONCE} at once.",
        answers.ChangeCount,
    )
    def retry(self, request: Request, **_: Any) -> Response:
        """Retry dead and retrying members and callbacks now; repeat the request while `changed` is not 0."""
        validated, batch = self.read_input(inputs.ReasonSerializer), self.get_object()
        # Bounded, so that the request ends in time; the client repeats it.
        changed = bulk.retry_batches([batch.bid], using=get_alias(), limit=inputs.MAX_AT_ONCE)
        record_change(request, batch, f"Retried {changed} failed jobs", reason=validated["reason"])
        return Response({"changed": changed})
