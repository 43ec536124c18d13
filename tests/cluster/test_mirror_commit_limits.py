"""The limits of a transaction, each where nothing else closes one: so many bytes, and so much time.

There is always more to come, which is waited for without end here; without a limit all that comes after the
first acknowledgement would be one transaction. How many there were is read from the target's log.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.delivery.transaction import MAX_SIZE
from tests.cluster.gap_stories import post
from tests.cluster.mirror_calls import partitions, states
from tests.cluster.mirror_process import all_batches, end_offset, program_with, send, until
from tests.pairs import Pair, in_pairs

NEVER_MS = 3_600_000
# Nor do sizes begin small and grow, or shrink where the machine is slow.
NOTHING_ELSE = {"LINGER_MS": NEVER_MS, "FIRST_SIZE": MAX_SIZE, "SLOW_MS": NEVER_MS}
RECORD_SIZE = 1_000


async def transactions(cluster: Cluster, topic: str) -> list[int]:
    """The bytes of each transaction that was committed to the topic's only partition, in the order of their
    ends."""
    open_bytes: defaultdict[int, int] = defaultdict(int)
    found = []
    async for _, header, is_data in all_batches(cluster, topic, 0):
        if is_data:
            open_bytes[header.producer_id] += header.size
        elif header.is_control and (size := open_bytes.pop(header.producer_id, 0)):
            found.append(size)
    assert not open_bytes
    return found


def carried(
    pair: Pair,
    batches: int,
    records: int,
    constants: Mapping[str, int],
    bytes_per_second: int | None = None,
) -> list[int]:
    """The transactions in which a mirror with these constants carries so many batches, that are there
    before the first is carried."""
    topic = pair.unique("limits")
    mirror = pair.mirror([topic], start=False)
    mirror.program = program_with(
        {f"delivery.transaction.{name}": value for name, value in constants.items()}
    )
    batch = build_batch([Record(None, b"v" * RECORD_SIZE)] * records)

    async def story() -> list[int]:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            for cluster in (source, target):
                await create_topic(cluster, topic, 1, 1)
            mirror.start()

            async def in_state(state: str) -> bool:
                return states(mirror) == {state}

            await until(lambda: in_state("running"), logs_of=[mirror])
            post(mirror, "/pause", source=pair.source.name)
            await until(lambda: in_state("paused"), logs_of=[mirror])
            for _ in range(batches):
                await send(source, topic, 0, batch)
            post(mirror, "/throttle", source=pair.source.name, bytes_per_second=bytes_per_second)
            post(mirror, "/resume", source=pair.source.name)

            async def all_committed() -> bool:
                positions = [each["position"] for each in partitions(mirror).values()]
                ends = [await end_offset(target, topic, 0, read_committed=each) for each in (True, False)]
                return positions == [batches * records] and ends[0] == ends[1]

            await until(all_committed, logs_of=[mirror])
            return await transactions(target, topic)

    return asyncio.run(story())


@in_pairs("millrace-millrace", "kafka-kafka")
def test_transaction_is_closed_by_its_bytes_before_its_time(pair: Pair) -> None:
    records = 900
    sizes = carried(pair, 84, records, NOTHING_ELSE | {"MAX_AGE_MS": NEVER_MS})
    most = MAX_SIZE + records * (RECORD_SIZE + 100)
    print("bytes of each transaction:", sizes)
    assert sum(size >= MAX_SIZE for size in sizes) == 2, sizes
    assert all(size < most for size in sizes), sizes


@in_pairs("millrace-millrace", "kafka-kafka")
def test_transaction_is_closed_by_its_time_long_before_its_bytes(pair: Pair) -> None:
    sizes = carried(pair, 40, 64, NOTHING_ELSE, bytes_per_second=1_000_000)
    print("bytes of each transaction:", sizes)
    assert sum(sizes) < MAX_SIZE
    assert len(sizes) > 2, sizes
