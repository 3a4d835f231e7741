"""Batches over the REST API: their trees and members, and a retry of the failed members."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db.models import Q
from drf_spectacular.utils import extend_schema_view
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from ...core.lifecycle import State
from ...models import Batch, Job
from ...operations import bulk
from ...operations.bulk import Verb
from ...operations.serializers import SHORT
from ...store.batches import tree as batch_tree
from . import answers, inputs
from .base import Resource, alias
from .described import described
from .filters import BatchFilter
from .journal import note
from .paging import NewestFirst


@extend_schema_view(
    list=described(summary="List batches, the newest first"),
    retrieve=described(summary="Show a batch"),
)
class Batches(ListModelMixin, RetrieveModelMixin, Resource):
    """Batches: jobs that belong together, and the callbacks that follow them."""

    queryset = Batch.objects.none()
    serializer_class = answers.BatchSerializer
    pagination_class = NewestFirst
    filterset_class = BatchFilter
    lookup_field = "bid"
    resource = "batch"
    needs: ClassVar = {
        "list": "batch.view",
        "retrieve": "batch.view",
        "members": "job.view",
        "children": "batch.view",
        "tree": "batch.view",
        "retry": "batch.retry",
    }

    def get_queryset(self) -> Any:
        """Return all stored batches, without the long texts of the callbacks."""
        return Batch.objects.using(alias()).defer("complete", "success")

    @described(
        summary="List the members of a batch",
        description="Only members with a row: a member that succeeded without a result to keep has none.",
        responses=answers.JobSummarySerializer(many=True),
        filters=False,
    )
    @action(detail=True, serializer_class=answers.JobSummarySerializer, filterset_class=None)
    def members(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Return the members of the batch, newest first. Needs permission to view jobs."""
        jobs = Job.objects.using(alias()).batch(self.get_object().bid).only(*SHORT)
        return self._page(jobs)

    @described(summary="List the children of a batch", responses=answers.BatchSerializer(many=True), filters=False)
    @action(detail=True, filterset_class=None)
    def children(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Return the direct children of the batch, newest first."""
        return self._page(self.get_queryset().filter(parent_bid=self.get_object().bid))

    @described(
        summary="Show the tree of a batch",
        description=f"Depth first, at most about {batch_tree.MAX_BATCHES} batches, with the path to this batch.",
        responses=answers.BatchTreeSerializer,
    )
    @action(detail=True, filterset_class=None, pagination_class=None)
    def tree(self, request: Request, **_: Any) -> Response:  # noqa: ARG002
        """Return the tree that contains the batch, depth first."""
        found = batch_tree.tree_of(self.get_object())
        shown = [answers.BatchTreeItemSerializer.shape(batch) for batch in found]
        return Response({"batches": shown, "is_more": len(found) >= batch_tree.MAX_BATCHES})

    @described(
        summary="Retry what failed of a batch",
        description=f"Members and callbacks that are dead or wait for a retry; at most {inputs.MAX_AT_ONCE} at once.",
        request=inputs.ReasonSerializer,
        responses={200: answers.ChangeCountSerializer},
    )
    @action(detail=True, methods=["post"])
    def retry(self, request: Request, **_: Any) -> Response:
        """Retry dead and retrying members and callbacks now; repeat the request while `changed` is not 0."""
        validated, batch = self.validated_data(inputs.ReasonSerializer), self.get_object()
        jobs = Job.objects.using(alias()).filter(Q(bid=batch.bid) | Q(callback_of=batch.bid))
        # Bounded, so that the request ends in time; the client repeats it.
        failed = jobs.in_state(State.DEAD, State.RETRIES).order_by("pk")[: inputs.MAX_AT_ONCE]
        changed = bulk.execute(Verb.RETRY, failed)
        note(request, batch, f"Retried what failed, {changed} jobs", reason=validated["reason"])
        return Response({"changed": changed})

    def _page(self, rows: Any) -> Response:
        page = self.paginate_queryset(rows)
        return self.get_paginated_response(self.get_serializer(page, many=True).data)
