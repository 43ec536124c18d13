"""How late a mirror says that it is: lag in seconds and the end-to-end latency, beside what the test itself
measured. Records that were written years ago are as late as they have waited here.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.gap_stories import values
from tests.cluster.mirror_calls import call, partitions, runs
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.pairs import Pair, in_pairs
from tests.waiting import until_async

YEAR_2013_MS = 1_370_000_000_000
OLD_BATCHES, RECORDS_OF_A_BATCH = 200, 5
WAITS_S = 1.5
LIVE_RECORDS = 10


class Observed(NamedTuple):
    """The end-to-end histogram for one way of knowing where it begins; `up_to` counts by upper bound."""

    count: float
    sum_s: float
    up_to: dict[float, float]


def samples(mirror: MirrorProcess, family: str) -> list[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each sample of a family of /metrics."""
    return [
        (sample.name, sample.labels, sample.value)
        for each in text_string_to_metric_families(mirror.get("/metrics")[1])
        if each.name == family
        for sample in each.samples
    ]


def end_to_end(mirror: MirrorProcess) -> dict[str, Observed]:
    """By the label `from`."""
    found: dict[str, Observed] = {}
    for name, labels, value in samples(mirror, "millrace_mirror_end_to_end_seconds"):
        each = found.setdefault(labels["from"], Observed(0, 0, {}))
        if name.endswith("_bucket"):
            each.up_to[float(labels["le"])] = value
        else:
            changed = {"count": value} if name.endswith("_count") else {"sum_s": value}
            found[labels["from"]] = each._replace(**changed)
    return found


def lag_seconds(mirror: MirrorProcess, topic: str) -> list[float]:
    """Of its one partition, as the status and as the metrics have it."""
    told = [
        value
        for _, labels, value in samples(mirror, "millrace_mirror_lag_seconds")
        if labels["topic"] == topic
    ]
    return [partitions(mirror)[topic, 0]["lag_seconds"], *told]


@in_pairs("kafka-millrace", "millrace-kafka")
def test_what_is_late_is_counted_from_when_it_waited_and_not_from_what_the_records_say(pair: Pair) -> None:
    old, live = pair.unique("old"), pair.unique("live")

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, old, 1, 1, {"retention.ms": "-1"})
            await create_topic(source, live, 1, 1)
            # It keeps the times of its own appends: before them nothing was acknowledged.
            await create_topic(target, live, 1, 1, {"message.timestamp.type": "LogAppendTime"})
            mirror = pair.mirror([old, live])
            await runs(mirror, 2)
            await another_year(mirror, source, old)
            await live_records(mirror, source, target, live)

    asyncio.run(story())


async def another_year(mirror: MirrorProcess, source: Cluster, topic: str) -> None:
    """Old records come while the mirror is paused, wait, and are carried."""
    where = {"source": "src", "topic": topic}
    call(mirror, "POST", "/pause", where)

    async def is_paused() -> bool:
        return partitions(mirror)[topic, 0]["state"] == "paused"

    await until(is_paused, logs_of=[mirror])
    began = time.monotonic()
    for number in range(OLD_BATCHES):
        at_ms = YEAR_2013_MS + number
        records = [Record(b"k", b"%d" % number, (), at_ms) for _ in range(RECORDS_OF_A_BATCH)]
        await send(source, topic, 0, build_batch(records))

    async def waits() -> bool:
        """All of it is seen to wait, and no longer than it can have."""
        found = lag_seconds(mirror, topic)
        assert len(found) == 2 and max(found) <= time.monotonic() - began
        behind = partitions(mirror)[topic, 0]["lag_records"]
        return behind == OLD_BATCHES * RECORDS_OF_A_BATCH and min(found) >= WAITS_S

    await until(waits, lambda: str(partitions(mirror)))
    call(mirror, "POST", "/resume", where)

    async def has_caught_up() -> bool:
        found = lag_seconds(mirror, topic)
        assert max(found) <= time.monotonic() - began
        return partitions(mirror)[topic, 0]["lag_records"] == 0

    await until(has_caught_up, logs_of=[mirror])
    elapsed_s = time.monotonic() - began
    assert lag_seconds(mirror, topic) == [0, 0]
    (known_by, seen), *others = end_to_end(mirror).items()
    assert (known_by, others) == ("seen", [])
    assert seen.sum_s <= seen.count * elapsed_s
    bounds = sorted(seen.up_to)
    assert seen.up_to[min(each for each in bounds if each >= elapsed_s)] == seen.count > 0
    # The first of it has waited for as long as was seen above.
    assert seen.up_to[max(each for each in bounds if each < WAITS_S)] < seen.count


async def live_records(mirror: MirrorProcess, source: Cluster, target: Cluster, topic: str) -> None:
    """Each is written when the one before it can be read: the target had it before, at the time of its
    append at the earliest."""
    created_ms, read_ms = [], []
    for number in range(LIVE_RECORDS):
        created_ms.append(time.time_ns() // 1_000_000)
        record = Record(b"k", b"%d" % number, (), created_ms[-1])
        await send(source, topic, 0, build_batch([record]))

        async def is_there(count: int = number + 1) -> bool:
            return len(await values(target, topic)) == count

        await until_async(is_there, logs_of=[mirror], every_s=0.005)
        read_ms.append(time.time_ns() / 1_000_000)
    appended_ms = [record.timestamp_ms async for record in read_topic_to_end(target, topic)]
    observed = end_to_end(mirror)["create"]
    assert observed.count == LIVE_RECORDS
    assert sum(appended_ms) - sum(created_ms) <= round(observed.sum_s * 1_000, 3)
    assert observed.sum_s * 1_000 <= sum(read_ms) - sum(created_ms)
    assert lag_seconds(mirror, topic) == [0, 0]
