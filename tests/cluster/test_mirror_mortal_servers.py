"""Servers that are killed, frozen or lose the end of their disk under a running mirror.

They are the module's own (`mortal`); each test leaves them running. A process is started on the main thread
alone: the kernel ends it when the thread that started it is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.handover import WorkLeft
from tests.cluster.gap_stories import (
    EXACTLY_ONCE,
    SKIP,
    STOP,
    GapStory,
    has_lost_its_end,
    in_each_delivery,
    one,
    values,
)
from tests.cluster.mirror_calls import command
from tests.cluster.mirror_process import TIMEOUT_S, send, until
from tests.pairs import End, Pair, in_pairs
from tests.waiting import patience, until_async

SHOWN = [b"%d" % number for number in range(6)]
LATER = [b"later %d" % number for number in range(8)]
KEPT = 3
DRAIN_TIMEOUT_MS = 3_000
# Starting to stop and the interpreter's own end, on a busy machine.
GRACE_S = 30.0
MOST_HELD_UP_S = 15.0
"""Half of what a request waits for its answer, and with it a record that another source holds up."""
GROUP = {"session_timeout_ms": 3_000, "rebalance_timeout_ms": 10_000}


async def start_again(end: End) -> None:
    end.server.launch()
    await asyncio.to_thread(end.server.wait_until_serving)


@pytest.mark.safety
@in_each_delivery()
@in_pairs("millrace-millrace", "millrace-kafka", "kafka-millrace", mortal=True)
def test_brokers_killed_in_mid_flow_cost_nothing(pair: Pair, delivery: str) -> None:
    """The source's, then the target's. At least once the worker's seat may be lost with the target, and what
    it carried then comes again, so what comes for the first time is looked at."""
    topic = pair.unique("flights")

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)
            mirror = pair.mirror([topic], delivery=delivery, group=GROUP)
            stop = asyncio.Event()

            async def feed() -> None:
                number = 0
                while not stop.is_set():
                    await send(source, topic, 0, build_batch([one(b"%d" % number)]))
                    number += 1
                    await asyncio.sleep(0.005)

            async def carried_more(than: int) -> bool:
                return len(await values(target, topic)) >= than + 50

            feeding = asyncio.create_task(feed())
            for end in (pair.source, pair.target):
                there = len(await values(target, topic))
                await until(lambda there=there: carried_more(there), logs_of=[mirror])
                end.server.kill()
                await start_again(end)
            there = len(await values(target, topic))
            await until(lambda: carried_more(there), logs_of=[mirror])
            stop.set()
            await feeding

            async def judged(cluster: Cluster) -> list[bytes | None]:
                # Not the numbers themselves: this test's own producer repeats what it is not sure of.
                there = await values(cluster, topic)
                return there if delivery == EXACTLY_ONCE else list(dict.fromkeys(there))

            sent = await judged(source)

            async def all_there() -> bool:
                return len(await judged(target)) >= len(sent)

            await until(all_there, logs_of=[mirror])
            assert await judged(target) == sent

    asyncio.run(story())


@in_pairs("millrace-millrace", "millrace-kafka", "kafka-millrace", mortal=True)
def test_source_that_is_away_holds_up_no_other(pair: Pair, second_source: End) -> None:
    """One of two sources stands still, then it is killed; what the other has arrives meanwhile, in ordinary
    time. Back again, the first goes on where it was."""
    own, other = pair.unique("own"), pair.unique("other")
    sent = {own: 0, other: 0}

    async def story() -> None:
        async with (
            pair.source.cluster() as source,
            second_source.cluster() as second,
            pair.target.cluster() as target,
        ):
            await create_topic(source, own, 1, 1)
            await create_topic(second, other, 1, 1)
            mirror = pair.mirror([own, other], also=[second_source], group=GROUP)

            async def carry(cluster: Cluster, topic: str, within_s: float = TIMEOUT_S) -> None:
                """Until what is sent now has arrived, and all before it, each once and in order."""
                await send(cluster, topic, 0, build_batch([one(b"%d" % sent[topic])]))
                sent[topic] += 1

                async def is_there() -> bool:
                    there = await values(target, topic)
                    assert there == [b"%d" % number for number in range(len(there))]
                    return len(there) == sent[topic]

                await until_async(is_there, within_s=within_s, logs_of=[mirror], every_s=0.1)

            async def carry_other() -> None:
                for _ in range(3):
                    await carry(second, other, within_s=MOST_HELD_UP_S)

            await carry(source, own)
            await carry(second, other)
            os.kill(pair.source.pid, signal.SIGSTOP)
            try:
                await carry_other()
            finally:
                os.kill(pair.source.pid, signal.SIGCONT)
            await carry(source, own)
            pair.source.server.kill()
            try:
                await carry_other()

                async def is_said() -> bool:
                    told = {each["cluster"]: each["error"] for each in mirror.status().get("sources", ())}
                    return bool(told.get(pair.source.name)) and told.get(second_source.name, "") is None

                await until(is_said, lambda: str(mirror.status().get("sources")))
                await carry_other()
            finally:
                await start_again(pair.source)
            # Not a connection of before: this one's server was killed.
            async with pair.source.cluster() as again:
                await carry(again, own)

    asyncio.run(story())


@in_pairs("millrace-millrace", "millrace-kafka", "kafka-kafka", mortal=True)
def test_worker_whose_target_is_away_is_not_ready_until_it_is_back(pair: Pair) -> None:
    """Also one that has nothing to carry, and learns of it by the group alone."""
    topic = pair.unique("flights")

    async def story() -> None:
        async with pair.source.cluster() as source:
            await create_topic(source, topic, 1, 1)
            await send(source, topic, 0, build_batch([one(b"before")]))
            mirror = pair.mirror([topic], group=GROUP)

            async def has(*wanted: bytes) -> bool:
                async with pair.target.cluster() as target:
                    is_there = await values(target, topic) == list(wanted)
                return is_there and mirror.get("/readyz") == (200, "ready\n")

            await until(lambda: has(b"before"), logs_of=[mirror])
            pair.target.server.kill()
            try:
                said = f"not ready; target {pair.target.name} does not answer: {pair.target.bootstrap}"
                up = f'millrace_mirror_target_up{{target="{pair.target.name}"}} 0.0'

                async def is_told() -> bool:
                    (status, text), told = mirror.get("/readyz"), mirror.status()["target"]
                    is_down = not told["connected"] and pair.target.bootstrap in (told["error"] or "")
                    is_said = status == 503 and text.startswith(said)
                    return is_said and is_down and up in mirror.get("/metrics")[1]

                await until(is_told, lambda: f"{mirror.get('/readyz')} {mirror.status()['target']}")
                assert mirror.get("/healthz") == (200, "ok\n")
                shown = command(mirror, "status")
                assert "target down · 1 worker · " in shown.splitlines()[0]
                assert f"cannot reach target {pair.target.name}: " in shown
                await send(source, topic, 0, build_batch([one(b"meanwhile")]))
            finally:
                await start_again(pair.target)
            await until(lambda: has(b"before", b"meanwhile"), logs_of=[mirror])

    asyncio.run(story())


def _lose_tail(folder: Path) -> None:
    """What a loss of power leaves of a log whose last batches were never flushed."""
    (path,) = folder.glob("*.log")
    batches = list(iterate_batches(memoryview(path.read_bytes())))
    with path.open("r+b") as file:
        file.truncate(batches[KEPT][0])


@in_pairs("millrace-millrace", "millrace-kafka", "kafka-millrace", mortal=True)
def test_single_broker_that_lost_its_unflushed_tail(pair: Pair) -> None:
    """What was lost had been shown and carried, and the log grows beyond the mirror's position again before
    the mirror asks (see test_mirror_several_brokers::test_unclean_election). The class has a policy of its
    own here."""
    gaps = {
        STOP: {"default": "skip", "truncated": "stop"},
        SKIP: {"default": "stop", "truncated": "skip"},
    }

    async def story() -> None:
        async with GapStory(pair, gaps=gaps, config={"group": GROUP}) as gap:
            await gap.create_source()
            await gap.send(*SHOWN)
            gap.start()
            for policy in (STOP, SKIP):
                await gap.has(policy, *SHOWN)
            gap.post("/pause")
            await gap.is_in_state("paused")
            pair.source.server.kill()
            _lose_tail(pair.source.log_folder(gap.topic, 0))
            await start_again(pair.source)
            await gap.send(*LATER)
            gap.post("/resume")
            await has_lost_its_end(gap, SHOWN, KEPT, LATER)

    asyncio.run(story())


@in_pairs("millrace-millrace", "millrace-kafka", "kafka-millrace", mortal=True)
def test_target_that_is_away_ends_the_drain_in_time_and_the_next_start_repeats_nothing(pair: Pair) -> None:
    """A mirror that is told to stop while its target is away ends in time, says what it leaves, and whoever
    comes next carries it without a repeat."""
    topic = pair.unique("stopping")
    mirror = pair.mirror([topic], start=False, drain_timeout_ms=DRAIN_TIMEOUT_MS, group=GROUP)
    sent = 0

    async def send_some(source: Cluster) -> None:
        nonlocal sent
        numbers = [str(number).encode() for number in range(sent, sent + 50)]
        now_ms = time.time_ns() // 1_000_000
        await send(source, topic, 0, build_batch([Record(None, each, (), now_ms) for each in numbers]))
        sent += len(numbers)

    async def arrived() -> bool:
        # Not a connection of before: the target was frozen with it.
        async with pair.target.cluster() as target:
            numbers = [int(record.value or b"-1") async for record in read_topic_to_end(target, topic)]
        assert numbers == list(range(len(numbers))), "each record once, in order"
        return len(numbers) == sent

    async def story() -> None:
        async with pair.source.cluster() as source:
            await create_topic(source, topic, 1, 1)
            async with pair.target.cluster() as target:
                await create_topic(target, topic, 1, 1)
            mirror.start()
            await send_some(source)
            await until(arrived, logs_of=[mirror])
            assert mirror.process is not None
            os.kill(pair.target.pid, signal.SIGSTOP)
            try:
                for _ in range(5):
                    await send_some(source)

                async def is_under_way() -> bool:
                    partitions = (await asyncio.to_thread(mirror.status)).get("partitions", ())
                    return any(each["outstanding_bytes"] for each in partitions)

                await until(is_under_way, logs_of=[mirror])
                mirror.process.send_signal(signal.SIGTERM)
                within_s = patience(DRAIN_TIMEOUT_MS / 1000 + GRACE_S)
                status = await asyncio.to_thread(mirror.process.wait, within_s)
            finally:
                os.kill(pair.target.pid, signal.SIGCONT)
            assert status == WorkLeft.exit_status, mirror.log
            (said,) = (line for line in mirror.log.splitlines() if line.startswith("millrace mirror: "))
            assert f"1 partition ({pair.source.name}/{topic}-0), " in said
            assert f"target {pair.target.name} did not take it within drain_timeout_ms 3000" in said
            assert said.endswith("nothing is lost, nothing is repeated")
            mirror.start()
            await send_some(source)
            await until(arrived, logs_of=[mirror])
            assert await asyncio.to_thread(mirror.terminate) == 0, mirror.log

    asyncio.run(story())
