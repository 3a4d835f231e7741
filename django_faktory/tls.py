"""TLS for both sides: contexts made of files, and every trouble with a file in one line that names it.

Knows no socket and no setting. TLS 1.2 and newer; a client checks the server's certificate and name, always.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

from .errors import FaktoryError


class UnusableFile(FaktoryError):
    """A certificate, a key or a CA cannot be used; the message says which and why."""


def server_context(certificate: str, key: str = "") -> ssl.SSLContext:
    """What a server needs. Certificate (its chain behind it) and key are PEM files; no `key`: both in one file.

    Raises UnusableFile where one is missing, unreadable, no PEM, asks for a passphrase, or belongs to another.
    """
    _require(certificate, "a certificate")
    if key:
        _require(key, "a private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # costs the server more than the client, and nobody needs it
    key_file = key or certificate
    try:
        context.load_cert_chain(certificate, key or None, password=_refuse_passphrase(key_file))
    except ssl.SSLError as error:
        raise UnusableFile(f"TLS: {_reason(certificate, key_file)}") from error
    return context


def client_context(ca: str = "") -> ssl.SSLContext:
    """What a client needs; `ca` is a PEM file of the only authorities trusted, the system's where none is given.

    Raises UnusableFile where that file cannot be used.
    """
    if ca:
        _require(ca, "a CA's certificate")
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except ssl.SSLError as error:
        raise UnusableFile(f"TLS: expected a CA's certificate (PEM) in {ca}, found none") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _require(path: str, what: str) -> None:
    """OpenSSL does not say which file it could not read."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        told = error.strerror if isinstance(error, OSError) else error
        raise UnusableFile(
            f"TLS: expected a readable file with {what} at {path}, got: {told}; mend the path"
        ) from error


def _refuse_passphrase(key: str) -> Callable[[], str]:
    def refuse() -> str:
        # Without this OpenSSL asks at the terminal, and a server that starts by itself waits there for ever.
        raise UnusableFile(f"TLS: expected a private key without a passphrase in {key}; remove it with openssl pkey")

    return refuse


def _reason(certificate: str, key: str) -> str:
    """OpenSSL's own reasons name neither file, and differ with the kinds of keys."""
    if not _has_certificate(certificate):
        return f"expected a certificate (PEM) in {certificate}, found none"
    with open(key, "rb") as file:
        if b"PRIVATE KEY-----" not in file.read():
            return f"expected the certificate's private key (PEM) in {key}, found none"
    return f"the private key in {key} does not belong to the certificate in {certificate}, or is damaged"


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        return False
    return True
