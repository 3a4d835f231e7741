"""Names of workers as people use them: `host:pid`, of present workers and of those lost lately."""

from __future__ import annotations

from collections.abc import Iterable

from ..models import AlarmRecord, WorkerProcess
from ..store import alarm_records


def read(wids: Iterable[str], *, using: str) -> dict[str, str]:
    """Return the names of these workers, in at most two statements; unknown wids are left out."""
    wanted = set(wids) - {""}
    rows = WorkerProcess.objects.using(using).filter(wid__in=wanted).only("wid", "hostname", "pid") if wanted else ()
    names = {row.wid: row.name for row in rows}
    if unknown := wanted - names.keys():
        lost = AlarmRecord.objects.using(using).filter(kind=alarm_records.LOST_WORKER, way="", subject__in=unknown)
        names |= dict(lost.values_list("subject", "text"))
    return names
