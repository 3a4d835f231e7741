"""Report the predecessors of a restarted worker as lost."""

from __future__ import annotations

from ..brokers import Broker
from ..errors import FaktoryError
from ..logs import get_logger
from ..worker.terms import Launch

logger = get_logger(__name__)


def report_lost(broker: Broker, launch: Launch) -> None:
    """Give back the jobs of the workers before this one that died: now, not after a minute without BEATs (W20)."""
    silent = launch.unresponsive
    try:
        for wid in launch.lost:
            if wid in silent:
                reason = f"its process stopped responding and was killed after {silent[wid]} s"
                broker.lost([wid], reason=reason)
        if others := [wid for wid in launch.lost if wid not in silent]:
            broker.lost(others)
    except FaktoryError as error:
        logger.warning("lost workers could not be reported wids=%s error=%s", ",".join(launch.lost), error)
