"""Arguments and results that only this project's processes can read: encrypted where they lie and where they travel.

`"args": [{"$encrypted": TOKEN}]`; the token is Fernet's, of JSON `[jobtype, args, kwargs]`. The format is told in
docs/security.md, "Encrypted arguments". Needs the package `cryptography`, at run time and only where it is used.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from . import conf, jsontext
from .errors import CannotDecrypt, CannotEncrypt, InvalidPayload
from .options import SAME, SEALED, canonical

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

_BEGINNING, _SHORTEST = "gAAAA", 100
"""Of a Fernet token in base64: version 128 and a time before 2106; it has at least 73 bytes."""


def is_wanted(encrypt: bool | None) -> bool:
    """Whether jobs of a task with this option are encrypted: as it says itself, or the project for all."""
    return bool(conf.get("ENCRYPT_ARGUMENTS")) if encrypt is None else encrypt


def seal(jobtype: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, tells_same: bool) -> list[Any]:
    """The arguments that stand for these; the call then has none by keyword. The first key encrypts.

    `tells_same`: that two jobs have the same arguments can be seen, as uniqueness and locks ask. Raises CannotEncrypt.
    """
    fernet = _fernet(CannotEncrypt)
    text = jsontext.encode([jobtype, args, kwargs])
    jsontext.check_depth(text)
    envelope = {SEALED: fernet.encrypt(_bytes(text)).decode()}
    if tells_same:
        envelope[SAME] = _mark(text)
    return [envelope]


def is_sealed(args: Sequence[Any]) -> bool:
    """Whether these stand for arguments that were encrypted."""
    return len(args) == 1 and type(args[0]) is dict and SEALED in args[0] and _is_token(args[0][SEALED])


def _is_token(value: object) -> bool:
    """Whether this has the form of a Fernet token; tasks with `plain_json` may be given any other `$encrypted`."""
    return isinstance(value, str) and value.startswith(_BEGINNING) and len(value) >= _SHORTEST


def opened(jobtype: str, args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that were sealed for this jobtype. Any key opens. Raises CannotDecrypt, InvalidPayload."""
    found = _open(args[0][SEALED])
    match found:
        case [str(own), list(positional), dict(named)] if own == jobtype:
            return positional, named
    raise InvalidPayload("args: they were encrypted for another jobtype, or are no arguments")


def seal_value(value: Any) -> dict[str, str]:
    """What stands for a result."""
    return {SEALED: _fernet(CannotEncrypt).encrypt(_bytes(jsontext.encode(value))).decode()}


def opened_value(value: Any) -> Any:
    """The result that was sealed; one that was not, as it is. Raises CannotDecrypt."""
    return _open(value[SEALED]) if isinstance(value, dict) and value.keys() == {SEALED} else value


def problem() -> str:
    """Why nothing can be encrypted; "" where all is well. Never tells a key."""
    try:
        _fernet(CannotEncrypt)
    except CannotEncrypt as error:
        return str(error)
    return ""


def _open(token: object) -> Any:
    fernet = _fernet(CannotDecrypt)
    from cryptography.fernet import InvalidToken  # an extra

    try:
        return jsontext.decode(fernet.decrypt(str(token)).decode("utf-8", "surrogatepass"))
    except InvalidToken:
        count = len(conf.get("ENCRYPTION_KEYS"))
        raise CannotDecrypt(
            f"none of the {count} keys in FAKTORY['ENCRYPTION_KEYS'] opens what was encrypted: add the key it was "
            "encrypted with, behind the others"
        ) from None


def _fernet(error: type[CannotDecrypt | CannotEncrypt]) -> MultiFernet:
    keys = conf.get("ENCRYPTION_KEYS")
    if not keys:
        raise error("FAKTORY['ENCRYPTION_KEYS']: expected one key or more, got none")
    try:
        return _made(tuple(keys))
    except ImportError:
        raise error("cryptography is not installed: pip install django-faktory[crypto]") from None
    except (TypeError, ValueError):  # not `from` it: nothing of a key may be told
        raise error(
            "FAKTORY['ENCRYPTION_KEYS']: expected keys of 32 bytes in URL-safe base64, got another text among them; "
            "Fernet.generate_key() makes one"
        ) from None


@lru_cache(maxsize=8)
def _made(keys: tuple[str, ...]) -> MultiFernet:
    from cryptography.fernet import Fernet, MultiFernet  # an extra

    return MultiFernet([Fernet(key) for key in keys])


def _mark(text: str) -> str:
    """The same for the same call, under the same first key; without that key nobody can try guesses."""
    key = sha256(b"django_faktory: same arguments\0" + _bytes(str(conf.get("ENCRYPTION_KEYS")[0]))).digest()
    return hmac.new(key, canonical(text).encode(), sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
