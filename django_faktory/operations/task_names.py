"""Find tasks by the last part of a dotted name, or by a misspelled name."""

from __future__ import annotations

from collections import defaultdict
from difflib import get_close_matches
from typing import Any

from msgspec import structs

from ..core.histograms import OTHER
from ..core.queries import Pattern, Query
from ..errors import UnknownJobType
from ..store.statistics import histograms
from ..tasks import base
from ..tasks.base import FaktoryTask, registered

SUGGESTED = 5
"""Number of suggestions for one word."""


def known_tasks(*, using: str) -> set[str]:
    """Return the tasks of this project, and those in any language with the most starts."""
    started = {jobtype for _, jobtype in histograms.read_totals(using=using) if jobtype != OTHER}
    return started | {task.jobtype for task in registered()}


def expand_short_names(query: Query, *, using: str) -> Query:
    """Return the query with full names of tasks in place of last parts: `shop.tasks.charge` for `task:charge`.

    A name that is a task itself, or no last part of one, stays unchanged.
    """
    short = [pattern.text for pattern in query.tasks if not pattern.is_prefix and "." not in pattern.text]
    if not short:
        return query
    known = known_tasks(using=using)
    tasks: list[Pattern] = []
    for pattern in query.tasks:
        full = [] if pattern.text in known else sorted(name for name in known if name.endswith(f".{pattern.text}"))
        tasks += [Pattern(name) for name in full] if pattern.text in short and full else [pattern]
    return structs.replace(query, tasks=tuple(tasks))


def lookup(jobtype: str) -> FaktoryTask[..., Any]:
    """Return a registered task. Raises UnknownJobType, which suggests the most similar task, for any other name."""
    try:
        return base.lookup(jobtype)
    except UnknownJobType as error:
        similar = _most_similar(jobtype, {task.jobtype for task in registered()})
        raise UnknownJobType(f"{error}{f'; did you mean {similar[0]}?' if similar else ''}") from None


def find_similar(word: str, *, using: str) -> list[str]:
    """Return tasks with the word in their name, or with a similar name or last part of the name."""
    return _most_similar(word, known_tasks(using=using))


def _most_similar(word: str, known: set[str]) -> list[str]:
    lowered = word.lower()
    containing = sorted(name for name in known if lowered in name.lower())
    by_last_part: dict[str, list[str]] = defaultdict(list)
    for name in sorted(known):
        by_last_part[name.rpartition(".")[2]].append(name)
    close = get_close_matches(word, sorted(known), n=SUGGESTED) if "." in word else []
    close += [name for part in get_close_matches(word, list(by_last_part), n=SUGGESTED) for name in by_last_part[part]]
    return list(dict.fromkeys([*containing, *close]))[:SUGGESTED]
