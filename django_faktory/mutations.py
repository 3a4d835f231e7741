"""What MUTATE asks for: a change to all jobs of one set that a filter describes (W23). Shape only; no rule of jobs."""

from __future__ import annotations

import msgspec

COMMANDS = ("clear", "kill", "discard", "requeue")
TARGETS = ("scheduled", "retries", "dead")
MAX_REGEXP, MAX_STARS, MAX_SEGMENT = 1000, 100, 100
"""Of a glob, which is tried on every job of the set: its characters, its stars, and the characters between two stars
where `?` or `[…]` is among them."""


class Mutation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`command` on the jobs of `target`. With `jids` the other filters do not count; `jobtype` and `regexp` must
    both be met; without any, it is the whole set. `clear` never looks at a filter. As the original server has it."""

    command: str
    target: str
    jids: tuple[str, ...] | None = None
    """These only; an empty one names none."""
    jobtype: str = ""
    regexp: str = ""
    """A glob over the job's whole JSON as FETCH would give it, without white space between its tokens."""
