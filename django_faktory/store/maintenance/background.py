"""Steps of maintenance that may take long: each has a thread, so that due jobs do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from django.db import Error, connections

from ...core.logs import get_logger
from ...errors import BrokerUnavailable
from ..database_errors import first_line

logger = get_logger(__name__)


class BackgroundStep:
    """Calls `work` in a thread, once at a time."""

    def __init__(self, name: str, work: Callable[[], object]) -> None:
        self._name, self._work = name, work
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the work, unless it runs."""
        if not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name=f"faktory-{self._name}", daemon=True)
            self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the running work, if any."""
        if self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._work()
        except (Error, BrokerUnavailable) as error:
            logger.warning(
                "background step failed, it runs again when it is due step=%s error=%s", self._name, first_line(error)
            )
        finally:
            connections.close_all()
