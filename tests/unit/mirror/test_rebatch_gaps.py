"""A real pipeline over merged and unreadable batches: what cannot be carried is named exactly."""

from __future__ import annotations

import asyncio
from typing import Any

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import InvalidTimestamp
from millrace.broker.protocol.records import read_records
from millrace.mirror.batches.rebatch import stamp_for_target
from millrace.mirror.gaps.gaps import GapClass
from millrace.mirror.pipeline import State
from tests.unit.mirror.fetch_answers import Raw, marker, raw_batch
from tests.unit.mirror.pipeline_stage import Target, started


def answer(*batches: bytearray, aborted: Any = (), end: int = 1_000) -> FetchedPartition:
    data = memoryview(bytearray(b"".join(batches)))
    return FetchedPartition("flights", 0, 0, end, end, 0, tuple(aborted), None, data)


def unreadable(base_offset: int, last_offset_delta: int) -> bytearray:
    """Its checksum is right; its offsets have holes, so it would have to be read."""
    return raw_batch(
        [], base_offset=base_offset, record_count=1, last_offset_delta=last_offset_delta, body=b"\x10\x00"
    )


def deliver_but(target: Target, refused: bytes) -> list[bytes | None]:
    """The target takes everything but one value; what it took, in order."""
    taken: list[bytes | None] = []
    while target.queue:
        batch = target.queue[0].batch
        stamp_for_target(batch, 1, 0, 0)
        values = [record.value for record in read_records(batch)]
        if refused in values:
            target.refuse(InvalidTimestamp())
        else:
            taken += values
            target.acknowledge()
    return taken


def test_one_refused_record_of_many_merged_batches_is_found() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.REFUSED)
        # Every third offset, as compaction leaves them, and the end of a transaction between.
        singles = [
            raw_batch([Raw(0, 0, value=b"%d" % offset)], base_offset=offset) for offset in range(0, 90, 3)
        ]
        pipeline.accept(answer(*singles[:20], marker(58, 5, abort=False), *singles[20:], end=88))
        assert target.offsets() == [list(range(0, 90, 3))], "one batch"
        taken = deliver_but(target, b"42")
        await around.rest()
        assert taken == [b"%d" % offset for offset in range(0, 90, 3) if offset != 42]
        assert around.events == [(42, 43, "refused")]
        assert (pipeline.progress.position, pipeline.state) == (88, State.RUNNING)

    asyncio.run(story())


def test_an_unreadable_batch_is_skipped_with_its_offsets_and_not_fetched_again() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.CORRUPT)
        good = raw_batch([Raw(0, 0, value=b"a")], base_offset=0)
        behind = raw_batch([Raw(0, 0, value=b"b")], base_offset=6)
        pipeline.accept(answer(good, unreadable(1, 4), behind))
        assert pipeline.progress.is_blocked, "nothing passes the gap before its event is durable"
        await around.rest()
        assert around.events == [(1, 6, "corrupt")]
        assert pipeline.progress.fetch_offset == 6
        pipeline.accept(answer(behind))
        assert deliver_but(target, b"") == [b"a", b"b"]
        assert pipeline.progress.position == 7

    asyncio.run(story())


def test_an_unreadable_batch_stops_the_partition_with_its_reason() -> None:
    async def story() -> None:
        pipeline, _, around = started()
        pipeline.accept(answer(unreadable(0, 4)))
        await around.rest()
        gap = pipeline.gap
        assert gap is not None and pipeline.state is State.STOPPED
        assert (gap.from_offset, gap.to_offset, gap.gap_class) == (0, 5, GapClass.CORRUPT)
        assert "its checksum is right, but" in gap.reason

    asyncio.run(story())


def test_a_control_batch_that_cannot_be_read_is_a_gap_of_its_own() -> None:
    async def story() -> None:
        pipeline, target, around = started(GapClass.CORRUPT)
        aborted = raw_batch([Raw(0, 0, value=b"gone")], base_offset=0, producer_id=4, bits=0x10)
        end = raw_batch([], base_offset=1, producer_id=4, bits=0x30, record_count=1, body=b"\x10\x00")
        pipeline.accept(answer(aborted, end, aborted=[(4, 0)]))
        await around.rest()
        assert around.events == [(1, 2, "corrupt")]
        assert (target.queue, pipeline.progress.position) == ([], 2)

    asyncio.run(story())
