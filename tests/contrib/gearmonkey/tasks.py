"""Tasks that serve GearMonkey functions, and remote tasks, for the processes of `test_runfaktory`."""

import os
from pathlib import Path

from django_faktory import task
from django_faktory.contrib.gearmonkey import gearmonkey_task


@task(gearmonkey="shout")
def shout(text):
    return text.upper()


@task(gearmonkey="add")
def add(first, second=0):
    return first + second


@task(gearmonkey="fails", max_attempts=1)
def fails(text):
    raise ValueError(text)


@task(gearmonkey="flaky", takes_context=True, backoff=lambda *_: 0)
def flaky(context):
    """Succeed at the third attempt. The specification has no retries; the job rows of this package do."""
    if context.attempt < 3:
        raise ValueError(f"attempt {context.attempt}")
    return context.attempt


@task(gearmonkey="slowly", takes_context=True)
def slowly(context, folder):
    """Report progress, then wait until the test writes to `folder`/pipe."""
    context.progress(3, 10)
    path = Path(folder) / "pid"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    (Path(folder) / "pipe").read_text()
    return "done"


@gearmonkey_task("elsewhere", wait_s=20)
def elsewhere(text):
    """Executed by any worker that serves the function."""


@gearmonkey_task("elsewhere.sum", output=int, max_attempts=1)
def elsewhere_sum(*numbers): ...


@gearmonkey_task("elsewhere.unserved", rollcall=True, max_attempts=1)
def unserved(): ...
