"""Validation of the security settings: a predicate and an error text for each. Used by `checks`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.utils.module_loading import import_string

from .. import conf


def _are_commands(value: Any) -> bool:
    return isinstance(value, list | tuple | set) and all(name in conf.REFUSABLE for name in value)


# bool is a subclass of int: True would otherwise count as 1.
def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_hook(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return value == "" or callable(import_string(value))
    except Exception:  # noqa: BLE001  (importing runs anybody's code; whatever is wrong there, it cannot be used)
        return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


SECURITY_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "ENCRYPT_ARGUMENTS": (lambda value: isinstance(value, bool), "True or False"),
    "ENCRYPTION_KEYS": (_are_texts, "a list of keys, each a text that Fernet.generate_key() makes"),
    "PASSWORD_TRIES": (_is_count, "a whole number, 0 or more"),
    "REDACT": (_is_hook, "the dotted path of a function that takes a jobtype and arguments, or an empty text"),
    "REFUSED_COMMANDS": (_are_commands, f"a list of some of {', '.join(conf.REFUSABLE)}"),
    "STRICT_WIDS": (lambda value: isinstance(value, bool), "True or False"),
}
