"""`limits`: show limits and their use; set and remove them; pause and resume tasks."""

from __future__ import annotations

from functools import partial
from typing import Any

from ....core.limits import Allowance, InvalidLimit, Scope
from ....core.suggestions import suggest
from ....errors import quoted
from ....models import Limit
from ....operations import task_names
from ....operations.serializers import read_limits
from ....store.limits import definitions
from ....tasks import limits as task_limits
from ....tasks.base import import_tasks
from ..screen import age_of
from ..subcommand import NOTHING, OK, REASON, Argument, Invocation, Unsupported, flag, operator, subcommand, verbs
from ..table import Column

_NAMES = "set: task|queue|key NAME LIMIT…; remove: SCOPE NAME; pause: tasks."
_EXPECTED = {
    "list": "no names",
    "set": "a scope (queue, task or key), a name, and a number, a rate such as 100/s, or both",
    "remove": "a scope (queue, task or key) and a name",
    "pause": "names of tasks",
    "resume": "names of tasks",
}


@subcommand(
    "limits",
    "List limits; set or remove them, pause tasks: limits pause TASK.",
    verbs(*_EXPECTED),
    Argument("names", nargs="*", metavar="NAME", help=_NAMES),
    flag("--new", "set, pause: accept names of tasks and queues not used yet."),
    REASON,
)
def _limits(call: Invocation) -> int:
    verb, names = call.options["verb"], list(call.options["names"])
    using = call.require_alias()
    try:
        match verb, names:
            case "list", []:
                return _list(call, using)
            case "set", [scope, name, *values] if values:
                return _set(call, using, scope, name, values)
            case "remove", [scope, name]:
                return _remove(call, using, scope, name)
            case (("pause" | "resume"), [_, *_]):
                tasks = [task_limits.check_name(Scope.TASK, name) for name in names]
                _require_known_names(call, Scope.TASK, tasks, using)
                pause = partial(definitions.pause, by=operator(), reason=call.options["reason"])
                change = pause if verb == "pause" else definitions.resume
                return _print_changed(call, verb, change(tasks, using=using))
    except InvalidLimit as error:  # names the field; the subcommand adds where it was given
        raise Unsupported(f"limits {verb}: {error}") from None
    raise Unsupported(f"limits {verb}: expected {_EXPECTED[verb]}")


def _set(call: Invocation, using: str, scope: str, name: str, values: list[str]) -> int:
    numbers: dict[str, Any] = {}
    for value in values:
        # isdigit() alone also accepts characters such as ², which int() rejects.
        numbers |= {"concurrency": int(value)} if value.isascii() and value.isdigit() else {"rate": value}
    if scope not in list(Scope):
        raise InvalidLimit("scope: expected %(known)s, got %(scope)s", known=", ".join(Scope), scope=quoted(scope))
    allowance = Allowance.of(numbers)
    checked_name = task_limits.check_name(scope, name)
    _require_known_names(call, scope, [checked_name], using)
    limit = definitions.save_limit(scope, checked_name, allowance, using=using)
    return _print_changed(call, "set", [limit.name])


def _remove(call: Invocation, using: str, scope: str, name: str) -> int:
    limits = Limit.objects.using(using).filter(scope=scope)
    limit = limits.filter(name=name).first()
    if limit is None:
        known = limits.values_list("name", flat=True)
        call.screen.note(f"limits remove: there is no limit of the {scope} {name}{suggest(name, known)}")
        # Nothing to remove is a result and no error: the exit code reports it.
        return _print_changed(call, "remove", [])
    definitions.remove(limit, using=using)
    if limit.removal_warning:
        call.screen.note(f"limits remove: {name}: {limit.removal_warning}")
    return _print_changed(call, "remove", [name])


def _require_known_names(call: Invocation, scope: str, names: list[str], using: str) -> None:
    # Each job names its own key, so any key may be new.
    if scope == Scope.KEY:
        return
    import_tasks()
    limited = Limit.objects.using(using).filter(scope=scope).values_list("name", flat=True)
    known = task_names.known_tasks(using=using) if scope == Scope.TASK else call.known_queue_names()
    call.require_known(scope, names, {*known, *limited})


def _print_changed(call: Invocation, verb: str, names: list[str]) -> int:
    call.screen.result({"limits": names}, f"limits {verb}: {', '.join(names) or 'none'}")
    return OK if names else NOTHING


def _list(call: Invocation, using: str) -> int:
    limits = list(Limit.objects.using(using).order_by("scope", "name"))
    documents = read_limits(limits, using=using)
    texts = {limit.pk: limit.allowance_text for limit in limits}
    call.screen.listing({"limits": documents}, _COLUMNS, [{**one, "allows": texts[one["id"]]} for one in documents])
    return OK


_COLUMNS = (
    Column("SCOPE", "scope"),
    Column("NAME", "name", is_name=True),
    Column("ALLOWS", "allows", 1),
    Column("IN USE", "in_use", 2),
    Column("WAITING", "waiting", 3),
    Column("OPENS", age_of("opens_at"), 4),
    Column("ORIGIN", "origin", 5),
)
