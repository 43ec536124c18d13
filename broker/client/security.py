"""How a client proves who it is and whom it trusts: the `security:` section of a cluster, checked.

Part of the mirror's and the audit's config (each cluster has one) and what `client_properties.py` makes of
Apache Kafka's client files. `tls.py` and `login.py` act on it.

    security:
      protocol: SASL_SSL        # PLAINTEXT | SSL | SASL_PLAINTEXT | SASL_SSL
      ssl: {ca: ca.pem, cert: client.pem, key: client.key, key_password: {env: KEY_PASSWORD}}
      sasl: {mechanism: SCRAM-SHA-512, username: mirror, password: {file: /run/secrets/mirror}}

Invariants: a secret is a reference, `{file: …}` or `{env: …}`, and is read when it is needed, at each login:
no object here holds one, so none can be printed, and a changed password needs no restart (a secret that a
client file of Apache Kafka holds itself is the exception: it is kept out of repr, errors and JSON). What can
be found out from the files alone, a missing one or a key of another certificate, is an error of the config's
line. Relative paths are taken from the config file's folder.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from millrace.broker.client.sasl import MechanismName, is_extension

ProtocolName = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SECRET_EXPECTED = "{file: path} or {env: NAME}; secrets are never written into the config itself"


class SecretUnreadable(Exception):
    """A secret's file or variable is gone or empty. The message names it, never what is in it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _in_folder(path: Any, info: ValidationInfo) -> Any:
    folder = (info.context or {}).get("folder")
    return folder / path if isinstance(path, str) and folder is not None else path


def _readable(path: Path) -> str | None:
    """Why a file cannot be read; None when it can."""
    try:
        with path.open("rb"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _existing(path: Path) -> Path:
    reason = _readable(path)
    if reason is not None:
        raise ValueError(f"a readable file ({reason})")
    return path


File = Annotated[Path, BeforeValidator(_in_folder)]


class Secret(_Section):
    """Where a secret is. `read()` gives it as it is now, without the line end of a file."""

    file: File | None = None
    env: str | None = None
    _value: str | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _is_a_reference(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError(SECRET_EXPECTED)
        return value

    @model_validator(mode="after")
    def _is_readable(self) -> Self:
        if self._value is not None:
            return self
        if (self.file is None) == (self.env is None):
            raise ValueError(SECRET_EXPECTED)
        try:
            self.read()
        except SecretUnreadable as error:
            raise ValueError(f"a secret that can be read ({error})") from None
        return self

    @classmethod
    def of(cls, value: str) -> Secret:
        """A secret that the caller already holds (from a client file of Apache Kafka)."""
        held = cls.model_construct()
        held._value = value
        return held

    def read(self) -> str:
        """Raises SecretUnreadable."""
        if self._value is not None:
            return self._value
        if self.env is not None:
            value = os.environ.get(self.env)
            if not value:
                state = "empty" if value == "" else "not set"
                raise SecretUnreadable(f"environment variable {self.env} is {state}")
            return value
        try:
            value = (self.file or Path()).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except OSError as error:
            raise SecretUnreadable(f"{self.file}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise SecretUnreadable(f"{self.file} is not UTF-8") from None
        if not value:
            raise SecretUnreadable(f"{self.file} is empty")
        return value


class TlsConfig(_Section):
    """`ca` is a PEM file of the authorities to trust (the system's without it), `cert` and `key` the client's
    own for servers that ask for one. `verify_hostname: false` takes a trusted certificate of any name:
    whoever has one that the CA signed can then stand in for the server."""

    ca: File | None = None
    cert: File | None = None
    key_password: Secret | None = None
    key: File | None = Field(default=None, validate_default=True)
    verify_hostname: bool = True

    @field_validator("ca")
    @classmethod
    def _ca_is_one(cls, ca: Path | None) -> Path | None:
        if ca is not None:
            _existing(ca)
            try:
                ssl.create_default_context(cafile=str(ca))
            except (ssl.SSLError, OSError):
                raise ValueError("a PEM file of CA certificates (-----BEGIN CERTIFICATE-----)") from None
        return ca

    @field_validator("cert")
    @classmethod
    def _cert_exists(cls, cert: Path | None) -> Path | None:
        return cert if cert is None else _existing(cert)

    @field_validator("key")
    @classmethod
    def _key_fits(cls, key: Path | None, info: ValidationInfo) -> Path | None:
        cert, key_password = info.data.get("cert"), info.data.get("key_password")
        if key is not None:
            _existing(key)
            if "cert" in info.data and cert is None:
                raise ValueError("cert as well: a key is of no use without its certificate")
        if cert is not None and "key_password" in info.data:
            try:
                load_certificate(ssl.create_default_context(), cert, key, key_password)
            except ValueError as error:
                raise ValueError(f"the key of {cert} ({error})") from None
        return key


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None, password: Secret | None) -> None:
    """Give a client its own certificate. Raises ValueError with the reason, SecretUnreadable."""
    # Always a password, were it empty: OpenSSL would ask for one on the terminal and wait.
    try:
        context.load_cert_chain(str(cert), key and str(key), password.read() if password else "")
    except ssl.SSLError as error:
        reason = (error.reason or "").upper()
        if "KEY_VALUES_MISMATCH" in reason:
            raise ValueError("the certificate is of another key") from None
        if error.reason is None or "DECRYPT" in reason or "PASSWORD" in reason:
            words = "key_password does not open it" if password else "it is encrypted: set key_password"
            raise ValueError(
                words if _is_encrypted(key or cert) else "no certificate and key in PEM"
            ) from None
        raise ValueError(f"no certificate and key in PEM: {reason.replace('_', ' ').lower()}") from None
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None


def _is_encrypted(key: Path) -> bool:
    return b"ENCRYPTED" in key.read_bytes()


class TokenConfig(_Section):
    """Where OAUTHBEARER's token comes from, anew for each login: a file (re-read), a variable, the output of
    a command, or a token endpoint asked with client credentials (KIP-768). `urlencode` is for an endpoint
    that wants them so in its header (RFC 6749); Apache Kafka's clients do not unless told to, either."""

    file: File | None = None
    env: str | None = None
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    endpoint: str | None = None
    client_id: str | None = Field(default=None, validate_default=True)
    client_secret: Secret | None = Field(default=None, validate_default=True)
    scope: str | None = None
    ca: File | None = None
    urlencode: bool = False

    @field_validator("endpoint")
    @classmethod
    def _endpoint_is_http(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            parts = urlsplit(endpoint)
            if parts.scheme not in ("https", "http") or not parts.hostname or parts.username:
                raise ValueError("an address such as https://login.example.com/oauth2/token")
        return endpoint

    @field_validator("client_id", "client_secret")
    @classmethod
    def _endpoint_knows_the_client(cls, value: Any, info: ValidationInfo) -> Any:
        if (value is None) != (info.data.get("endpoint") is None) and "endpoint" in info.data:
            raise ValueError(f"{info.field_name} together with endpoint, neither without the other")
        return value

    @field_validator("ca")
    @classmethod
    def _ca_exists(cls, ca: Path | None) -> Path | None:
        return ca if ca is None else _existing(ca)

    @model_validator(mode="after")
    def _has_one_origin(self) -> Self:
        if sum(each is not None for each in (self.file, self.env, self.command, self.endpoint)) != 1:
            raise ValueError("one of file, env, command or endpoint")
        if self.file is not None or self.env is not None:
            Secret(file=self.file, env=self.env)
        return self


class SaslConfig(_Section):
    """The login. `username` and `password` for PLAIN and SCRAM, `token` (and `extensions`, KIP-342) for
    OAUTHBEARER."""

    mechanism: MechanismName
    username: str | None = Field(default=None, min_length=1, validate_default=True)
    password: Secret | None = Field(default=None, validate_default=True)
    token: TokenConfig | None = Field(default=None, validate_default=True)
    extensions: dict[str, str] = {}

    @field_validator("username", "password", "token")
    @classmethod
    def _fits_the_mechanism(cls, value: Any, info: ValidationInfo) -> Any:
        mechanism = info.data.get("mechanism")
        if mechanism is not None:
            is_wanted = (info.field_name == "token") == (mechanism == "OAUTHBEARER")
            if is_wanted and value is None:
                raise ValueError(f"{info.field_name}: {mechanism} needs it")
            if not is_wanted and value is not None:
                raise ValueError(f"no {info.field_name}: {mechanism} has none")
        return value

    @field_validator("extensions")
    @classmethod
    def _extensions_can_be_sent(cls, extensions: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if extensions and info.data.get("mechanism") not in (None, "OAUTHBEARER"):
            raise ValueError("no extensions: only OAUTHBEARER has them")
        if not all(is_extension(*each) for each in extensions.items()):
            raise ValueError("names of letters (not auth) and printable values")
        return extensions


class Security(_Section):
    """The whole section. Without one connections are plain TCP and nobody logs in."""

    protocol: ProtocolName = "PLAINTEXT"
    ssl: TlsConfig | None = None
    sasl: SaslConfig | None = Field(default=None, validate_default=True)

    @field_validator("ssl")
    @classmethod
    def _ssl_is_used(cls, value: TlsConfig | None, info: ValidationInfo) -> TlsConfig | None:
        protocol = info.data.get("protocol", "SSL")
        if value is not None and not protocol.endswith("SSL"):
            raise ValueError(f"no ssl with protocol {protocol}: it is not used; SSL and SASL_SSL use it")
        return value

    @field_validator("sasl")
    @classmethod
    def _sasl_is_used(cls, value: SaslConfig | None, info: ValidationInfo) -> SaslConfig | None:
        protocol = info.data.get("protocol")
        if protocol is not None and protocol.startswith("SASL") and value is None:
            raise ValueError(f"sasl: protocol {protocol} needs it")
        if protocol is not None and not protocol.startswith("SASL") and value is not None:
            raise ValueError(f"no sasl with protocol {protocol}; SASL_SSL and SASL_PLAINTEXT use it")
        return value

    @property
    def uses_tls(self) -> bool:
        return self.protocol in ("SSL", "SASL_SSL")
