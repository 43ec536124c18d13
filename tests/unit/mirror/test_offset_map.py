"""The offset map's format and its rules, one by one; `tests/properties/test_offset_map.py` has histories."""

from __future__ import annotations

from uuid import UUID

import pytest

from millrace.broker.errors import UnreadableRecord
from millrace.mirror.offsets import map_upkeep
from millrace.mirror.offsets.map_upkeep import MAX_CHUNK_SIZE, WORTH_JOINING, plan_upkeep
from millrace.mirror.offsets.offset_map import (
    MAX_TAIL_SIZE,
    Chunk,
    ChunkKey,
    OffsetRun,
    Runs,
    decode_chunk,
    decode_key,
    decode_runs,
    encode_key,
    map_partition,
)
from millrace.mirror.offsets.offset_runs import OffsetRuns
from millrace.mirror.offsets.translation import Answer, PartitionMap, Translation
from millrace.mirror.topics.own_topics import OFFSET_MAP
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

PARTITION = SourcePartition("ewr", "flights", 7)
TOPIC_ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
TARGET, OTHER = TargetPartition("agg.flights", 3), TargetPartition("flights", 3)
END = 1 << 40


def chunks_of(records: list[tuple[bytes, bytes]]) -> list[Chunk]:
    """The newest record of each key, as compaction leaves it."""
    newest = dict(records)
    found = []
    for raw, value in newest.items():
        key = decode_key(raw)
        assert key is not None
        found.append(decode_chunk(key, value))
    return found


def runs_in(chunk: Chunk) -> list[OffsetRun]:
    return list(decode_runs(chunk.body, chunk.from_offset, chunk.head.base))


def map_of(records: list[tuple[bytes, bytes]]) -> PartitionMap:
    found = PartitionMap()
    for chunk in chunks_of(records):
        found.put(chunk)
    return found


# --- the format, which is final ------------------------------------------------------------------------


def test_the_format_is_what_the_documentation_says() -> None:
    runs = Runs(PARTITION, 100, 1_700_000_000_000, TOPIC_ID, TARGET)
    runs.add(range(103, 203), 5_000)  # 3 offsets were not carried
    runs.add(range(203, 206), 5_101)  # behind a transaction's marker
    runs.add(range(210, 211), 5_104)  # behind 4 that were not carried
    runs.add(range(211, 212), 5_200)  # behind 95 offsets of others
    runs.add(range(212, 214), -1)
    ((key, value),) = runs.take_until(214)
    assert key == (
        b'{"source":"ewr","topic":"flights","partition":7,"from":100,"began_ms":1700000000000,'
        b'"target":["agg.flights",3]}'
    )
    assert value == (
        b"\x01\x02"  # version, the last run's target offsets are not known
        + TOPIC_ID.bytes
        + b"\x88\x27"  # base 5000
        + b"\x72\xc9\x01\x05"  # 114 source offsets, 201 target offsets, 5 runs
        + b"\x91\x03\x03"  # 100 records, kind 1, 3 left out
        + b"\x0c"  # 3 records, kind 0
        + b"\x05\x04"  # 1 record, kind 1, 4 left out
        + b"\x06\x00\xbe\x01"  # 1 record, kind 2, none left out, 95 at the target
        + b"\x0b\x00"  # 2 records, kind 3
    )


def test_a_chunk_reads_back() -> None:
    runs = Runs(PARTITION, 100, 5, TOPIC_ID)
    runs.add(OffsetRuns([range(100, 110), range(120, 125)]), 40)
    runs.add(range(125, 130), 55)
    runs.cut(90, 6, TOPIC_ID)
    old, cut = chunks_of(runs.take_until(90))
    assert runs_in(old) == [OffsetRun(100, 110, 40), OffsetRun(120, 130, 50)]
    assert (old.from_offset, old.source_end, old.target_end, old.head.run_count) == (100, 130, 60, 2)
    assert (cut.key, cut.head.cut_from, runs_in(cut)) == (ChunkKey(PARTITION, 90, 6), 90, [])


@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"x",
        b"[]",
        b"7",
        b'{"source":"a","topic":"b","partition":0}',
        b'{"source":1,"topic":"b"}',
        b'{"source":"a","topic":"b","partition":0,"from":0,"began_ms":0,"target":["c"]}',
    ],
)
def test_a_key_of_another_kind_is_none_of_ours(key: bytes | None) -> None:
    assert decode_key(key) is None


def test_keys_read_back() -> None:
    for key in (
        ChunkKey(PARTITION, 3, 4),
        ChunkKey(PARTITION, 3, 4, 9),
        ChunkKey(PARTITION, 3, 4, target=TARGET),
        ChunkKey(PARTITION, 3, 4, 9, TARGET),
    ):
        assert decode_key(encode_key(key)) == key


@pytest.mark.parametrize(
    "value", [b"", b"\x01\x00", b"\x02" + bytes(30), b"\x01\x00" + bytes(16) + b"\xff\xff"]
)
def test_a_value_that_cannot_be_read_says_so(value: bytes) -> None:
    with pytest.raises(UnreadableRecord):
        decode_chunk(ChunkKey(PARTITION, 0, 0), value)


def test_runs_that_were_cut_off_say_so() -> None:
    runs = Runs(PARTITION, 0, 0)
    runs.add(range(1, 1000), 5)
    ((_, value),) = runs.take_until(END)
    with pytest.raises(UnreadableRecord):
        runs_in(decode_chunk(ChunkKey(PARTITION, 0, 0), value[:-2]))


def test_all_partitions_of_a_topic_are_in_one_partition_of_the_map() -> None:
    places = {map_partition(SourcePartition("ewr", "flights", n), OFFSET_MAP.partitions) for n in range(50)}
    assert places == {2}  # for good: records that are there stay there
    places = {map_partition(SourcePartition("ewr", f"t{n}", 0), OFFSET_MAP.partitions) for n in range(50)}
    assert len(places) == 4


# --- writing -------------------------------------------------------------------------------------------


def test_neighbours_are_one_run_for_ever() -> None:
    runs = Runs(PARTITION, 0, 0)
    for number in range(1_000):
        runs.add(range(number * 10, number * 10 + 10), number * 10 + 7)
        records = runs.take_until(number * 10 + 10)
    (chunk,) = chunks_of(records)
    assert runs_in(chunk) == [OffsetRun(0, 10_000, 7)]


def test_each_transaction_costs_a_byte_or_two() -> None:
    runs = Runs(PARTITION, 0, 0)
    written: list[tuple[bytes, bytes]] = []
    for number in range(1_000):
        runs.add(range(number * 50, number * 50 + 50), number * 51)
        written += runs.take_until(number * 50 + 50)
    chunks = chunks_of(written)
    assert sum(len(chunk.body) for chunk in chunks) < 2_100
    assert len(chunks) == 8
    assert max(len(value) for _, value in written) < MAX_TAIL_SIZE + 50


def test_only_what_is_below_the_position_is_written() -> None:
    runs = Runs(PARTITION, 0, 0)
    runs.add(range(10), 100)
    assert runs_in(chunks_of(runs.take_until(4))[0]) == [OffsetRun(0, 4, 100)]
    assert runs_in(chunks_of(runs.take_until(10))[0]) == [OffsetRun(0, 10, 100)]
    assert runs.take_until(10) == []


def test_where_the_map_begins_is_written_before_anything_is_carried() -> None:
    runs = Runs(PARTITION, 5, 0)
    assert runs.take_until(5) == []
    (chunk,) = chunks_of(runs.take_until(8))
    assert (chunk.from_offset, chunk.head.run_count) == (5, 0)
    assert runs.take_until(9) == []


def test_a_restart_forgets_what_was_not_written_and_takes_another_key() -> None:
    runs = Runs(PARTITION, 0, 10)
    runs.add(range(10), 100)
    first = runs.take_until(10)
    runs.add(range(10, 20), 110)
    runs.restart(10, 10, TOPIC_ID)  # within the same millisecond
    runs.add(range(10, 20), 121)
    found = map_of(first + runs.take_until(20))
    assert found.translate(12, 20) == Translation(Answer.EXACT, 123)
    assert len(found.chunks) == 2


# --- translating ---------------------------------------------------------------------------------------


def a_map() -> PartitionMap:
    runs = Runs(PARTITION, 50, 0)
    runs.add(range(52, 60), 1_000)
    runs.add(range(65, 70), 1_009)
    return map_of(runs.take_until(75))


@pytest.mark.parametrize(
    ("offset", "answer"),
    [
        (49, Translation(Answer.TOO_OLD, bound=50)),
        (50, Translation(Answer.EXACT, 1_000)),  # never carried: the next that was
        (52, Translation(Answer.EXACT, 1_000)),
        (59, Translation(Answer.EXACT, 1_007)),
        (60, Translation(Answer.EXACT, 1_009)),
        (69, Translation(Answer.EXACT, 1_013)),
        (70, Translation(Answer.EXACT, 1_014)),  # behind all that was carried
        (75, Translation(Answer.EXACT, 1_014)),
        (76, Translation(Answer.NOT_YET, bound=75)),
    ],
)
def test_every_kind_of_offset(offset: int, answer: Translation) -> None:
    assert a_map().translate(offset, 75) == answer


def test_an_empty_map_is_too_young_for_everything() -> None:
    assert PartitionMap().translate(0, 10) == Translation(Answer.TOO_OLD)
    # Nothing at or after it was carried, whatever came before it.
    assert PartitionMap().translate(10, 10) == Translation(Answer.NOTHING)
    assert PartitionMap().translate(11, 10) == Translation(Answer.NOT_YET, bound=10)


def test_nothing_is_translated_by_a_map_that_cannot_be_read_whole() -> None:
    found = a_map()
    (key,) = found.chunks
    assert found.translate(53, 75).answer is Answer.EXACT
    found.put_unreadable(ChunkKey(PARTITION, 60, 9))
    assert found.translate(53, 75) == Translation(Answer.UNREADABLE)
    found.remove(ChunkKey(PARTITION, 60, 9))
    chunk = found.chunks[key]
    found.put(Chunk(key, chunk.head, chunk.body[:-1]))
    assert found.translate(53, 75) == Translation(Answer.UNREADABLE)
    found.put(chunk)
    assert found.translate(53, 75).answer is Answer.EXACT


def test_copies_translate_to_the_first() -> None:
    first = Runs(PARTITION, 0, 1)
    first.add(range(10), 0)
    second = Runs(PARTITION, 5, 2)
    second.add(range(5, 20), 10)
    found = map_of(first.take_until(10) + second.take_until(20))
    assert found.translate(7, 20) == Translation(Answer.EXACT, 7)
    assert found.translate(10, 20) == Translation(Answer.EXACT, 15)
    assert found.translate(20, 20) == Translation(Answer.EXACT, 25)


def test_what_the_target_did_not_say_is_safe_and_not_exact() -> None:
    runs = Runs(PARTITION, 0, 1)
    runs.add(range(10), 100)
    runs.add(range(10, 20), -1)
    runs.add(range(20, 30), 120)
    found = map_of(runs.take_until(30))
    assert found.translate(9, 30) == Translation(Answer.EXACT, 109)
    assert found.translate(15, 30) == Translation(Answer.SAFE, 110)
    assert found.translate(20, 30) == Translation(Answer.EXACT, 120)


def test_a_target_that_was_made_anew_never_leaves_anything_out() -> None:
    runs = Runs(PARTITION, 0, 1)
    runs.add(range(100), 0)
    runs.add(range(100, 110), 0)
    found = map_of(runs.take_until(110))
    assert found.translate(50, 110) == Translation(Answer.SAFE, 0)
    assert found.translate(105, 110) == Translation(Answer.EXACT, 5)
    assert found.translate(110, 110) == Translation(Answer.EXACT, 10)


def test_offsets_of_a_log_that_was_cut_mean_what_they_mean_now() -> None:
    runs = Runs(PARTITION, 0, 1, TOPIC_ID)
    runs.add(range(100), 0)
    written = runs.take_until(100)
    runs.cut(90, 2, TOPIC_ID)
    runs.add(range(90, 95), 100)
    found = map_of(written + runs.take_until(95))
    assert found.translate(89, 95, TOPIC_ID) == Translation(Answer.EXACT, 89)
    assert found.translate(92, 95, TOPIC_ID) == Translation(Answer.EXACT, 102)
    assert found.translate(97, 95, TOPIC_ID) == Translation(Answer.NOT_YET, bound=95)


def test_a_cut_is_younger_than_what_it_cuts_within_a_millisecond_too() -> None:
    runs = Runs(PARTITION, 0, 1, TOPIC_ID)
    runs.add(range(100), 0)
    runs.cut(90, 1, TOPIC_ID)
    assert map_of(runs.take_until(90)).translate(95, 90, TOPIC_ID).answer is Answer.NOT_YET


def test_what_was_cut_leaves_holes_alone() -> None:
    runs = Runs(PARTITION, 0, 1, TOPIC_ID)
    runs.add(OffsetRuns([range(10), range(20, 30)]), 0)
    second = Runs(PARTITION, 30, 2, TOPIC_ID)
    second.add(range(40, 50), 20)
    written = runs.take_until(30) + second.take_until(50)
    second.cut(15, 3, TOPIC_ID)
    second.add(range(16, 18), 30)
    found = map_of(written + second.take_until(35))
    assert found.translate(12, 35, TOPIC_ID) == Translation(Answer.EXACT, 30)
    assert found.translate(9, 35, TOPIC_ID) == Translation(Answer.EXACT, 9)
    assert found.translate(25, 35, TOPIC_ID) == Translation(Answer.EXACT, 32)


def test_a_chunk_that_begins_in_a_hole_is_cut_with_its_first_record() -> None:
    first = Runs(PARTITION, 0, 1, TOPIC_ID)
    first.add(range(5), 0)
    second = Runs(PARTITION, 10, 2, TOPIC_ID)
    second.add(range(20, 30), 5)
    written = first.take_until(10) + second.take_until(30)
    second.cut(15, 3, TOPIC_ID)
    second.add(range(15, 17), 15)
    found = map_of(written + second.take_until(17))
    assert found.translate(7, 17, TOPIC_ID) == Translation(Answer.EXACT, 15)


def test_a_log_whose_id_was_not_known_is_void_once_it_is_another() -> None:
    runs = Runs(PARTITION, 0, 1)
    runs.add(range(100), 0)
    written = runs.take_until(100)
    runs.cut(20, 2, TOPIC_ID)  # the new log begins at 20
    found = map_of(written + runs.take_until(20))
    assert found.translate(10, 20, TOPIC_ID) == Translation(Answer.TOO_OLD, bound=20)
    assert found.translate(20, 20, TOPIC_ID) == Translation(Answer.EXACT, 100)


def test_what_an_aborted_transaction_cut_off_is_not_written_later() -> None:
    runs = Runs(PARTITION, 0, 1, TOPIC_ID)
    runs.add(range(10), 0)
    runs.cut(5, 2, TOPIC_ID)
    runs.restart(0, 3, TOPIC_ID)
    runs.add(range(10), 11)
    assert map_of(runs.take_until(10)).translate(3, 10, TOPIC_ID) == Translation(Answer.EXACT, 14)


def test_a_long_chunk_is_found_behind_short_ones() -> None:
    written = []
    for began_ms, (first, end, target) in enumerate([(0, 100, 0), (10, 12, 100), (20, 22, 102)]):
        runs = Runs(PARTITION, first, began_ms)
        runs.add(range(first, end), target)
        written += runs.take_until(end)
    assert map_of(written).translate(50, 100) == Translation(Answer.EXACT, 50)


def test_offsets_of_another_log_of_that_name_mean_nothing() -> None:
    runs = Runs(PARTITION, 0, 1, TOPIC_ID)
    runs.add(range(100), 0)
    found = map_of(runs.take_until(100))
    assert found.translate(10, 100, UUID(int=5)) == Translation(Answer.TOO_OLD)


# --- upkeep --------------------------------------------------------------------------------------------


def many_transactions(
    count: int, records: int = 2, first: int = 0, target: TargetPartition | None = None
) -> list[tuple[bytes, bytes]]:
    """The source's offsets from `first` on, at `target` from 0 on."""
    runs = Runs(PARTITION, first, 1 + first, TOPIC_ID, target)
    written: list[tuple[bytes, bytes]] = []
    for number in range(count):
        begin = first + number * records
        runs.add(range(begin, begin + records), number * (records + 1))
        written += runs.take_until(begin + records)
    return written


def apply_upkeep(records: list[tuple[bytes, bytes]], start: int) -> list[tuple[bytes, bytes]]:
    newest = dict(records)
    for batch in plan_upkeep(chunks_of(records), {None: start}):
        for key, value in batch:
            if value is None:
                del newest[key]
            else:
                newest[key] = value
    return list(newest.items())


def test_many_chunks_become_few_that_say_the_same() -> None:
    before = many_transactions(40_000)
    after = apply_upkeep(before, -1)
    assert len(dict(before)) == 157
    assert len(after) == 2 + 28 + 1  # full ones, too few for the next, and the youngest
    assert max(len(value) for _, value in after) < MAX_CHUNK_SIZE + 1_024
    old, new = map_of(before), map_of(after)
    for offset in (*range(0, 80_000, 997), 79_999, 80_000):
        assert new.translate(offset, 80_000) == old.translate(offset, 80_000)
    assert apply_upkeep(after, -1) == after  # and are not written again


def test_few_chunks_are_left_alone() -> None:
    before = many_transactions(256 * (WORTH_JOINING - 1))
    assert plan_upkeep(chunks_of(before), {None: -1}) == []


def test_what_the_target_no_longer_has_is_forgotten() -> None:
    before = many_transactions(2_000)
    after = apply_upkeep(before, 3_000)
    assert len(after) < len(dict(before))
    found = map_of(after)
    assert found.translate(0, 4_000).answer is Answer.TOO_OLD
    for offset in range(2_000, 4_001, 37):  # 2000 is at 3000
        assert found.translate(offset, 4_000) == map_of(before).translate(offset, 4_000)


def test_what_one_target_no_longer_has_another_may() -> None:
    """Of a topic that was renamed: each chunk counts by the log that it is of."""
    old, new = many_transactions(2_000, target=OTHER), many_transactions(2_000, first=4_000, target=TARGET)
    for starts, wanted in (
        ({}, [old, new]),
        ({OTHER: 1 << 40}, [new]),
        ({TARGET: 1 << 40}, [old, new[-1:]]),
        ({None: 1 << 40}, [old, new]),
    ):
        batches = plan_upkeep(chunks_of(old + new), starts)
        gone = {key for batch in batches for key, value in batch if value is None}
        kept = {key for each in wanted for key, _ in each}
        assert gone == dict(old + new).keys() - kept, starts


def test_chunks_that_do_not_say_where_they_went_count_by_who_knows() -> None:
    before = many_transactions(2_000)
    assert plan_upkeep(chunks_of(before), {OTHER: 3_000}) == []
    assert plan_upkeep(chunks_of(before), {TARGET: 3_000}, OTHER) == []
    assert plan_upkeep(chunks_of(before), {OTHER: 3_000}, OTHER) != []


def test_chunks_of_two_targets_are_never_one() -> None:
    """Though they follow each other at the source, and their offsets do."""
    first = many_transactions(256 * 20, target=OTHER)
    behind = Runs(PARTITION, 10_240, 20_000, TOPIC_ID, TARGET)
    for number in range(256 * 20):
        behind.add(range(10_240 + number * 2, 10_242 + number * 2), 100_000 + number * 3)
        first += behind.take_until(10_242 + number * 2)
    joined_keys = [
        key
        for batch in plan_upkeep(chunks_of(first), {})
        for raw, value in batch
        if value is not None and (key := decode_key(raw)) is not None
    ]
    assert {(key.from_offset < 10_240, key.target) for key in joined_keys} <= {(True, OTHER), (False, TARGET)}
    assert all((key.to_offset or 0) <= 10_240 for key in joined_keys if key.target == OTHER)


def test_the_youngest_is_never_touched() -> None:
    before = many_transactions(10)
    assert plan_upkeep(chunks_of(before), {None: 1 << 40}) == []


def test_the_last_that_has_runs_says_where_the_target_goes_on() -> None:
    before = many_transactions(2_000)
    after = Runs(PARTITION, 4_010, 9, TOPIC_ID).take_until(4_011)  # nothing carried since the last restart
    found = map_of(apply_upkeep(before + after, 1 << 40))
    assert found.translate(4_005, 4_011) == Translation(Answer.EXACT, 5_999)


# (began, from, runs, log, cut): what is not to be joined with its neighbours, or only so.
Shape = tuple[int, int, list[tuple[range, int]], int, bool]
SHAPES: dict[str, tuple[int, list[Shape]]] = {
    "neighbours": (
        2,
        [(1, 0, [(range(10), 0)], 1, False), (2, 10, [(range(10, 20), 30)], 1, False)],
    ),
    "a hole at the source alone between them": (
        2,
        [(1, 0, [(range(10), 0)], 1, False), (2, 12, [(range(15, 20), 10)], 1, False)],
    ),
    "one without runs between them": (
        3,
        [
            (1, 0, [(range(10), 5)], 1, False),
            (2, 12, [], 1, False),
            (3, 14, [(range(15, 20), 15)], 1, False),
        ],
    ),
    "copies": (
        0,
        [(1, 0, [(range(10), 0)], 1, False), (2, 5, [(range(5, 20), 10)], 1, False)],
    ),
    "the target's log was made anew": (
        0,
        [(1, 0, [(range(10), 50)], 1, False), (2, 10, [(range(10, 20), 0)], 1, False)],
    ),
    "another log of the source": (
        0,
        [(1, 0, [(range(10), 0)], 1, False), (2, 10, [(range(10, 20), 10)], 2, False)],
    ),
    "older behind younger": (
        0,
        [(5, 0, [(range(10), 0)], 1, False), (4, 10, [(range(10, 20), 10)], 1, False)],
    ),
    "partly void": (
        2,
        [
            (1, 0, [(range(10), 0)], 1, False),
            (1, 10, [(range(10, 20), 10)], 1, False),
            (1, 20, [(range(20, 30), 20)], 1, False),
            (2, 25, [(range(25, 40), 30)], 1, True),
            (2, 40, [(range(40, 45), 45)], 1, False),
        ],
    ),
    "cut by one that carried nothing": (
        0,
        [
            (1, 0, [(range(4), 0)], 1, False),
            (2, 4, [(range(4, 5), 4)], 1, False),
            (3, 5, [(range(5, 8), 5)], 1, False),
            (4, 3, [], 1, True),
            (5, 3, [(range(3, 5), 8)], 1, False),
        ],
    ),
    "a target offset that is not known at the end": (
        2,
        [
            (1, 0, [(range(10), 0), (range(10, 12), -1)], 1, False),
            (2, 12, [(range(12, 15), 12)], 1, False),
        ],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("start", [-1, 5])
def test_upkeep_changes_no_translation(name: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_upkeep, "WORTH_JOINING", 2)
    joined, shapes = SHAPES[name]
    written: list[tuple[bytes, bytes]] = []
    for began_ms, first, stretches, log, is_cut in [*shapes, (9, 200, [(range(200, 210), 300)], 1, False)]:
        runs = Runs(PARTITION, first, began_ms - is_cut, UUID(int=log))
        if is_cut:
            runs.cut(first, began_ms, UUID(int=log))
        for offsets, target in stretches:
            runs.add(offsets, target)
        written += runs.take_until(first + 100)
    after = apply_upkeep(written, start)
    if start < 0:
        assert len(dict(written)) - len(after) == max(0, joined - 1)
    before, now = map_of(written), map_of(after)
    for log in range(3):
        for offset in range(215):
            answer = now.translate(offset, 210, UUID(int=log))
            wanted = before.translate(offset, 210, UUID(int=log))
            if answer.answer is Answer.TOO_OLD:
                assert wanted.target is None or wanted.target < start
            else:
                assert answer == wanted, (offset, log)
