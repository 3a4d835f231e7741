"""Split a sequence into chunks, for transactions and statements of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def chunks(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the values in order, in slices of at most `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
