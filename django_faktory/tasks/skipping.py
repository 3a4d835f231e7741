"""Skip the block of a `with` statement: Python has no means of its own, so a trace function raises in its first line.

A block that cannot be skipped is found before it runs for the first time (`find_block`), not only when it has to be
skipped. Works on CPython 3.11 to 3.14. Independent of jobs and steps.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any


class _Skipped(BaseException):
    """Ends a skipped block; `Skipper.end` recognizes it."""


class Skipper:
    """Skips the block at `start` of the `with` statement that runs in `frame`."""

    def __init__(self, frame: FrameType, start: int) -> None:
        self._frame, self._start = frame, start
        self._tracers = sys.gettrace(), frame.f_trace

    def begin(self) -> None:
        """Raise in the first line of the block. Call it at the end of `__enter__`."""
        self._frame.f_trace = self._trace
        # Without a trace function of the thread, Python calls none of a frame. This one traces no other frame.
        sys.settrace(_trace_nothing)

    def end(self, kind: type[BaseException] | None) -> bool:
        """Restore the trace functions, such as those of a debugger; return whether the block was skipped."""
        thread_tracer, self._frame.f_trace = self._tracers
        sys.settrace(thread_tracer)
        return kind is _Skipped

    def _trace(self, frame: FrameType, *_: Any) -> Callable[..., Any]:
        # The target of `as` may have a line of its own, before the block.
        if frame.f_lasti >= self._start:
            raise _Skipped
        return self._trace


def _trace_nothing(*_: Any) -> None:
    return None


def find_block(frame: FrameType) -> int | None:
    """Return the place of the first line of the block, if an exception there reaches the `with` statement itself.

    None: that line is `try:` or has no code, it is also the line of the `with`, or the frame runs no such statement.
    """
    return _find_block(frame.f_code, frame.f_lasti)


@lru_cache(maxsize=256)
def _find_block(code: CodeType, entered_at: int) -> int | None:
    # The instruction that called `__enter__`: until Python 3.13 one of its own, then a call of a method it looked up.
    called, before = code.co_code[entered_at], code.co_code[max(entered_at - 2, 0)]
    if dis.opname[called] != "BEFORE_WITH" and dis.opname[before] != "LOAD_SPECIAL":
        return None
    handlers = list(_handlers(code))
    # The statement's handler applies from the next instruction on, which assigns the target of `as`.
    assigned_at, _, own = min((handler for handler in handlers if handler[0] > entered_at), default=(0, 0, 0))
    lines = [(start, line) for start, end, line in code.co_lines() if line is not None and end > assigned_at]
    start = next((start for start, line in lines if start > assigned_at and line != lines[0][1]), -1)
    return start if [target for at, end, target in handlers if at <= start < end] == [own] else None


def _handlers(code: CodeType) -> Iterator[tuple[int, int, int]]:
    """Yield the begin, the end and the handler of each range of instructions in CPython's `co_exceptiontable`."""
    numbers = _numbers(iter(code.co_exceptiontable))
    for start, length, target, _ in zip(numbers, numbers, numbers, numbers, strict=False):
        yield 2 * start, 2 * (start + length), 2 * target


def _numbers(data: Iterator[int]) -> Iterator[int]:
    """Decode numbers of 6 bits in each byte, of which all but the last have bit 6 set."""
    number = 0
    for byte in data:
        number = number << 6 | byte & 63
        if not byte & 64:
            yield number
            number = 0
