"""Settings of GearMonkey, read-only."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from ... import conf
from .errors import UnusableServer


def url_of(url: str | None = None) -> str:
    """Return the server's URL: the argument, else `GEARMONKEY_URL` of the environment, else the setting.

    Raises UnusableServer if there is none.
    """
    found = url or os.environ.get("GEARMONKEY_URL") or conf.get("GEARMONKEY_URL")
    if not found:
        raise UnusableServer(
            "GearMonkey: no server is known; give its URL, or set GEARMONKEY_URL in FAKTORY or in the environment"
        )
    return str(found)


def without_password(url: str) -> str:
    """Return the URL without user and password, for log lines."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
