"""How much a fetch asks for: more of what is far behind, and never more than memory allows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.mirror.config import FetchConfig
from millrace.mirror.sources import source as source_module
from millrace.mirror.sources.fetch_loop import FetchLoop, Way
from millrace.mirror.sources.fetch_memory import FetchBudget
from millrace.mirror.sources.fetch_sizes import (
    ANSWERS_OF_A_BACKLOG,
    MORE_SIZE,
    MOST_OF_A_LOOK,
    FetchSizes,
    fetch_sizes,
    larger_look,
)
from tests.unit.mirror.test_pipeline_gaps import answer, batch, started
from tests.unit.mirror.test_source_answers import Source, pipeline_at, reader_of
from tests.waiting import patience

MEBIBYTE = 1 << 20
USUAL, MOST = FetchSizes(8 * MEBIBYTE, 4 * MEBIBYTE), FetchSizes(32 * MEBIBYTE, 16 * MEBIBYTE)


def sizes_of(*behind_mebibytes: int, most: FetchSizes = MOST) -> tuple[float, float]:
    found = fetch_sizes(USUAL, most, [each * MEBIBYTE for each in behind_mebibytes])
    return found.answer / MEBIBYTE, found.partition / MEBIBYTE


def test_fetch_near_the_end_asks_for_the_usual_sizes() -> None:
    assert sizes_of() == sizes_of(0) == sizes_of(0, 0, 0) == (8, 4)
    assert sizes_of(4 * ANSWERS_OF_A_BACKLOG) == (8, 4), "several answers, so that one is on its way"


def test_fetch_far_behind_asks_for_more_up_to_the_most() -> None:
    assert sizes_of(12 * ANSWERS_OF_A_BACKLOG) == (12, 12)
    assert sizes_of(1_000) == sizes_of(1_000, 0) == (32, 16)
    grown = [sizes_of(behind) for behind in range(0, 400, 7)]
    assert grown == sorted(grown)


def test_look_at_what_follows_a_batch_has_room_for_it_however_large_the_batch_is() -> None:
    for given in (61, 36_000, 100 * MEBIBYTE):
        assert larger_look(given) >= given + MORE_SIZE
        looks = [larger_look(given, times) for times in range(1, 70)]
        assert looks == sorted(looks) and looks[-1] == max(MOST_OF_A_LOOK, given + MORE_SIZE)
    assert larger_look(100, 1, 9 * MEBIBYTE) == 9 * MEBIBYTE
    assert larger_look(100, 1, 1 << 31) == MOST_OF_A_LOOK, "a length that is wrong, too"


def test_many_partitions_a_little_behind_get_a_larger_answer_with_the_usual_part_each() -> None:
    assert sizes_of(*[10] * 8) == (20, 4)


def test_most_below_the_usual_sizes_changes_nothing() -> None:
    assert sizes_of(1_000, most=FetchSizes(0, 0)) == (8, 4)


def test_pipeline_knows_about_how_many_bytes_it_is_behind() -> None:
    async def story() -> None:
        pipeline, _, _ = started()
        assert pipeline.bytes_behind == 0, "nothing is known before the first answer"
        batches = [batch(base, [100, 100]) for base in range(0, 20, 2)]
        pipeline.accept(answer(*batches, end=1_020))
        assert pipeline.bytes_behind == 1_000 * sum(map(len, batches)) // 20
        pipeline.accept(answer(*[batch(base, [100, 100]) for base in range(20, 1_020, 2)], end=1_020))
        assert pipeline.bytes_behind == 0

    asyncio.run(story())


@pytest.mark.parametrize(
    ("in_flight", "config", "expected"),
    [
        (256, FetchConfig(), (16, 16)),
        (256, FetchConfig(behind_max_bytes=0), (8, 4)),
        (32, FetchConfig(), (14, 8)),  # half of the ordinary room; a quarter of the share
        (4, FetchConfig(), (1.75, 4)),
    ],
)
def test_fetch_loop_asks_for_more_when_behind_within_the_rule_of_memory(
    monkeypatch: pytest.MonkeyPatch, in_flight: int, config: FetchConfig, expected: tuple[float, float]
) -> None:
    asked: list[tuple[float, float]] = []

    async def fetch(*_: object, max_bytes: int, partition_max_bytes: int, **__: object) -> Any:
        asked.append((max_bytes / MEBIBYTE, partition_max_bytes / MEBIBYTE))
        if len(asked) == 2:
            raise asyncio.CancelledError
        return [FetchedPartition("t", 0, 0, 1, 1, 0, (), None, memoryview(b""))]

    monkeypatch.setattr(source_module, "fetch", fetch)
    reader = reader_of(Source())
    reader._fetch_config = config
    reader._budget = FetchBudget(in_flight * MEBIBYTE)
    loop = FetchLoop(reader._budget)
    pipeline = loop.partitions["t", 0] = pipeline_at(0, bytes_behind=1 << 40)
    pipeline.accept = lambda *_: None
    with pytest.raises(asyncio.CancelledError):
        fetching = reader._fetch_from(Way(1, 0), loop)
        asyncio.run(asyncio.wait_for(fetching, patience(10)))
    assert asked == [expected] * 2
