"""Map functions to tasks, inputs to a task's arguments, and results to outputs.

Security invariant: nothing is imported because a peer named it. A function is in this table or is not served.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ... import conf
from ...core.json import jsontext
from ...errors import InvalidPayload, UnknownJobType
from ...tasks import base
from ...tasks.base import FaktoryTask

DIRECT, GATEWAY = "direct", "gateway"


def served_tasks() -> dict[str, FaktoryTask[..., Any]]:
    """Return the task of each function, from `@task(gearmonkey=…)` and GEARMONKEY_FUNCTIONS.

    Raises ImproperlyConfigured if two tasks serve one function, or if a task cannot serve one.
    """
    tasks: dict[str, FaktoryTask[..., Any]] = {}
    definitions = [(task.gearmonkey, task) for task in base.registered() if task.gearmonkey]
    definitions += [(fn, _lookup_task(fn, name)) for fn, name in conf.get("GEARMONKEY_FUNCTIONS").items()]
    is_direct = conf.get("GEARMONKEY_MODE") == DIRECT
    for fn, task in definitions:
        earlier = tasks.setdefault(fn, task)
        if earlier.jobtype != task.jobtype:
            raise ImproperlyConfigured(
                f"GearMonkey function {fn!r}: expected one task, got {earlier.jobtype} and {task.jobtype}"
            )
        # In direct mode no row exists that could be finished in the task's transaction.
        if is_direct and task.atomic:
            raise ImproperlyConfigured(
                f'GearMonkey function {fn!r}: task {task.jobtype} is atomic: set GEARMONKEY_MODE to "gateway", '
                "where its job is a row"
            )
    return tasks


def _lookup_task(fn: str, name: str) -> FaktoryTask[..., Any]:
    try:
        return base.lookup(name)
    except UnknownJobType as error:
        raise ImproperlyConfigured(f"GEARMONKEY_FUNCTIONS[{fn!r}]: {error}") from error


def call_of(raw: bytes, *, max_bytes: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an input. Raises InvalidPayload.

    A JSON array is the positional arguments, a JSON object the keyword arguments, an empty input none. Any other text
    is one argument.
    """
    # Before decoding: a peer may push an input of any size.
    if len(raw) > max_bytes:
        raise InvalidPayload(f"input: expected at most {max_bytes} bytes, got {len(raw)}")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidPayload(f"input: expected UTF-8, got byte {raw[error.start]:#04x} at {error.start}") from None
    match decode_structure(text):
        case list() as args:
            return args, {}
        case dict() as kwargs:
            return [], kwargs
    return ([text] if text else []), {}


def decode_structure(text: str) -> Any:
    """Return a JSON array or object decoded, any other text unchanged.

    Raises InvalidPayload if it is nested too deep.
    """
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        decoded = json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise InvalidPayload("input: nested too deep") from None
    jsontext.check_depth(text)
    return decoded


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return arguments as an input that `call_of` reads back.

    Raises TypeError for positional and keyword arguments together: an input has room for one kind.
    """
    if args and kwargs:
        raise TypeError("expected positional or keyword arguments, got both: a GearMonkey input holds one kind")
    if not args and not kwargs:
        return b""
    only_argument = args[0] if len(args) == 1 else None
    # Plain text is sent as it is, for peers that read no JSON, unless it would be read back as JSON.
    if isinstance(only_argument, str) and only_argument and decode_structure(only_argument) is only_argument:
        return only_argument.encode()
    # `call_of` reads an array as positional and an object as keyword arguments.
    return json.dumps(kwargs or list(args), ensure_ascii=False, allow_nan=False).encode()


def output_of(result: str | None) -> bytes:
    """Return a task's JSON result as output: a string becomes its text, null becomes empty."""
    if result is None or result == "null":
        return b""
    if result.startswith('"'):
        text: str = json.loads(result)
        # A JSON string may contain a lone surrogate, which UTF-8 cannot encode.
        return text.encode("utf-8", "replace")
    return result.encode("utf-8", "replace")
