"""`locks`: show lock keys in use with the jobs that wait for them; release locks manually."""

from __future__ import annotations

from ....models import Job, JobLock
from ....operations.rows import LockRow
from ....store.jobs import transitions
from ..screen import age_of, quantity
from ..subcommand import NOTHING, OK, YES, Argument, Invocation, Unsupported, limit, subcommand, verbs
from ..table import Column

COUNTED = 1000
"""Largest number of waiting jobs that is counted for one lock."""


@subcommand(
    "locks",
    "List locks and the jobs that wait for them; release them: locks release TOKEN.",
    verbs("list", "release"),
    Argument("names", nargs="*", metavar="KEY|TOKEN", help="list: keys to show; release: tokens of locks."),
    limit("locks"),
    YES,
)
def _locks(call: Invocation) -> int:
    using, names = call.require_alias(), list(dict.fromkeys(call.options["names"]))
    return _release(call, names, using) if call.options["verb"] == "release" else _list(call, names, using)


def _list(call: Invocation, keys: list[str], using: str) -> int:
    most = call.options["limit"]
    locks = JobLock.objects.using(using).order_by("-pk")
    # No lock has an unprintable key, and PostgreSQL raises for NUL.
    if keys:
        locks = locks.filter(key__in=[key for key in keys if key.isprintable()])
    # One row more than shown: its presence means that there are more, without a count.
    rows = list(locks[: most + 1])
    waiting = Job.objects.using(using).blocked()
    documents = [
        LockRow.read(lock) | {"waiting": waiting.filter(lock_key=lock.key).count_up_to(COUNTED)} for lock in rows[:most]
    ]
    call.screen.listing({"locks": documents, "is_more": len(rows) > most}, _COLUMNS, documents)
    locked_keys = set(locks.values_list("key", flat=True)) if keys else set()
    for key in keys:
        if key not in locked_keys:
            call.screen.note(f"no job has a lock of the key {key}")
    return OK if rows or not keys else NOTHING


_COLUMNS = (
    Column("TOKEN", "token", is_name=True),
    Column("KEY", "key", 1),
    Column("JID", "jid", is_name=True),
    Column("WORKER", "worker", 5),
    Column("HELD SINCE", age_of("acquired_at"), 3),
    Column("EXPIRES", age_of("expires_at"), 4),
    Column("WAITING", lambda lock: f"{lock['waiting']}{'+' if lock['waiting'] == COUNTED else ''}", 2),
)


def _release(call: Invocation, names: list[str], using: str) -> int:
    # At most 18 digits: larger numbers do not fit the database's integer.
    if not names or not all(name.isascii() and name.isdigit() and len(name) <= 18 for name in names):
        raise Unsupported("locks release: expected the tokens of locks, as `faktory locks` prints them")
    tokens = {int(name) for name in names}
    keys = dict(JobLock.objects.using(using).filter(pk__in=tokens).values_list("pk", "key"))
    if missing := sorted(tokens - keys.keys()):
        call.screen.note(f"locks release: no lock has the token {missing[0]}; it was released, or acquired again")
        return NOTHING
    question = f"release {', '.join(keys.values())}? Other jobs of the key may run while the holder still runs."
    call.require_confirmation(question)
    changed = transitions.free_locks(sorted(tokens), using=using)
    call.screen.result({"changed": changed}, f"locks release: {quantity(changed, 'lock')}")
    return OK if changed else NOTHING
