"""How a connection comes about: TCP, TLS, the server's version ranges, the login; or why it does not.

Called by `connection_pool.py` and, among brokers, `broker_connections.py`. What goes wrong here is what
people get wrong (an address, a port of another protocol, a setting of TLS), so it is told in their words.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import struct
from functools import cache

from kio.index import load_response_schema
from kio.schema.api_versions.v0.request import ApiVersionsRequest as ApiVersionsRequestV0
from kio.schema.api_versions.v3.request import ApiVersionsRequest as ApiVersionsRequestV3
from kio.static.protocol import RequestPayload

from millrace.broker.client.connection import MAX_RESPONSE_SIZE, Connection, VersionRanges
from millrace.broker.client.frame_memory import FrameMemory
from millrace.broker.client.login import Access, log_in
from millrace.broker.client.tls import handshake_cut, tls_refusal
from millrace.broker.errors import (
    AccessRefused,
    KafkaError,
    NetworkException,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersion,
    error_for_code,
)
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import Api, encode_request

_ERROR_CODE = struct.Struct(">h")
_ERRNO = re.compile(r"\[Errno (\d+)\]")


async def open_connection(
    cluster: str,
    address: Address,
    *,
    client_id: str,
    timeout_ms: float,
    access: Access | None = None,
    max_response_size: int = MAX_RESPONSE_SIZE,
    frame_memory: FrameMemory | None = None,
) -> Connection:
    """Connect, learn the server's version ranges, and log in where `access` says so, within `timeout_ms` in
    all.

    Raises NetworkException when there is no connection to be had, RequestTimedOut, ProtocolError,
    AccessRefused when client and server do not accept each other.
    """
    connection = Connection(cluster, address, client_id, max_response_size, access, frame_memory)
    loop = asyncio.get_running_loop()
    try:
        context = access.tls_context() if access is not None else None
    except ValueError as error:
        raise AccessRefused(cluster, f"{address}: {error}") from None
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            try:
                await loop.create_connection(
                    lambda: connection,
                    address.host,
                    address.port,
                    ssl=context,
                    server_hostname=address.host if context else None,
                )
            except OSError:
                raise  # a refused certificate is a ValueError, too
            except (ValueError, OverflowError) as error:
                # An empty or overlong part of the name, a port below 0: also a broker may advertise such.
                raise NetworkException(f"{connection}: no host and port that there can be: {error}") from None
            connection.versions = await _ask_versions(connection, timeout_ms)
            if access is not None and access.logs_in:
                await log_in(connection, access, timeout_ms)
    except TimeoutError as error:
        what, hint = "no connection", ""
        if connection.was_made and not connection.versions.ranges:
            what, hint = "no answer to the first request", ": it is stuck, or does not speak Kafka's protocol"
        elif connection.was_made:
            what = "the login was not over"
            if access is not None and access.uses_tokens:
                hint = "; if its token is slow to come, see security.sasl.token"
        connection.close()
        raise RequestTimedOut(f"{connection}: {what} within {timeout_ms:.0f} ms{hint}") from error
    except OSError as error:  # includes failed TLS handshakes and unknown host names
        connection.close()
        raise _connect_failure(connection, access, error) from error
    except (NetworkException, ProtocolError) as error:
        connection.close()
        if connection.refusal is not None:
            raise AccessRefused(cluster, f"{address}: {connection.refusal}") from error
        raise
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_failure(connection: Connection, access: Access | None, error: OSError) -> Exception:
    """The error to raise for a connection that did not come about."""
    if access is not None and access.tls is not None:
        refusal = tls_refusal(error, connection.address.host, access.tls.config)
        if refusal is not None:
            return AccessRefused(connection.cluster, f"{connection.address}: {refusal}")
        if handshake_cut(error) and not isinstance(error, ConnectionRefusedError):
            reason = "the server closed the connection in the TLS handshake; a port without TLS does that"
            return NetworkException(f"{connection}: {reason}: see security.protocol")
    return NetworkException(f"{connection}: {os_reason(error)}")


async def _ask_versions(connection: Connection, timeout_ms: float) -> VersionRanges:
    """ApiVersions version 3; a server that does not know it says so in a version 0 body (KIP-511)."""
    request: RequestPayload = ApiVersionsRequestV3(
        client_software_name="millrace", client_software_version=_software_version()
    )
    frame = await _exchange_entity(connection, request, timeout_ms)
    if _error_code(connection, frame) == UnsupportedVersion.code:
        request = ApiVersionsRequestV0()
        frame = await _exchange_entity(connection, request, timeout_ms)
    code = _error_code(connection, frame)
    if code != 0:
        refusal: KafkaError = error_for_code(code)
        raise type(refusal)(f"{connection}: ApiVersions is refused: {refusal}")
    response = connection.decode(load_response_schema(Api.API_VERSIONS, int(request.__version__)), frame)
    return VersionRanges(
        {int(each.api_key): (int(each.min_version), int(each.max_version)) for each in response.api_keys}
    )


async def _exchange_entity(connection: Connection, request: RequestPayload, timeout_ms: float) -> memoryview:
    return await connection.exchange(
        lambda correlation_id: (encode_request(request, correlation_id, connection.client_id),), timeout_ms
    )


def _error_code(connection: Connection, frame: memoryview) -> int:
    """The error code that opens every ApiVersions body; the response header is always version 0."""
    if len(frame) < 6:
        raise connection.breach(f"an ApiVersions answer of {len(frame)} bytes")
    return int(_ERROR_CODE.unpack_from(frame, 4)[0])


def os_reason(error: OSError) -> str:
    """Why the system did not connect, in its plain words."""
    # Both event loops put an address into strerror, in words of their own; the errno's text is plainer.
    if error.errno is not None:
        return os.strerror(error.errno) if error.errno > 0 else error.strerror or str(error)
    # A name with several addresses, of which each failed: asyncio has their errors as text alone.
    numbers = dict.fromkeys(map(int, _ERRNO.findall(str(error))))
    return ", ".join(map(os.strerror, numbers)) or str(error)


@cache
def _software_version() -> str:
    """What a broker's metrics and logs show. A copy that travelled without its metadata is no reason not to
    connect; the word is one that KIP-511 lets a version be."""
    try:
        return importlib.metadata.version("millrace")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
