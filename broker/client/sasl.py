"""SASL conversations as a client has them: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER. Pure.

`login.py` carries the messages over a connection: `first()` opens, `answer(challenge)` replies to what the
server says until `is_done`. A conversation is for one login; a conversation that fails raises SaslFailure
with words that name no secret.

User names and passwords go out as the UTF-8 of what was configured: Apache Kafka keeps SCRAM credentials
without SASLprep, so preparing them here would lock out who has a character that it changes.

Sources: RFC 4616 (PLAIN), RFC 5802 and 7677 (SCRAM), RFC 7628 with KIP-255 and KIP-342 (OAUTHBEARER).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from millrace.broker.protocol.foreign_json import read_json

MechanismName: TypeAlias = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

SCRAM_HASHES = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
# Fewer rounds make a stolen exchange cheap to guess from (RFC 7677 asks for this many); a server that asks
# for more than the upper bound keeps its clients busy, whoever it is.
MIN_ITERATIONS = 4_096
MAX_ITERATIONS = 1_000_000

_EXTENSION_NAME = re.compile(r"[A-Za-z]+")
_EXTENSION_VALUE = re.compile(r"[\x21-\x7e \t\r\n]+")
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


class SaslFailure(Exception):
    """The conversation cannot go on: the server's words make no sense, prove nothing, or refuse."""


class Conversation(Protocol):
    """One login. `is_done`: nothing more is to be said, and the server has proven what it had to."""

    mechanism: str

    @property
    def is_done(self) -> bool: ...

    def first(self) -> bytes: ...

    def answer(self, challenge: bytes) -> bytes:
        """The reply to what the server said; raises SaslFailure."""
        ...


class Plain:
    """User name and password as they are: for TLS connections."""

    mechanism = "PLAIN"

    def __init__(self, username: str, password: str) -> None:
        if "\0" in username + password:
            raise SaslFailure("a user name or password with a NUL character cannot be sent by PLAIN")
        self._message = f"\0{username}\0{password}".encode()
        self.is_done = False

    def first(self) -> bytes:
        self.is_done = True
        return self._message

    def answer(self, challenge: bytes) -> bytes:
        raise SaslFailure("the server goes on after a PLAIN login, which has one message")


class Scram:
    """RFC 5802: neither side shows the password, both prove that they know it.

    `hash_name` is one of hashlib's. `nonce` is the client's part, random unless a test pins it.
    """

    def __init__(
        self, mechanism: str, hash_name: str, username: str, password: str, *, nonce: str | None = None
    ) -> None:
        self.mechanism = mechanism
        self.is_done = False
        self._hash = hash_name
        self._password = password.encode()
        self._nonce = nonce or secrets.token_urlsafe(24)
        name = username.replace("=", "=3D").replace(",", "=2C")
        self._first_bare = f"n={name},r={self._nonce}"
        self._server_signature = b""

    def first(self) -> bytes:
        return f"n,,{self._first_bare}".encode()

    def answer(self, challenge: bytes) -> bytes:
        """The proof, after the server's first message; b"" after its last, which is verified.

        Takes milliseconds of computing after the first (the password is hashed thousands of times).
        """
        said = _attributes(challenge)
        if "e" in said:
            raise SaslFailure(f"the server ends the login: {said['e'][:80]!r}")
        if not self._server_signature:
            return self._prove(challenge.decode(), said)
        if not hmac.compare_digest(_base64(said.get("v", ""), "signature"), self._server_signature):
            raise SaslFailure("the server does not prove that it knows the password; it may be an impostor")
        self.is_done = True
        return b""

    def _prove(self, server_first: str, said: Mapping[str, str]) -> bytes:
        nonce, salt = said.get("r", ""), _base64(said.get("s", ""), "salt")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise SaslFailure("the server's nonce does not continue the client's")
        iterations = int(said["i"]) if re.fullmatch(r"[0-9]{1,9}", said.get("i", "")) else 0
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise SaslFailure(
                f"the server asks for {said.get('i', 'no')[:12]} iterations, accepted are "
                f"{MIN_ITERATIONS} to {MAX_ITERATIONS}"
            )
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, salt, iterations)
        client_key = self._hmac(salted, b"Client Key")
        without_proof = f"c=biws,r={nonce}"  # biws: base64 of "n,,", no channel binding
        message = f"{self._first_bare},{server_first},{without_proof}".encode()
        signature = self._hmac(hashlib.new(self._hash, client_key).digest(), message)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), message)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._hash)


class OAuthBearer:
    """A token that the server checks; `extensions` are KIP-342's, which some services ask for."""

    mechanism = "OAUTHBEARER"

    def __init__(self, token: str, extensions: Mapping[str, str] | None = None) -> None:
        if _TOKEN.fullmatch(token) is None:
            raise SaslFailure("the token has characters that no bearer token has (RFC 6750)")
        parts = [f"auth=Bearer {token}"]
        for name, value in (extensions or {}).items():
            if not is_extension(name, value):
                raise SaslFailure(
                    f"extension {name!r} cannot be sent: letters in its name, text in its value"
                )
            parts.append(f"{name}={value}")
        self._expires_s = _expiry(token)
        self._message = ("n,,\x01" + "\x01".join(parts) + "\x01\x01").encode()
        self.is_done = False
        self._status = ""

    def reason(self, now_s: float) -> str:
        """What is known of why it was refused, in words."""
        if self._expires_s is not None and self._expires_s <= now_s:
            return "it has expired"
        return f"the server says {self._status!r}" if self._status else "the server does not say why"

    def first(self) -> bytes:
        self.is_done = True
        return self._message

    def answer(self, challenge: bytes) -> bytes:
        """The server has refused: it says why, and fails the login after this one byte (RFC 7628)."""
        try:
            status = read_json(challenge).get("status")
            self._status = status[:80] if isinstance(status, str) else ""
        except (ValueError, AttributeError):
            self._status = ""
        return b"\x01"


def is_extension(name: str, value: str) -> bool:
    """Whether this may be sent as an extension of OAUTHBEARER."""
    return (
        name != "auth"
        and _EXTENSION_NAME.fullmatch(name) is not None
        and _EXTENSION_VALUE.fullmatch(value) is not None
    )


def password_login(mechanism: str, username: str, password: str) -> Conversation:
    """A login by PLAIN or SCRAM."""
    if mechanism == "PLAIN":
        return Plain(username, password)
    return Scram(mechanism, SCRAM_HASHES[mechanism], username, password)


def _expiry(token: str) -> float | None:
    """When a JWT expires, in seconds since 1970; None where the token does not tell."""
    try:
        body = token.split(".")[1]
        return float(read_json(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["exp"])
    except (LookupError, ValueError, TypeError, OverflowError):
        return None


def _attributes(message: bytes) -> dict[str, str]:
    """`r=…,s=…,i=…` by name. Raises SaslFailure."""
    try:
        parts = message.decode("utf-8").split(",")
    except UnicodeDecodeError:
        raise SaslFailure("the server's message is no text") from None
    if any(part[1:2] != "=" for part in parts):
        raise SaslFailure("the server's message is not one of SCRAM")
    if parts[0][0] == "m":
        raise SaslFailure("the server asks for an extension of SCRAM that is not known here")
    return {part[0]: part[2:] for part in reversed(parts)}


def _base64(text: str, what: str) -> bytes:
    try:
        value = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        value = b""
    if not value:
        raise SaslFailure(f"the server's {what} cannot be read")
    return value
