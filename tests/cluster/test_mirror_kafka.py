"""Through Apache Kafka and back: Millrace -> Apache Kafka -> Millrace, with every byte of the records."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.records import Record, build_batch
from tests.cluster.mirror_process import MirrorProcess, end_offset, record_bytes, send, until
from tests.peers.kafka import KafkaPeer
from tests.servers import BrokerProcess

pytestmark = [pytest.mark.java, pytest.mark.kafka]


def test_records_survive_the_way_through_apache_kafka(
    broker_factory: Callable[..., BrokerProcess], kafka_peer: KafkaPeer, tmp_path: Path
) -> None:
    ewr, agg = broker_factory(), broker_factory()
    topics = [r"chain\..*"]
    there = MirrorProcess(
        tmp_path / "there", kafka_peer.bootstrap, {"ewr": ewr.bootstrap}, topics=topics, name="there"
    )
    back = MirrorProcess(
        tmp_path / "back", agg.bootstrap, {"kafka": kafka_peer.bootstrap}, topics=topics, name="back"
    )
    there.start()
    back.start()
    try:
        asyncio.run(chain(ewr, agg, there, back))
    finally:
        there.kill()
        back.kill()


async def chain(ewr: BrokerProcess, agg: BrokerProcess, there: MirrorProcess, back: MirrorProcess) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
        await create_topic(source, "chain.flights", 2, 1, {"retention.ms": "-1"})
        for number in range(200):
            records = [
                Record(rng.randbytes(5), rng.randbytes(rng.randrange(300)), (("h", None),), number)
                for _ in range(rng.randint(1, 20))
            ]
            await send(source, "chain.flights", number % 2, build_batch(records, compression=number % 5))
        for partition in range(2):
            end = await end_offset(source, "chain.flights", partition)

            async def all_there(partition: int = partition, end: int = end) -> bool:
                return await end_offset(target, "chain.flights", partition) >= end

            await until(all_there, lambda: there.log + back.log)
            sent = await record_bytes(source, "chain.flights", partition)
            assert await record_bytes(target, "chain.flights", partition) == sent
