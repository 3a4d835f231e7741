"""Report the predecessors of a restarted worker as lost (`report_lost`)."""

from __future__ import annotations

from ...brokers.base import WorkerBroker
from ...core.logs import get_logger
from ...errors import FaktoryError
from .contract import ChildSpec

logger = get_logger(__name__)


def report_lost(broker: WorkerBroker, child_spec: ChildSpec) -> None:
    """Return the jobs of this child's dead predecessors to their queues now.

    Otherwise these jobs would wait until maintenance notices a minute without BEATs (W20). Errors of the broker are
    only logged.
    """
    silence_s = child_spec.unresponsive
    try:
        for wid in child_spec.lost:
            # One call for each wid, since the seconds in the reason differ.
            if wid in silence_s:
                reason = f"its process stopped responding and was killed after {silence_s[wid]} s"
                broker.lost([wid], reason=reason)
        if crashed := [wid for wid in child_spec.lost if wid not in silence_s]:
            broker.lost(crashed)
    except FaktoryError as error:
        logger.warning("lost workers could not be reported wids=%s error=%s", ",".join(child_spec.lost), error)
