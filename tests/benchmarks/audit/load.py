"""Audited records by the million: whole batches as producers build them, written fast enough to fill a
broker.

One batch of a shape is built record by record; every other is its copy with sequences, creation times and
stream ids written over, compressed again and given its checksum. So a hundred million records take a minute
or two to make, and each has its own identity. Called by `bench_audit`, `bench_scan` and the tests of memory.

Values are lines of JSON about flights, different in every record of a batch, which codecs shrink about as
they shrink real feeds; one value repeated would flatter every codec.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.audit.contract.header import encode_identity, encode_prefix
from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_produce import produce
from millrace.broker.protocol.batch import HEADER_SIZE
from millrace.broker.protocol.checksum import crc32c
from millrace.broker.protocol.compression import CODEC_IDS, compress
from millrace.broker.protocol.records import Record, build_batch

BATCH_BYTES = 100_000
RECORDS_PER_MS = 10  # so a window of 60 s holds 600,000 records of a partition
HASHED_PARTITIONS = 64
HASHED_PER_S = 83_333  # of all producers together, as in `make audit-hundred-million`
IN_FLIGHT = 8
_LENGTH, _CRC, _ATTRIBUTES = 8, 17, 21
_SEED = 1987


def recent_start_ms() -> int:
    """An hour ago: a broker deletes what is older than its retention."""
    return time.time_ns() // 1_000_000 - 3_600_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What a topic is filled with. `record_bytes` is a record's size in an uncompressed batch, identity
    header included. With several producers each batch is one producer's, in turn, as producers send;
    `mixed` puts them into every batch in turn instead, as a mirror that merges small batches does.
    `batch_bytes` is a batch's size before compression. `hashed` are records with keys, hashed over
    HASHED_PARTITIONS, laid out as their producers leave them ("sent") or as a mirror does ("merged").
    """

    codec: str = "none"
    record_bytes: int = 200
    producers: int = 1
    mixed: bool = False
    batch_bytes: int = BATCH_BYTES
    hashed: str = ""

    @property
    def batch_records(self) -> int:
        return max(1, self.batch_bytes // self.record_bytes)

    @property
    def name(self) -> str:
        mixed = " mixed" if self.mixed else ""
        small = f", {self.batch_bytes // 1000} KB batches" if self.batch_bytes != BATCH_BYTES else ""
        hashed = f", hashed, as {self.hashed}" if self.hashed else ""
        return f"{self.codec}, {self.record_bytes} B, {self.producers} producers{mixed}{small}{hashed}"


def producer_name(number: int) -> bytes:
    """Names of one length, so that any of them can be written over another."""
    return f"feed@host-{number:04d}".encode()


def stream_number(partition: int, producer: int) -> int:
    """The stream id of a producer in a partition: no two partitions share a stream."""
    return (partition + 1 << 32) + producer + 1


class BatchMaker:
    """Makes the batches of one partition. `start_ms` is the first record's creation time."""

    def __init__(self, shape: Shape, partition: int = 0, start_ms: int | None = None) -> None:
        self.shape = shape
        self._start_ms = recent_start_ms() if start_ms is None else start_ms
        self._partition = partition
        count = shape.batch_records
        name = producer_name(0)
        identity = encode_identity(encode_prefix("00" * 8), 1, self._start_ms, name)
        texts = random.Random(_SEED)
        self.value_bytes = shape.record_bytes - len(identity) - 16
        values = [_value(texts, self.value_bytes) for _ in range(count)]
        records = [
            Record(None, value, (("_mr", identity),), self._start_ms, at) for at, value in enumerate(values)
        ]
        self._batch = build_batch(records)
        self._octets = np.frombuffer(self._batch, np.uint8)
        at = np.array(_positions(self._batch, identity))
        self._streams = at[:, None] + np.arange(1, 9)
        self._sequences = at[:, None] + np.arange(9, 17)
        self._times = at[:, None] + np.arange(17, 23)
        self._names = at[:, None] + np.arange(23, 23 + len(name))
        self._places = np.arange(count)
        self._codec = CODEC_IDS[shape.codec]
        self.plain_bytes = len(self._batch)

    def batch(self, number: int) -> bytes:
        """Batch `number` of the partition, from 0."""
        shape, places = self.shape, self._places
        count = len(places)
        if shape.mixed:
            producers = (number * count + places) % shape.producers
            sequences = (number * count + places) // shape.producers + 1
        else:
            producers = np.full(count, number % shape.producers)
            sequences = number // shape.producers * count + places + 1
        octets = self._octets
        if shape.producers > 1 or number == 0:
            octets[self._streams] = _big_endian(stream_number(self._partition, 0) + producers)
            octets[self._names[:, -4:]] = _digits(producers)
        octets[self._sequences] = _big_endian(sequences)
        octets[self._times] = _big_endian(self._start_ms + (number * count + places) // RECORDS_PER_MS)[:, 2:]
        batch = self._batch
        if self._codec:
            section = compress(self._codec, memoryview(batch)[HEADER_SIZE:])
            batch = batch[:HEADER_SIZE] + section
            struct.pack_into(">i", batch, _LENGTH, len(batch) - 12)
            struct.pack_into(">h", batch, _ATTRIBUTES, self._codec)
        struct.pack_into(">q", batch, 0, number * count)
        struct.pack_into(">I", batch, _CRC, crc32c(memoryview(batch)[_ATTRIBUTES:]))
        return bytes(batch)

    def batches(self, record_count: int, first: int = 0) -> Iterator[bytes]:
        """As many whole batches as hold `record_count` records, beginning with batch `first`."""
        for number in range(first, first + -(-record_count // self.shape.batch_records)):
            yield self.batch(number)


async def fill(
    bootstrap: str,
    topic: str,
    shape: Shape,
    record_count: int,
    partitions: int = 2,
    *,
    start_ms: int | None = None,
    without: Set[tuple[int, int]] = frozenset(),
) -> tuple[int, int]:
    """Create the topic and write about `record_count` records, as many to each partition. Gives records and
    the bytes of their batches in the log. Batches of `without` (partition, number) are not written."""
    async with Cluster("load", [bootstrap]) as cluster:
        await create_topic(cluster, topic, partitions, 1)
        view = await cluster.metadata([topic], max_age_ms=0)
        written = [0, 0]
        start_ms = recent_start_ms() if start_ms is None else start_ms
        for partition in range(partitions):
            leader = view.leader(topic, partition)
            if leader is None:
                raise RuntimeError(f"{topic}-{partition} has no leader")
            maker = BatchMaker(shape, partition, start_ms)
            under_way: list[asyncio.Task[None]] = []

            async def send(batch: bytes, leader: int = leader, partition: int = partition) -> None:
                outcome = (await produce(cluster, leader, {(topic, partition): batch}))[topic, partition]
                if outcome.error_code:
                    raise RuntimeError(f"produce was refused with code {outcome.error_code}")

            for number, batch in enumerate(maker.batches(record_count // partitions)):
                if (partition, number) in without:
                    continue
                written[0] += shape.batch_records
                written[1] += len(batch)
                under_way.append(asyncio.create_task(send(batch)))
                if len(under_way) >= IN_FLIGHT:
                    await under_way.pop(0)
                else:
                    await asyncio.sleep(0)  # tasks send in the order in which they were made
            await asyncio.gather(*under_way)
    return written[0], written[1]


async def fill_hashed(bootstrap: str, topic: str, shape: Shape, record_count: int) -> tuple[int, int]:
    """As `fill`, of a `hashed` shape."""
    from tests.proofs.hashed_load import even, make_topic, write

    sending = even(
        shape.producers,
        record_count,
        recent_start_ms(),
        max(1, record_count * 1000 // HASHED_PER_S),
        HASHED_PARTITIONS,
        codec=shape.codec,
        record_bytes=shape.record_bytes,
    )
    await make_topic(bootstrap, topic, HASHED_PARTITIONS)
    done = await write(bootstrap, sending, shape.hashed, topic=topic)
    return done.record_count, done.byte_count


def _value(texts: random.Random, size: int) -> bytes:
    """A line of JSON of exactly `size` bytes."""
    flight = {
        "flight": f"{texts.choice(('UA', 'DL', 'AA', 'B6', 'EV'))}{texts.randrange(1, 7000)}",
        "tail": f"N{texts.randrange(10_000, 99_999)}",
        "origin": texts.choice(("EWR", "JFK", "LGA")),
        "dest": texts.choice(("ORD", "ATL", "LAX", "BOS", "MCO", "CLT", "SFO", "FLL")),
        "delay": texts.randrange(-20, 300),
        "distance": texts.randrange(80, 5000),
    }
    line = json.dumps(flight, separators=(",", ":"))[:-1]
    while len(line) < size - 12:
        line += f',"{texts.choice(("gate", "crew", "fuel", "seat", "wind"))}":{texts.randrange(10_000)}'
    return (line[: size - 1] + "}").ljust(size).encode()


def _positions(batch: bytearray, identity: bytes) -> list[int]:
    found, at = [], batch.find(identity)
    while at >= 0:
        found.append(at)
        at = batch.find(identity, at + len(identity))
    return found


def _big_endian(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    return numbers.astype(">u8").view(np.uint8).reshape(-1, 8)


def _digits(numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
    return (numbers[:, None] // np.array((1000, 100, 10, 1)) % 10 + 48).astype(np.uint8)
