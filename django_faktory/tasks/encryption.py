"""Encryption of arguments and results, at rest and in transit; only this project's processes can read them.

`"args": [{"$encrypted": TOKEN}]`; the token is Fernet's, of the JSON `[jobtype, args, kwargs]`. The format:
`docs/private-arguments.md`. Needs the package `cryptography` at run time, only if encryption is used.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from .. import conf
from ..core.extras import explain_missing
from ..core.job_options import SAME, SEALED
from ..core.json import jsontext
from ..errors import CannotDecrypt, CannotEncrypt, InvalidPayload

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

_TOKEN_PREFIX, _MIN_TOKEN_LENGTH = "gAAAA", 100
"""Prefix and minimum length of a Fernet token in base64: version 128 and a time before 2106; at least 73 bytes."""


def is_enabled(encrypt: bool | None) -> bool:
    """Return True if jobs of a task with this option are encrypted; None: the project's setting decides."""
    return bool(conf.get("ENCRYPT_ARGUMENTS")) if encrypt is None else encrypt


def encrypt_arguments(
    jobtype: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, with_fingerprint: bool
) -> list[Any]:
    """Encrypt with the first key; return the arguments that replace these. Keyword arguments are included.

    `with_fingerprint` adds a fingerprint that equal arguments share, for uniqueness and locks. Raises CannotEncrypt.
    """
    fernet = _fernet(CannotEncrypt)
    # The jobtype is encrypted too: a token copied into a job of another task is rejected there.
    text = jsontext.encode([jobtype, args, kwargs])
    jsontext.check_depth(text)
    envelope = {SEALED: fernet.encrypt(_encode_text(text)).decode()}
    if with_fingerprint:
        # Fernet tokens of equal texts differ, so the fingerprint is what can be compared.
        envelope[SAME] = _fingerprint(text)
    return [envelope]


def is_encrypted(args: Sequence[Any]) -> bool:
    """Return True if these are encrypted arguments."""
    return len(args) == 1 and type(args[0]) is dict and SEALED in args[0] and _is_token(args[0][SEALED])


def _is_token(value: object) -> bool:
    """Return True for text in the form of a Fernet token. Tasks with `plain_json` may get any other `$encrypted`."""
    return isinstance(value, str) and value.startswith(_TOKEN_PREFIX) and len(value) >= _MIN_TOKEN_LENGTH


def decrypt_arguments(jobtype: str, args: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Decrypt arguments with any of the keys and check the jobtype. Raises CannotDecrypt, InvalidPayload."""
    content = _decrypt(args[0][SEALED])
    # Any of the keys may decrypt a token, so the content proves that it belongs to this jobtype.
    match content:
        case [str(encrypted_for), list(positional), dict(named)] if encrypted_for == jobtype:
            return positional, named
    raise InvalidPayload("args: they were encrypted for another jobtype, or are not arguments")


def encrypt_value(value: Any) -> dict[str, str]:
    return {SEALED: _fernet(CannotEncrypt).encrypt(_encode_text(jsontext.encode(value))).decode()}


def decrypt_value(value: Any) -> Any:
    """Decrypt a result; return a plain one unchanged. Raises CannotDecrypt."""
    return _decrypt(value[SEALED]) if isinstance(value, dict) and value.keys() == {SEALED} else value


def problem() -> str:
    """Return the reason why encryption is impossible; "" if it works. Never contains a key."""
    try:
        _fernet(CannotEncrypt)
    except CannotEncrypt as error:
        return str(error)
    return ""


def _decrypt(token: object) -> Any:
    fernet = _fernet(CannotDecrypt)
    from cryptography.fernet import InvalidToken  # an optional dependency

    try:
        return jsontext.decode(fernet.decrypt(str(token)).decode("utf-8", "surrogatepass"))
    except InvalidToken:
        count = len(conf.get("ENCRYPTION_KEYS"))
        raise CannotDecrypt(
            f"none of the {count} keys in FAKTORY['ENCRYPTION_KEYS'] decrypts the data: append the key with which "
            "it was encrypted"
        ) from None


def _fernet(error: type[CannotDecrypt | CannotEncrypt]) -> MultiFernet:
    keys = conf.get("ENCRYPTION_KEYS")
    if not keys:
        raise error("FAKTORY['ENCRYPTION_KEYS']: expected one key or more, got none")
    try:
        return _make_fernet(tuple(keys))
    except ImportError:
        raise error(explain_missing("FAKTORY['ENCRYPTION_KEYS']", "cryptography", "crypto")) from None
    except (TypeError, ValueError):  # `from None`: the cause could contain a part of a key
        raise error(
            "FAKTORY['ENCRYPTION_KEYS']: expected keys of 32 bytes in URL-safe base64, got an invalid one; "
            "create keys with Fernet.generate_key()"
        ) from None


# Cached by keys, so that a changed setting takes effect.
@lru_cache(maxsize=8)
def _make_fernet(keys: tuple[str, ...]) -> MultiFernet:
    from cryptography.fernet import Fernet, MultiFernet  # an optional dependency

    return MultiFernet([Fernet(key) for key in keys])


def _fingerprint(text: str) -> str:
    """Return the fingerprint of a call: equal for equal calls under the same first key.

    It is keyed, so that guesses cannot be verified without the key.
    """
    # The prefix separates this use of the key from Fernet's.
    key = sha256(b"django_faktory: same arguments\0" + _encode_text(str(conf.get("ENCRYPTION_KEYS")[0]))).digest()
    return hmac.new(key, jsontext.canonical(text).encode(), sha256).hexdigest()


def _encode_text(text: str) -> bytes:
    # JSON allows lone surrogates, which strict UTF-8 rejects.
    return text.encode("utf-8", "surrogatepass")
