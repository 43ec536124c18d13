"""The TLS side of a client: contexts made from files, renewed when the files change, and failures in words.

`login.py`'s `Access` holds one `TlsContexts` for each cluster; `connection.py` puts handshake failures into
words by `tls_refusal` and `handshake_cut`. A certificate that was replaced on disk is used by the next
connection: nothing has to be restarted for it.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from millrace.broker.client.security import SecretUnreadable, TlsConfig, load_certificate

_HAS_EXPIRED = 10
_NOT_YET_VALID = 9
_OTHER_NAME = {62, 64}
_UNTRUSTED = {2, 18, 19, 20, 21}
_CERTIFICATE_ALERTS = {
    "BAD_CERTIFICATE",
    "CERTIFICATE_EXPIRED",
    "CERTIFICATE_REVOKED",
    "CERTIFICATE_UNKNOWN",
    "UNKNOWN_CA",
    "UNSUPPORTED_CERTIFICATE",
    "ACCESS_DENIED",
    "HANDSHAKE_FAILURE",
}


class TlsContexts:
    """The context for the next connection. Synchronous; reads files only when one of them has changed."""

    def __init__(self, config: TlsConfig) -> None:
        self.config = config
        self._context: ssl.SSLContext | None = None
        self._stamps: tuple[object, ...] = ()

    def current(self) -> ssl.SSLContext:
        """Raises ValueError with a reason fit for a person, when a file is gone or makes no sense now."""
        stamps = tuple(_stamp(path) for path in self._files())
        if self._context is None or stamps != self._stamps:
            self._context = make_context(self.config)
            self._stamps = stamps
        return self._context

    def _files(self) -> list[Path]:
        config = self.config
        password = config.key_password.file if config.key_password is not None else None
        return [path for path in (config.ca, config.cert, config.key, password) if path is not None]


def make_context(config: TlsConfig) -> ssl.SSLContext:
    """A client's context: TLS 1.2 or newer, the server's certificate is always verified."""
    try:
        context = ssl.create_default_context(cafile=str(config.ca) if config.ca else None)
    except (ssl.SSLError, OSError) as error:
        reason = error.strerror if not isinstance(error, ssl.SSLError) else "no CA certificate in PEM"
        raise ValueError(f"security.ssl.ca {config.ca}: {reason}") from None
    context.check_hostname = config.verify_hostname
    if config.cert is not None:
        try:
            load_certificate(context, config.cert, config.key, config.key_password)
        except (ValueError, SecretUnreadable) as error:
            raise ValueError(f"security.ssl.cert {config.cert}: {error}") from None
    return context


def tls_refusal(error: BaseException, host: str, config: TlsConfig) -> str | None:
    """What is wrong and what to do, when one side does not accept the other's certificate; None when this
    error tells of no such thing."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _certificate_refusal(error, host, config)
    if not isinstance(error, ssl.SSLError):
        return None
    reason = (error.reason or "").upper()
    alert = reason.partition("_ALERT_")[2]
    if "WRONG_VERSION_NUMBER" in reason:
        return (
            "the port does not speak TLS; use its TLS port, or security.protocol PLAINTEXT or SASL_PLAINTEXT"
        )
    if "PROTOCOL" in alert or "UNSUPPORTED_PROTOCOL" in reason:
        return "the server speaks no TLS version that is safe today (1.2 or newer)"
    if alert == "CERTIFICATE_REQUIRED" or (alert in _CERTIFICATE_ALERTS and config.cert is None):
        return "the server asks for a client certificate; set security.ssl.cert and security.ssl.key"
    if alert in _CERTIFICATE_ALERTS:
        said = alert.replace("_", " ").lower()
        question = "has it expired, is its CA known there?"
        return f"the server refuses the certificate {config.cert} ({said}): {question}"
    return None


def _certificate_refusal(error: ssl.SSLCertVerificationError, host: str, config: TlsConfig) -> str:
    code = error.verify_code
    if code == _HAS_EXPIRED:
        return "the server's certificate has expired; renew it there (or set this machine's clock right)"
    if code == _NOT_YET_VALID:
        return "the server's certificate is not valid yet; check both clocks"
    if code in _OTHER_NAME:
        return (
            f"the server's certificate is not for {host}; use a name that stands in it (in bootstrap and in "
            "the brokers' advertised.listeners), or set security.ssl.verify_hostname: false"
        )
    if code in _UNTRUSTED:
        trusted = f"a CA in {config.ca}" if config.ca is not None else "a CA of this system"
        return f"the server's certificate is not signed by {trusted}; set security.ssl.ca to its CA's file"
    return f"the server's certificate cannot be trusted: {error.verify_message}"


def handshake_cut(error: BaseException) -> bool:
    """Whether the server went away in the middle of the handshake, as one does that speaks no TLS."""
    if isinstance(error, ssl.SSLError):
        return "EOF" in (error.reason or "") or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return isinstance(error, ConnectionError)


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
