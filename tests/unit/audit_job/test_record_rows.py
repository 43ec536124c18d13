"""How many records are held before they go to Spark: by rows, and by bytes, whatever batch they are from."""

from __future__ import annotations

import pytest

from millrace.audit.scanning.range_reader import COMPACTED, EXPIRED, index_fetched
from millrace.audit.spark import record_rows
from millrace.audit.spark.read_options import RECORDS, ReadOptions
from millrace.audit.spark.record_rows import RecordRows
from millrace.audit.spark.task_plan import OffsetRange
from millrace.audit.spark.task_reader import _read_records
from millrace.broker.protocol.compression import CODEC_IDS, compress

RANGE = OffsetRange("ewr", "ewr", "flights", "flights", 0, 0, 1_000)


def offsets_by_batch(batches, **options) -> list[list[int]]:
    rows = RecordRows(ReadOptions({"ewr": ["h:1"]}, mode=RECORDS, **options))
    given = [part for batch in batches for part in rows.add(RANGE, memoryview(batch))]
    return [part.column("offset").to_pylist() for part in (*given, rows.flush())]


def test_large_records_go_to_spark_by_their_bytes_and_not_by_rows_alone(build):
    value = b"x" * (record_rows.BYTES_PER_ARROW_BATCH // 2)
    batches = [build.batch(offset, [build.record(0, value=value)]) for offset in range(5)]
    assert offsets_by_batch(batches) == [[0, 1], [2, 3], [4]]


def test_one_batch_that_holds_many_times_its_size_goes_in_parts(build):
    value = bytes(record_rows.BYTES_PER_ARROW_BATCH * 3 // 4)
    section = b"".join(build.record(delta, value=value) for delta in range(3))
    batch = bytearray(build.batch(0, [bytes(compress(CODEC_IDS["gzip"], section))], attributes=1))
    batch[57:61] = (3).to_bytes(4, "big")
    assert len(batch) < 100_000 and offsets_by_batch([batch]) == [[0], [1], [2]]


@pytest.mark.parametrize("shown", [True, False])
def test_keys_and_shown_headers_are_of_the_size(build, monkeypatch, shown):
    monkeypatch.setattr(record_rows, "BYTES_PER_ARROW_BATCH", 100)
    keyed = [build.record(delta, key=b"k" * 60, value=None) for delta in range(2)]
    assert offsets_by_batch([build.batch(0, keyed)]) == [[0], [1]]
    headed = [build.record(delta, [(b"h" * 30, b"v" * 30), (b"", None)], value=b"") for delta in range(2)]
    parts = offsets_by_batch([build.batch(0, headed)], headers=shown)
    assert parts == ([[0], [1]] if shown else [[0, 1]])


def test_record_that_alone_is_larger_goes_alone(build, monkeypatch):
    monkeypatch.setattr(record_rows, "BYTES_PER_ARROW_BATCH", 100)
    sizes = (10, 200, 10, 10)
    records = [build.record(delta, value=b"x" * size) for delta, size in enumerate(sizes)]
    assert offsets_by_batch([build.batch(0, records)]) == [[0], [1], [2, 3]]


def test_small_records_go_by_rows(build, monkeypatch):
    monkeypatch.setattr(record_rows, "ROWS_PER_ARROW_BATCH", 3)
    batches = [build.batch(base, [build.record(delta) for delta in range(4)]) for base in (0, 4)]
    assert offsets_by_batch(batches) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_a_task_gives_every_row_once_however_they_are_parted(build, monkeypatch):
    monkeypatch.setattr(record_rows, "BYTES_PER_ARROW_BATCH", 12)

    class Reader:
        def read(self, range_, distrust, unread):
            for base in range(0, 40, 4):
                raw = b"".join(
                    build.batch(first, [build.record(delta) for delta in range(2)])
                    for first in (base, base + 2)
                )
                yield index_fetched(raw)

    options = ReadOptions({"ewr": ["h:1"]}, mode=RECORDS)
    parts = list(_read_records(Reader(), [RANGE], options))
    assert [row for part in parts for row in part.column("offset").to_pylist()] == list(range(40))
    assert {part.num_rows for part in parts} == {2}


def test_what_was_deleted_within_a_batch_since_it_was_pinned_is_not_shown(build):
    """The log begins at offset 2 now, and the batch there is given whole, with what stood before it."""

    class Reader:
        def read(self, range_, distrust, unread):
            unread(0, 2, EXPIRED)
            yield index_fetched(build.batch(0, [build.record(delta) for delta in range(4)]))
            unread(4, 6, COMPACTED)
            yield index_fetched(build.batch(4, [build.record(delta) for delta in (1, 2)]))

    options = ReadOptions({"ewr": ["h:1"]}, mode=RECORDS, fail_on_loss=False)
    (shown,) = _read_records(Reader(), [RANGE], options)
    assert shown.column("offset").to_pylist() == [2, 3, 5, 6]
    with pytest.raises(ValueError, match="offsets 0 to 1 cannot be read any more: expired"):
        list(_read_records(Reader(), [RANGE], ReadOptions({"ewr": ["h:1"]}, mode=RECORDS)))
