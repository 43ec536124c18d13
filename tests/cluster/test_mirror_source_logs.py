"""Logs as their brokers leave them: compacted with tombstones and transactions in them, and with attribute
bits that nobody knows today. What a client reads there is what it reads at the target.

A cleaner marks a batch of tombstones, and the end of a transaction whose records are gone, with a time from
which they may go (the delete horizon, in the place of the base timestamp), and keeps the header of a
producer's last batch when no record of it is left.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.protocol.batch import (
    ATTRIBUTES_POSITION,
    HEADER_SIZE,
    BatchHeader,
    iterate_batches,
    seal,
)
from millrace.broker.protocol.compression import LZ4
from millrace.broker.protocol.records import Record, build_batch, read_records
from tests.cluster.mirror_process import send
from tests.cluster.test_mirror_paths import (
    COMPACT_SOON,
    READ_S,
    batches_on_disk,
    carried,
    check_count,
    check_stamps,
    codecs,
    now_ms,
    paths_taken,
    read,
    some_records,
    source_batch_count,
    transactional_producers,
    until_cleaned,
)
from tests.pairs import End, Pair, in_pairs

KEYS, ROUNDS = 12, 12
NEVER_SENT = b"given up"
UNKNOWN_BIT = 0x0100


class Cleaned(NamedTuple):
    """One batch as a cleaner has left it."""

    header: BatchHeader
    records: list[Record]
    section: bytes

    @property
    def is_dense(self) -> bool:
        return self.header.record_count == self.header.last_offset_delta + 1


def cleaned(folder: Path) -> list[Cleaned]:
    found = []
    for path in sorted(folder.glob("*.log")):
        data = memoryview(path.read_bytes())
        for position, header in iterate_batches(data):
            batch = data[position : position + header.size]
            records = read_records(batch) if header.record_count and not header.is_control else []
            found.append(Cleaned(header, list(records), bytes(batch[HEADER_SIZE:])))
    return found


def write_transactions(end: End, topic: str) -> None:
    """Over few keys, ended either way; each producer gives its last one up."""
    rng = random.Random(9)
    producers = transactional_producers(end, topic)
    for number in range(ROUNDS):
        for producer in producers:
            is_given_up = number == ROUNDS - 1 or rng.random() < 0.4
            producer.begin_transaction()
            for at in range(rng.choice((1, 3, 8))):
                value = NEVER_SENT if is_given_up else None if rng.random() < 0.3 else b"%d.%d" % (number, at)
                producer.produce(topic, value, b"key-%d" % rng.randrange(KEYS), 0, timestamp=now_ms())
            producer.flush(READ_S)
            if is_given_up:
                producer.abort_transaction(READ_S)
            else:
                producer.commit_transaction(READ_S)


async def write_compacted(pair: Pair, topic: str, *, forgets: bool) -> None:
    """Transactions, and tombstones with and without neighbours that go. Returns when the source's cleaner can
    take no more records away: with `forgets` tombstones and ends of transactions are gone too, otherwise
    they, and headers without records, are there."""
    folder = pair.source.log_folder(topic, 0)

    def is_clean() -> bool:
        """No key twice: no later round can take a record away."""
        batches = cleaned(folder)
        data = [each for each in batches if not each.header.is_control]
        ends = [each.header for each in batches if each.header.is_control]
        records = [record for each in data for record in each.records]
        if len({record.key for record in records}) < len(records):
            return False
        if any(record.value == NEVER_SENT for record in records):
            return False
        if forgets:
            return len(ends) < ROUNDS and all(record.value is not None for record in records)
        to_go = [each for each in data if each.header.has_delete_horizon]
        return (
            {each.is_dense for each in to_go} == {True, False}
            and any(end.has_delete_horizon for end in ends)
            and any(each.header.record_count == 0 for each in data)
        )

    async with pair.source.cluster() as source:
        how_long = "1" if forgets else "86400000"
        await create_topic(source, topic, 1, 1, COMPACT_SOON | {"delete.retention.ms": how_long})
        for keys in ([b"gone-1", b"gone-2", b"gone-3"], [b"gone-4", b"again", b"gone-5"], [b"again"]):
            records = [Record(key, b"x" if key == b"again" else None, (), now_ms()) for key in keys]
            await send(source, topic, 0, build_batch(records))
        await asyncio.to_thread(write_transactions, pair.source, topic)
        await until_cleaned(source, topic, is_clean)


@pytest.mark.safety
@in_pairs("kafka-millrace", "millrace-kafka")
def test_compacted_transactions_and_tombstones_arrive_as_they_are_read_at_the_source(pair: Pair) -> None:
    asyncio.run(compacted_transactions(pair))


async def compacted_transactions(pair: Pair) -> None:
    kept, forgotten = topics = [pair.unique(name) for name in ("kept", "forgotten")]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write_compacted(pair, kept, forgets=False))
        tasks.create_task(write_compacted(pair, forgotten, forgets=True))
    async with pair.target.cluster() as target:
        for topic in topics:  # whose disk is looked at: no cleaner may be at it
            await create_topic(target, topic, 1, 1)
            await create_topic(target, f"{pair.source.name}.{topic}", 1, 1)
    not_compacted = {"exclude": ["cleanup.policy"]}
    apart = await carried(pair, topics, batches="pass_through", config_sync=not_compacted)
    merged = await carried(pair, topics, naming="{cluster}.{topic}", config_sync=not_compacted)
    for topic in topics:
        expected = await asyncio.to_thread(read, pair.source, topic)
        assert any(record.value is None for record in expected) == (topic == kept)
        there = cleaned(pair.source.log_folder(topic, 0))
        sent = [(each.header, each.section) for each in there if each.records]
        for mirror, name in ((apart, topic), (merged, f"{pair.source.name}.{topic}")):
            assert await asyncio.to_thread(read, pair.target, name) == expected, name
            await check_stamps(pair, mirror, name)
            arrived = batches_on_disk(pair.target.log_folder(name, 0))
            assert codecs(arrived) == codecs(sent), name
    # A batch of nothing but tombstones is sent as it is; of its header that bit alone is the source's own.
    sections = {section for _, section in batches_on_disk(pair.target.log_folder(kept, 0))}
    marked = [each for each in cleaned(pair.source.log_folder(kept, 0)) if each.header.has_delete_horizon]
    assert {each.section for each in marked if each.records and each.is_dense} <= sections
    assert paths_taken(apart).keys() == {"pass_through", "rebuild", "drop"}
    assert paths_taken(merged).keys() >= {"coalesce", "drop"}


@in_pairs("millrace-kafka", "kafka-millrace")
def test_attribute_bits_of_another_day_go_no_further(pair: Pair) -> None:
    asyncio.run(unknown_bits(pair))


async def unknown_bits(pair: Pair) -> None:
    rng = random.Random(10)
    topic = pair.unique("bits")
    folder = pair.source.log_folder(topic, 0)
    async with pair.source.cluster() as source:
        await create_topic(source, topic, 1, 1)
        for count, size, codec in ((100, 1_000, 0), (100, 1_000, LZ4), (1, 100, 0), (1, 100, 0)):
            await send(source, topic, 0, build_batch(some_records(rng, count, size), compression=codec))
    (log,) = folder.glob("*.log")
    data = bytearray(log.read_bytes())
    _, *others = iterate_batches(memoryview(bytes(data)))
    for position, header in others:
        data[position + ATTRIBUTES_POSITION] |= UNKNOWN_BIT >> 8
        seal(memoryview(data)[position : position + header.size])
    with log.open("r+b") as file:
        file.write(data)
    mirror = await carried(pair, [topic])
    expected = await asyncio.to_thread(read, pair.source, topic)
    assert len(expected) == 202
    assert await asyncio.to_thread(read, pair.target, topic) == expected
    assert paths_taken(mirror) == {"pass_through": 1, "rebuild": len(others)}
    check_count(mirror, source_batch_count(pair, topic))
    await check_stamps(pair, mirror, topic)
    arrived = list(batches_on_disk(pair.target.log_folder(topic, 0)))
    assert not any(header.attributes & UNKNOWN_BIT for header, _ in arrived)
    assert codecs(arrived) == codecs(batches_on_disk(folder))
