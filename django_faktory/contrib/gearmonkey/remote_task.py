"""`@gearmonkey_task("name")`: a task that is executed by a GearMonkey worker elsewhere.

Our job waits for the GearMonkey job, and so has our retries, results and admin pages. If our worker dies while waiting,
the next attempt creates a second GearMonkey job.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from ...tasks.base import FaktoryTask, new_task
from . import protocol
from .client import Client
from .errors import RemoteFailure
from .protocol import NORMAL, OPT_BLOCKING, OPT_ROLLCALL, Status
from .registry import decode_structure, input_of
from .settings import url_of


def gearmonkey_task(
    fn: str,
    *,
    prio: str = NORMAL,
    wait_s: float | None = None,
    rollcall: bool = False,
    url: str | None = None,
    output: Callable[[str], Any] = decode_structure,
    **options: Any,
) -> Callable[[Callable[..., Any]], FaktoryTask[..., Any]]:
    """Turn a function into a task that a GearMonkey worker elsewhere runs as `fn`; its own body is never run.

    The signature describes the job's arguments. `prio` is "high", "normal" or "low"; `url` is as for `Client`. The
    result is `output` applied to the output's text; by default a JSON array or object is decoded and any other text is
    returned as it is. `wait_s` bounds the wait (JobTimeout). With `rollcall` a run fails at once if there is no worker
    (NoWorkers). An error of the remote job raises RemoteFailure. `options` are those of `@task`.
    """
    protocol.function_name(fn)
    # The thread of our worker is occupied until the end, so waiting for a time is left to our own job.
    if protocol.priority(prio) == protocol.SCHEDULED:
        raise ValueError("gearmonkey_task: prio: expected high, normal or low; a time is given by using(run_after=…)")
    client_options = [OPT_BLOCKING, OPT_ROLLCALL] if rollcall else [OPT_BLOCKING]

    def decorate(function: Callable[..., Any]) -> FaktoryTask[..., Any]:
        signature = inspect.signature(function)

        @wraps(function)
        def run_remotely(*args: Any, **kwargs: Any) -> Any:
            # Wrong arguments should fail here, before a job is created.
            signature.bind(*args, **kwargs)
            client = _client(url_of(url))
            id_ = client.run(fn, input_of(args, kwargs), prio, client_options, timeout=wait_s)
            job = client.get(fn, id_)
            if job.status is Status.ERROR:
                raise RemoteFailure(job.text)
            return output(job.text)

        # `enqueue` checks a call against the function's own signature, which is (*args, **kwargs).
        run_remotely.__signature__ = signature  # type: ignore[attr-defined]
        return new_task(func=run_remotely, **options)

    return decorate


@lru_cache(maxsize=16)
def _client(url: str) -> Client:
    """Return the client of this URL: one connection pool per server and process."""
    return Client(url)
