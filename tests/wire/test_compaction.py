"""A compacted topic, read from its start: the newest value of every key, at its own offset, in order."""

from __future__ import annotations

import random
import time

import pytest

from tests.wire.foreign_clients import CODECS, ForeignClient, Received, Sent, wait_until

COMPACT_SOON = {
    "cleanup_policy": "compact",
    "segment_bytes": 1 << 20,
    "segment_ms": 100,
    "min_cleanable_dirty_ratio": "0.01",
    "max_compaction_lag_ms": 100,
    "delete_retention_ms": 600_000,
}
COMPACTION_S = 120.0


class Ledger:
    """What was written, in order; what must be left of it."""

    def __init__(self, client: ForeignClient, topic: str) -> None:
        self.client, self.topic = client, topic
        self.written: list[tuple[int, bytes, bytes | None]] = []

    def write(self, pairs: list[tuple[bytes, bytes | None]], codec: str = "none") -> None:
        now_ms = int(time.time() * 1000)
        records = [Sent(value, key, (("h", key),), now_ms) for key, value in pairs]
        offsets = self.client.produce(self.topic, records, codec)
        self.written += [(offset, key, value) for offset, (key, value) in zip(offsets, pairs, strict=True)]

    def seal(self) -> None:
        """The active segment is never compacted: time passes, and one more record begins a new one."""
        time.sleep(0.15)
        self.write([(b"last", b"")])

    def newest(self) -> list[tuple[int, bytes, bytes | None]]:
        last = {key: offset for offset, key, _ in self.written}
        return [(offset, key, value) for offset, key, value in self.written if last[key] == offset]


def as_written(records: list[Received]) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for record in records]


def wait_for_compaction(ledger: Ledger) -> list[Received]:
    """Until every older value is gone; the record after each round shows that reading goes on meanwhile."""
    seen: list[list[Received]] = []

    def compacted() -> bool:
        seen.append(ledger.client.drain(ledger.topic))
        return len(seen[-1]) <= len(ledger.newest())

    wait_until(compacted, "compaction", COMPACTION_S)
    return seen[-1]


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec in ("none", "lz4", "zstd")])
def test_compacted_topic_keeps_the_newest_value_of_every_key(readers, kcat, java, new_topic, codec):
    topic = new_topic(**COMPACT_SOON)
    ledger = Ledger(readers[0], topic)
    rng = random.Random(2_011)
    for round_number in range(3):
        ledger.write(
            [(b"key-%d" % rng.randrange(50), b"value %d.%d" % (round_number, n)) for n in range(200)], codec
        )
        time.sleep(0.15)
    ledger.seal()
    left = wait_for_compaction(ledger)
    assert as_written(left) == ledger.newest()
    assert all(record.headers == (("h", record.key),) for record in left)
    for reader in readers:
        assert as_written(reader.drain(topic)) == ledger.newest(), reader.name
        assert reader.bounds(topic, 0) == (0, len(ledger.written)), "no offset changes"
        # From an offset whose record is gone: the next one that is left.
        gone = next(offset for offset, *_ in ledger.written if offset not in {o for o, *_ in ledger.newest()})
        following = next(entry for entry in ledger.newest() if entry[0] > gone)
        assert reader.consume(topic, [0], 1, start=gone)[0].offset == following[0]
    lines = [f"{offset}|{key.decode()}|{(value or b'').decode()}" for offset, key, value in ledger.newest()]
    by_kcat = kcat.run("-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%o|%k|%s\n")
    assert by_kcat.decode().splitlines() == lines
    if codec == "zstd":  # a JVM is dear
        shown = ("print.offset=true", "print.key=true", "key.separator=|")
        by_java = java.run(
            "console-consumer",
            *("--topic", topic, "--partition", "0", "--offset", "earliest"),
            *("--max-messages", str(len(lines)), "--timeout-ms", "20000"),
            *(word for each in shown for word in ("--property", each)),
        ).checked()
        assert [line.removeprefix("Offset:") for line in by_java.lines] == lines


def test_tombstones_are_kept_for_their_time_and_then_gone(readers, new_topic):
    kept = new_topic(**COMPACT_SOON)
    dropped = new_topic(**{**COMPACT_SOON, "delete_retention_ms": 100})
    for topic, tombstone_stays in ((kept, True), (dropped, False)):
        ledger = Ledger(readers[0], topic)
        ledger.write([(b"stays", b"1"), (b"goes", b"1"), (b"comes back", None)])
        time.sleep(0.15)
        ledger.write([(b"goes", None), (b"comes back", b"2")])
        ledger.seal()
        expected = [
            (offset, key, value)
            for offset, key, value in ledger.newest()
            if tombstone_stays or key != b"goes"
        ]

        def left() -> list[tuple[int, bytes | None, bytes | None]]:
            # A tombstone's time begins when a compaction has first met it: a further one has to come by.
            time.sleep(0.2)
            ledger.write([(b"last", b"")])  # noqa: B023
            records = readers[1].drain(topic)  # noqa: B023
            return [entry for entry in as_written(records) if entry[1] != b"last"]

        expected = [entry for entry in expected if entry[1] != b"last"]
        wait_until(lambda: left() == expected, f"what is left of {topic}", COMPACTION_S)  # noqa: B023


def test_compaction_does_not_touch_transactions_that_count(readers, new_topic, fresh_name):
    """Aborted values do not replace committed ones; after compaction every level reads the same as before."""
    topic = new_topic(**COMPACT_SOON)
    producer = readers[0].transactional(fresh_name("transactional"))

    def send(key: bytes, value: bytes) -> Sent:
        return Sent(value, key, (), int(time.time() * 1000))

    try:
        for value, fate in ((b"1", "commit"), (b"2", "abort"), (b"3", "commit"), (b"4", "abort")):
            producer.begin()
            producer.send(topic, [send(b"a", b"a" + value), send(b"b" + value, b"b" + value)])
            getattr(producer, fate)()
            time.sleep(0.15)
        readers[0].produce(topic, [send(b"last", b"")])
        expected = [(b"b1", b"b1"), (b"a", b"a3"), (b"b3", b"b3"), (b"last", b"")]

        def committed(reader: ForeignClient) -> list[tuple[bytes | None, bytes | None]]:
            return [(record.key, record.value) for record in reader.drain(topic, committed=True)]

        wait_until(lambda: committed(readers[0]) == expected, "compaction", COMPACTION_S)
        for reader in readers:
            assert committed(reader) == expected, reader.name
    finally:
        producer.close()


def test_old_segments_go_by_age_and_by_size(readers, new_topic):
    """`retention.ms` and `retention.bytes` drop whole segments from the start, never the newest."""
    by_age = new_topic(retention_ms=1_000, segment_ms=100, file_delete_delay_ms=0)
    old_ms = int(time.time() * 1000) - 60_000
    readers[0].produce(by_age, [Sent(b"old", timestamp_ms=old_ms)])
    readers[0].produce(by_age, [Sent(b"new", timestamp_ms=int(time.time() * 1000) + 600_000)])
    wait_until(lambda: readers[0].bounds(by_age, 0) == (1, 2), "the old segment is gone", COMPACTION_S)
    assert [(r.offset, r.value) for r in readers[1].drain(by_age)] == [(1, b"new")]

    by_size = new_topic(retention_bytes=2 << 20, segment_bytes=1 << 20)
    for _ in range(8):
        readers[0].produce(by_size, [Sent(b"x" * 500_000)])
    wait_until(lambda: readers[0].bounds(by_size, 0)[0] > 0, "the first segments are gone", COMPACTION_S)
    first, end = readers[0].bounds(by_size, 0)
    assert end == 8
    assert 0 < first <= 4, "what is kept is more than the limit, less than a segment more"
    for reader in readers:
        assert [record.offset for record in reader.drain(by_size)] == list(range(first, end))
