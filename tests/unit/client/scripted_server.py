"""A server that does exactly what a test tells it, right or wrong, on a loopback port.

`ScriptedServer(script)` runs `script(peer)` for each connection; `Peer` reads requests and sends answers or
raw bytes. `brokerlike(handlers)` is the script of a well-behaved broker made of one function for each API.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from kio.index import load_request_schema, load_response_schema

from millrace.broker.client.connection import Connection
from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.frames import Api, RequestHead, decode_entity, decode_request, encode_response

EVERY_VERSION = {int(api): (0, 20) for api in Api}
Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number

    async def read(self) -> tuple[RequestHead, Any, bytes]:
        """The next request: its head, the request itself, and the whole frame."""
        (size,) = struct.unpack(">i", await self.reader.readexactly(4))
        frame = await self.reader.readexactly(size)
        head, position = decode_request(memoryview(frame))
        if head.api_key == Api.PRODUCE:
            return head, hot_produce.decode_request(memoryview(frame), position, head.version), frame
        if head.api_key == Api.FETCH:
            return head, hot_fetch.decode_request(memoryview(frame), position, head.version), frame
        request_type = load_request_schema(head.api_key, head.version)
        return head, decode_entity(request_type, frame, position), frame

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def answer(self, head: RequestHead, answer: Any) -> None:
        """Send a kio entity, or the bytes of a whole frame."""
        await self.send(answer if isinstance(answer, bytes) else encode_response(head, answer))

    async def answer_versions(self, ranges: Mapping[int, tuple[int, int]] = EVERY_VERSION) -> None:
        """Read the ApiVersions request that opens every connection, and answer it."""
        head, _, _ = await self.read()
        assert head.api_key == Api.API_VERSIONS
        await self.answer(head, versions_answer(ranges, head.version))


def versions_answer(ranges: Mapping[int, tuple[int, int]], version: int, error_code: int = 0) -> Any:
    schema = load_response_schema(Api.API_VERSIONS, version)
    key_type = _nested(schema, "ApiVersion")
    keys = tuple(
        key_type(api_key=key, min_version=low, max_version=high) for key, (low, high) in ranges.items()
    )
    return build(schema, error_code=_error(error_code), api_keys=keys)


def build(schema: Any, **values: Any) -> Any:
    """An entity with the values given, and nothing (0, no time) where the schema wants one."""
    from kio.static.primitive import i32Timedelta

    if "throttle_time" in schema.__dataclass_fields__:
        import datetime

        values.setdefault("throttle_time", i32Timedelta.parse(datetime.timedelta(0)))
    return schema(**values)


def response(api: Api, version: int, **values: Any) -> Any:
    if "error_code" in values:
        values["error_code"] = _error(values["error_code"])
    return build(load_response_schema(api, version), **values)


def nested(api: Api, version: int, class_name: str, /, **values: Any) -> Any:
    if "error_code" in values:
        values["error_code"] = _error(values["error_code"])
    return _nested(load_response_schema(api, version), class_name)(**values)


def _nested(schema: Any, name: str) -> Any:
    import sys

    return getattr(sys.modules[schema.__module__], name)


def _error(code: int) -> Any:
    from kio.schema.errors import ErrorCode

    return ErrorCode(code)


def coordinator_answer(version: int, port: int, **more: Any) -> Any:
    """To FindCoordinator: it is node 1, at this port. `more` are further fields of the answer."""
    where = {"node_id": 1, "host": "127.0.0.1", "port": port}
    return response(Api.FIND_COORDINATOR, version, error_code=0, error_message=None, **where, **more)


def metadata_answer(
    version: int,
    brokers: Mapping[int, int],
    topics: Mapping[str, Mapping[int, int]],
    *,
    unknown: tuple[str, ...] = (),
) -> Any:
    """Brokers {id: port} on loopback; topics {name: {partition: leader}}; names in `unknown` get error 3."""
    import uuid

    def partition(number: int, leader: int) -> Any:
        return nested(
            Api.METADATA,
            version,
            "MetadataResponsePartition",
            error_code=0,
            partition_index=number,
            leader_id=leader,
            leader_epoch=0,
            replica_nodes=(leader,),
            isr_nodes=(leader,),
        )

    def topic(name: str, partitions: Mapping[int, int], code: int) -> Any:
        return nested(
            Api.METADATA,
            version,
            "MetadataResponseTopic",
            error_code=code,
            name=name,
            topic_id=uuid.uuid5(uuid.NAMESPACE_DNS, name),
            partitions=tuple(partition(number, leader) for number, leader in partitions.items()),
        )

    return response(
        Api.METADATA,
        version,
        brokers=tuple(
            nested(Api.METADATA, version, "MetadataResponseBroker", node_id=n, host="127.0.0.1", port=port)
            for n, port in brokers.items()
        ),
        cluster_id="scripted",
        controller_id=min(brokers, default=-1),
        topics=(
            *(topic(name, partitions, 0) for name, partitions in topics.items()),
            *(topic(name, {}, 3) for name in unknown),
        ),
    )


Handler = Callable[[RequestHead, Any], Any]


def brokerlike(
    handlers: Mapping[Api, Handler], ranges: Mapping[int, tuple[int, int]] = EVERY_VERSION
) -> Script:
    """Answer each request by its API's function (plain or async); None means no answer."""

    async def script(peer: Peer) -> None:
        await peer.answer_versions(ranges)
        while True:
            head, request, _ = await peer.read()
            answer = handlers[Api(head.api_key)](head, request)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                await peer.answer(head, answer)

    return script


class ScriptedServer:
    """Listens while its `async with` lasts; an error in the script is raised at its end.
    `connection_count` counts the connections ever made."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self.connection_count = 0
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        if self._error is not None:
            raise self._error

    async def stop(self) -> None:
        """Refuse new connections and drop those that there are."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connection_count += 1
        try:
            await self._script(Peer(reader, writer, self.connection_count))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        except Exception as error:
            self._error = error
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


def waiting_count(connection: Connection) -> int:
    """Requests of ours whose answers are still to come."""
    return len(connection._waiting)
