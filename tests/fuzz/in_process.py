"""A real broker inside this process, fed frames without a network; handlers, logs, ZooKeeper are real.

`Fuzzer.run` hands frames to connections whose transport is a stand-in, in pieces cut at random, and asks
after each few hundred whether the next client is still served. Anything that the broker itself calls a
failure (an exception in a handler, a task, a callback) is collected with the frame that did it.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import structlog

from millrace.broker.config import BrokerConfig, parse_settings
from millrace.broker.coordination import controller_client
from millrace.broker.coordination.controller_client import NewTopic
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.hot_fetch import decode_response as decode_fetched
from millrace.broker.protocol.hot_fetch import encode_request as encode_fetch
from millrace.broker.protocol.hot_produce import decode_response as decode_produced
from millrace.broker.protocol.hot_produce import encode_request as encode_produce
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.server.broker import Broker
from millrace.broker.server.connection import Connection
from millrace.broker.server.dispatch import Dispatcher
from millrace.broker.telemetry.memory import trim_heap
from tests.fuzz.frames import TOPICS, Seeds, mutate
from tests.waiting import until_async

SETTINGS = {
    "group.initial.rebalance.delay.ms": 0,
    "group.min.session.timeout.ms": 1,
    "group.max.session.timeout.ms": 2_000,
    "offsets.topic.num.partitions": 2,
    "log.segment.bytes": 64 << 20,
    "zookeeper.session.timeout.ms": 30_000,
    "zookeeper.connection.timeout.ms": 120_000,
}
HEALTH_TOPIC = "healthy"
CHECK_EVERY = 500
FRAMES_A_CONNECTION = 40
LOOKS = 20
"""How often a run looks at its memory, and never after more than this:"""
LOOK_EVERY = 10_000


class Transport:
    """Takes everything at once; keeps only what somebody wants to look at."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.sent = bytearray()
        self.closed = False
        self.reading = True
        self._keeps = keeps

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, _name: str) -> tuple[str, int]:
        return ("10.1.1.1", 9)

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        if self._keeps:
            self.sent += data

    def writelines(self, buffers: Any) -> None:
        for buffer in buffers:
            self.write(buffer)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


@dataclass
class Findings:
    """What went wrong, and how much memory it all took."""

    failures: list[str] = field(default_factory=list)
    frames: int = 0
    resident: list[tuple[int, int]] = field(default_factory=list)
    """(frames so far, resident bytes) as the run went on."""

    def note(self, what: str) -> None:
        if len(self.failures) < 20:
            self.failures.append(what)


class Fuzzer:
    """One broker and its stream of frames; the same seed gives the same stream."""

    def __init__(self, zookeeper_path: str, folder: Path, seed: int) -> None:
        self.findings = Findings()
        self._rng = random.Random(seed)
        settings = parse_settings(SETTINGS)
        self._broker = Broker(
            BrokerConfig(
                id=1,
                listen=Address("127.0.0.1", 0),
                zookeeper=zookeeper_path,
                data=[folder],
                settings=settings,
            )
        )
        self._frame = b""

    async def run(self, count: int) -> Findings:
        """`count` frames; raises nothing for what the broker did wrong."""
        asyncio.get_running_loop().set_exception_handler(self._on_loop_failure)
        structlog.configure(processors=[self._on_log_line])
        controller_client.MOST_PARTITIONS = 20  # a flipped bit shall not ask for thousands
        self._watch_failures()
        await self._broker.start()
        try:
            await self._make_topics()
            await self._stream(count)
        finally:
            await self._broker.stop()
        if self._broker._supervisor.failure is not None:
            self.findings.note(f"a task of the broker failed: {self._broker._supervisor.failure!r}")
        return self.findings

    def _watch_failures(self) -> None:
        fuzzer, original = self, Dispatcher._failed

        def failed(self: Dispatcher, head: Any, error: Exception, read_request: Any) -> Any:
            if not isinstance(error, KafkaError):
                fuzzer.findings.note(f"{head}\n{fuzzer._frame.hex()}\n{traceback.format_exc()}")
            return original(self, head, error, read_request)

        Dispatcher._failed = failed  # type: ignore[method-assign]

    def _on_loop_failure(self, _loop: Any, context: dict[str, Any]) -> None:
        self.findings.note(f"the event loop: {context}\n{self._frame.hex()}")

    def _on_log_line(self, _logger: Any, method: str, event: dict[str, Any]) -> Any:
        if event.get("exc_info"):
            self.findings.note(f"{event}\n{self._frame.hex()}\n{traceback.format_exc()}")
        elif method in ("error", "critical"):
            self.findings.note(f"{event}\n{self._frame.hex()}")
        raise structlog.DropEvent

    async def _make_topics(self) -> None:
        services = self._broker._listener._dispatcher._services
        for name in (*TOPICS, HEALTH_TOPIC):
            await services.controller.create_topic(NewTopic(name, 2, 1), 20_000)
        self._topic_ids = [services.metadata_cache.topics[name].topic_id for name in TOPICS]

    def _connect(self, *, keeps: bool = False) -> tuple[Connection, Transport]:
        listener = self._broker._listener
        connection = Connection(
            listener._dispatcher,
            self._broker._metrics,
            listener._limits,
            listener._complaints,
            listener._forget,
            listener._admit,
        )
        transport = Transport(keeps=keeps)
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    async def _stream(self, count: int) -> None:
        rng = self._rng
        seeds = Seeds(list(self._broker._listener._dispatcher.handlers.values()), rng, self._topic_ids)
        findings = self.findings
        other = seeds.next()
        looked, look_every = 0, min(LOOK_EVERY, count // LOOKS)
        began = time.monotonic()
        while findings.frames < count:
            connection, transport = self._connect()
            for _ in range(FRAMES_A_CONNECTION):
                seed = seeds.next()
                self._frame = mutate(seed, other, rng)
                other = seed
                findings.frames += 1
                await self._feed(connection, transport, self._frame)
                if findings.frames % CHECK_EVERY == 0:
                    await self._check_health()
                if transport.closed:
                    break
            connection.close("test")
            connection.connection_lost(None)
            if findings.frames >= looked + look_every:
                looked = findings.frames
                await self._look_at_memory(began)

    async def _feed(self, connection: Connection, transport: Transport, frame: bytes) -> None:
        """As a network would: in pieces, and not while the broker does not read."""
        position = 0
        turns = 0
        while position < len(frame) and not transport.closed:
            if not transport.reading:
                turns += 1
                if turns > 50:
                    return  # it waits for something of its own: somebody else's turn
                await asyncio.sleep(0)
                continue
            room = connection.get_buffer(-1)
            size = min(len(room), len(frame) - position)
            if self._rng.random() < 0.2:
                size = min(size, self._rng.choice([1, 3, 4, 11, 100]))
            room[:size] = frame[position : position + size]
            room.release()
            try:
                connection.buffer_updated(size)
            except Exception:
                self.findings.note(f"{frame.hex()}\n{traceback.format_exc()}")
                return
            position += size
        if self._rng.random() < 0.1:
            await asyncio.sleep(0)

    async def _check_health(self) -> None:
        """The next client is served: it writes and reads what it wrote."""
        connection, transport = self._connect(keeps=True)
        value = b"%d" % self.findings.frames
        batch = build_batch([Record(key=None, value=value, headers=(), timestamp_ms=1_700_000_000_000)])
        request = b"".join(encode_produce(9, 1, "health", {(HEALTH_TOPIC, 0): batch}, acks=1))
        (answer,), _ = decode_produced(await self._exchange(connection, transport, request), 9)
        if answer.error_code:
            self.findings.note(f"a good producer was refused: {answer}")
        asked = FetchRequest(
            0, 1, 1 << 20, False, [PartitionFetch(HEALTH_TOPIC, 0, answer.base_offset, 1 << 20)]
        )
        fetched = decode_fetched(
            await self._exchange(connection, transport, encode_fetch(12, 2, "health", asked)), 12
        )
        if value not in bytes(fetched.partitions[0].records):
            self.findings.note(f"a good consumer did not get {value!r}: {fetched}")
        connection.connection_lost(None)

    async def _exchange(self, connection: Connection, transport: Transport, request: bytes) -> memoryview:
        transport.sent.clear()
        room = connection.get_buffer(-1)
        room[: len(request)] = request
        room.release()
        connection.buffer_updated(len(request))

        def is_answered() -> bool:
            assert not transport.closed, "the next client is not served"
            sent = transport.sent
            return len(sent) >= 4 and len(sent) >= 4 + struct.unpack_from(">i", sent)[0]

        await until_async(is_answered, "the next client is served")
        return memoryview(bytes(transport.sent))[4:]

    async def _look_at_memory(self, began: float) -> None:
        await asyncio.sleep(0)
        trim_heap()
        size = psutil.Process().memory_info().rss
        self.findings.resident.append((self.findings.frames, size))
        rate = self.findings.frames / (time.monotonic() - began)
        print(
            f"{self.findings.frames:,} frames, {rate:,.0f} a second, {size >> 20} MiB,"
            f" {len(self.findings.failures)} failures",
            file=sys.stderr,
            flush=True,
        )
