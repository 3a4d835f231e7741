"""Check whether a task can be called with given arguments, when a job is made of them instead of when it runs.

Every way to make a job of a registered task asks `CallSignature.problem_with`: `enqueue`, `push`, batches, cron
entries, the admin and the API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter, signature
from reprlib import Repr
from typing import TYPE_CHECKING, Any

from . import encryption, redaction
from .options import did_you_mean

if TYPE_CHECKING:
    from .base import FaktoryTask

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class CallSignature:
    """The parameters of a function that arguments of a job fill: without the context, which the worker passes."""

    def __init__(self, func: Callable[..., Any], *, takes_context: bool) -> None:
        # That of the function itself, not of one that it wraps: a decorator may pass arguments of its own.
        own = signature(func, follow_wrapped=False)
        self._signature = own.replace(
            parameters=[
                parameter.replace(annotation=Parameter.empty)
                for parameter in list(own.parameters.values())[takes_context:]
            ],
            return_annotation=Parameter.empty,
        )
        parameters = self._signature.parameters.values()
        positional = [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]
        required = {
            parameter.name
            for parameter in parameters
            if parameter.default is Parameter.empty and parameter.kind in (*_BY_POSITION, *_BY_NAME)
        }
        self._names = frozenset(parameter.name for parameter in parameters if parameter.kind in _BY_NAME)
        # Indexed by the number of positional arguments: the parameters that they fill, and those still required.
        self._filled = [frozenset(positional[:count]) for count in range(len(positional) + 1)]
        self._missing = [frozenset(required - filled) for filled in self._filled]
        self._nameless = [
            name
            for name, parameter in self._signature.parameters.items()
            if parameter.kind is Parameter.POSITIONAL_ONLY and name in required
        ]

    def __str__(self) -> str:
        return f"{self._signature!s:.200}"

    def problem_with(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Return why these arguments do not fit, in Python's words; "" if they do."""
        # Decides nearly every call: `Signature.bind` takes 4 to 9 µs, this 0.2 to 0.5.
        count, names = len(args), kwargs.keys()
        if (
            count < len(self._missing)
            and names >= self._missing[count]
            and (not names or (names <= self._names and names.isdisjoint(self._filled[count])))
        ):
            return ""
        # Python 3.13.0 binds a call that misses one of these and passes its name to `**kwargs`.
        if count < len(self._nameless):
            return f"missing a required positional-only argument: {self._nameless[count]!r}"
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in self._names and f"'{name}'" in str(error)), "")
            return f"{error}{did_you_mean(unknown, self._names)}"
        return ""


@lru_cache(maxsize=4096)
def _read(func: Callable[..., Any], takes_context: bool) -> CallSignature:
    return CallSignature(func, takes_context=takes_context)


def signature_of(task: FaktoryTask[..., Any]) -> CallSignature:
    """Return the signature of a task's function; each function is inspected once."""
    return _read(task.func, task.takes_context)


def call_error(task: FaktoryTask[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], problem: str) -> TypeError:
    """Return the error for a call with this problem: one line, without arguments that are redacted or encrypted."""
    if redaction.is_on() or encryption.is_enabled(task.encrypt):
        call = redaction.HIDDEN
    else:
        values = [_shown.repr(value) for value in args] + [f"{name}={_shown.repr(kwargs[name])}" for name in kwargs]
        call = f"({', '.join(values):.300})"
    return TypeError(f"{task.jobtype}{signature_of(task)} cannot be called with {call}: {problem}")


class _ShortRepr(Repr):
    def repr_instance(self, value: Any, level: int) -> str:  # noqa: ARG002
        """Return the name of the class: `repr` of a queryset would run a query."""
        return f"<{type(value).__name__}>"


_shown = _ShortRepr()
_shown.maxstring = 80
