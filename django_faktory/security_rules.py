"""What the settings about trust may be: a test for each, and its words. Used by `checks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import conf


def _are_commands(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(name in conf.REFUSABLE for name in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


SECURITY_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "PASSWORD_TRIES": (_is_count, "a whole number, 0 or more"),
    "REFUSED_COMMANDS": (_are_commands, f"a list of some of {', '.join(conf.REFUSABLE)}"),
}
