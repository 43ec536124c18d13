"""What one worker of a mirror is told holds for the others, too."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest
import yaml

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from tests.cluster.fed_workers import PARTITIONS, until_shared
from tests.cluster.mirror_calls import answered, call, command, partitions, states
from tests.cluster.mirror_process import MirrorProcess, end_offset, send, until
from tests.cluster.test_mirror_control import arrives, batch, both_in
from tests.pairs import Pair, in_pairs

# Who is frozen keeps its seat meanwhile.
GROUP = {"session_timeout_ms": 60_000, "rebalance_timeout_ms": 10_000}
FETCH = {"partition_max_bytes": 65_536, "max_bytes": 65_536}
BATCHES, RECORDS = 60, 50
LIMIT = 400_000
# Enough to tell a limit from twice that limit.
CARRIED = 1_800_000


async def crew(pair: Pair, topic: str) -> list[MirrorProcess]:
    """Two workers that carry half of the topic's partitions each, and know each other."""
    first = pair.mirror([topic], group=GROUP, fetch=FETCH)
    workers = [first, pair.mirror([topic], name=first.settings["name"], group=GROUP, fetch=FETCH)]
    await until_shared(workers)
    await until(lambda: answered(both_in(*workers)), logs_of=workers)
    return workers


@in_pairs("millrace-kafka", "kafka-millrace")
def test_a_pause_and_a_limit_that_one_worker_is_told_hold_for_both(pair: Pair) -> None:
    topic = pair.unique("shared")

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, PARTITIONS, 1)
            workers = await crew(pair, topic)
            await paused(source, target, topic, workers)
            await throttled(topic, workers)
            call(workers[1], "POST", "/throttle", {"source": "src", "bytes_per_second": None})
            await arrives(target, topic, BATCHES * RECORDS, *workers)

    asyncio.run(story())


async def paused(source: Cluster, target: Cluster, topic: str, workers: list[MirrorProcess]) -> None:
    """By a word to the first; of what comes then nothing is carried by either."""
    command(workers[0], "pause", f"src/{topic}")

    async def both_stand() -> bool:
        return [states(each) for each in workers] == [{"paused"}] * 2

    await until(both_stand, logs_of=workers)
    for number in range(BATCHES):
        await send(source, topic, number % PARTITIONS, batch(RECORDS, 1_000))

    async def all_waits() -> bool:
        behind = [each["lag_records"] for each in partitions(*workers).values()]
        return behind == [BATCHES * RECORDS // PARTITIONS] * PARTITIONS

    await until(all_waits, lambda: str(partitions(*workers)))
    assert [await end_offset(target, topic, number) for number in range(PARTITIONS)] == [0] * PARTITIONS


def carried(topic: str, worker: MirrorProcess) -> int:
    return sum(each["bytes"] for each in worker.status()["topics"] if each["topic"] == topic)


async def throttled(topic: str, workers: list[MirrorProcess]) -> None:
    """By a word to the second, and let go by one to it: what both carry together is within the limit."""
    _, second = workers
    command(second, "throttle", "src", f"{LIMIT // 1_000}kB")

    async def both_know() -> bool:
        limits = [each.status()["sources"][0]["throttle_bytes_per_second"] for each in workers]
        return limits == [LIMIT] * 2

    await until(both_know, logs_of=workers)
    before = [carried(topic, each) for each in workers]
    began = time.monotonic()
    call(second, "POST", "/resume", {"source": "src", "topic": topic})

    async def enough() -> bool:
        grown = [carried(topic, each) - was for each, was in zip(workers, before, strict=True)]
        elapsed_s = time.monotonic() - began
        # Two buckets that hold a second's worth together, and a fetch of each worker.
        assert sum(grown) <= LIMIT * (elapsed_s + 1) + len(workers) * FETCH["max_bytes"], (grown, elapsed_s)
        return sum(grown) >= CARRIED and min(grown) > 0

    await until(enough, logs_of=workers)


@pytest.mark.long
@in_pairs("millrace-kafka", "kafka-millrace")
def test_a_reload_reaches_both_workers_and_names_one_that_does_not_take_it(pair: Pair) -> None:
    topic = pair.unique("shared")

    async def story() -> None:
        async with pair.source.cluster() as source:
            await create_topic(source, topic, PARTITIONS, 1)
        await reloaded(*await crew(pair, topic))

    asyncio.run(story())


async def reloaded(first: MirrorProcess, second: MirrorProcess) -> None:
    """Each reads its own file. Where one does not, the other has done it all the same."""

    def set_policy(worker: MirrorProcess, policy: str) -> None:
        worker.settings["gaps"] = {"default": policy}
        worker.config_path.write_text(yaml.safe_dump(worker.settings))

    def takes(worker: MirrorProcess) -> str:
        return f"http://127.0.0.1:{worker.port}: reloaded: gaps.default\n"

    def nothing_new(worker: MirrorProcess) -> str:
        return f"http://127.0.0.1:{worker.port}: nothing has changed in the file\n"

    for worker in (first, second):
        set_policy(worker, "skip")
    said = command(first, "reload")
    assert sorted(said.splitlines(True)) == sorted([takes(first), takes(second)])

    set_policy(first, "stop")
    set_policy(second, "maybe")
    said = command(first, "reload", expect=1)
    assert takes(first) in said and takes(second) not in said
    assert f"millrace: http://127.0.0.1:{second.port}: " in said and "gaps.default" in said

    set_policy(first, "skip")
    set_policy(second, "stop")
    assert second.process is not None
    second.process.send_signal(signal.SIGSTOP)
    try:

        async def noticed() -> bool:
            workers: list[dict[str, Any]] = call(first, "GET", "/mirror")[2]["workers"]
            return any(each["error"] for each in workers)

        await until(noticed, logs_of=[first])
        said = command(first, "reload", expect=1)
        assert takes(first) in said
        silent = f"http://127.0.0.1:{second.port} does not answer: no answer within 2 s"
        assert f"millrace: not reloaded: {silent}\n" in said
    finally:
        second.process.send_signal(signal.SIGCONT)
    await until(lambda: answered(both_answer(first)), logs_of=[first, second])
    said = command(first, "reload")
    assert sorted(said.splitlines(True)) == sorted([nothing_new(first), takes(second)])


def both_answer(asked: MirrorProcess) -> Any:
    async def known() -> bool:
        return [each["error"] for each in call(asked, "GET", "/mirror")[2]["workers"]] == [None, None]

    return known
