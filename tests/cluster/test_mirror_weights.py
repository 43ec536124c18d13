"""Workers share the load and not the count: of two partitions with fifty times the bytes of the others, one
worker that has both gives one away, as the rule in mirror/sharing/balance.py says.

Rates are looked at a few times as often here as otherwise, so that nobody waits for a minute.
"""

from __future__ import annotations

import asyncio
import re
import sys

from millrace.broker.client.admin import create_topic
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess, send, until
from tests.cluster.test_mirror_sharing import share_of
from tests.pairs import Pair, in_pairs

PARTITIONS = 4
LIGHT_SIZE, TIMES = 4_000, 50
LOAD_PAUSE_S = 0.05
GROUP = {"session_timeout_ms": 6_000, "rebalance_timeout_ms": 10_000}


class Watchful(MirrorProcess):
    """Its rates count after 2 s instead of 10, and are told again after 3 s instead of a minute."""

    def command(self) -> list[str]:
        words = super().command()
        program = (
            "import sys; from millrace.mirror import worker; from millrace.mirror.sharing import rates; "
            "worker.SAMPLE_INTERVAL_S = 1.0; rates.MEASURED_AFTER_MS = 2_000; rates.STALE_AFTER_MS = 3_000; "
            "from millrace.deploy.cli import main; sys.exit(main())"
        )
        return [sys.executable, "-c", program, *words[words.index("mirror") :]]


@in_pairs("millrace-millrace", "kafka-kafka")
def test_two_partitions_of_fifty_times_the_load_end_apart(pair: Pair) -> None:
    topic, name = pair.unique("uneven"), pair.unique("sharing")
    workers = [
        Watchful(
            pair.folder / f"worker-{number}",
            pair.target.bootstrap,
            {pair.source.name: pair.source.bootstrap},
            topics=[re.escape(topic)],
            target_name=pair.target.name,
            name=name,
            group=GROUP,
        )
        for number in range(2)
    ]
    pair.mirrors.extend(workers)
    sent = [0] * PARTITIONS

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, PARTITIONS, 1)
            for worker in workers:
                worker.start()

            async def shares() -> list[list[int]]:
                return [await asyncio.to_thread(share_of, worker) for worker in workers]

            def told() -> str:
                return "\n---\n".join([str(sent), *(worker.log[-3000:] for worker in workers)])

            async def even() -> list[list[int]] | None:
                found = await shares()
                are_even = [len(each) for each in found] == [2, 2] and not {*found[0]} & {*found[1]}
                return found if are_even else None

            async def fill(partition: int) -> None:
                size = LIGHT_SIZE * (TIMES if partition in heavy else 1)
                while not is_over.is_set():
                    record = Record(None, (b"%d " % sent[partition]).ljust(size, b"."))
                    await send(source, topic, partition, build_batch([record]))
                    sent[partition] += 1
                    await asyncio.sleep(LOAD_PAUSE_S)

            async def are_apart() -> bool:
                found = await shares()
                is_whole = sorted(found[0] + found[1]) == list(range(PARTITIONS))
                return is_whole and all(len({*heavy} & {*each}) == 1 for each in found)

            # Without any load each has as many as the other.
            heavy = (await until(even, told) or [[]])[0]
            is_over = asyncio.Event()
            loading = asyncio.gather(*map(fill, range(PARTITIONS)))
            try:
                await until(are_apart, told)
            finally:
                is_over.set()
                await loading

            async def numbers() -> list[list[int]]:
                found: list[list[int]] = [[] for _ in sent]
                async for record in read_topic_to_end(target, topic):
                    found[record.partition].append(int((record.value or b"").split()[0]))
                return found

            async def all_there() -> bool:
                return [len(each) for each in await numbers()] >= sent

            await until(all_there, told)
            assert await numbers() == [list(range(count)) for count in sent]

    asyncio.run(story())
