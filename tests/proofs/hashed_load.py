"""Records of many producers whose keys are hashed over partitions, as the log of a real topic has them.

A producer hands record after record to its client; the key's murmur2 chooses the partition; what is for one
partition within a linger goes as one batch. So every partition has all producers' streams interleaved, each
with holes that the other partitions fill. `SENT` lays the bytes out as such producers leave them in a source:
a batch is one producer's. `MERGED` lays them out as a mirror leaves them in the aggregate, which coalesces
small batches: large ones, of many producers. Both are the same records in the same order of arrival.

Everything follows from a record's number: record `n` of a `Sending` is producer `n mod producers`' next one,
created evenly over the span. Nothing is held but a slice of the time: a compiled loop writes the records,
Kafka's own protocol brings the batches to the broker. Called by the proofs of this folder and, for its loads,
by `bench_audit`.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numba
import numpy as np
from confluent_kafka import Producer
from numpy.typing import NDArray

from millrace.audit.clients.events_topic import ensure_events_topic
from millrace.audit.contract.events import CountEvent, StreamEvent, encode_event
from millrace.audit.contract.header import HEADER_KEY, HEADER_VERSION
from millrace.audit.contract.sequence_set import from_ranges
from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.producer import partition_for_key
from millrace.broker.client.raw_produce import produce
from millrace.broker.protocol.batch import ATTRIBUTES_POSITION, CRC_POSITION, HEADER_SIZE
from millrace.broker.protocol.checksum import crc32c
from millrace.broker.protocol.compression import CODEC_IDS, compress

SENT, MERGED = "sent", "merged"
TOPIC, EVENTS_TOPIC, POSITIONS_TOPIC = "flights", "millrace.audit", "millrace.positions.proof"
WINDOW_MS = 60_000
SESSION = "a" * 16
MERGED_BYTES = 100_000
SENT_BYTES = 16_384  # `batch.size` of Apache Kafka's producer
SLICE_RECORDS = 400_000
KEYS = 65_536
IN_FLIGHT = 4
PUBLISH_S = 300.0
_VALUES = 512  # different ones, so that codecs do not shrink a single one to nothing
_NAME_BYTES, _KEY_BYTES = 14, 8
_FIXED_BYTES = 18 + _KEY_BYTES + len(HEADER_KEY) + 23 + _NAME_BYTES
"""Of a record, beside its value: lengths, deltas, key and header."""


def producer_name(number: int) -> str:
    """Of one length for all, so that records differ in nothing but digits."""
    return f"feed@host{number:05d}"


@dataclass(frozen=True, slots=True)
class Sending:
    """What some producers send in a stretch of time: `record_count` records, as many each. `who` are their
    numbers, `streams` the ids that they write under, `assigned` the sequence that each had given out before.
    `hot_share` of the records have one key, beside those that are drawn for it.
    """

    who: NDArray[np.int64]
    streams: NDArray[np.int64]
    assigned: NDArray[np.int64]
    record_count: int
    start_ms: int
    span_ms: int
    partitions: int
    linger_ms: int = 1000
    record_bytes: int = 200
    codec: str = "lz4"
    seed: int = 1
    hot_share: float = 0.0

    @property
    def value_bytes(self) -> int:
        return max(16, self.record_bytes - _FIXED_BYTES)

    @property
    def rounds(self) -> int:
        """Records of each producer."""
        return self.record_count // len(self.who)

    def created_ms(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.start_ms + numbers * self.span_ms // self.record_count

    def sequences(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.assigned[numbers % len(self.who)] + numbers // len(self.who) + 1

    def keys(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drawn for each record, by Steele's splitmix64."""
        mixed = numbers.astype(np.uint64) + np.uint64(self.seed * 0x9E3779B97F4A7C15 % 2**64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
        drawn = (mixed >> np.uint64(40)).astype(np.int64) % KEYS
        is_hot = (mixed & np.uint64(0xFFFF)) < np.uint64(self.hot_share * 0x10000)
        return np.where(is_hot, 0, drawn)

    def place(self, number: int) -> tuple[str, int]:
        """(producer's name, sequence) of a record."""
        return producer_name(int(self.who[number % len(self.who)])), int(
            self.sequences(np.array([number]))[0]
        )

    def assigned_after(self) -> NDArray[np.int64]:
        return self.assigned + self.rounds


def even(
    producers: int, record_count: int, start_ms: int, span_ms: int, partitions: int, **more: float | str
) -> Sending:
    """All producers from their first record on; as many records as each can have the same number of."""
    who = np.arange(producers, dtype=np.int64)
    whole = max(1, record_count // producers) * producers
    nothing = np.zeros(producers, np.int64)
    return Sending(who, who + 1, nothing, whole, start_ms, span_ms, partitions, **more)  # type: ignore[arg-type]


def drawn(sending: Sending, count: int, seed: int) -> list[int]:
    """Numbers of so many records of different producers, none at a stream's ends."""
    luck = random.Random(seed)
    chosen = luck.sample(range(len(sending.who)), count)
    least, most = sending.rounds // 10, max(sending.rounds // 10 + 1, sending.rounds * 9 // 10)
    return [luck.randrange(least, most) * len(sending.who) + each for each in chosen]


# -- bytes


def slices(
    sending: Sending,
    layout: str,
    without: Collection[int] = (),
    twice: Collection[int] = (),
    only: Collection[int] | None = None,
) -> Iterator[dict[int, list[bytes]]]:
    """{partition: its next batches}, slice of the time by slice. Records `without` are left out, those of
    `twice` stand twice; where `only` some are wanted, nothing else is made."""
    maker = _Maker(sending, layout)
    per_linger = sending.record_count * sending.linger_ms / sending.span_ms
    lingers = max(1, int(SLICE_RECORDS // per_linger)) if per_linger else 1
    step = max(1, round(lingers * per_linger))
    if only is not None:
        yield maker.batches(np.array(sorted(only), np.int64))
        return
    gone, again = np.array(sorted(without), np.int64), np.array(sorted(twice), np.int64)
    for first in range(0, sending.record_count, step):
        numbers = np.arange(first, min(first + step, sending.record_count), dtype=np.int64)
        if len(gone):
            numbers = numbers[~np.isin(numbers, gone)]
        if len(again):
            numbers = np.concatenate([numbers, again[np.isin(again, numbers)]])
        if len(numbers):
            yield maker.batches(numbers)


class _Maker:
    """Writes the batches of one sending."""

    def __init__(self, sending: Sending, layout: str) -> None:
        self._sending, self._layout = sending, layout
        keys = [f"{number:0{_KEY_BYTES}d}".encode() for number in range(KEYS)]
        self._keys = _table(keys)
        self._partitions = np.array([partition_for_key(key, sending.partitions) for key in keys], np.int64)
        self._names = _table([producer_name(int(each)).encode() for each in sending.who])
        texts = random.Random(sending.seed)
        self._values = _table([_value(texts, sending.value_bytes) for _ in range(_VALUES)])
        self._codec = CODEC_IDS[sending.codec]
        self._most = max(1, (MERGED_BYTES if layout == MERGED else SENT_BYTES) // sending.record_bytes)

    def batches(self, numbers: NDArray[np.int64]) -> dict[int, list[bytes]]:
        sending = self._sending
        producers = numbers % len(sending.who)
        created = sending.created_ms(numbers)
        keys = sending.keys(numbers)
        partitions = self._partitions[keys]
        lingers = (created - sending.start_ms) // sending.linger_ms
        # Whose batch arrives first within a linger is nobody's choice: another one each time.
        turn = (producers + lingers * 7919) % len(sending.who)
        place = (partitions * (lingers.max() + 1) + lingers) * len(sending.who) + turn
        order = np.argsort(place, kind="stable")
        group = place[order] if self._layout == SENT else partitions[order]
        starts = _starts(group, self._most)
        numbers, producers = numbers[order], producers[order]
        out = np.empty(len(numbers) * (_FIXED_BYTES + sending.value_bytes + 16) + len(starts) * 61, np.uint8)
        bounds = _write(
            out,
            starts,
            producers,
            sending.streams[producers],
            sending.sequences(numbers),
            created[order],
            keys[order],
            numbers % _VALUES,
            self._keys,
            self._names,
            self._values,
        )
        found: dict[int, list[bytes]] = defaultdict(list)
        content = out.data
        for at, partition in enumerate(partitions[order][starts].tolist()):
            found[partition].append(self._closed(content[bounds[at] : bounds[at + 1]]))
        return found

    def _closed(self, batch: memoryview) -> bytes:
        """Compressed, with its length and checksum."""
        head = bytearray(batch[:HEADER_SIZE])
        section = compress(self._codec, batch[HEADER_SIZE:]) if self._codec else bytes(batch[HEADER_SIZE:])
        struct.pack_into(">i", head, 8, HEADER_SIZE - 12 + len(section))
        struct.pack_into(">h", head, ATTRIBUTES_POSITION, self._codec)
        whole = bytes(head) + section
        struct.pack_into(">I", head, CRC_POSITION, crc32c(memoryview(whole)[ATTRIBUTES_POSITION:]))
        return bytes(head) + section


def _table(texts: Sequence[bytes]) -> NDArray[np.uint8]:
    """Texts of one length, a row each."""
    return np.frombuffer(b"".join(texts), np.uint8).reshape(len(texts), -1)


def _value(texts: random.Random, size: int) -> bytes:
    line = f'{{"flight":"UA{texts.randrange(7000)}","tail":"N{texts.randrange(99999)}","dest":"ORD"'
    while len(line) < size:
        line += f',"gate{texts.randrange(99)}":{texts.randrange(10_000)}'
    return line[: size - 1].encode() + b"}"


@numba.njit(cache=True)
def _starts(group: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Where batches begin: at another group, and where one would have more than `most` records."""
    found = np.empty(len(group), np.int64)
    count = 0
    begin = 0
    for at in range(len(group)):
        if at == 0 or group[at] != group[at - 1] or at - begin >= most:
            begin = at
            found[count] = at
            count += 1
    return found[:count]


@numba.njit(cache=True)
def _varint(out: NDArray[np.uint8], at: int, number: int) -> int:
    """Zigzag, seven bits a byte. Returns the place behind it."""
    left = np.uint64((number << 1) ^ (number >> 63))
    while left >= np.uint64(128):
        out[at] = np.uint8(left & np.uint64(127)) | np.uint8(128)
        left >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(left)
    return at + 1


@numba.njit(cache=True)
def _varint_size(number: int) -> int:
    left = np.uint64((number << 1) ^ (number >> 63))
    size = 1
    while left >= np.uint64(128):
        left >>= np.uint64(7)
        size += 1
    return size


@numba.njit(cache=True)
def _big(out: NDArray[np.uint8], at: int, number: int, size: int) -> int:
    for place in range(size):
        out[at + place] = np.uint8((number >> (8 * (size - 1 - place))) & 255)
    return at + size


@numba.njit(cache=True)
def _copy(out: NDArray[np.uint8], at: int, text: NDArray[np.uint8]) -> int:
    out[at : at + len(text)] = text
    return at + len(text)


@numba.njit(cache=True)
def _write(
    out: NDArray[np.uint8],
    starts: NDArray[np.int64],
    producers: NDArray[np.int64],
    streams: NDArray[np.int64],
    sequences: NDArray[np.int64],
    created: NDArray[np.int64],
    keys: NDArray[np.int64],
    values: NDArray[np.int64],
    key_texts: NDArray[np.uint8],
    names: NDArray[np.uint8],
    value_texts: NDArray[np.uint8],
) -> NDArray[np.int64]:
    """Whole batches but for length, codec and checksum; returns their bounds."""
    bounds = np.empty(len(starts) + 1, np.int64)
    at = 0
    identity = 23 + names.shape[1]
    for batch in range(len(starts)):
        bounds[batch] = at
        first = starts[batch]
        end = starts[batch + 1] if batch + 1 < len(starts) else len(keys)
        latest = created[first]
        head = at
        out[head : head + 61] = 0
        out[head + 12 : head + 16] = 255  # no leader epoch yet
        out[head + 16] = 2
        _big(out, head + 23, end - first - 1, 4)
        _big(out, head + 27, created[first], 8)
        out[head + 43 : head + 57] = 255  # no producer id, epoch or sequence
        _big(out, head + 57, end - first, 4)
        at += 61
        for number in range(first, end):
            latest = max(latest, created[number])
            age = created[number] - created[first]
            size = 1 + _varint_size(age) + _varint_size(number - first)
            size += _varint_size(key_texts.shape[1]) + key_texts.shape[1]
            size += _varint_size(value_texts.shape[1]) + value_texts.shape[1]
            size += 1 + 1 + 3 + _varint_size(identity) + identity
            at = _varint(out, at, size)
            out[at] = 0
            at = _varint(out, at + 1, age)
            at = _varint(out, at, number - first)
            at = _varint(out, at, key_texts.shape[1])
            at = _copy(out, at, key_texts[keys[number]])
            at = _varint(out, at, value_texts.shape[1])
            at = _copy(out, at, value_texts[values[number]])
            at = _varint(out, at, 1)
            at = _varint(out, at, 3)
            out[at], out[at + 1], out[at + 2] = 95, 109, 114  # _mr
            at = _varint(out, at + 3, identity)
            out[at] = 1
            at = _big(out, at + 1, streams[number], 8)
            at = _big(out, at, sequences[number], 8)
            at = _big(out, at, created[number], 6)
            at = _copy(out, at, names[producers[number]])
        _big(out, head + 35, latest, 8)
    bounds[len(starts)] = at
    return bounds


if (HEADER_KEY, HEADER_VERSION) != ("_mr", 1):
    raise ImportError("the header that is written here is another one now")


# -- to brokers


@dataclass(frozen=True, slots=True)
class Written:
    record_count: int = 0
    batch_count: int = 0
    byte_count: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(
            self.record_count + other.record_count,
            self.batch_count + other.batch_count,
            self.byte_count + other.byte_count,
        )


async def make_topic(bootstrap: str, name: str, partitions: int) -> None:
    """Nothing of it grows old: times of records are those of the scenario."""
    async with Cluster("load", [bootstrap]) as cluster:
        await create_topic(cluster, name, partitions, 1, {"retention.ms": "-1"})


async def write(
    bootstrap: str,
    sending: Sending,
    layout: str,
    *,
    without: Collection[int] = (),
    twice: Collection[int] = (),
    only: Collection[int] | None = None,
    topic: str = TOPIC,
) -> Written:
    """Produce it (see `slices`). A request has one batch for each partition, as the protocol wants it."""
    done = Written()
    async with Cluster("load", [bootstrap]) as cluster:
        view = await cluster.metadata([topic], max_age_ms=0)
        leader = view.leader(topic, 0)
        if leader is None:
            raise RuntimeError(f"{topic} has no leader")
        under_way: list[asyncio.Task[None]] = []

        async def send(row: dict[tuple[str, int], bytes]) -> None:
            for key, outcome in (await produce(cluster, leader, row)).items():
                if outcome.error_code:
                    raise RuntimeError(f"{key} was refused with code {outcome.error_code}")

        for found in slices(sending, layout, without, twice, only):
            for row in _rows(found, topic):
                done += Written(0, len(row), sum(map(len, row.values())))
                under_way.append(asyncio.create_task(send(row)))
                if len(under_way) >= IN_FLIGHT:
                    await under_way.pop(0)
                else:
                    await asyncio.sleep(0)  # tasks send in the order in which they were made
        await asyncio.gather(*under_way)
    count = sending.record_count - len(set(without)) + len(set(twice)) if only is None else len(only)
    return replace(done, record_count=count)


def _rows(found: dict[int, list[bytes]], topic: str) -> Iterator[dict[tuple[str, int], bytes]]:
    for number in range(max(map(len, found.values()))):
        yield {
            (topic, partition): batches[number]
            for partition, batches in found.items()
            if number < len(batches)
        }


# -- what producers say


def count_events(sending: Sending, at_ms: int) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of each producer's report of each window in which it sent, all of it acknowledged."""
    many = len(sending.who)
    rounds = np.arange(sending.rounds, dtype=np.int64) * many
    checked = False
    for place, number in enumerate(sending.who.tolist()):
        windows = sending.created_ms(rounds + place) // WINDOW_MS
        first = np.flatnonzero(np.diff(windows, prepend=windows[:1] - 1))
        ends = np.append(first[1:], len(windows))
        base = int(sending.assigned[place])
        stream, name = f"{int(sending.streams[place]):016x}", producer_name(number)
        for begin, end, window in zip(first.tolist(), ends.tolist(), windows[first].tolist(), strict=True):
            event = stream, name, window * WINDOW_MS, base + begin + 1, base + end, sending.value_bytes, at_ms
            key, value = count_text(*event)
            if not checked:
                _require_contract(event, key, value)
                checked = True
            yield key, value


def count_text(
    stream: str, name: str, window_ms: int, first: int, last: int, value_bytes: int, at_ms: int
) -> tuple[bytes, bytes]:
    """A count event, as `encode_event` writes it; that takes ten times as long, and there are millions."""
    count = last - first + 1
    return f"count/{stream}/{window_ms}".encode(), (
        f'{{"version":1,"type":"count","stream":"{stream}","session":"{SESSION}","topic":"{TOPIC}",'
        f'"producer":"{name}","window_start_ms":{window_ms},"window_ms":{WINDOW_MS},"report":1,'
        f'"count":{count},"bytes":{count * value_bytes},"acknowledged":[[{first},{last}]],"ambiguous":[],'
        f'"failed":[],"digest":null,"at_ms":{at_ms}}}'
    ).encode()


def _require_contract(event: tuple[str, str, int, int, int, int, int], key: bytes, value: bytes) -> None:
    stream, name, window_ms, first, last, value_bytes, at_ms = event
    count, nothing = last - first + 1, from_ranges(())
    theirs = CountEvent(
        stream, SESSION, TOPIC, name, window_ms, WINDOW_MS, 1, count, count * value_bytes,
        from_ranges(((first, last),)), nothing, nothing, at_ms,
    )  # fmt: skip
    if encode_event(theirs) != (key, value):
        raise RuntimeError(f"events are written otherwise now: {encode_event(theirs)!r}, here {value!r}")


def stream_event(
    number: int, stream: int, state: str, last: int, promise_ms: int | None, at_ms: int
) -> tuple[bytes, bytes]:
    """A producer's word on its stream: all up to `last` is told."""
    return encode_event(
        StreamEvent(
            state, f"{stream:016x}", SESSION, TOPIC, producer_name(number), f"host{number:05d}", "feed",
            "src", WINDOW_MS, last, last, promise_ms, 2 * 86_400_000, at_ms,
        )
    )  # fmt: skip


def tell(bootstrap: str, events: Iterable[tuple[bytes, bytes]], topic: str = EVENTS_TOPIC) -> int:
    """Publish as any language does. Returns how many."""
    client = {
        "bootstrap.servers": bootstrap,
        "enable.idempotence": True,
        "linger.ms": 20,
        "queue.buffering.max.messages": 1_000_000,
    }
    if topic == EVENTS_TOPIC:
        ensure_events_topic({"bootstrap.servers": bootstrap}, topic, 60.0)
    producer = Producer(client)
    count = 0
    for key, value in events:
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.1)
        count += 1
        if count % 1000 == 0:
            producer.poll(0)
    if producer.flush(PUBLISH_S):
        raise RuntimeError(f"events were not acknowledged within {PUBLISH_S:.0f} s")
    return count
