"""Who a client is to a cluster: its TLS context, its login, and the login again before a session ends.

`ConnectionPool` has one `Access`; `opening.open_connection` takes the TLS context from it and calls `log_in`
once the server's versions are known. The messages are `sasl.py`'s, the rules of the config `security.py`'s.

A login holds the connection's turn: no request may go out between SaslHandshake and the end of the login.
It begins when the requests that were sent before it are answered, however long the server holds an answer
back; later ones wait. That is all that a re-authentication (KIP-368) needs to be safe beside pipelined
traffic: a server closes a session that has ended at the next request, and takes a login even then.

Every refusal is an `AccessRefused` that names cluster, address and mechanism, and says what to change.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from kio.index import load_payload_module
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from kio.static.constants import EntityType

from millrace.broker.client.oauth import TokenSource, TokenUnavailable
from millrace.broker.client.sasl import Conversation, OAuthBearer, SaslFailure, password_login
from millrace.broker.client.security import SecretUnreadable, Security, TlsConfig
from millrace.broker.client.tls import TlsContexts
from millrace.broker.errors import (
    AccessRefused,
    IllegalSaslState,
    MillraceError,
    NetworkException,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanism,
    error_for_code,
)
from millrace.broker.protocol.frames import Api

if TYPE_CHECKING:
    from millrace.broker.client.connection import Connection

Ask: TypeAlias = Callable[[Any], Awaitable[Any]]

_AUTHENTICATE_VERSIONS = (0, 2)
# A session is renewed in this part of its life, at a random moment, so that connections that were opened
# together do not all log in together.
_RENEWED_FROM, _RENEWED_UNTIL = 0.75, 0.85


class Access:
    """What one cluster's connections need to be let in. On one event loop."""

    def __init__(self, security: Security) -> None:
        self.security = security
        self.tls = TlsContexts(security.ssl or TlsConfig()) if security.uses_tls else None
        sasl = security.sasl
        self._tokens = TokenSource(sasl.token) if sasl is not None and sasl.token is not None else None

    @property
    def logs_in(self) -> bool:
        return self.security.sasl is not None

    @property
    def uses_tokens(self) -> bool:
        return self._tokens is not None

    def tls_context(self) -> ssl.SSLContext | None:
        """For the next connection; raises ValueError when its files cannot be read now."""
        return self.tls.current() if self.tls is not None else None

    async def conversation(self) -> Conversation:
        """A new login, with secrets as they are now. Raises SaslFailure, SecretUnreadable,
        TokenUnavailable."""
        sasl = self.security.sasl
        if sasl is None:
            raise AssertionError("asked for a login where there is none")
        if self._tokens is not None:
            return OAuthBearer(await self._tokens.token(), sasl.extensions)
        if sasl.username is None or sasl.password is None:
            raise AssertionError("checked by the config")
        return password_login(sasl.mechanism, sasl.username, sasl.password.read())

    def refused(self) -> None:
        """The server did not take the login."""
        if self._tokens is not None:
            self._tokens.forget()


async def log_in(connection: Connection, access: Access, timeout_ms: float) -> None:
    """Log in, and again each time before the session ends, for as long as the connection lives.

    Raises AccessRefused, NetworkException, RequestTimedOut, ProtocolError.
    """
    lifetime_ms = await _authenticate(connection, access, timeout_ms)
    if lifetime_ms > 0 and connection.is_open:
        _Renewal(connection, access, timeout_ms).in_time(lifetime_ms)


class _Renewal:
    """The next login of a connection whose session ends. Given up when the connection closes."""

    def __init__(self, connection: Connection, access: Access, timeout_ms: float) -> None:
        self._connection = connection
        self._access = access
        self._timeout_ms = timeout_ms
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        connection.on_close = self._give_up

    def in_time(self, lifetime_ms: int) -> None:
        share = random.uniform(_RENEWED_FROM, _RENEWED_UNTIL)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(lifetime_ms * share / 1000, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._log_in_again())

    async def _log_in_again(self) -> None:
        try:
            lifetime_ms = await _authenticate(self._connection, self._access, self._timeout_ms)
        except MillraceError as error:
            # What waits for its turn fails as with any lost connection, and is sent again on the next one,
            # whose login then says what is wrong.
            self._connection.fail(f"it could not log in again: {error}")
        else:
            if lifetime_ms > 0 and self._connection.is_open:
                self.in_time(lifetime_ms)

    def _give_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


async def _authenticate(connection: Connection, access: Access, timeout_ms: float) -> int:
    """One login; the session's lifetime in ms, 0 without an end."""
    mechanism = access.security.sasl.mechanism if access.security.sasl is not None else ""
    try:
        conversation = await access.conversation()
        async with connection.alone(timeout_ms) as ask:
            await _shake_hands(connection, mechanism, ask)
            try:
                return await _converse(connection, conversation, ask)
            except NetworkException:
                # Apache Kafka closes the connection where its check of a token fails by an exception.
                if isinstance(conversation, OAuthBearer) and not connection.is_open:
                    raise _refusal(connection, _refused_token(conversation)) from None
                raise
    except (SaslFailure, SecretUnreadable, TokenUnavailable) as error:
        raise _refusal(connection, f"cannot log in by {mechanism}: {error}") from None
    except AccessRefused:
        access.refused()
        raise


async def _shake_hands(connection: Connection, mechanism: str, ask: Ask) -> None:
    if not connection.versions.offers(Api.SASL_HANDSHAKE, 1):
        raise _refusal(connection, "the server knows no logins; set security.protocol to PLAINTEXT or SSL")
    answer = await ask(SaslHandshakeRequest(mechanism=mechanism))
    code = int(answer.error_code)
    if code == UnsupportedSaslMechanism.code:
        offered = ", ".join(sorted(map(str, answer.mechanisms))) or "none"
        reason = f"it takes no logins by {mechanism}; set security.sasl.mechanism to one of {offered}"
        raise _refusal(connection, reason)
    if code == IllegalSaslState.code:
        reason = "this port asks for no login; set security.protocol to PLAINTEXT or SSL, or use another port"
        raise _refusal(connection, reason)
    if code:
        raise _refusal(connection, f"the login by {mechanism} is refused: {error_for_code(code)}")


async def _converse(connection: Connection, conversation: Conversation, ask: Ask) -> int:
    version = connection.versions.highest(Api.SASL_AUTHENTICATE, *_AUTHENTICATE_VERSIONS)
    if version is None:
        raise _refusal(connection, "the server is too old to log in to (Apache Kafka 1.0 or newer is needed)")
    schema = load_payload_module(Api.SASL_AUTHENTICATE, version, EntityType.request)
    message = conversation.first()
    while True:
        answer = await ask(schema.SaslAuthenticateRequest(auth_bytes=message))
        if answer.error_code:
            raise _refusal(connection, _refused_login(conversation, answer))
        challenge = bytes(answer.auth_bytes)
        if not conversation.is_done or challenge:
            # In a thread: a password is hashed thousands of times.
            message = await asyncio.to_thread(conversation.answer, challenge)
        if conversation.is_done and not (challenge and message):
            lifetime = getattr(answer, "session_lifetime", None)  # version 0 tells of none
            return round(lifetime.total_seconds() * 1000) if lifetime is not None else 0


def _refused_login(conversation: Conversation, answer: Any) -> str:
    code = int(answer.error_code)
    if code != SaslAuthenticationFailed.code:
        error = error_for_code(code, answer.error_message or "")
        return f"the login by {conversation.mechanism} is refused: {error.name}, {error}"
    if isinstance(conversation, OAuthBearer):
        return _refused_token(conversation)
    return f"the login by {conversation.mechanism} is refused; check security.sasl's username and password"


def _refused_token(conversation: OAuthBearer) -> str:
    return f"the token is refused ({conversation.reason(time.time())}); check security.sasl.token"


def _refusal(connection: Connection, message: str) -> AccessRefused:
    return AccessRefused(connection.cluster, f"{connection.address}: {message}")
