"""The compiled scan against a plain-Python oracle, and against bytes that lie."""

from __future__ import annotations

import random
import struct
from collections import Counter

import numpy as np
import pytest

from millrace.audit.contract.header import decode_identity
from millrace.audit.contract.producer_names import is_shown, name_doubts, names_in, plain
from millrace.audit.scanning import counting
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import index_fetched
from millrace.broker.protocol.checksum import crc32c_reference
from tests import seeds
from tests.cells import CountedRow, rows_of

EVERYTHING = (0, 1 << 62)


def count(
    data: bytes, window_ms: int = 1000, chunk: int = 1 << 20, bounds: tuple[int, int] = EVERYTHING
) -> CellCounter:
    counter = CellCounter(window_ms, chunk)
    batches = index_fetched(data)
    counter.count(batches.buffer, batches.index, *bounds)
    return counter


def only(counter: CellCounter) -> CountedRow:
    (row,) = rows_of(counter.take())
    return row


def test_consecutive_records_become_one_dense_cell(build):
    records = [build.stamped(i, 7, i + 1, 1500, value=b"x" * 10) for i in range(50)]
    row = only(count(build.batch(100, records)))
    assert (row.stream, row.window_start_ms, row.count, row.byte_count) == (7, 1000, 50, 500)
    assert (row.first_offset, row.last_offset, row.producer) == (100, 149, "feed@host")
    assert list(row.sequences) == list(range(1, 51)) and row.repeats == {}


def test_stream_id_with_the_top_bit_set_stays_unsigned(build):
    assert only(count(build.batch(0, [build.stamped(0, 2**64 - 2, 1)]))).stream == 2**64 - 2


def test_repeats_in_one_cell_are_counted_by_extra_copies(build):
    sequences = [1, 2, 3, 2, 3, 3, 9]
    row = only(count(build.batch(0, [build.stamped(i, 1, s) for i, s in enumerate(sequences)])))
    assert list(row.sequences) == [1, 2, 3, 9] and row.repeats == {2: 1, 3: 2} and row.count == 7


def test_repeats_across_folds_are_found(build, monkeypatch):
    monkeypatch.setattr(counting, "RUNS_PER_FOLD", 1)
    counter = CellCounter(1000, 1 << 20)
    counter._runs = np.zeros((4, 3), np.int64)
    for base in (0, 3, 6):
        batches = index_fetched(build.batch(base, [build.stamped(i, 1, s) for i, s in enumerate((5, 7, 9))]))
        counter.count(batches.buffer, batches.index, *EVERYTHING)
    row = only(counter)
    assert row.repeats == {5: 2, 7: 2, 9: 2} and row.count == 9


def test_runs_that_do_not_touch_are_not_sorted_again_for_every_batch(build, monkeypatch):
    monkeypatch.setattr(counting, "RUNS_PER_FOLD", 1000)
    sorted_runs = []
    merge_runs = counting.merge_runs
    monkeypatch.setattr(counting, "merge_runs", lambda *runs: sorted_runs.append(1) or merge_runs(*runs))
    counter = CellCounter(1000, 1 << 20)
    counter._runs = np.zeros((1000, 3), np.int64)
    content = b"".join(
        build.batch(first, [build.stamped(i, 1, 2 * (first + i) + 1) for i in range(20)])
        for first in range(0, 1200, 20)
    )
    batches = index_fetched(content)
    counter.count(batches.buffer, batches.index, *EVERYTHING)
    assert len(sorted_runs) == 1 and counter.is_full()
    assert list(only(counter).sequences) == list(range(1, 2400, 2))


def test_many_short_runs_use_the_expanded_path_and_find_repeats(build):
    sequences = [i * 2 for i in range(1, 200)] + [10, 10]
    row = only(count(build.batch(0, [build.stamped(i, 1, s) for i, s in enumerate(sequences)])))
    assert len(row.sequences) == 199 and row.repeats == {10: 2}


def test_windows_and_chunks_split_cells(build):
    records = [build.stamped(i, 1, i + 1, 999 + i) for i in range(4)]
    rows = rows_of(count(build.batch(8, records), chunk=10).take())
    assert sorted((r.window_start_ms, r.chunk, list(r.sequences)) for r in rows) == [
        (0, 0, [1]),
        (1000, 0, [2]),
        (1000, 1, [3, 4]),
    ]


def test_sequence_beyond_32_bits_keeps_its_base(build):
    high = (1 << 33) - 1
    rows = rows_of(count(build.batch(0, [build.stamped(0, 1, high), build.stamped(1, 1, high + 1)])).take())
    assert sorted(row.base + next(iter(row.sequences)) for row in rows) == [high, high + 1]


def test_sequence_zero_is_counted_but_not_numbered(build):
    row = only(count(build.batch(0, [build.stamped(i, 1, 0) for i in range(3)])))
    assert not row.sequenced and row.count == 3 and not row.sequences


def test_records_outside_the_range_are_left_to_the_neighbouring_task(build):
    records = [build.stamped(i, 1, i + 1) for i in range(10)]
    row = only(count(build.batch(10, records), bounds=(12, 17)))
    assert (row.first_offset, row.last_offset, list(row.sequences)) == (12, 16, [3, 4, 5, 6, 7])


def test_append_time_is_taken_only_where_the_broker_stamped_it(build):
    assert only(count(build.batch(0, [build.stamped(0, 1, 1)], max_ms=5))).last_append_ms == -1
    stamped = only(count(build.batch(0, [build.stamped(0, 1, 1)], attributes=8, max_ms=5)))
    assert (stamped.first_append_ms, stamped.last_append_ms) == (5, 5)


def test_append_times_bound_all_records_in_whatever_order_batches_are_counted(build):
    times = (7, 5, 9)
    content = b"".join(
        build.batch(i, [build.stamped(0, 1, i + 1)], attributes=8, max_ms=each)
        for i, each in enumerate(times)
    )
    row = only(count(content))
    assert (row.first_append_ms, row.last_append_ms) == (5, 9)


def test_last_identity_header_wins(build):
    headers = [(b"_mr", build.identity(1, 1, 1000)), (b"other", None), (b"_mr", build.identity(2, 8, 1000))]
    assert only(count(build.batch(0, [build.record(0, headers)]))).stream == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "header cut short or impossible"),
        (None, "header cut short or impossible"),
        (b"\x01" * 22, "header cut short or impossible"),
        (b"\x02" * 30, "header of an unknown version"),
        (b"\x01" + b"\0" * 8 + b"\xff" * 8 + b"\0" * 6, "header cut short or impossible"),
    ],
)
def test_header_that_cannot_be_trusted_is_counted_and_not_filed(build, content, reason):
    counter = count(build.batch(0, [build.record(0, [(b"_mr", content)])]))
    assert rows_of(counter.take()) == []
    assert counter.totals().untrusted == {reason: 1} and counter.totals().records == 1


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\nb", b"x" * 10_000])
def test_unshowable_producer_name_is_counted_and_its_records_kept(build, name):
    counter = count(build.batch(0, [build.record(0, [(b"_mr", build.identity(1, 1, 0, name))])]))
    (kept,) = names_in(only(counter).producer)
    assert not is_shown(kept) and plain(kept).isprintable() and len(kept) < 80
    assert plain(kept).startswith(f"{len(name):,} bytes that begin with ")
    assert counter.totals().untrusted == {"producer name that cannot be shown": 1}


def test_second_name_under_one_stream_is_counted_and_both_are_kept_wherever_it_comes(build):
    names = [b"", b"UA@ewr", b"UA@ewr", b"ZZ@lga", b"", b"UA@ewr", b"B6@jfk"]
    records = [build.record(i, [(b"_mr", build.identity(1, i + 1, 0, name))]) for i, name in enumerate(names)]
    counter = count(build.batch(0, records))
    assert counter.totals().untrusted == {"two producers use one stream id: UA@ewr and ZZ@lga": 2}
    row = only(counter)
    assert names_in(row.producer) == ["UA@ewr", "ZZ@lga"] and row.count == 7
    assert counter.totals().untrusted == {"two producers use one stream id: UA@ewr and ZZ@lga": 2}


def test_names_are_compared_across_buffers_and_never_across_streams(build):
    counter = CellCounter(1000, 1 << 20)
    for offset, (stream, name) in enumerate([(1, b"UA@ewr"), (2, b"ZZ@lga"), (1, b"UA@ewr"), (1, b"UA@ewx")]):
        data = build.batch(offset, [build.record(0, [(b"_mr", build.identity(stream, offset + 1, 0, name))])])
        batches = index_fetched(data)
        counter.count(batches.buffer, batches.index, *EVERYTHING)
    assert {row.stream: names_in(row.producer) for row in rows_of(counter.take())} == {
        1: ["UA@ewr", "UA@ewx"],
        2: ["ZZ@lga"],
    }
    assert counter.totals().untrusted == {"two producers use one stream id: UA@ewr and UA@ewx": 1}


@pytest.mark.parametrize("first", ["shown", "hidden"])
def test_name_that_cannot_be_shown_is_noticed_in_any_order(build, first):
    names = [b"UA@ewr", b"n" * 10_240] if first == "shown" else [b"n" * 10_240, b"UA@ewr"]
    records = [build.record(i, [(b"_mr", build.identity(1, i + 1, 0, name))]) for i, name in enumerate(names)]
    counter = count(build.batch(0, records))
    assert counter.totals().untrusted == {"producer name that cannot be shown": 1}
    kept = names_in(only(counter).producer)
    assert sorted(map(is_shown, kept)) == [False, True]
    assert name_doubts("UA@ewr", kept) == [
        "record headers carry a producer name that cannot be shown: "
        "10,240 bytes that begin with 'nnnnnnnnnnnnnnnn'"
    ]


def test_any_two_names_differ_exactly_where_their_bytes_do(build):
    """One byte anywhere, one byte more or less: sizes around the kernel's words; the oracle is `==`."""
    seed = seeds.given()
    rng = random.Random(seed)
    for size in [*range(1, 36), 100, 249]:
        name = bytes(rng.choice(b"ab@-") for _ in range(size))
        others = [name[:at] + b"X" + name[at + 1 :] for at in range(size)]
        others += [name, name + b"a", name[1:], name[:-1], name[::-1]]
        records = [build.record(0, [(b"_mr", build.identity(1, 1, 0, name))])]
        records += [
            build.record(i + 1, [(b"_mr", build.identity(1, i + 2, 0, other))])
            for i, other in enumerate(others)
        ]
        found = sum(count(build.batch(0, records)).totals().untrusted.values())
        assert found == sum(other not in (name, b"") for other in others), name


def test_plain_records_are_counted_as_unaudited(build):
    counter = count(build.batch(0, [build.record(0), build.record(1, [(b"_mx", b"1"), (b"_", b"2")])]))
    assert rows_of(counter.take()) == [] and counter.totals().unaudited == 2


def test_batch_with_fewer_records_than_announced_is_malformed_and_never_read_beyond(build):
    whole = bytearray(build.batch(0, [build.stamped(0, 1, 1), build.stamped(1, 1, 2)]))
    whole[57:61] = (1000).to_bytes(4, "big")
    counter = count(bytes(whole) + build.batch(2, [build.stamped(0, 1, 3)]))
    assert list(only(counter).sequences) == [1, 2, 3]
    assert counter.totals().untrusted == {"malformed batch": 1}


def test_random_damage_never_reads_outside_or_invents_records(build):
    seed = seeds.given()
    rng = random.Random(seed)
    good = build.batch(0, [build.stamped(i, 3, i + 1, value=None if i % 3 else b"v" * i) for i in range(40)])
    for _ in range(2_000):
        damaged = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(61, len(damaged))] = rng.randrange(256)
        counter = count(bytes(damaged))
        rows = rows_of(counter.take())
        totals = counter.totals()
        filed = sum(row.count for row in rows)
        bad_headers = sum(n for reason, n in totals.untrusted.items() if reason.startswith("header"))
        assert totals.records == filed + totals.unaudited + bad_headers <= 40


def test_random_traffic_agrees_with_a_plain_count(build):
    rng = random.Random(seeds.given())
    truth: dict[tuple[int, int], Counter[int]] = {}
    data, offset = b"", 0
    for _ in range(60):
        records = []
        for delta in range(rng.randrange(1, 40)):
            stream, sequence, created = rng.randrange(5), rng.randrange(1, 300), rng.randrange(0, 5000)
            value = build.identity(stream, sequence, created)
            told = decode_identity(value)
            truth.setdefault((int(told.stream, 16), created // 1000 * 1000), Counter())[told.sequence] += 1
            records.append(build.record(delta, [(b"x", b"y"), (b"_mr", value)]))
        data += build.batch(offset, records)
        offset += len(records)
    found: dict[tuple[int, int], Counter[int]] = {}
    for row in rows_of(count(data, chunk=100).take()):
        held = found.setdefault((row.stream, row.window_start_ms), Counter())
        held.update(row.sequences)
        held.update(row.repeats)
        assert row.count == len(row.sequences) + sum(row.repeats.values())
    assert found == truth


def test_a_stream_of_which_every_record_comes_twice_is_held_as_one_range(build):
    sequences = [1 + i // 2 for i in range(2_000)]
    counter = count(build.batch(0, [build.stamped(i, 1, s) for i, s in enumerate(sequences)]))
    counter._fold()
    assert counter._repeats.tolist() == [[0, 1, 1_000, 1]]
    assert only(counter).repeats == dict.fromkeys(range(1, 1_001), 1)


def test_a_header_that_claims_all_records_there_can_be_makes_no_room_for_them(build):
    """Its CRC is right: whoever wrote it lies, or is broken."""
    body = bytes(8192)
    tail = bytearray(build.batch(0, [body])[21:])
    tail[36:40] = (2**31 - 1).to_bytes(4, "big")
    head = struct.pack(">qiibI", 0, len(tail) + 9, -1, 2, crc32c_reference(bytes(tail)))
    counter = count(head + bytes(tail) + build.batch(1, [build.stamped(0, 1, 1)]))
    assert counter.totals().untrusted == {"malformed batch": 1}
    assert counter.totals().records == 1 and len(counter._groups) <= 2048
