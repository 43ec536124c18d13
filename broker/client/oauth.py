"""Tokens for OAUTHBEARER: from a file, the environment, a command or a token endpoint (KIP-768).

`login.py` asks for one at each login. A file, a variable and a command are asked every time; a token of an
endpoint is kept until most of its life is over, so that a hundred connections are not a hundred requests.

A token, a client's secret and whatever a command prints are never part of an error.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from millrace.broker.client.security import Secret, SecretUnreadable, TokenConfig
from millrace.broker.protocol.foreign_json import read_json

COMMAND_TIMEOUT_S = 30.0
ENDPOINT_TIMEOUT_S = 10.0
MAX_TOKEN_SIZE = 1 << 20
# A token is not used in the last part of its life: the session that it opens would end soon.
USED_SHARE_OF_LIFE = 0.8


class TokenUnavailable(Exception):
    """No token is to be had now; one line that says where from and why."""


class TokenSource:
    """See the module's text. `token()` may be called by many logins at a time."""

    def __init__(self, config: TokenConfig) -> None:
        self._config = config
        self._kept: str | None = None
        self._kept_until = 0.0
        self._asking = asyncio.Lock()

    async def token(self) -> str:
        """Raises TokenUnavailable."""
        config = self._config
        if config.command is not None:
            return await _from_command(config.command)
        if config.endpoint is not None:
            return await self._from_endpoint()
        try:
            return Secret.model_construct(file=config.file, env=config.env).read().strip()
        except SecretUnreadable as error:
            raise TokenUnavailable(f"no token: {error}") from None

    def forget(self) -> None:
        """The server refused it: ask for another next time."""
        self._kept = None

    async def _from_endpoint(self) -> str:
        async with self._asking:
            if self._kept is not None and time.monotonic() < self._kept_until:
                return self._kept
            began = time.monotonic()
            token, life_s = await asyncio.to_thread(_ask_endpoint, self._config)
            self._kept, self._kept_until = token, began + life_s * USED_SHARE_OF_LIFE
            return token


async def _from_command(command: tuple[str, ...]) -> str:
    name = command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise TokenUnavailable(f"no token: {name} cannot be started: {error.strerror}") from None
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise TokenUnavailable(f"no token: {name} did not end within {COMMAND_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode != 0:
        raise TokenUnavailable(f"no token: {name} ended with status {process.returncode}")
    token = output[:MAX_TOKEN_SIZE].decode("ascii", "replace").strip()
    if not token:
        raise TokenUnavailable(f"no token: {name} printed nothing")
    return token


def _ask_endpoint(config: TokenConfig) -> tuple[str, float]:
    """The token and the seconds it lives. Blocks; for a thread."""
    endpoint, client_id, secret = config.endpoint, config.client_id, config.client_secret
    if endpoint is None or client_id is None or secret is None:
        raise AssertionError("checked by the config")
    try:
        parts = [client_id, secret.read()]
        credentials = ":".join(map(urllib.parse.quote_plus, parts) if config.urlencode else parts)
        context = None
        if endpoint.startswith("https"):
            context = ssl.create_default_context(cafile=str(config.ca) if config.ca else None)
    except (SecretUnreadable, OSError) as error:
        raise TokenUnavailable(f"no token: {error}") from None
    form = {"grant_type": "client_credentials", **({"scope": config.scope} if config.scope else {})}
    request = urllib.request.Request(
        endpoint,
        data=urllib.parse.urlencode(form).encode(),
        headers={
            "Authorization": "Basic " + base64.b64encode(credentials.encode()).decode(),
            "Accept": "application/json",
        },
    )
    try:
        # No redirects: they would carry the secret to wherever the answer says.
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))
        with opener.open(request, timeout=ENDPOINT_TIMEOUT_S) as answer:
            content = answer.read(MAX_TOKEN_SIZE)
    except urllib.error.HTTPError as error:
        raise TokenUnavailable(f"no token: {endpoint} answers HTTP {error.code}{_reason_of(error)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise TokenUnavailable(f"no token: {endpoint} cannot be asked: {reason}") from None
    return _read_answer(endpoint, content)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _reason_of(error: urllib.error.HTTPError) -> str:
    """The `error` word of RFC 6749 (invalid_client and its like), nothing else of the answer."""
    try:
        word = read_json(error.read(4096)).get("error")
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        return ""
    return f", {word[:40]!r}" if isinstance(word, str) else ""


def _read_answer(endpoint: str, content: bytes) -> tuple[str, float]:
    try:
        answer = read_json(content)
        token, life_s = answer["access_token"], float(answer.get("expires_in", 0))
        if not isinstance(token, str) or not token:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise TokenUnavailable(f"no token: the answer of {endpoint} has no access_token") from None
    return token, life_s
