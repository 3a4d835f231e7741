"""`batches`: show the latest batches, or one with its children."""

from __future__ import annotations

import argparse
from typing import Any

from ....errors import UnknownBatch
from ....models import Batch
from ....operations.rows import BatchRow
from ..screen import age_of
from ..subcommand import NOTHING, OK, Invocation, Subcommand, whole
from ..table import Column


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bid", nargs="?", help="Show this batch with its children.")
    parser.add_argument("--limit", type=whole, default=50, metavar="N", help="Maximum number of batches; default: 50.")


def _batches(call: Invocation) -> int:
    bid, limit = call.options["bid"], call.options["limit"]
    # No batch has such an id, and PostgreSQL raises for NUL.
    if bid and not bid.isprintable():
        return _report_unknown(call, bid)
    # The protocol can only show one batch by its id, without its children.
    if bid and call.alias is None:
        try:
            return _show(call, [BatchRow.read(call.broker.batch_status(bid))], is_more=False)
        except UnknownBatch:
            return _report_unknown(call, bid)
    rows = Batch.objects.using(call.require_alias())
    if bid:
        batch_rows = list(rows.filter(bid=bid))
        if not batch_rows:
            return _report_unknown(call, bid)
        # One row more than shown: its presence means that there are more, without a count.
        children = list(rows.filter(parent_bid=bid).order_by("-pk")[: limit + 1])
        return _show(
            call, [BatchRow.read(batch) for batch in [*batch_rows, *children[:limit]]], is_more=len(children) > limit
        )
    latest = list(rows.order_by("-pk")[: limit + 1])
    return _show(call, [BatchRow.read(batch) for batch in latest[:limit]], is_more=len(latest) > limit)


def _report_unknown(call: Invocation, bid: str) -> int:
    call.screen.note(f"no batch has the ID {bid}")
    return NOTHING


def _show(call: Invocation, documents: list[dict[str, Any]], *, is_more: bool) -> int:
    call.screen.listing({"batches": documents, "is_more": is_more}, _COLUMNS, documents)
    return OK


_COLUMNS = (
    Column("BID", "bid", is_name=True),
    Column("DESCRIPTION", "description", 3),
    Column("SETTLED", lambda batch: f"{batch['total'] - batch['pending']} of {batch['total']}", 1),
    Column("FAILED", "failed", 2),
    Column("COMPLETE", "complete", 6),
    Column("SUCCESS", lambda batch: "cannot" if batch["is_broken"] else batch["success"], 4),
    Column("CREATED", age_of("created_at"), 5),
)


SUBCOMMANDS = (Subcommand("batches", "Show the latest batches, or one with its children.", _batches, _arguments),)
