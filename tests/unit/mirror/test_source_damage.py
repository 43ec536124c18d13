"""How far damage in a source's log goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import (
    CorruptMessage,
)
from millrace.broker.protocol.batch import seal, stamp_offset_and_epoch
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.sources import survey as survey_module
from millrace.mirror.sources.doubt import Found, Question
from millrace.mirror.topics.routes import SourcePartition
from tests.unit.mirror.old_entries import entry, packed
from tests.unit.mirror.source_stage import OLD, Source, answered, surveyor_of, with_records


def looked_at(offset: int, **question: Any) -> Found:
    """What a look finds at an offset of which nothing is believed."""
    asked = Question(offset, "bad", **question)
    return asyncio.run(surveyor_of(Source()).look(SourcePartition("ewr", "t", 0), OLD, asked))


def batches_at(*bases: int) -> list[bytearray]:
    made = [build_batch([Record(b"k", b"v", timestamp_ms=1)]) for _ in bases]
    for base, batch in zip(bases, made, strict=True):
        stamp_offset_and_epoch(memoryview(batch), base, 0)
    return made


@pytest.mark.parametrize(
    ("damaged", "end"),
    [
        ([10], 12),
        ([10, 12, 15], 40),
        ([10, 40], 12),
        ([10, 12, 15, 40], 99),
        ([10, 12, 15, 40, 99], 100),
        ([], None),
    ],
)
@pytest.mark.parametrize("how", ["checksum", "error"])
def test_damage_ends_at_the_first_batch_that_is_whole(
    monkeypatch: pytest.MonkeyPatch, damaged: list[int], end: int | None, how: str
) -> None:
    """A compacted log with holes: batches of one record at these offsets, the log ends at 100."""
    bases = [9, 10, 12, 15, 40, 99]
    log = dict(zip(bases, batches_at(*bases), strict=True))
    for base in damaged:
        log[base][-1] ^= 1

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        found = next((base for base in bases if base >= asked.offset), None)
        if found in damaged and how == "error":
            return [answered(CorruptMessage.code)]
        data = b"" if found is None else bytes(log[found])
        return [with_records(data)]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    found = looked_at(10)
    assert (found.damage_end, found.is_in_order) == ((-1, True) if end is None else (end, False))


def test_damage_in_a_log_of_old_formats_ends_with_the_damaged_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a source gives them out: from the entry on that holds the offset."""
    whole = [
        (9, entry(9, 0, None, b"a")),
        (14, packed(14, 1, [0, 1, 2, 3, 4])),
        (15, entry(15, 1, b"k", b"b")),
        (20, packed(20, 0, [17, 18, 20])),
        (99, packed(99, 1, [0, 1])),
    ]
    for damaged, end in [(14, 15), (15, 17), (20, 98), (99, 100)]:
        log = dict(whole)
        log[damaged] = log[damaged][:-1] + bytes([log[damaged][-1] ^ 1])

        async def fetch(
            _cluster: object, _node: int, positions: Any, log: dict[int, bytes] = log, **_: object
        ) -> list[FetchedPartition]:
            (asked,) = positions.values()
            return [with_records(b"".join(data for last, data in log.items() if last >= asked.offset))]

        monkeypatch.setattr(survey_module, "fetch", fetch)
        first = max((last + 1 for last in log if last < damaged), default=0)
        assert looked_at(first).damage_end == end


@pytest.mark.parametrize(("bases", "end"), [((10, 11, 99), 11), ((10,), 100)])
def test_damage_of_a_batchs_own_offset_ends_with_the_next_batch_or_the_log(
    monkeypatch: pytest.MonkeyPatch, bases: tuple[int, ...], end: int
) -> None:
    """The offset is not under the checksum, so the batch looks whole."""
    log = dict(zip(bases, batches_at(*bases), strict=True))
    log[10][:8] = (10 + (1 << 29)).to_bytes(8, "big")

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        return [with_records(b"".join(data for base, data in log.items() if base >= asked.offset))]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    assert looked_at(10).damage_end == end


def test_batch_that_its_own_header_hides_is_damage_up_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksum is right, and it claims to end before it begins."""
    bad, good, last = batches_at(10, 11, 99)
    bad[23] = 0x80
    seal(memoryview(bad))

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        given = [bad, good, last][max(0, min(2, asked.offset - 10)) :]
        return [with_records(b"".join(bytes(each) for each in given))]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    assert looked_at(10).damage_end == 11


def test_source_that_finds_nothing_behind_a_wrong_length_has_lost_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (bad,) = batches_at(10)
    bad[-1] ^= 1

    async def fetch(_cluster: object, _node: int, positions: Any, **_: object) -> list[FetchedPartition]:
        (asked,) = positions.values()
        return [with_records(bytes(bad) if asked.offset <= 10 else b"")]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    assert looked_at(10).damage_end == 100


def test_source_that_can_read_nothing_is_in_trouble_and_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fetch(*_: object, **__: object) -> list[FetchedPartition]:
        return [answered(CorruptMessage.code)]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    found = looked_at(10)
    assert (found.damage_end, found.is_in_order, bool(found.why_not)) == (-1, False, True)


@pytest.mark.parametrize(("in_vain", "end"), [(False, -1), (True, 11)])
def test_batch_that_looks_find_good_and_the_walk_refuses_for_ever_is_damage_in_the_end(
    monkeypatch: pytest.MonkeyPatch, in_vain: bool, end: int
) -> None:
    """Otherwise it would be fetched and looked at, and fetched again, for ever."""
    data = b"".join(bytes(each) for each in batches_at(10, 11, 12))

    async def fetch(*_: object, **__: object) -> list[FetchedPartition]:
        return [with_records(data)]

    monkeypatch.setattr(survey_module, "fetch", fetch)
    found = looked_at(10, is_out_of_order=True, is_last=in_vain)
    assert (found.damage_end, found.is_in_order) == (end, not in_vain)
