"""Asking another worker's HTTP port, from inside the event loop.

Called by `control` to show the whole mirror. One request a connection, no redirects, an answer of
bounded size within a bounded time.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any
from urllib.parse import urlsplit

import h11

from millrace.broker.protocol.foreign_json import read_json

TIMEOUT_S = 2.0
MAX_ANSWER_SIZE = 32 << 20


class NoAnswer(Exception):
    """The worker did not answer as it should; the message says how."""


async def get_json(url: str, *, timeout_s: float = TIMEOUT_S) -> Any:
    """The JSON document at an http:// URL. Raises NoAnswer."""
    try:
        parts = urlsplit(url)
        async with asyncio.timeout(timeout_s):
            status, body = await _get(parts.hostname or "", parts.port or 80, parts.netloc, parts.path or "/")
    except TimeoutError:
        raise NoAnswer(f"no answer within {timeout_s:.0f} s") from None
    except OSError as error:
        # asyncio's own words are about its calls; those of names that are not found have negative numbers.
        number = error.errno or 0
        words = os.strerror(number) if number > 0 else error.strerror or str(error)
        raise NoAnswer(words) from None
    except (ValueError, OverflowError) as error:  # of the address: a host or port that there cannot be
        raise NoAnswer(f"nothing can answer at {url}: {error}") from None
    except h11.ProtocolError as error:
        raise NoAnswer(f"it does not speak HTTP as it should: {error}") from None
    if status != 200:
        raise NoAnswer(f"it answers with status {status}")
    try:
        return read_json(body)
    except ValueError:
        raise NoAnswer("it answers with something else than JSON") from None


async def _get(host: str, port: int, authority: str, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        http = h11.Connection(h11.CLIENT)
        headers = [("Host", authority), ("Accept", "application/json"), ("Connection", "close")]
        request = h11.Request(method="GET", target=path, headers=headers)
        writer.write((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
        await writer.drain()
        status, body = 0, bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(1 << 16))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_ANSWER_SIZE:
                    raise NoAnswer("its answer is too large")
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return status, bytes(body)
    finally:
        writer.close()
