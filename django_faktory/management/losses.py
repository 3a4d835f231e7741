"""What a child has to say of those before it, in whose place it was started."""

from __future__ import annotations

from ..brokers import Broker
from ..errors import FaktoryError
from ..logs import get_logger
from ..worker.terms import Launch

logger = get_logger(__name__)


def report_lost(broker: Broker, launch: Launch) -> None:
    """Say which workers before this one died: what they held goes on now, not after a minute without beats (W20)."""
    if not launch.lost:
        return
    try:
        broker.lost(launch.lost)
    except FaktoryError as error:
        logger.warning("lost workers could not be reported wids=%s error=%s", ",".join(launch.lost), error)
