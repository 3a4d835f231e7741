"""Find the URL of the GearMonkey server: in the environment or in the settings."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from ... import conf
from .errors import UnusableServer


def url_of(url: str | None = None) -> str:
    """Return the server's URL: the argument, else `GEARMONKEY_URL` of the environment, else the setting.

    Raises UnusableServer if there is none.
    """
    configured = url or os.environ.get("GEARMONKEY_URL") or conf.get("GEARMONKEY_URL")
    if not configured:
        raise UnusableServer(
            "GearMonkey: no server is known; give its URL, or set GEARMONKEY_URL in FAKTORY or in the environment"
        )
    return str(configured)


def is_configured() -> bool:
    """Return whether the environment or the settings name a server."""
    return bool(os.environ.get("GEARMONKEY_URL") or conf.get("GEARMONKEY_URL"))


def without_password(url: str) -> str:
    """Return the URL without user and password, for log lines."""
    split_url = urlsplit(url)
    return f"{split_url.scheme}://{split_url.netloc.rpartition('@')[2]}{split_url.path}"
