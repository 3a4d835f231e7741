"""Suggest the known name that an unknown one resembles, for the end of an error message. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 100
"""Characters of a name that is compared: the time grows with its square, and a client chooses the name."""


def find_closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar, whatever its case and its dashes; None if none is similar."""
    by_spelling = {_normalize(candidate): candidate for candidate in sorted(known, reverse=True)}
    spelling = _normalize(name)
    matches = get_close_matches(spelling, by_spelling, n=1) if len(spelling) <= _LONGEST else []
    return by_spelling[matches[0]] if matches else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the most similar known name; "" if none is similar."""
    closest = find_closest(name, known)
    return f"; did you mean {closest}?" if closest else ""


def explain_unknown(name: str, known: Iterable[str], *, elsewhere: Iterable[str] = ()) -> str:
    """Return what was expected in place of an unknown member: the name that it resembles, or all of them.

    `elsewhere` has members of other objects, as paths: `filter.jids` is suggested for `jids`.
    """
    known = list(known)
    paths = {path.rpartition(".")[2]: path for path in elsewhere}
    closest = find_closest(name, [*known, *paths])
    return f"did you mean {paths.get(closest, closest)}?" if closest else f"expected {', '.join(known) or 'none'}"


def _normalize(name: str) -> str:
    return name.casefold().replace("-", "_")
