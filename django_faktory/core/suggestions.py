"""Suggest the known name that an unknown one resembles, for the end of an error message. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from ..errors import InvalidPayload

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


def refuse_unknown(names: Iterable[str], known: Iterable[str], *, within: str = "", also: Iterable[str] = ()) -> None:
    """Raise InvalidPayload for the first name that is not known, with the known name that it resembles.

    `also` has further names to suggest, such as members of another object: `filter.jids` is suggested for `jids`.
    """
    known = list(known)
    if (unknown := next((name for name in names if name not in known), None)) is None:
        return
    elsewhere = {name.rpartition(".")[2]: name for name in also}
    closest = find_closest(unknown, [*known, *elsewhere])
    expected = f"did you mean {elsewhere.get(closest, closest)}?" if closest else f"expected {', '.join(known)}"
    raise InvalidPayload(f"{within}unknown member {ascii(unknown)[:60]}; {expected or 'expected none'}")


def _normalize(name: str) -> str:
    return name.casefold().replace("-", "_")
