"""A partition that is stopped at a gap beside others that go on: it holds up none of them, and what an
operator says of it is said of it alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from millrace.broker.client.admin import alter_configs, create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import LATEST
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import build_batch
from millrace.broker.protocol.topic_partition import TopicPartition
from tests.cluster.audited_topics import read_all
from tests.cluster.gap_stories import one
from tests.cluster.mirror_calls import command, partitions
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.pairs import Pair, in_pairs

LIMITS = (1_000, 20_000, 100_000)
LARGE, LARGER = b"L" * 5_000, b"L" * 50_000
"""Each over a limit, and under the next."""
SOME = 30
"""So many records more have to arrive before it is said that a partition goes on."""
PAUSE_S = 0.01


class Flow:
    """What is sent to some partitions of the source, and what a reader of committed records finds of it in
    the target."""

    def __init__(self, source: Cluster, target: Cluster, *keys: TopicPartition) -> None:
        self._source, self._target = source, target
        self._sent: dict[TopicPartition, dict[int, bytes]] = {key: {} for key in keys}
        self._left_out: set[tuple[TopicPartition, int]] = set()

    async def send(self, key: TopicPartition, *values: bytes) -> int:
        """As one batch; the offset of the first of them."""
        first = await send(self._source, *key, build_batch([one(value) for value in values]))
        self._sent[key].update(enumerate(values, first))
        return first

    def leave_out(self, key: TopicPartition, offset: int) -> None:
        self._left_out.add((key, offset))

    @asynccontextmanager
    async def under_load(self, *keys: TopicPartition) -> AsyncIterator[None]:
        """Records come to these partitions all the while."""
        is_over = asyncio.Event()

        async def feed(key: TopicPartition) -> None:
            while not is_over.is_set():
                await self.send(key, b"%d" % len(self._sent[key]))
                await asyncio.sleep(PAUSE_S)

        feeding = [asyncio.create_task(feed(key)) for key in keys]
        try:
            yield
        finally:
            is_over.set()
            await asyncio.gather(*feeding)

    async def found(self) -> dict[TopicPartition, list[bytes]]:
        found: dict[TopicPartition, list[bytes]] = {key: [] for key in self._sent}
        for topic in {topic for topic, _ in self._sent}:
            async for record in read_topic_to_end(self._target, topic):
                found[topic, record.partition].append(record.value or b"")
        return found

    def expected(self, key: TopicPartition) -> list[bytes]:
        """Everything that was sent, in its order, without what an operator let pass."""
        sent = sorted(self._sent[key].items())
        return [value for offset, value in sent if (key, offset) not in self._left_out]

    async def stable_ends(self) -> dict[TopicPartition, tuple[int, int]]:
        """(last stable offset, end) of each partition of the target."""
        wanted = dict.fromkeys(self._sent, LATEST)
        stable = await self._target.list_offsets(wanted, True)
        ends = await self._target.list_offsets(wanted)
        return {key: (stable[key].offset, ends[key].offset) for key in wanted}


class Stage:
    """A mirror of a flow, and an operator of it."""

    def __init__(self, pair: Pair, flow: Flow, mirror: MirrorProcess) -> None:
        self._pair, self.flow, self.mirror = pair, flow, mirror

    def place(self, key: TopicPartition) -> str:
        """As an operator names it."""
        return f"{self._pair.source.name}/{key[0]}:{key[1]}"

    def stopped(self) -> dict[TopicPartition, tuple[str, int, int]]:
        rows = partitions(self.mirror)
        gaps = {key: row["gap"] for key, row in rows.items() if row["state"] == "stopped"}
        return {key: (gap["class"], gap["from"], gap["to"]) for key, gap in gaps.items()}

    async def is_stopped(self, at: dict[TopicPartition, int]) -> None:
        """Until these stand at the one record that is too large, and nobody else stands or waits."""
        wanted = {key: ("too_large", offset, offset + 1) for key, offset in at.items()}

        async def is_so() -> bool:
            states = {key: row["state"] for key, row in partitions(self.mirror).items() if key not in at}
            return self.stopped() == wanted and set(states.values()) == {"running"}

        await until(is_so, lambda: f"{partitions(self.mirror)}", logs_of=[self.mirror])

    async def goes_on(self, *keys: TopicPartition) -> None:
        """Until readers have seen more of each of these partitions than there was."""
        before = await self.flow.found()

        async def has_more() -> bool:
            now = await self.flow.found()
            return all(len(now[key]) >= len(before[key]) + SOME for key in keys)

        await until(has_more, logs_of=[self.mirror])

    async def holds(self, key: TopicPartition, *values: bytes) -> None:
        """Until readers see these in the partition, whatever comes behind them."""

        async def is_there() -> bool:
            found = (await self.flow.found())[key]
            return Counter(values) <= Counter(found)

        await until(is_there, lambda: str(partitions(self.mirror).get(key)), logs_of=[self.mirror])

    async def shows(self, keys: Collection[TopicPartition]) -> None:
        """Until readers see everything of these partitions, once and in order, and nothing else."""

        async def is_there() -> bool:
            found = await self.flow.found()
            return all(found[key] == self.flow.expected(key) for key in keys)

        await until(is_there, lambda: str(partitions(self.mirror)), logs_of=[self.mirror])


@in_pairs("kafka-kafka", "millrace-kafka", "kafka-millrace", "millrace-millrace")
def test_partition_that_is_stopped_holds_up_no_other_and_is_let_go_on_alone(pair: Pair) -> None:
    """All of them share one lane, so one transaction."""
    topic, other = pair.unique("flights"), pair.unique("orders")
    first, second, third, apart = (topic, 0), (topic, 1), (topic, 2), (other, 0)
    everything = (first, second, third, apart)

    async def raise_limit(target: Cluster, limit: int) -> None:
        await alter_configs(target, topic, {"max.message.bytes": str(limit)})

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            for cluster, configs in ((source, {}), (target, {"max.message.bytes": str(LIMITS[0])})):
                await create_topic(cluster, topic, 3, 1, configs)
                await create_topic(cluster, other, 1, 1)
            flow = Flow(source, target, *everything)
            mirror = pair.mirror([topic, other], lanes=1, config_sync={"enabled": False})
            stage = Stage(pair, flow, mirror)
            for key in everything:
                await flow.send(key, b"before")
            await stage.shows(everything)
            async with flow.under_load(first, third, apart):
                # One is stopped: the others arrive, and nothing of theirs, or of it, stays in a transaction.
                at = await flow.send(second, b"A", LARGE, b"B") + 1
                await stage.is_stopped({second: at})
                await stage.holds(second, b"A")
                ends = await flow.stable_ends()
                await stage.goes_on(first, third, apart)
                later = await flow.stable_ends()
                assert all(later[key][0] > ends[key][0] for key in (first, third, apart)), (ends, later)
                assert later[second][0] == later[second][1] == ends[second][1]
                read = await asyncio.to_thread(read_all, pair.target.bootstrap, topic)
                values = [message.value() for message in read if message.partition() == second[1]]
                assert values == [b"before", b"A"]
                shown = command(mirror, "status")
                line = f"{stage.place(second)} is stopped: too large, 1 offset from {at}\n"
                assert line in shown and shown.count(" is stopped: ") == 1, shown
                refused = command(mirror, "skip", stage.place(first), expect=1)
                assert f"{stage.place(first)} is not stopped at a gap: it is running" in refused

                # Two are stopped, at records that are alike: one is let pass.
                also_at = await flow.send(third, b"C", LARGE, b"D") + 1
                await stage.is_stopped({second: at, third: also_at})
                said = command(mirror, "skip", stage.place(second))
                assert said == f"the too_large gap of {stage.place(second)} at offset {at} is let pass\n"
                flow.leave_out(second, at)
                await stage.shows([second])
                await stage.goes_on(first, apart)
                await stage.is_stopped({third: also_at})
                before = (await flow.found())[third]
                assert before[-1] == b"C" and LARGE not in before

                # Two again, and both could go on now: one is told to.
                at = await flow.send(second, b"E", LARGE, b"F") + 1
                await stage.is_stopped({second: at, third: also_at})
                await raise_limit(target, LIMITS[1])
                assert command(mirror, "resume", stage.place(second)) == f"{stage.place(second)} goes on\n"
                await stage.shows([second])
                await stage.goes_on(first, apart)
                await stage.is_stopped({third: also_at})
                assert (await flow.found())[third] == before

                # And the other way round.
                at = await flow.send(second, b"G", LARGER, b"H") + 1
                await stage.is_stopped({second: at, third: also_at})
                await raise_limit(target, LIMITS[2])
                await stage.holds(second, b"G")
                before = (await flow.found())[second]
                said = command(mirror, "retry", stage.place(third))
                assert said == f"what is stopped of {stage.place(third)} is tried again\n"
                await stage.holds(third, LARGE, b"D")
                await stage.goes_on(first, third, apart)
                await stage.is_stopped({second: at})
                assert (await flow.found())[second] == before and before[-1] == b"G"
                command(mirror, "resume", f"{pair.source.name}/{topic}")
                await stage.shows([second])
            await stage.shows(everything)
            counted = 'millrace_mirror_gaps_total{class="too_large",source="src"} 4.0'
            assert counted in mirror.get("/metrics")[1]
            assert mirror.status()["troubles"] == []

    asyncio.run(story())
