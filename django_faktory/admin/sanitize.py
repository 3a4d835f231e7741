"""Replace control and bidirectional characters in client texts with visible symbols.

`with_readable_text` wraps the views of pages. Escaping of markup is left to the templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpResponse
from django.http.response import HttpResponseBase
from django.template.response import SimpleTemplateResponse

_UNSAFE = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_unsafe_pattern = re.compile(f"[{_UNSAFE}]")
# Tags and text areas stay unchanged, because the browser sends their texts back to the server.
_text_pattern = re.compile(rf"(<textarea\b.*?</textarea>|<[^>]*>)|([{_UNSAFE}])", re.DOTALL)

View = Callable[..., HttpResponseBase]


def make_readable(text: str) -> str:
    """Return the text with a symbol in place of each control character, surrogate and bidirectional mark."""
    return _unsafe_pattern.sub(lambda match: _symbol(match[0]), text) if _unsafe_pattern.search(text) else text


def with_readable_text(view: View) -> View:
    """Wrap a view so that its pages show symbols in place of these characters."""

    @wraps(view)
    def readable_view(*args: Any, **kwargs: Any) -> HttpResponseBase:
        response = view(*args, **kwargs)
        if isinstance(response, SimpleTemplateResponse):  # it gets its content after the view
            response.add_post_render_callback(_clean)
        elif isinstance(response, HttpResponse):
            _clean(response)
        return response

    return readable_view


def _clean(response: HttpResponse) -> None:
    # Only pages are changed; other content, such as JSON, must stay as it is.
    if not response.headers.get("Content-Type", "").startswith("text/html"):
        return
    page = response.content.decode(response.charset)
    if _unsafe_pattern.search(page):
        response.content = _text_pattern.sub(lambda match: match[1] or _symbol(match[2]), page)


def _symbol(char: str) -> str:
    """Return the visible symbol: Unicode has pictures of the C0 controls, such as ␛, other characters become U+FFFD."""
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
