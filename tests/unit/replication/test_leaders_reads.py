"""What a leader reads for others: of which log, off the loop, and while it leads."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
import weakref
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.errors import (
    InconsistentTopicId,
    KafkaStorageError,
    NotLeaderOrFollower,
)
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.replication.local_partition import (
    MustReadCold,
)
from millrace.broker.replication.partition import PartitionState
from millrace.broker.server.internal_topics import COMMITTED_POLL_SECONDS, InternalTopicLog
from tests.unit.replication.replicated_stage import REPLICAS, TOPIC_ID, Bench, batch, run
from tests.waiting import patience


def test_a_whole_partition_is_read_in_runs_of_whole_batches_off_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.broker.replication.reading.READ_ALL_SIZE", 300)
    loop_thread = threading.get_ident()

    async def scenario(bench: Bench) -> None:
        await bench.lead(1)
        for _ in range(50):
            bench.append(b"x", acks=1)
        partition_log = bench.manager.leader_of("t", 0).log
        reader = partition_log.read
        readers: set[int] = set()

        def read(*arguments: Any, **options: Any) -> Any:
            readers.add(threading.get_ident())
            return reader(*arguments, **options)

        monkeypatch.setattr(partition_log, "read", read)
        offsets = []
        runs = 0
        async for run_of_batches in bench.manager.read_all("t", 0):
            runs += 1
            offsets += [header.base_offset for _, header in iterate_batches(run_of_batches)]
        assert offsets == list(range(50))
        assert 10 < runs < 50
        assert loop_thread not in readers

    run(tmp_path, scenario)


@pytest.mark.parametrize("from_too_few", [True, False])
def test_a_coordinator_that_loads_from_an_in_sync_set_that_is_too_small(
    tmp_path: Path, from_too_few: bool
) -> None:
    """Two of three brokers are gone and min.insync.replicas is 2: groups go on reading, as with Apache Kafka;
    the outcome of a transaction must be safe before anything follows from it."""

    async def scenario(bench: Bench) -> None:
        await bench.manager.hosted.apply_topic(
            "t", TOPIC_ID, {0: PartitionState(2, 0, (1, 2), 1, 0)}, {"min.insync.replicas": "2"}, REPLICAS
        )
        following = bench.logs.get(("t", 0))
        assert following is not None
        following.append(batch(b"a"), leader_epoch=0, now_ms=1)
        log = InternalTopicLog("t", bench.manager, MetadataCache(), 1, loads_from_too_few=from_too_few)
        await bench.lead(1, 2, epoch=1, version=1, min_insync_replicas="2")
        loading = asyncio.ensure_future(log.until_committed(0, 1))
        await asyncio.wait([loading], timeout=3 * COMMITTED_POLL_SECONDS)
        assert not loading.done(), "a member of the in-sync set may lack it"
        await bench.lead(1, epoch=2, version=2, min_insync_replicas="2")
        await asyncio.wait([loading], timeout=10 * COMMITTED_POLL_SECONDS)
        assert (loading.done(), bench.high_watermark) == (from_too_few, 0)
        bench.fetch(2, 1, epoch=2)
        await bench.lead(1, 2, epoch=2, version=3, min_insync_replicas="2")
        await asyncio.wait_for(loading, patience())

    run(tmp_path, scenario)


def test_only_the_log_of_the_very_topic_is_read(tmp_path: Path) -> None:
    """A topic that was made anew begins with the same epochs: a follower that knows it already, and asks by
    its id, would fill its log with the records of the one that is deleted here next."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, 3)
        bench.append(b"old", acks=1)
        with pytest.raises(InconsistentTopicId):
            bench.fetch(2, 0, topic_id=uuid.UUID(int=8))
        assert bench.fetch(2, 0, topic_id=TOPIC_ID).records

    run(tmp_path, scenario)


def test_a_refusal_to_read_what_is_cold_is_freed_at_once_with_what_it_was_raised_through(
    tmp_path: Path,
) -> None:
    """Each fetch of old records begins with one: in a cycle they would pile up for the garbage collector."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, 3, epoch=1)
        bench.append(b"old", acks=1)
        rest(bench)
        refusals: list[weakref.ref[BaseException]] = []
        try:
            bench.fetch(3, 0, epoch=1)
        except MustReadCold as cold:
            read, each = cold.read, cold
            while each is not None:
                refusals.append(weakref.ref(each))
                each = each.__context__
        assert len(refusals) > 1, "each is raised where the one before it was caught"
        assert [refusal() for refusal in refusals] == [None] * len(refusals)
        assert (await read()).records

    gc.collect()  # of tests before
    gc.disable()
    try:
        run(tmp_path, scenario)
    finally:
        gc.enable()


def rest(bench: Bench) -> None:
    """Lets go of the log's file, which the next read has to open."""
    file = bench.manager.leader_of("t", 0).log._segments.active.file
    file.was_used()
    file.rest()


@pytest.mark.parametrize("change", ["deposed", "another epoch", "made anew"])
def test_what_a_disk_had_is_no_answer_of_a_leader_that_was_replaced_meanwhile(
    tmp_path: Path, change: str
) -> None:
    """The log may have been cut on the way, and have gone on with another leader's records, or with its list
    of aborted transactions in pieces."""

    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, 3, epoch=1)
        bench.append(b"old", acks=1)
        rest(bench)
        with pytest.raises(MustReadCold) as cold:
            bench.fetch(3, 0, epoch=1)
        state = PartitionState(1 if change == "another epoch" else 2, 2, (1, 2, 3), 1, 1)
        if change == "made anew":
            state = PartitionState(1, 1, (1, 2, 3), 1, 0)
        topic_id = uuid.UUID(int=8) if change == "made anew" else TOPIC_ID
        await bench.manager.hosted.apply_topic("t", topic_id, {0: state}, {}, REPLICAS)
        with pytest.raises((NotLeaderOrFollower, KafkaStorageError)):
            await cold.value.read()

    run(tmp_path, scenario)


@pytest.mark.parametrize("change", ["deposed", "another epoch", "none"])
def test_what_a_disk_said_of_a_time_is_no_answer_of_a_leader_that_was_replaced_meanwhile(
    tmp_path: Path, change: str
) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.lead(1, 2, 3, epoch=1)
        bench.append(b"old", acks=1)
        local = bench.manager.leader_of("t", 0)
        is_asked, may_answer = threading.Event(), threading.Event()

        def look() -> int:
            is_asked.set()
            may_answer.wait()
            return 7

        answer = asyncio.ensure_future(bench.manager.on_disk_as_leader(local, look))
        await asyncio.to_thread(is_asked.wait)
        if change != "none":
            leader = 1 if change == "another epoch" else 2
            state = PartitionState(leader, 2, (1, 2, 3), 1, 1)
            await bench.manager.hosted.apply_topic("t", TOPIC_ID, {0: state}, {}, REPLICAS)
        may_answer.set()
        if change == "none":
            assert await answer == 7
        else:
            with pytest.raises(NotLeaderOrFollower):
                await answer

    run(tmp_path, scenario)
