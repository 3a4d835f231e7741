"""TLS contexts for server and client; every problem with a file is one line that names the file.

Independent of sockets and settings. TLS 1.2 and newer; a client always checks the server's certificate and name.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

from ..errors import FaktoryError


class UnusableFile(FaktoryError):
    """Raised for an unusable certificate, key or CA; the message names the file and the reason."""


def server_context(certificate: str, key: str = "") -> ssl.SSLContext:
    """Return a server context. Certificate and key are PEM files; without `key` both are in one file.

    The certificate is followed by its chain. Raises UnusableFile for a file that is missing, unreadable, not PEM,
    protected by a passphrase, or for a key that does not belong to the certificate.
    """
    _require(certificate, "a certificate")
    if key:
        _require(key, "a private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # a client could make the server spend more CPU than itself
    key_file = key or certificate
    try:
        context.load_cert_chain(certificate, key or None, password=_refuse_passphrase(key_file))
    except ssl.SSLError as error:
        raise UnusableFile(f"TLS: {_reason(certificate, key_file)}") from error
    return context


def client_context(ca: str = "") -> ssl.SSLContext:
    """Return a client context. `ca` is a PEM file of the only trusted authorities; by default the system's are trusted.

    Raises UnusableFile if that file cannot be used.
    """
    if ca:
        _require(ca, "a CA's certificate")
    try:
        # This context verifies certificate and host name by default.
        context = ssl.create_default_context(cafile=ca or None)
    except ssl.SSLError as error:
        raise UnusableFile(f"TLS: expected a CA's certificate (PEM) in {ca}, found none") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _require(path: str, content: str) -> None:
    """Check that a file is readable, because OpenSSL's error does not name the file."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise UnusableFile(
            f"TLS: expected a readable file with {content} at {path}, got: {reason}; correct the path"
        ) from error


def _refuse_passphrase(key: str) -> Callable[[], str]:
    def refuse() -> str:
        # Without this callback OpenSSL prompts on the terminal, and a server started by a service manager hangs there.
        raise UnusableFile(f"TLS: expected a private key without a passphrase in {key}; remove it with openssl pkey")

    return refuse


def _reason(certificate: str, key: str) -> str:
    """Find the cause of an error: OpenSSL's reasons name neither file and differ with the type of key."""
    # Tested one after the other, because OpenSSL's message does not distinguish these cases.
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
