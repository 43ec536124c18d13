"""What read_committed hides, and what a damaged batch does."""

from __future__ import annotations

from collections import Counter

from millrace.audit.counting import CellCounter
from millrace.audit.range_reader import AbortedTransactions, hole_within, index_fetched, mark_skipped
from millrace.audit.task_reader import count_batches
from millrace.broker.protocol.compression import CODEC_IDS, compress

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
    return sorted(sequence for row in counter.take() for sequence in row.sequences)


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
