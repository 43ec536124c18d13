"""Finding a cluster, following it, and keeping traffic of one purpose out of the way of another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest
from kio.schema.heartbeat.v4.request import HeartbeatRequest

from millrace.broker.client import cluster as cluster_module
from millrace.broker.client import opening
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import Connection
from millrace.broker.client.offsets import LATEST
from millrace.broker.client.opening import open_connection
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.client.raw_produce import ProduceOutcome, produce
from millrace.broker.errors import (
    ClusterUnreachable,
    NetworkException,
    NotLeaderOrFollower,
    ProtocolError,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import Api, RequestHead
from tests.ports import free_port
from tests.unit.client.scripted_server import (
    Handler,
    Peer,
    Script,
    ScriptedServer,
    brokerlike,
    metadata_answer,
    nested,
    response,
)
from tests.waiting import until_async as until

HEARTBEAT = HeartbeatRequest(group_id="g", generation_id=1, member_id="m")


class FakeBroker:
    """A server whose metadata a test can change, and that counts what it is asked."""

    def __init__(self, handlers: Mapping[Api, Handler] | None = None, versions: Any = None) -> None:
        self.brokers: dict[int, int] = {}
        self.topics: dict[str, dict[int, int]] = {"flights": {0: 1, 1: 1}}
        self.metadata_count = 0
        self.handlers: dict[Api, Handler] = {
            Api.METADATA: self.metadata,
            Api.HEARTBEAT: lambda head, request: response(Api.HEARTBEAT, head.version, error_code=0),
            **(handlers or {}),
        }
        ranges = versions or {int(api): (0, 12) for api in Api}
        self.server = ScriptedServer(brokerlike(self.handlers, ranges))

    async def __aenter__(self) -> FakeBroker:
        await self.server.__aenter__()
        self.brokers = {1: self.server.port}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.__aexit__()

    def metadata(self, head: RequestHead, request: Any) -> Any:
        self.metadata_count += 1
        names = [topic.name for topic in request.topics] if request.topics is not None else list(self.topics)
        known = {name: self.topics[name] for name in names if name in self.topics}
        unknown = tuple(name for name in names if name not in self.topics)
        return metadata_answer(head.version, self.brokers, known, unknown=unknown)


def cluster(*addresses: str, **options: Any) -> Cluster:
    options.setdefault("request_timeout_ms", 3000)
    options.setdefault("rng", random.Random(5))
    return Cluster("ewr", addresses, **options)


async def hold(peer: Peer) -> None:
    await peer.reader.read()


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
        monkeypatch.setattr(cluster_module, "open_connection", self._open)
        monkeypatch.setattr(Cluster, "_now", lambda _: self.now)

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
        monkeypatch.setattr(cluster_module, "open_connection", self._open)

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


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The addresses of all connections that were begun."""
    addresses: list[Address] = []

    async def open_connection(name: str, address: Address, **options: Any) -> Connection:
        addresses.append(address)
        return await opening.open_connection(name, address, **options)

    monkeypatch.setattr(cluster_module, "open_connection", open_connection)
    return addresses


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


def test_metadata_comes_from_memory_until_it_is_invalid() -> None:
    async def main() -> None:
        async with FakeBroker() as broker, cluster(broker.server.address) as ewr:
            await ewr.metadata(["flights"])
            await ewr.metadata(["flights"])
            await ewr.metadata([])
            assert broker.metadata_count == 1
            ewr.invalidate()
            await ewr.metadata(["flights"])
            assert broker.metadata_count == 2
            await ewr.metadata(["flights"], max_age_ms=0)
            assert broker.metadata_count == 3
            await ewr.metadata()  # all topics were never asked for
            await ewr.metadata()
            await ewr.metadata(["flights"])
            assert broker.metadata_count == 4

    asyncio.run(main())


def test_unknown_topic_is_asked_for_again_until_it_exists() -> None:
    async def main() -> None:
        async with FakeBroker() as broker, cluster(broker.server.address) as ewr:
            assert (await ewr.metadata(["new"])).topic_errors == {"new": 3}
            broker.topics["new"] = {0: 1}
            view = await ewr.metadata(["new"])
            assert view.topic_errors == {}
            assert view.partitions("new") == [("new", 0)]
            del broker.topics["new"]
            assert (await ewr.metadata(["new"], max_age_ms=0)).topics == {}

    asyncio.run(main())


def test_metadata_asked_for_at_once_is_read_once() -> None:
    async def main() -> None:
        async with FakeBroker() as broker, cluster(broker.server.address) as ewr:
            await asyncio.gather(*[ewr.metadata(["flights"]) for _ in range(20)])
            assert broker.metadata_count == 1

    asyncio.run(main())


def test_requests_at_once_share_one_connection() -> None:
    async def main() -> None:
        async with FakeBroker() as broker, cluster(broker.server.address) as ewr:
            await ewr.metadata([])
            before = broker.server.connection_count
            await asyncio.gather(*[ewr.request(HEARTBEAT, node_id=1) for _ in range(20)])
            assert broker.server.connection_count == before + 1

    asyncio.run(main())


def test_batches_sent_while_the_connection_opens_keep_their_order() -> None:
    received: list[int] = []

    def take(head: RequestHead, request: hot_produce.ProduceRequest) -> None:
        received.append(int.from_bytes(bytes(request.partitions[0].records or b""), "big"))

    async def main() -> None:
        async with FakeBroker({Api.PRODUCE: take}) as broker, cluster(broker.server.address) as ewr:
            await ewr.metadata([])
            sending = []
            for number in range(300):  # spread over the turns of the loop in which the connection opens
                batch = number.to_bytes(2, "big")
                sending.append(asyncio.create_task(produce(ewr, 1, {("flights", 0): batch}, acks=0)))
                if number % 5 == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*sending)
            await until(lambda: len(received) == 300)
            assert received == list(range(300))

    asyncio.run(main())


def test_waiting_requests_share_one_failure_to_connect(tried: list[Address]) -> None:
    async def main() -> None:
        async with FakeBroker() as gateway, cluster(gateway.server.address) as ewr:
            gateway.brokers = {1: gateway.server.port, 2: free_port()}
            await ewr.metadata([])
            tried.clear()
            results = await asyncio.gather(
                *[ewr.request(HEARTBEAT, node_id=2) for _ in range(50)], return_exceptions=True
            )
            assert {type(each) for each in results} == {NetworkException}
            assert len(tried) == 1

    asyncio.run(main())


def test_caller_that_gives_up_does_not_take_the_connection_from_the_others() -> None:
    release = asyncio.Event()

    async def main() -> None:
        plain = FakeBroker()

        async def slow_after_bootstrap(peer: Peer) -> None:
            if peer.number > 1:
                await release.wait()
            await brokerlike(plain.handlers)(peer)

        script: Script = slow_after_bootstrap
        async with ScriptedServer(script) as server, cluster(server.address) as ewr:
            plain.brokers = {1: server.port}
            await ewr.metadata([])
            first = asyncio.create_task(ewr.request(HEARTBEAT, node_id=1))
            second = asyncio.create_task(ewr.request(HEARTBEAT, node_id=1))
            await until(lambda: server.connection_count == 2)
            first.cancel()
            await asyncio.wait([first])
            release.set()
            assert (await second).error_code == 0
            assert server.connection_count == 2

    asyncio.run(main())


def test_broker_that_comes_back_elsewhere_is_followed() -> None:
    async def main() -> None:
        async with FakeBroker() as gateway, FakeBroker() as old, FakeBroker() as new:
            gateway.brokers = {1: old.server.port}
            old.brokers = new.brokers = gateway.brokers
            async with cluster(gateway.server.address) as ewr:
                await ewr.request(HEARTBEAT, node_id=1)
                await old.server.stop()
                gateway.brokers = new.brokers = {1: new.server.port}
                answer = await ewr.retrying(lambda: ewr.request(HEARTBEAT, node_id=1))
                assert answer.error_code == 0
                assert new.server.connection_count == 1

    asyncio.run(main())


def test_connection_to_a_broker_that_moved_is_replaced_though_it_still_works() -> None:
    async def main() -> None:
        async with FakeBroker() as old, FakeBroker() as new, cluster(old.server.address) as ewr:
            await ewr.request(HEARTBEAT, node_id=1)
            old.brokers = {1: new.server.port}
            await ewr.metadata([], max_age_ms=0)
            await ewr.request(HEARTBEAT, node_id=1)
            assert new.server.connection_count == 1

    asyncio.run(main())


def test_broker_that_is_not_known_is_an_error_that_may_be_retried() -> None:
    async def main() -> None:
        async with FakeBroker() as broker, cluster(broker.server.address) as ewr:
            with pytest.raises(
                NetworkException, match=r"cluster ewr: broker 9 is not among its brokers \[1\]"
            ):
                await ewr.request(HEARTBEAT, node_id=9)

    asyncio.run(main())


def test_long_poll_does_not_hold_up_other_purposes() -> None:
    polling, release = asyncio.Event(), asyncio.Event()

    async def long_poll(head: RequestHead, request: Any) -> bytes:
        polling.set()
        await release.wait()
        given = hot_fetch.PartitionData("flights", 0, records=b"", high_watermark=5)
        return b"".join(hot_fetch.encode_response(head.version, head.correlation_id, [given]))

    async def main() -> None:
        broker = FakeBroker({Api.FETCH: long_poll})
        async with broker, cluster(broker.server.address) as ewr:
            fetching = asyncio.create_task(fetch(ewr, 1, {("flights", 0): FetchPosition(5)}))
            await polling.wait()
            assert (await ewr.request(HEARTBEAT, node_id=1)).error_code == 0
            assert not fetching.done()
            release.set()
            (fetched,) = await fetching
            assert (fetched.topic, fetched.partition, fetched.high_watermark) == ("flights", 0, 5)

    asyncio.run(main())


def test_answer_of_not_leader_makes_the_next_look_read_the_metadata() -> None:
    def refuse(head: RequestHead, request: Any) -> bytes:
        answers = [hot_produce.PartitionAnswer("flights", 0, NotLeaderOrFollower.code)]
        return hot_produce.encode_response(head.version, head.correlation_id, answers)

    async def main() -> None:
        async with FakeBroker({Api.PRODUCE: refuse}) as broker, cluster(broker.server.address) as ewr:
            await ewr.metadata(["flights"])
            outcomes = await produce(ewr, 1, {("flights", 0): b"batch"})
            assert outcomes == {("flights", 0): ProduceOutcome(error_code=6)}
            before = broker.metadata_count
            await ewr.metadata(["flights"])
            assert broker.metadata_count == before + 1

    asyncio.run(main())


@pytest.mark.parametrize("partitions", [[], [0], [0, 1, 2]])
def test_produce_answer_about_other_partitions_is_a_breach(partitions: list[int]) -> None:
    def answer(head: RequestHead, request: Any) -> bytes:
        answers = [hot_produce.PartitionAnswer("flights", number) for number in partitions]
        return hot_produce.encode_response(head.version, head.correlation_id, answers)

    async def main() -> None:
        async with FakeBroker({Api.PRODUCE: answer}) as broker, cluster(broker.server.address) as ewr:
            with pytest.raises(ProtocolError, match="not about the partitions that were sent"):
                await produce(ewr, 1, {("flights", 0): b"a", ("flights", 1): b"b"})

    asyncio.run(main())


def test_produce_sends_the_batches_as_they_are_and_acks_0_waits_for_nothing() -> None:
    received: list[tuple[int, list[bytes]]] = []

    def take(head: RequestHead, request: hot_produce.ProduceRequest) -> None:
        received.append((request.acks, [bytes(each.records or b"") for each in request.partitions]))

    async def main() -> None:
        async with FakeBroker({Api.PRODUCE: take}) as broker, cluster(broker.server.address) as ewr:
            batch = bytes(range(256)) * 1000
            outcomes = await produce(
                ewr, 1, {("flights", 0): memoryview(batch), ("flights", 1): [batch[:7], batch[7:]]}, acks=0
            )
            assert set(outcomes.values()) == {ProduceOutcome()}
            await until(lambda: bool(received))
            assert received == [(0, [batch, batch])]

    asyncio.run(main())


def test_retrying_stops_at_success_at_hopelessness_and_at_the_deadline() -> None:
    async def main() -> None:
        async with FakeBroker() as broker, cluster(broker.server.address, request_timeout_ms=400) as ewr:
            attempts: list[type[Exception]] = []

            async def attempt() -> str:
                if not attempts:
                    return "done"
                raise attempts.pop()("scripted")

            attempts += [RequestTimedOut, NotLeaderOrFollower]
            assert await ewr.retrying(attempt) == "done"
            attempts += [NotLeaderOrFollower] * 1000
            with pytest.raises(NotLeaderOrFollower):
                await ewr.retrying(attempt)
            assert 2 < 1000 - len(attempts) < 20
            attempts[:] = [UnknownTopicOrPartition]
            with pytest.raises(UnknownTopicOrPartition):
                await ewr.retrying(attempt, final=(UnknownTopicOrPartition,))
            attempts[:] = [ProtocolError]
            with pytest.raises(ProtocolError):
                await ewr.retrying(attempt)

    asyncio.run(main())


def test_list_offsets_follows_a_leader_that_moves() -> None:
    def offsets(code: int, offset: int) -> Handler:
        def answer(head: RequestHead, request: Any) -> Any:
            (topic,) = request.topics
            parts = tuple(
                nested(
                    Api.LIST_OFFSETS,
                    head.version,
                    "ListOffsetsPartitionResponse",
                    partition_index=part.partition_index,
                    error_code=code,
                    timestamp=-1,
                    offset=offset,
                    leader_epoch=4,
                )
                for part in topic.partitions
            )
            given = nested(
                Api.LIST_OFFSETS, head.version, "ListOffsetsTopicResponse", name=topic.name, partitions=parts
            )
            return response(Api.LIST_OFFSETS, head.version, topics=(given,))

        return answer

    async def main() -> None:
        one = FakeBroker({Api.LIST_OFFSETS: offsets(6, -1)})
        two = FakeBroker({Api.LIST_OFFSETS: offsets(0, 77)})
        async with one, two, cluster(one.server.address) as ewr:
            one.brokers = two.brokers = {1: one.server.port, 2: two.server.port}
            await ewr.metadata(["flights"])
            one.topics["flights"] = two.topics["flights"] = {0: 2, 1: 2}
            found = await ewr.list_offsets({("flights", 0): LATEST, ("flights", 1): LATEST})
            assert found == {("flights", 0): (77, -1, 4), ("flights", 1): (77, -1, 4)}

    asyncio.run(main())


def test_close_fails_what_is_under_way() -> None:
    async def never(head: RequestHead, request: Any) -> None:
        asked.set()

    asked = asyncio.Event()

    async def main() -> None:
        async with FakeBroker({Api.HEARTBEAT: never}) as broker:
            ewr = cluster(broker.server.address)
            waiting = asyncio.create_task(ewr.request(HEARTBEAT, node_id=1))
            await asked.wait()
            await ewr.close()
            with pytest.raises(NetworkException, match="closed by this client"):
                await waiting
            with pytest.raises(NetworkException, match="closed by this client"):
                await ewr.request(HEARTBEAT, node_id=1)

    asyncio.run(main())


@pytest.mark.parametrize("ends", [True, False])
def test_connection_that_is_given_up_while_it_opens_ends_nobodys_task(ends: bool) -> None:
    """By a close, or by other means of being let in: what was begun with the old ones is not used."""
    release = asyncio.Event()

    async def main() -> None:
        plain = FakeBroker()

        async def slow_after_bootstrap(peer: Peer) -> None:
            if peer.number == 2:
                await release.wait()
            await brokerlike(plain.handlers)(peer)

        script: Script = slow_after_bootstrap
        async with ScriptedServer(script) as server, cluster(server.address) as ewr:
            plain.brokers = {1: server.port}
            await ewr.metadata([])
            waiting = asyncio.create_task(ewr.request(HEARTBEAT, node_id=1))
            await until(lambda: server.connection_count == 2)
            if ends:
                await ewr.close()
            else:
                ewr.take_security(None)
            await until(waiting.done)
            assert not waiting.cancelled(), "nobody has cancelled it"
            with pytest.raises(NetworkException, match="given up by this client"):
                await waiting
            if not ends:
                assert (await ewr.request(HEARTBEAT, node_id=1)).error_code == 0
                assert server.connection_count == 3
            release.set()

    asyncio.run(main())


@pytest.mark.parametrize("wrong", [[], ["localhost"], ["localhost:9092", "x:0"]])
def test_unreadable_bootstrap_is_refused_at_once(wrong: list[str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Cluster("ewr", wrong)
