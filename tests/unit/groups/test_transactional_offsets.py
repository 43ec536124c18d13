"""Offsets committed in transactions: who may commit them, when they count, and what a restart makes of them.

Whatever a history of commits, transactions, markers and removals did to memory, reading the log anew must
come to the same (`test_memory_and_log_never_disagree`).
"""

from __future__ import annotations

import asyncio
import random

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.errors import NotEnoughReplicas
from millrace.broker.groups.values import CommitRequest, LeaveRequest, OffsetToCommit
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.records import Record, build_batch
from tests.unit.groups.coordinator_bench import GROUP, Bench, run
from tests.waiting import until_async as until

PARTITION = coordinator_partition(GROUP, 4)
FLIGHTS = ("flights", 0)


class TransactionalBench(Bench):
    """A bench with a producer (7, epoch 0) that commits offsets and has markers written."""

    async def commit_in_transaction(
        self, offset, member_id="", generation=-1, producer_id=7, partition=FLIGHTS, instance_id=None
    ):
        request = CommitRequest(
            member_id, instance_id, generation, {partition: OffsetToCommit(offset, -1, "")}
        )
        answers = await self.groups.commit_transactional(GROUP, request, producer_id, 0)
        return answers[partition]

    def end(self, *, committed: bool, producer_id=7, told=True) -> None:
        """The marker reaches the log, and the coordinator if it is told."""
        offset = self.log.append_marker(PARTITION, producer_id, committed=committed)
        if told:
            self.groups.transaction_ended(PARTITION, producer_id, committed, offset)

    def fetch(self, partition=FLIGHTS, *, stable=False):
        _, found = self.groups.fetch_offsets(GROUP, [partition], require_stable=stable)
        kept = found[partition]
        return kept.offset if kept is not None and not isinstance(kept, ErrorCode) else kept


def test_offsets_of_a_transaction_count_when_it_is_committed(offsets_log):
    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        await bench.commit(1)
        assert await bench.commit_in_transaction(5) is ErrorCode.none
        assert bench.fetch() == 1, "a plain reader sees what is committed"
        assert bench.fetch(stable=True) is ErrorCode.unstable_offset_commit
        assert bench.fetch(("flights", 1), stable=True) is None
        bench.end(committed=True)
        assert bench.fetch() == bench.fetch(stable=True) == 5
        await bench.restart()
        assert bench.fetch(stable=True) == 5
        header = parse_header(bench.log.batches[PARTITION][1])
        assert (header.is_transactional, header.producer_id, header.producer_epoch) == (True, 7, 0)
        assert header.base_sequence == -1

    run(scenario())


def test_offsets_of_an_aborted_transaction_never_count(offsets_log):
    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        await bench.commit(1)
        await bench.commit_in_transaction(5)
        bench.end(committed=False)
        assert bench.fetch(stable=True) == 1
        await bench.restart()
        assert bench.fetch(stable=True) == 1

    run(scenario())


@pytest.mark.parametrize("committed", [True, False])
def test_open_transaction_stays_open_when_the_coordinator_moves(offsets_log, committed):
    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        await bench.commit_in_transaction(5)
        await bench.restart()
        assert bench.fetch(stable=True) is ErrorCode.unstable_offset_commit
        assert bench.fetch() is None
        bench.end(committed=committed)
        assert bench.fetch(stable=True) == (5 if committed else None)

    run(scenario())


def test_marker_that_comes_while_the_groups_are_loaded_is_not_lost(offsets_log):
    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        await bench.commit_in_transaction(5)
        await bench.groups.close()
        bench.groups = bench.coordinator()
        offsets_log.gate.clear()
        loading = asyncio.create_task(bench.groups.load(PARTITION))
        await asyncio.sleep(0.01)
        # The reader has come to its end of the log already: it will not see this marker.
        bench.groups.transaction_ended(PARTITION, 7, True, offsets_log.next_offset[PARTITION])
        assert not loading.done()
        offsets_log.gate.set()
        await loading
        assert bench.fetch(stable=True) == 5

    run(scenario())


def test_transactional_commit_of_a_member_is_fenced_by_its_generation(offsets_log):
    """KIP-447: one producer serves several members, so the generation must fence, not the producer."""

    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        assert await bench.commit_in_transaction(1, "m", 1) is ErrorCode.illegal_generation
        member_id, generation = await bench.stable_member()
        commit = bench.commit_in_transaction
        assert await commit(1, member_id, generation - 1) is ErrorCode.illegal_generation
        assert await commit(1, "stranger", generation) is ErrorCode.unknown_member_id
        assert await commit(1, member_id, generation, instance_id="host") is ErrorCode.unknown_member_id
        assert await commit(2, member_id, generation) is ErrorCode.none
        assert await commit(3) is ErrorCode.none, "older producers name no member"
        assert await bench.commit(3) is ErrorCode.unknown_member_id, "but plain commits must"

    run(scenario())


def test_transactional_commit_goes_on_while_others_join(offsets_log):
    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        member_id, _ = await bench.stable_member()
        joining = asyncio.create_task(bench.join())
        await asyncio.sleep(0)
        generation = (await bench.join(member_id)).generation
        await joining
        assert bench.groups.describe(GROUP).state == "CompletingRebalance"
        assert await bench.commit(1, member_id, generation) is ErrorCode.rebalance_in_progress
        assert await bench.commit_in_transaction(1, member_id, generation) is ErrorCode.none

    run(scenario())


def test_refusals(offsets_log):
    async def scenario():
        bench = TransactionalBench(offsets_log, offset_metadata_max_size=2)
        assert await bench.commit_in_transaction(1) is ErrorCode.not_coordinator
        await bench.start()
        offsets_log.failure = NotEnoughReplicas()
        assert await bench.commit_in_transaction(1) is ErrorCode.coordinator_not_available
        assert bench.fetch(stable=True) is None, "nothing is pending that is not in the log"
        offsets_log.failure = None
        offsets = {FLIGHTS: OffsetToCommit(1, -1, "long"), ("b", 0): OffsetToCommit(2, -1, "ok")}
        answers = await bench.groups.commit_transactional(GROUP, CommitRequest("", None, -1, offsets), 7, 0)
        assert answers == {FLIGHTS: ErrorCode.offset_metadata_too_large, ("b", 0): ErrorCode.none}

    run(scenario())


@pytest.mark.parametrize("before", [1, None])
def test_pending_offsets_keep_their_group_from_expiring(offsets_log, before):
    async def scenario():
        bench = await TransactionalBench(offsets_log, offsets_retention_ms=100).start()
        member_id, generation = await bench.stable_member()
        if before is not None:
            await bench.commit(before, member_id, generation)
        bench.groups.leave(GROUP, [LeaveRequest(member_id, None)])
        await bench.commit_in_transaction(5)
        bench.now_ms += 1_000
        await bench.groups.sweep(bench.now_ms)
        assert bench.fetch() == before
        assert bench.groups.describe(GROUP).state == "Empty"
        bench.end(committed=False)
        await bench.groups.sweep(bench.now_ms)
        assert bench.groups.describe(GROUP).state == "Dead"
        await bench.restart()
        assert bench.fetch() is None

    run(scenario())


def test_group_with_nothing_but_an_open_transaction_is_kept(offsets_log):
    async def scenario():
        bench = await TransactionalBench(offsets_log, offsets_retention_ms=100).start()
        await bench.commit_in_transaction(5)
        bench.now_ms += 1_000
        await bench.groups.sweep(bench.now_ms)
        await bench.restart()
        await bench.groups.sweep(bench.now_ms)
        bench.end(committed=True)
        assert bench.fetch() == 5

    run(scenario())


@pytest.mark.parametrize("removal", ["group", "offsets", "topic"])
def test_removal_takes_pending_offsets_with_it(offsets_log, removal):
    """As in Apache Kafka 4: otherwise the marker would bring back what was deleted."""

    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        await bench.commit_in_transaction(5)
        if removal == "group":
            assert await bench.groups.delete_group(GROUP) is ErrorCode.none
        elif removal == "offsets":
            assert (await bench.groups.delete_offsets(GROUP, [FLIGHTS]))[0] is ErrorCode.none
        else:
            bench.groups.forget_topics({"flights"})
        bench.end(committed=True)
        assert bench.fetch() is None
        await bench.restart()
        assert bench.fetch() is None

    run(scenario())


def test_control_records_of_other_kinds_end_no_transaction(offsets_log):
    async def scenario():
        bench = await TransactionalBench(offsets_log).start()
        await bench.commit_in_transaction(5)
        for key in (bytes.fromhex("00000002"), b"\x00"):  # a leader change; a key that is cut
            control = build_batch([Record(key, b"", (), 0)], producer_id=7, producer_epoch=0, control=True)
            offsets_log.append_now(PARTITION, bytes(control))
        await bench.restart()
        assert bench.fetch(stable=True) is ErrorCode.unstable_offset_commit

    run(scenario())


@pytest.mark.parametrize("seed", range(25))
def test_memory_and_log_never_disagree(offsets_log, seed):
    """Random commits, transactions, markers and removals, some of them slow; then the log is read anew."""
    rng = random.Random(seed)

    async def scenario():
        bench = await TransactionalBench(offsets_log, commit_timeout_ms=1).start()
        partitions = [("flights", number) for number in range(3)]
        for step in range(60):
            partition = rng.choice(partitions)
            match rng.randrange(8):
                case 0 | 1:
                    await bench.groups.commit(
                        GROUP, CommitRequest("", None, -1, {partition: OffsetToCommit(step, -1, "")})
                    )
                case 2 | 3:
                    await bench.commit_in_transaction(
                        step, producer_id=rng.choice([7, 8]), partition=partition
                    )
                case 4 | 5:
                    bench.end(committed=rng.random() < 0.6, producer_id=rng.choice([7, 8]))
                case 6:
                    await bench.groups.delete_offsets(GROUP, [partition])
                case 7:
                    if offsets_log.gate.is_set():
                        offsets_log.gate = asyncio.Event()
                    else:
                        offsets_log.gate.set()
                        await asyncio.sleep(0)
        offsets_log.gate.set()
        await until(lambda: not bench.groups._journal._under_way)

        def seen():
            return {
                (partition, stable): bench.fetch(partition, stable=stable)
                for partition in partitions
                for stable in (False, True)
            }

        before = seen()
        await bench.restart()
        assert seen() == before, f"seed {seed}"

    run(scenario())
