"""Finding a cluster: which servers are asked, in which order, and how long it may take."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from millrace.broker.client import connection_pool as pool_module
from millrace.broker.client import opening
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import Connection
from millrace.broker.client.opening import open_connection
from millrace.broker.errors import (
    ClusterUnreachable,
    NetworkException,
    RequestTimedOut,
)
from millrace.broker.protocol.address import Address
from tests.ports import free_port
from tests.unit.client.cluster_stage import FakeBroker, cluster, hold
from tests.unit.client.scripted_server import (
    Peer,
    ScriptedServer,
)
from tests.waiting import until_async as until


def test_dead_bootstrap_servers_are_passed_over() -> None:
    async def main() -> None:
        async with FakeBroker() as broker:
            dead = [f"127.0.0.1:{free_port()}" for _ in range(3)]
            async with cluster(*dead, broker.server.address) as ewr:
                view = await ewr.metadata()
            assert view.cluster_id == "scripted"
            assert view.leader("flights", 1) == 1
            assert view.leader("flights", 2) is None

    asyncio.run(main())


def test_bootstrap_begins_at_random_servers() -> None:
    async def main() -> None:
        async with FakeBroker() as one, FakeBroker() as two:
            for seed in range(12):
                servers = (one.server.address, two.server.address)
                async with Cluster("ewr", servers, rng=random.Random(seed)) as ewr:
                    await ewr.metadata([])
            assert one.metadata_count and two.metadata_count
            assert one.metadata_count + two.metadata_count == 12

    asyncio.run(main())


def test_unreachable_cluster_is_named_with_every_address_and_reason() -> None:
    async def main() -> None:
        async with ScriptedServer(hold) as silent:
            dead = f"127.0.0.1:{free_port()}"
            async with cluster(dead, silent.address, request_timeout_ms=1_000) as ewr:
                with pytest.raises(ClusterUnreachable) as caught:
                    await ewr.metadata()
        text = str(caught.value)
        assert text.startswith("cluster ewr: no server answers; tried ")
        assert f"{dead}: Connection refused" in text
        assert f"{silent.address}: no " in text
        assert "\n" not in text

    asyncio.run(main())


@pytest.mark.parametrize("where", [Address("kafka..example.com", 9092), Address("127.0.0.1", -1)])
def test_address_that_there_cannot_be_is_one_that_is_not_reached(where: Address) -> None:
    """Whoever writes a config, or a broker that advertises it, has made it up."""

    async def main() -> None:
        with pytest.raises(NetworkException, match=r"cluster ewr at .*: no host and port that there can be"):
            await open_connection("ewr", where, client_id="test", timeout_ms=60_000)

    asyncio.run(main())


def test_each_of_many_who_ask_waits_no_longer_than_one(tried: list[Address]) -> None:
    """Of those who wait for another who asks, none begins to wait anew when that has asked in vain."""

    async def main() -> None:
        dead = cluster(f"127.0.0.1:{free_port()}", request_timeout_ms=300)
        now, loop = 0.0, asyncio.get_running_loop()
        dead._now = lambda: loop.time() + now  # type: ignore[method-assign]
        asked = [asyncio.create_task(dead.metadata([topic])) for topic in "abcdefgh"]
        await until(lambda: bool(tried))
        now, tried_count = 1.0, len(tried)  # the time of all is over
        late = asyncio.create_task(dead.metadata(["late"]))
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in errors] == [ClusterUnreachable] * 8
        assert len({str(each) for each in errors}) == 1 and len(set(map(id, errors))) == 8
        assert len(tried) <= tried_count + 2, "the first may be about to try, as may the next"
        assert not late.done(), "who came later has time left"
        with pytest.raises(ClusterUnreachable):
            await late
        await dead.close()

    asyncio.run(main())


STUCK = [f"stuck-{number}:9092" for number in range(12)]


class StuckServers:
    """They take a connection and say nothing; each try passes its whole time on a clock of this class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.tried: list[Address] = []
        monkeypatch.setattr(pool_module, "open_connection", self._open)
        monkeypatch.setattr(Cluster, "_now", lambda _: self.now)
        monkeypatch.setattr(pool_module, "_now", lambda: self.now)

    async def _open(self, name: str, address: Address, *, timeout_ms: float, **options: Any) -> Connection:
        if not address.host.startswith("stuck-"):
            return await opening.open_connection(name, address, timeout_ms=60_000, **options)
        self.tried.append(address)
        self.now += timeout_ms / 1000
        raise RequestTimedOut(f"cluster {name} at {address}: no answer within {timeout_ms:.0f} ms")


@pytest.mark.parametrize("timeout_ms", [2_000, 30_000, 120_000])
def test_servers_that_are_stuck_take_no_longer_than_a_request_may_in_all(
    monkeypatch: pytest.MonkeyPatch, timeout_ms: int
) -> None:
    async def main() -> None:
        stuck = StuckServers(monkeypatch)
        async with cluster(*STUCK, request_timeout_ms=timeout_ms) as ewr:
            with pytest.raises(ClusterUnreachable, match="tried stuck-"):
                await ewr.metadata([])
        assert stuck.now == pytest.approx(timeout_ms / 1000)
        assert len(stuck.tried) == {2_000: 3, 30_000: 10, 120_000: 12}[timeout_ms]

    asyncio.run(main())


def test_servers_that_are_stuck_leave_time_for_the_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with FakeBroker() as broker:
            most = 0
            for seed in range(8):
                stuck = StuckServers(monkeypatch)
                servers = (*STUCK[:4], broker.server.address)
                rng = random.Random(seed)
                async with cluster(*servers, request_timeout_ms=15_000, rng=rng) as ewr:
                    assert (await ewr.metadata([])).brokers
                most = max(most, len(stuck.tried))
            assert most == 4, "once it is the last that is asked"

    asyncio.run(main())


class OpeningSlowly:
    """Connections to the servers at these ports open when they are let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held_ports: set[int] = set()
        self.held_count = 0
        self.let = asyncio.Event()
        monkeypatch.setattr(pool_module, "open_connection", self._open)

    async def _open(self, name: str, address: Address, **options: Any) -> Connection:
        if address.port in self.held_ports:
            self.held_count += 1
            await self.let.wait()
        return await opening.open_connection(name, address, **options)


def test_who_gives_up_asking_leaves_the_connection_that_opens_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        slow = OpeningSlowly(monkeypatch)
        async with FakeBroker() as broker, cluster(broker.server.address, request_timeout_ms=1_000) as ewr:
            await ewr.metadata([])
            slow.held_ports = {broker.server.port}
            other = asyncio.create_task(ewr.connection(1))
            await until(lambda: slow.held_count == 1)
            async with asyncio.timeout(30):
                with pytest.raises(ClusterUnreachable, match=r"no answer within \d+ ms"):
                    await ewr.metadata(max_age_ms=0)
            slow.let.set()
            assert (await other).is_open
            assert slow.held_count == 1

    asyncio.run(main())


def test_brokers_that_cannot_be_reached_take_no_longer_than_a_request_may_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        slow = OpeningSlowly(monkeypatch)
        async with FakeBroker() as broker, cluster(broker.server.address, request_timeout_ms=1_000) as ewr:
            broker.brokers = {number: free_port() for number in range(5)}
            slow.held_ports = set(broker.brokers.values())
            async with asyncio.timeout(30):
                with pytest.raises(ClusterUnreachable, match="no broker it names can be reached") as caught:
                    await ewr.connection()
            assert all(f"127.0.0.1:{port}: no " in str(caught.value) for port in slow.held_ports)

    asyncio.run(main())


def test_bootstrap_waits_for_a_server_that_comes_late() -> None:
    async def main() -> None:
        broker = FakeBroker()
        broker.server.port = free_port()
        async with cluster(broker.server.address) as ewr:
            asking = asyncio.create_task(ewr.metadata())
            await asyncio.sleep(0.08)  # at least one pass has failed by now
            async with broker:
                assert (await asking).brokers[1].port == broker.server.port

    asyncio.run(main())


async def drop(peer: Peer) -> None:
    await peer.read()


def test_cluster_whose_start_is_not_awaited_is_tried_once_at_each_address(tried: list[Address]) -> None:
    async def main() -> None:
        dead = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        async with ScriptedServer(drop) as dropping:
            addresses = [*dead, dropping.address]
            async with cluster(*addresses, request_timeout_ms=500, awaits_start=False) as ewr:
                with pytest.raises(ClusterUnreachable) as caught:
                    await ewr.metadata()
        assert sorted(map(str, tried)) == sorted(addresses)
        assert all(f"{address}: Connection refused" in str(caught.value) for address in dead)

    asyncio.run(main())


def test_server_that_answers_without_brokers_is_waited_for_though_no_start_is_awaited() -> None:
    async def main() -> None:
        async with FakeBroker() as starting:
            brokers, starting.brokers = starting.brokers, {}
            async with cluster(starting.server.address, awaits_start=False) as ewr:
                asking = asyncio.create_task(ewr.metadata())
                await until(lambda: starting.metadata_count > 0)
                starting.brokers = brokers
                assert (await asking).brokers

    asyncio.run(main())


def test_cluster_that_was_reached_once_is_waited_for_though_no_start_is_awaited(tried: list[Address]) -> None:
    async def main() -> None:
        broker = FakeBroker()
        async with broker, cluster(broker.server.address, awaits_start=False) as ewr:
            await ewr.metadata()
            await broker.server.stop()
            tried.clear()
            asking = asyncio.create_task(ewr.metadata(max_age_ms=0))
            await until(lambda: len(tried) > 1)
            async with broker:
                assert (await asking).brokers

    asyncio.run(main())


def test_server_without_brokers_in_its_metadata_is_not_the_way_in() -> None:
    async def main() -> None:
        async with FakeBroker() as starting, FakeBroker() as ready:
            starting.brokers = {}
            async with cluster(starting.server.address, ready.server.address) as ewr:
                assert (await ewr.metadata()).brokers

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [[], ["localhost"], ["localhost:9092", "x:0"]])
def test_unreadable_bootstrap_is_refused_at_once(wrong: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Cluster("ewr", wrong)
