"""Texts of clients as a page may show them: what commands a terminal or turns text round is seen, and does nothing.

Knows no job. Escaping is the templates' business; this is about characters that are no markup.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.template.response import SimpleTemplateResponse

_BAD = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_bad = re.compile(f"[{_BAD}]")
# Left as they are: tags, whose attributes take texts back to us, and fields that somebody sends back.
_shown = re.compile(rf"(<textarea\b.*?</textarea>|<[^>]*>)|([{_BAD}])", re.DOTALL)

View = Callable[..., HttpResponseBase]


def readable(text: str) -> str:
    """The text with a sign in the place of each control character, half of a character, and mark that turns text."""
    return _bad.sub(lambda found: _sign(found[0]), text) if _bad.search(text) else text


def with_readable_text(view: View) -> View:
    """The view, whose page shows no such character."""

    @wraps(view)
    def shown(*args: Any, **kwargs: Any) -> HttpResponseBase:
        response = view(*args, **kwargs)
        if isinstance(response, SimpleTemplateResponse) and not response.is_rendered:
            response.add_post_render_callback(_cleaned)
        elif isinstance(response, HttpResponse):
            _cleaned(response)
        return response

    return shown


def _cleaned(response: HttpResponse) -> None:
    if not response.headers.get("Content-Type", "").startswith("text/html"):
        return
    page = response.content.decode(response.charset)
    if _bad.search(page):
        response.content = _shown.sub(lambda found: found[1] or _sign(found[2]), page)


def _sign(char: str) -> str:
    """Unicode has pictures of the oldest ones: ␛."""
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
