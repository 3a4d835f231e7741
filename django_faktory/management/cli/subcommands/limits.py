"""`limits`: show limits and their use; set and remove them; pause and resume tasks."""

from __future__ import annotations

import argparse
from typing import Any

from ....core.limits import Allowance, InvalidLimit, Scope
from ....models import Limit
from ....operations.serializers import limit_of
from ....store.limits import definitions
from ....tasks import limits as task_limits
from ..subcommand import NOTHING, OK, Invocation, Subcommand, Unsupported

_VERBS = ("list", "set", "remove", "pause", "resume")


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", choices=_VERBS, default="list", help="What to do; default: list.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="set: task|queue|key NAME LIMIT…; remove: SCOPE NAME; pause: tasks."
    )


def _limits(call: Invocation) -> int:
    verb, names = call.options["verb"], list(call.options["names"])
    using = call.database()
    try:
        match verb, names:
            case "list", []:
                return _list(call, using)
            case "set", [scope, name, *values] if values:
                return _set(call, using, scope, name, values)
            case "remove", [scope, name]:
                found = Limit.objects.using(using).filter(scope=scope, name=name).first()
                if found is not None:
                    definitions.remove(found, using=using)
                return _print_changed(call, verb, [name] if found else [])
            case (("pause" | "resume"), [_, *_]):
                tasks = [task_limits.checked_name(Scope.TASK, name) for name in names]
                return _print_changed(
                    call, verb, (definitions.pause if verb == "pause" else definitions.resume)(tasks, using=using)
                )
    except InvalidLimit as error:
        raise Unsupported(f"limits {verb}: {error}") from None
    raise Unsupported(f"limits {verb}: expected {_EXPECTED[verb]}")


_EXPECTED = {
    "list": "no names",
    "set": "a scope (queue, task or key), a name, and a number, a rate such as 100/s, or both",
    "remove": "a scope (queue, task or key) and a name",
    "pause": "names of tasks",
    "resume": "names of tasks",
}


def _set(call: Invocation, using: str, scope: str, name: str, values: list[str]) -> int:
    given: dict[str, Any] = {}
    for value in values:
        # isdigit() alone also accepts characters such as ², which int() rejects.
        given |= {"concurrency": int(value)} if value.isascii() and value.isdigit() else {"rate": value}
    if scope not in list(Scope):
        raise InvalidLimit(f"scope: expected {', '.join(Scope)}, got {scope!r:.80}")
    allowed = Allowance.of(given)
    limit = definitions.save_limit(scope, task_limits.checked_name(scope, name), allowed, using=using)
    return _print_changed(call, "set", [limit.name])


def _print_changed(call: Invocation, verb: str, names: list[str]) -> int:
    if call.screen.is_json:
        call.screen.json({"limits": names})
    else:
        call.screen.line(f"limits {verb}: {', '.join(names) or 'none'}")
    return OK if names else NOTHING


def _list(call: Invocation, using: str) -> int:
    found = list(Limit.objects.using(using).order_by("scope", "name"))
    used = definitions.read_usage([limit.pk for limit in found], using=using)
    shown = [
        limit_of(limit, *used.get(limit.pk, ())) | {"waiting": definitions.waiting(limit, using=using)}
        for limit in found
    ]
    if call.screen.is_json:
        call.screen.json({"limits": shown})
    else:
        heads = ("SCOPE", "NAME", "ALLOWS", "IN USE", "WAITING", "OPENS", "ORIGIN")
        call.screen.table(heads, [_line(limit, one) for limit, one in zip(found, shown, strict=True)])
    return OK


def _line(limit: Limit, shown: dict[str, Any]) -> tuple[object, ...]:
    return (
        limit.scope,
        limit.name,
        limit.allowance_text,
        *(shown[key] for key in ("in_use", "waiting", "opens_at", "origin")),
    )


SUBCOMMANDS = (
    Subcommand("limits", "Show limits; set or remove them, pause tasks: limits pause TASK.", _limits, _arguments),
)
