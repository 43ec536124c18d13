"""The client while its server is killed, comes back, and comes back elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from millrace.broker.client import admin
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_member import GroupMember
from millrace.broker.client.producer import Producer
from millrace.broker.client.read_to_end import read_topic_to_end
from tests.pairs import MORTAL_KAFKA
from tests.peers.kafka import KafkaPeer
from tests.ports import free_port
from tests.servers import BrokerProcess
from tests.waiting import patience

RECORD_COUNT = 300
KILL_AT = 100


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[KafkaPeer]:
    """A node for one test alone, which may do with it what it likes."""
    with KafkaPeer(tmp_path / "kafka", settings=MORTAL_KAFKA) as peer:
        yield peer


async def produce_through(ewr: Cluster, trouble: Callable[[], Awaitable[None]]) -> None:
    """Send records while `trouble` happens; every one must be acknowledged, and be there exactly once, in
    order, although answers got lost. A group member keeps or regains its seat meanwhile."""
    await admin.create_topic(ewr, "flights")
    has_share = False

    async def assigned(share: bytes) -> None:
        nonlocal has_share
        has_share = True

    async def revoked() -> None:
        nonlocal has_share
        has_share = False

    member = GroupMember(
        ewr,
        "workers",
        protocol_type="millrace-test",
        protocols=[("all", b"")],
        on_assign=assigned,
        on_revoke=revoked,
        on_lost=revoked,
        assign=lambda members: dict.fromkeys(members, b"all"),
        session_timeout_ms=6000,
        heartbeat_interval_ms=200,
    )
    async with Producer(ewr, linger_ms=1) as producer, member:
        futures = []
        troubling: asyncio.Task[None] | None = None
        for number in range(RECORD_COUNT):
            futures.append(await producer.send("flights", key=None, value=b"%d" % number, partition=0))
            if number == KILL_AT:
                troubling = asyncio.ensure_future(trouble())
            await asyncio.sleep(0.002)
        assert troubling is not None
        await troubling
        await asyncio.wait_for(asyncio.gather(*futures), patience(120))
        async with asyncio.timeout(patience(120)):
            while not has_share:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    values = [record.value async for record in read_topic_to_end(ewr, "flights")]
    assert values == [b"%d" % number for number in range(RECORD_COUNT)]


def run(bootstrap: list[str], test: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Cluster("ewr", bootstrap, request_timeout_ms=30_000) as ewr:
            await asyncio.wait_for(test(ewr), patience(300))

    uvloop.run(main())


@pytest.mark.java
@pytest.mark.kafka
def test_kafka_that_is_restarted_at_another_port_is_followed(own_kafka: KafkaPeer) -> None:
    # A client cannot guess the new port: one that will not move is in its list of servers, as in life.
    first = own_kafka.bootstrap
    second = free_port()

    async def trouble() -> None:
        await asyncio.to_thread(own_kafka.kill)
        await asyncio.to_thread(own_kafka.restart, port=second)

    run([first, f"127.0.0.1:{second}"], lambda ewr: produce_through(ewr, trouble))


@pytest.mark.java
def test_millrace_broker_that_is_killed_and_started_again_loses_nothing(broker: BrokerProcess) -> None:
    async def trouble() -> None:
        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)

    run([broker.bootstrap], lambda ewr: produce_through(ewr, trouble))
