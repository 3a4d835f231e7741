"""The MUTATE command: a change to all jobs of one set that a filter selects (W23). Data types only."""

from __future__ import annotations

import msgspec

from ..errors import InvalidPayload

# Commands and sets of the original server.
COMMANDS = ("clear", "kill", "discard", "requeue")
TARGETS = ("scheduled", "retries", "dead")
MAX_REGEXP, MAX_STARS, MAX_SEGMENT = 1000, 100, 100
"""Limits of a glob: its characters, its stars, and characters between two stars if `?` or `[…]` is among them.

They bound the CPU time, because a glob is matched with every job of the set.
"""


class Mutation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Apply `command` to the jobs of `target`, as the original server does.

    With `jids` the other filters are ignored; `jobtype` and `regexp` must both match; without a filter the whole set is
    selected. `clear` takes no filter.
    """

    command: str
    target: str
    jids: tuple[str, ...] | None = None
    """Only these jobs; an empty tuple selects none."""
    jobtype: str = ""
    regexp: str = ""
    """A glob over the job's whole JSON as FETCH sends it, without white space between tokens."""

    def __post_init__(self) -> None:
        """Raise InvalidPayload for `clear` with a filter, which the original server ignores."""
        if self.command == "clear" and (self.jids is not None or self.jobtype or self.regexp):
            raise InvalidPayload("invalid MUTATE: filter: clear takes none and drops the whole set; use discard")
