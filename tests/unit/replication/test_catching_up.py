"""A follower's real log, and a leader that is another real log."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.errors import CorruptMessage, KafkaStorageError, NotLeaderOrFollower, OffsetOutOfRange
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.catching_up import ALL, LARGE_APPEND_SIZE, NOT_ALL, CatchingUp, Taken
from millrace.broker.replication.follower import Answer
from millrace.broker.replication.local_partition import Flusher, LocalPartition
from millrace.broker.replication.partition import PartitionState, Replica
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from tests.stored_batches import batches_of

Scenario = Callable[["Pair"], Awaitable[None]]


class Pair:
    """A leader's log and a follower's, and how the follower takes what the leader answers."""

    def __init__(self, folder: Path) -> None:
        self.leader = Log.open(folder / "leader" / "t-0", LogConfig(), recovery_point=None, now_ms=0)
        follower = Log.open(folder / "follower" / "t-0", LogConfig(), recovery_point=None, now_ms=0)
        replica = Replica(2)
        self.local = LocalPartition("t", 0, uuid.UUID(int=7), follower, replica, 2**63 - 1)
        self.threads = 0
        flusher = Flusher(self._on_disk, lambda: 0, lambda _local: None, lambda _local, _error: None)
        self.catching_up = CatchingUp(self._on_disk, lambda: 0, flusher)
        self.follow(1)

    async def _on_disk(self, work: Callable[..., Any], *arguments: Any) -> Any:
        self.threads += 1
        return await asyncio.to_thread(work, *arguments)

    def follow(self, epoch: int) -> None:
        self.local.replica.apply(PartitionState(1, epoch, (1, 2), 1), self.local.log.end_offset)

    def write(self, log: Log, *values: bytes, epoch: int = 1) -> None:
        records = [Record(None, value, (), 1, number) for number, value in enumerate(values)]
        log.append(build_batch(records), leader_epoch=epoch, now_ms=0)

    async def fetch(
        self, *, error_code: int = 0, spoil: int = -1, high_watermark: int | None = None, behind: int = 0
    ) -> Taken:
        """One round: what a leader would answer to the follower's present position, taken in."""
        follower, leader = self.local.log, self.leader
        offset, last_epoch = follower.end_offset, follower.leader_epochs.latest_epoch
        diverging, records = None, bytearray()
        if not leader.start_offset <= offset:
            error_code = OffsetOutOfRange.code
        elif last_epoch >= 0:
            epoch, end = leader.leader_epochs.end_offset_for(last_epoch, leader.end_offset)
            if epoch < last_epoch or end < offset:
                diverging = (epoch, end)
        if not error_code and diverging is None:
            records = bytearray(leader.read(offset, 64 << 20).data)
        if spoil >= 0:
            records[spoil] ^= 0xFF
        answer = Answer(
            self.local.replica.leader_epoch - behind,
            offset,
            self.local.log.leader_epochs.latest_epoch,
            error_code,
            leader.end_offset if high_watermark is None else high_watermark,
            leader.start_offset,
            diverging,
        )

        async def bounds(_local: LocalPartition) -> tuple[int, int]:
            return leader.start_offset, leader.end_offset

        return await self.catching_up.take(self.local, answer, records, bounds)

    def content(self, log: Log) -> bytes:
        return b"".join(bytes(batch) for batch in batches_of(log))


def run(folder: Path, scenario: Scenario) -> None:
    async def main() -> None:
        await scenario(Pair(folder))

    asyncio.run(main())


def test_follower_takes_batches_epochs_high_watermark_and_start(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.write(pair.leader, b"a", b"b")
        pair.write(pair.leader, b"c", epoch=3)
        pair.leader.advance_start_offset(1)
        pair.write(pair.local.log, b"a", b"b")
        pair.follow(3)
        assert await pair.fetch(high_watermark=2) == ALL
        assert pair.content(pair.local.log) == pair.content(pair.leader)
        assert pair.local.log.leader_epochs.entries[-1] == (3, 2)
        assert (pair.local.replica.high_watermark, pair.local.log.start_offset) == (2, 1)
        assert pair.threads == 0

    run(tmp_path, scenario)


def test_large_answer_is_appended_on_a_thread(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        config = LogConfig(max_message_bytes=8 << 20)
        pair.leader.config = config
        pair.write(pair.leader, b"x" * (LARGE_APPEND_SIZE + 1))
        await pair.fetch()
        assert pair.threads == 1
        assert pair.content(pair.local.log) == pair.content(pair.leader)

    run(tmp_path, scenario)


def test_damaged_batch_is_not_appended_and_what_came_before_it_is(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.write(pair.leader, b"good")
        size = pair.leader.size
        pair.write(pair.leader, b"bad")
        with pytest.raises(CorruptMessage):
            await pair.fetch(spoil=size + 65)
        assert pair.local.log.end_offset == 1
        await pair.fetch()
        assert pair.content(pair.local.log) == pair.content(pair.leader)

    run(tmp_path, scenario)


def test_histories_are_made_to_agree_step_by_step(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        for log in (pair.leader, pair.local.log):
            pair.write(log, b"common", epoch=1)
        pair.write(pair.local.log, b"mine", epoch=2)
        pair.write(pair.leader, b"theirs", epoch=3)
        pair.write(pair.local.log, b"mine too", epoch=4)
        pair.write(pair.leader, b"theirs too", epoch=5)
        pair.local.replica.high_watermark = 2
        pair.follow(5)
        ends = []
        for _ in range(4):
            await pair.fetch(high_watermark=1)
            ends.append(pair.local.log.end_offset)
        # Epoch 4 is cut for the leader's 3, which is unknown here; then 2 for its 1.
        assert ends == [2, 1, 3, 3]
        assert pair.content(pair.local.log) == pair.content(pair.leader)
        assert pair.local.replica.high_watermark == 1

    run(tmp_path, scenario)


def test_follower_behind_the_leaders_start_begins_anew_even_within_a_batch(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.write(pair.local.log, b"old")
        pair.write(pair.leader, b"old")
        for _ in range(3):
            pair.write(pair.leader, b"a", b"b", b"c")
        pair.leader.advance_start_offset(5)
        await pair.fetch()
        assert (pair.local.log.start_offset, pair.local.log.end_offset) == (5, 5)
        await pair.fetch()
        assert (pair.local.log.start_offset, pair.local.log.end_offset) == (5, 10)
        assert pair.local.replica.high_watermark == 10
        assert pair.content(pair.local.log) == pair.content(pair.leader)[-len(pair.content(pair.local.log)) :]

    run(tmp_path, scenario)


def test_batches_of_a_later_epoch_than_the_leaders_are_another_leaders(tmp_path: Path) -> None:
    """A leader that was deposed while it read, and follows by now, may answer with them: taken behind records
    that the later leader has not, they would hide for good that the histories part."""

    async def scenario(pair: Pair) -> None:
        pair.write(pair.leader, b"of 1", epoch=1)
        pair.write(pair.leader, b"of 2", epoch=2)
        await pair.fetch()
        assert (pair.local.log.end_offset, pair.local.log.leader_epochs.latest_epoch) == (1, 1)
        pair.follow(2)
        await pair.fetch()
        assert pair.content(pair.local.log) == pair.content(pair.leader)

    run(tmp_path, scenario)


def test_answer_that_comes_after_a_change_of_roles_is_not_used(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        pair.write(pair.leader, b"a")
        pair.write(pair.local.log, b"other", epoch=0)
        async with pair.local.turn:
            # Someone else is at the log just now.
            assert await pair.fetch() == NOT_ALL
        assert pair.local.log.end_offset == 1
        holding = asyncio.ensure_future(pair.local.turn.acquire())
        await holding
        cutting = asyncio.ensure_future(pair.catching_up._truncate(pair.local, 1, 0))
        await asyncio.sleep(0)
        pair.local.replica.apply(PartitionState(2, 2, (2,), 1), 1)
        pair.local.turn.release()
        await cutting
        assert pair.local.log.end_offset == 1, "a leader's log is not cut"

    run(tmp_path, scenario)


def test_answer_in_an_earlier_epoch_is_not_taken(tmp_path: Path) -> None:
    """The leader has said its high watermark with it, and may have to say it again."""

    async def scenario(pair: Pair) -> None:
        pair.write(pair.leader, b"a")
        pair.follow(3)
        assert await pair.fetch(behind=1) == NOT_ALL
        assert (pair.local.log.end_offset, pair.local.replica.high_watermark) == (0, 0)

    run(tmp_path, scenario)


def test_expected_errors_are_waited_out_and_others_are_told(tmp_path: Path) -> None:
    async def scenario(pair: Pair) -> None:
        assert (await pair.fetch(error_code=NotLeaderOrFollower.code)).rest_seconds > 0
        with pytest.raises(KafkaStorageError):
            await pair.fetch(error_code=KafkaStorageError.code)
        # Out of range, and yet within the leader's bounds: no hurry.
        assert (await pair.fetch(error_code=OffsetOutOfRange.code)).rest_seconds >= 1

    run(tmp_path, scenario)
