"""`batches`: show the latest batches, or one with its children."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ....errors import UnknownBatch
from ....models import Batch
from ....operations.rows import BatchRow
from ..screen import age_of
from ..subcommand import NOTHING, OK, Argument, Invocation, limit, subcommand
from ..table import Column


@subcommand(
    "batches",
    "List the latest batches, or show one with its children.",
    Argument("bid", nargs="?", help="Show this batch with its children."),
    limit("batches"),
)
def _batches(call: Invocation) -> int:
    bid, most = call.options["bid"], call.options["limit"]
    named, children = _find(call, bid) if bid else ([], Batch.objects.using(call.require_alias()))
    if bid and not named:
        call.screen.note(f"no batch has the ID {bid}")
        return NOTHING
    # One row more than shown: its presence means that there are more, without a count.
    rows = list(children.order_by("-pk")[: most + 1])
    documents = list(map(BatchRow.read, [*named, *rows[:most]]))
    call.screen.listing({"batches": documents, "is_more": len(rows) > most}, _COLUMNS, documents)
    return OK


def _find(call: Invocation, bid: str) -> tuple[list[Any], Any]:
    """Return the batch, if it exists, and its children."""
    rows = Batch.objects.using(call.alias)
    # The protocol can only show one batch by its id, without its children.
    if call.alias is None:
        with suppress(UnknownBatch):
            return [call.broker.batch_status(bid)], rows.none()
    # No batch has an unprintable id, and PostgreSQL raises for NUL.
    if call.alias is None or not bid.isprintable():
        return [], rows.none()
    return list(rows.filter(bid=bid)), rows.filter(parent_bid=bid)


_COLUMNS = (
    Column("BID", "bid", is_name=True),
    Column("DESCRIPTION", "description", 3),
    Column("SETTLED", lambda batch: f"{batch['total'] - batch['pending']} of {batch['total']}", 1),
    Column("FAILED", "failed", 2),
    Column("COMPLETE", "complete", 6),
    Column("SUCCESS", lambda batch: "cannot" if batch["is_broken"] else batch["success"], 4),
    Column("CREATED", age_of("created_at"), 5),
)
