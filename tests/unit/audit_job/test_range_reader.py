"""What read_committed hides, and what a damaged batch does."""

from __future__ import annotations

import asyncio
import struct
import uuid
import zlib
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from millrace.audit.scanning import range_reader
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import (
    AbortedTransactions,
    hole_within,
    index_fetched,
    leading_batches,
    mark_skipped,
)
from millrace.audit.spark.task_plan import OffsetRange
from millrace.audit.spark.task_reader import count_batches
from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import ClusterUnreachable
from millrace.broker.protocol.checksum import crc32c_reference
from millrace.broker.protocol.compression import CODEC_IDS, compress
from tests.cells import rows_of

TRANSACTIONAL, CONTROL = 0x10, 0x20


def marker(build, offset: int, producer_id: int, kind: int) -> bytes:
    key = (0).to_bytes(2, "big") + kind.to_bytes(2, "big")
    control = build.record(0, value=b"\0" * 6, key=key)
    return build.batch(offset, [control], attributes=TRANSACTIONAL | CONTROL, producer_id=producer_id)


def data(build, offset: int, producer_id: int, sequence: int) -> bytes:
    return build.batch(
        offset, [build.stamped(0, 1, sequence)], attributes=TRANSACTIONAL, producer_id=producer_id
    )


def sequences(content: bytes, aborted=(), distrusted=None) -> list[int]:
    batches = index_fetched(content)
    transactions = AbortedTransactions()
    transactions.learn(aborted)
    told: Counter[str] = Counter() if distrusted is None else distrusted
    mark_skipped(batches, transactions, lambda reason: told.update([reason]))
    counter = CellCounter(1000, 1 << 20)
    count_batches(counter, batches, 0, 1 << 60)
    return sorted(sequence for row in rows_of(counter.take()) for sequence in row.sequences)


def test_aborted_transaction_is_hidden_and_the_next_committed_one_is_seen(build):
    content = data(build, 0, 7, 1) + data(build, 1, 8, 2) + marker(build, 2, 7, 0) + data(build, 3, 7, 3)
    assert sequences(content + marker(build, 4, 7, 1), aborted=[(7, 0)]) == [2, 3]


def test_committed_transaction_is_seen_and_its_marker_is_not_a_record(build):
    assert sequences(data(build, 0, 7, 1) + marker(build, 1, 7, 1)) == [1]


def test_abort_told_again_by_a_later_fetch_hides_nothing_new(build):
    transactions = AbortedTransactions()
    transactions.learn([(7, 0)])
    assert transactions.hides(7, 0)
    transactions.end(7, 2)
    transactions.learn([(7, 0)])
    assert not transactions.hides(7, 3)


def test_batch_with_a_wrong_crc_is_skipped_and_counted(build):
    damaged = bytearray(build.batch(0, [build.stamped(0, 1, 1)]))
    damaged[-1] ^= 1
    told: Counter[str] = Counter()
    assert sequences(bytes(damaged) + build.batch(1, [build.stamped(0, 1, 2)]), distrusted=told) == [2]
    assert told == {"batch with a wrong CRC": 1}


def test_every_codec_is_counted_like_plain_records(build):
    content = b""
    for offset, (name, codec) in enumerate(sorted(CODEC_IDS.items())):
        section = build.stamped(0, 1, offset + 1)
        packed = section if name == "none" else bytes(compress(codec, section))
        content += build.batch(offset, [packed], attributes=codec)
    assert sequences(content) == [1, 2, 3, 4, 5]


def test_compressed_batch_that_cannot_be_unpacked_is_counted(build):
    told: Counter[str] = Counter()
    content = build.batch(0, [b"this is no lz4 frame"], attributes=CODEC_IDS["lz4"])
    batches = index_fetched(content)
    counter = CellCounter(1000, 1 << 20)
    mark_skipped(batches, AbortedTransactions(), lambda reason: told.update([reason]))
    count_batches(counter, batches, 0, 1 << 60)
    assert counter.totals().untrusted == {"batch that cannot be decompressed (CorruptMessage)": 1}


def test_batch_cut_by_the_fetch_is_left_for_the_next_one(build):
    whole = build.batch(0, [build.stamped(0, 1, 1)])
    assert len(index_fetched(whole + whole[:-1]).index) == 1


def test_offsets_without_a_record_are_told_because_only_compaction_makes_them(build):
    def found(content, first=0, end=100):
        return hole_within(index_fetched(content).index, first, end)

    one, two = [build.stamped(0, 1, 1)], [build.stamped(0, 1, 1), build.stamped(1, 1, 2)]
    assert found(build.batch(0, two) + build.batch(2, one)) is None
    assert found(build.batch(0, two), first=1) is None, "a range may begin within a batch"
    assert found(build.batch(5, one)) == (0, 5)
    assert found(build.batch(0, one) + build.batch(3, one) + build.batch(8, one)) == (1, 8)
    assert found(build.batch(0, one) + build.batch(3, one), end=2) == (1, 2)
    hollow = bytearray(build.batch(4, two))
    hollow[23:27] = (5).to_bytes(4, "big")  # last offset delta: the batch once had six records
    hollow[17:21] = crc32c_reference(bytes(hollow[21:])).to_bytes(4, "big")
    assert found(bytes(hollow), first=4) == (4, 10)
    control = marker(build, 1, 7, 0)
    assert found(build.batch(0, one) + control + build.batch(2, one)) is None


def test_the_offsets_of_a_damaged_batch_are_told(build):
    damaged = bytearray(build.batch(3, [build.stamped(0, 1, 1), build.stamped(1, 1, 2)]))
    damaged[-1] ^= 1
    told = []
    batches = index_fetched(bytes(damaged) + build.batch(5, [build.stamped(0, 1, 3)]))
    mark_skipped(batches, AbortedTransactions(), lambda reason: None, lambda *hole: told.append(hole))
    assert told == [(3, 5, "damaged")]


RANGE = OffsetRange("ewr", "ewr", "flights", "flights", 0, 0, 4)


def answer(build, offset: int, empty: bool = False) -> FetchedPartition:
    """One record, or none although there are some: the broker waited for as long as it was told to."""
    records = b"" if empty else build.batch(offset, [build.stamped(0, 1, offset + 1)])
    return FetchedPartition(
        topic="flights", partition=0, error_code=0, high_watermark=4, last_stable_offset=4,
        log_start_offset=0, aborted=(), diverging=None, records=memoryview(records),
    )  # fmt: skip


class Counted(range_reader.RangeReader):
    """Answers at once; `asked` are the offsets of the fetches that were begun."""

    _read_committed = True

    def __init__(self, build) -> None:
        self.build = build
        self.asked: list[int] = []

    def _submit(self, work):
        found: Future = Future()
        found.set_result(asyncio.run(work))
        return found

    async def _fetch(self, range_, offset):
        self.asked.append(offset)
        return answer(self.build, offset)


def test_the_next_fetch_is_under_way_while_one_is_counted_and_no_more_than_that(build):
    """One ahead: network and counting go on together, and no more than two answers are held at a time."""
    reader = Counted(build)
    batches = reader.read(RANGE, print, print)
    asked = [(next(batches), list(reader.asked))[1] for _ in range(4)]
    assert asked == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert next(batches, None) is None and reader.asked == [0, 1, 2, 3]


def cluster_of(topic_id) -> SimpleNamespace:
    async def metadata(topics, **age):
        topic = SimpleNamespace(topic_id=topic_id, partitions={0: SimpleNamespace(leader=1)})
        return SimpleNamespace(topics={"flights": topic})

    return SimpleNamespace(metadata=metadata)


def test_the_broker_is_asked_to_wait_for_records_rather_than_asked_again_and_again(build, monkeypatch):
    """Every request lets it wait; the reader itself then waits for nothing more between two."""
    asked: list[dict] = []
    answers = [answer(build, 0, empty=True), answer(build, 0)]

    async def fetch(cluster, leader, positions, **settings):
        asked.append(settings)
        return [answers[len(asked) - 1]]

    async def sleep(seconds):
        raise AssertionError("the broker has waited already")

    monkeypatch.setattr(range_reader, "fetch", fetch)
    monkeypatch.setattr(range_reader, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    reader = range_reader.RangeReader({"ewr": ["h:1"]}, 1 << 20)
    reader._clusters["ewr"] = cluster_of(NO_TOPIC_ID)
    try:
        assert len(asyncio.run(reader._fetch(RANGE, 0)).records) > 0
    finally:
        reader._loop.close()
    assert [(each["max_wait_ms"] >= 200, each["min_bytes"]) for each in asked] == [(True, 1)] * 2


class Damaged(Counted):
    """A log of one record a batch, of which some offsets hold `instead` of their batch."""

    def __init__(self, build, damaged, instead) -> None:
        super().__init__(build)
        self.damaged, self.instead = damaged, instead

    async def _fetch(self, range_, offset):
        self.asked.append(offset)
        records = b"".join(
            self.instead if each in self.damaged else bytes(answer(self.build, each).records)
            for each in range(offset, min(offset + 3, range_.end_offset))
        )
        return replace(answer(self.build, offset, empty=True), records=memoryview(records))


def is_not_there(build):
    """A batch whose offset, which no CRC covers, was lost."""
    return bytes(8) + build.batch(0, [build.stamped(0, 1, 99)])[8:]


STRETCHES = [{5}, {4, 5, 6, 7, 8}, {98, 99}, set(range(1, 100))]


@pytest.mark.parametrize(
    ("damaged", "instead"),
    [
        *product([{0}, set(range(100)), *STRETCHES], [lambda _: bytes(100), lambda _: b"\xff" * 100]),
        *product(STRETCHES, [is_not_there]),
    ],
)
def test_damaged_bytes_are_told_and_reading_goes_on_behind_them(build, damaged, instead):
    whole = replace(RANGE, end_offset=100)
    distrusted: list[str] = []
    unread: list[tuple] = []
    reader = Damaged(build, damaged, instead(build))
    counter = CellCounter(1000, 1 << 20)
    for batches in reader.read(whole, distrusted.append, lambda *hole: unread.append(hole)):
        count_batches(counter, batches, 0, 100)
    seen = {sequence - 1 for row in rows_of(counter.take()) for sequence in row.sequences}
    assert seen == set(range(100)) - damaged
    assert unread == [(min(damaged), max(damaged) + 1, "damaged")]
    assert distrusted == ["stretch of bytes that is no batch"] and len(reader.asked) < 80


def test_a_batch_that_never_becomes_whole_is_damaged_and_no_hole(build, monkeypatch):
    """Its length, which no CRC covers, reaches beyond all that the broker has."""
    records = bytearray(answer(build, 0).records)
    records[8:12] = (1 << 20).to_bytes(4, "big")

    async def fetch_once(self, range_, offset, fresh):
        return replace(answer(build, offset), records=memoryview(records))

    monkeypatch.setattr(range_reader.RangeReader, "_fetch_once", fetch_once)
    fetched = asyncio.run(range_reader.RangeReader._fetch(Counted(build), RANGE, 0))
    assert fetched is not None and leading_batches(fetched.records, 0) is None


class Refusing(Counted):
    """A broker that finds some of its bytes corrupt, as often as it is asked for them (CORRUPT_MESSAGE)."""

    def __init__(self, build, damaged) -> None:
        super().__init__(build)
        self.damaged = damaged

    _fetch = range_reader.RangeReader._fetch

    async def _fetch_once(self, range_, offset, fresh_metadata):
        self.asked.append(offset)
        if offset in self.damaged:
            return replace(answer(self.build, offset, empty=True), error_code=2)
        return answer(self.build, offset)


@pytest.mark.parametrize("damaged", [{0}, {5}, {4, 5, 6, 7, 8}, set(range(1, 20))])
def test_what_a_broker_keeps_finding_corrupt_is_damaged_and_reading_goes_on_behind_it(
    build, damaged, monkeypatch
):
    monkeypatch.setattr(range_reader, "RETRY_WAIT_S", 0)
    distrusted: list[str] = []
    unread: list[tuple] = []
    whole = replace(RANGE, end_offset=20)
    read = Refusing(build, damaged).read(whole, distrusted.append, lambda *hole: unread.append(hole))
    seen = {int(offset) for batches in read for offset in batches.index[:, range_reader.B_BASE_OFFSET]}
    assert seen == set(range(20)) - damaged
    assert unread == [(min(damaged), max(damaged) + 1, "damaged")]
    assert distrusted == [range_reader.REFUSED]


class Silent(Refusing):
    """One that takes a damaged batch for the end of its file, wherever it has to go through it."""

    def __init__(self, build, damaged) -> None:
        super().__init__(build, damaged)
        self._clusters = {"ewr": SimpleNamespace(list_offsets=self._list_offsets)}

    async def _list_offsets(self, wanted):
        return {key: SimpleNamespace(offset=0) for key in wanted}  # all of it is on its own disk

    async def _fetch_once(self, range_, offset, fresh_metadata):
        self.asked.append(offset)
        told = answer(self.build, offset, empty=offset in self.damaged)
        return replace(told, last_stable_offset=range_.end_offset)


@pytest.mark.parametrize("damaged", [{0}, {5}, {4, 5, 6, 7, 8}, set(range(1, 20))])
def test_what_a_broker_does_not_send_is_damaged_where_it_has_records_behind_it(build, damaged):
    distrusted: list[str] = []
    unread: list[tuple] = []
    whole = replace(RANGE, end_offset=20)
    read = Silent(build, damaged).read(whole, distrusted.append, lambda *hole: unread.append(hole))
    seen = {int(offset) for batches in read for offset in batches.index[:, range_reader.B_BASE_OFFSET]}
    assert seen == set(range(20)) - damaged
    is_hole = max(damaged) == 19  # nothing behind it: compaction may have taken all of it
    assert unread == [(min(damaged), max(damaged) + 1, "compacted" if is_hole else "damaged")]
    assert distrusted == ([] if is_hole else [range_reader.UNSENT])


def test_bytes_that_another_leader_has_whole_are_read(build, monkeypatch):
    """Said to be corrupt once or twice, until somebody else leads."""
    monkeypatch.setattr(range_reader, "RETRY_WAIT_S", 0)
    reader = Refusing(build, {0})
    heals = reader._fetch_once

    async def fetch_once(range_, offset, fresh_metadata):
        fetched = await heals(range_, offset, fresh_metadata)
        if len(reader.asked) == range_reader.DAMAGED_AFTER_COUNT - 1:
            reader.damaged = set()
        return fetched

    monkeypatch.setattr(reader, "_fetch_once", fetch_once)
    unread: list[tuple] = []
    assert len(list(reader.read(RANGE, print, lambda *hole: unread.append(hole)))) == 4 and not unread


def v1(offset: int) -> bytes:
    """A message of the format before batches, long enough to be taken for one."""
    body = struct.pack(">bbqii", 1, 0, 1700000000000, -1, 60) + b"x" * 60
    message = struct.pack(">I", zlib.crc32(body)) + body
    return struct.pack(">qi", offset, len(message)) + message


def reaching_far(build, offset: int) -> bytes:
    """One flipped bit in the last offset delta: it seems to reach over all that follows."""
    raw = bytearray(answer(build, offset).records)
    raw[23] ^= 0x40
    return bytes(raw)


def reaching_nowhere(build, offset: int) -> bytes:
    """A page of a disk was lost from the middle of its offset on."""
    raw = bytearray(answer(build, offset).records)
    raw[2:8], raw[23:] = b"\x7f" * 6, bytes(len(raw) - 23)
    return bytes(raw)


class Odd(Counted):
    """A log of one record a batch, three of them an answer, with something else at offset `at`."""

    def __init__(self, build, at: int, instead: bytes) -> None:
        super().__init__(build)
        self.at, self.instead = at, instead

    async def _fetch(self, range_, offset):
        self.asked.append(offset)
        records = b"".join(
            self.instead if each == self.at else bytes(answer(self.build, each).records)
            for each in range(offset, min(offset + 3, range_.end_offset))
        )
        return replace(answer(self.build, offset, empty=True), records=memoryview(records))


@pytest.mark.parametrize("at", [0, 2, 3, 4, 99])
@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (lambda build, at: v1(at), "batch of an old format"),
        (reaching_far, "batch with a wrong CRC"),
        (reaching_nowhere, "batch with a wrong CRC"),
    ],
)
def test_a_header_that_cannot_be_believed_does_not_say_where_to_read_on(build, entry, reason, at):
    """Wherever in an answer it stands: all the others are read, and no more than its own offset is told."""
    reader = Odd(build, at, entry(build, at))
    distrusted: list[str] = []
    unread: list[tuple] = []
    counter = CellCounter(1000, 1 << 20)
    whole = replace(RANGE, end_offset=100)
    for batches in reader.read(whole, distrusted.append, lambda *hole: unread.append(hole)):
        count_batches(counter, batches, 0, 100)
    seen = {sequence - 1 for row in rows_of(counter.take()) for sequence in row.sequences}
    assert seen == set(range(100)) - {at}
    assert unread == [(at, at + 1, "damaged")] and distrusted == [reason]


@pytest.mark.parametrize("at", [0, 1, 3, 4])
def test_a_batch_whose_own_offset_was_changed_hides_none_of_those_that_follow(build, at):
    """No CRC covers it. The batches behind say that it is not where it claims to be."""
    raw = bytearray(answer(build, at).records)
    raw[4] ^= 0x40
    reader = Odd(build, at, bytes(raw))
    unread: list[tuple] = []
    whole = replace(RANGE, end_offset=100)
    read = reader.read(whole, lambda reason: None, lambda *hole: unread.append(hole))
    seen = {int(offset) for batches in read for offset in batches.index[:, range_reader.B_BASE_OFFSET]}
    assert seen == set(range(100)) - {at} and unread == [(at, at + 1, "damaged")]


def test_a_batch_with_a_wrong_crc_is_read_past_up_to_the_next_one(build):
    """What compaction left of it is not known: its own word on its records tells of no hole."""
    two = [build.stamped(0, 1, 1), build.stamped(1, 1, 2)]
    damaged = bytearray(build.batch(0, two))
    damaged[26] = 0  # the last offset delta
    found = leading_batches(bytes(damaged) + build.batch(5, two), 0)
    assert found is not None and found.index[:, range_reader.B_LAST_OFFSET].tolist() == [4, 6]
    assert hole_within(found.index, 0, 7) is None


class WithMarkers(Counted):
    """One record of producer 7 a transaction, each with its marker behind it; the first is aborted, and its
    marker was damaged. As Kafka's broker does, it tells with each answer what is aborted within that."""

    def _batches(self) -> list[bytes]:
        whole = []
        for n in range(10):
            whole += [data(self.build, 2 * n, 7, n + 1), marker(self.build, 2 * n + 1, 7, 0 if not n else 1)]
        whole[1] = whole[1][:-1] + bytes([whole[1][-1] ^ 1])
        return whole

    async def _fetch(self, range_, offset):
        self.asked.append(offset)
        told = answer(self.build, offset, empty=True)
        aborted = ((7, 0),) if offset <= 1 else ()
        return replace(told, aborted=aborted, records=memoryview(b"".join(self._batches()[offset:])))


def test_a_damaged_abort_marker_hides_nothing_that_was_committed_behind_it(build):
    reader = WithMarkers(build)
    unread: list[tuple] = []
    counter = CellCounter(1000, 1 << 20)
    for batches in reader.read(replace(RANGE, end_offset=20), print, lambda *hole: unread.append(hole)):
        count_batches(counter, batches, 0, 20)
    assert sorted(n for row in rows_of(counter.take()) for n in row.sequences) == list(range(2, 11))
    assert unread == [(1, 2, "damaged")] and reader.asked == [0, 2]


@pytest.mark.parametrize("tells_ids", [True, False])
def test_a_topic_that_was_made_anew_since_it_was_pinned_is_not_read_for_the_old_one(
    build, monkeypatch, tells_ids
):
    old, new = uuid.uuid4(), uuid.uuid4()
    asked: list[uuid.UUID] = []

    async def fetch(cluster, leader, positions, **settings):
        asked.extend(each.topic_id for each in positions.values())
        return [answer(build, 0)]

    monkeypatch.setattr(range_reader, "fetch", fetch)
    reader = range_reader.RangeReader({"ewr": ["h:1"]}, 1 << 20)
    reader._clusters["ewr"] = cluster_of(new if tells_ids else NO_TOPIC_ID)
    try:
        pinned = replace(RANGE, topic_id=str(new if tells_ids else ""))
        assert asyncio.run(reader._fetch(pinned, 0)).records
        assert asked == [new if tells_ids else NO_TOPIC_ID]
        if tells_ids:
            with pytest.raises(ClusterUnreachable, match="topic flights was deleted and made anew"):
                asyncio.run(reader._fetch(replace(RANGE, topic_id=str(old)), 0))
        assert len(asked) == 1
    finally:
        reader._loop.close()
