"""Following a cluster, and keeping traffic of one purpose out of the way of another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.offsets import LATEST
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.client.raw_produce import ProduceOutcome, produce
from millrace.broker.errors import (
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
from tests.unit.client.cluster_stage import HEARTBEAT, FakeBroker, cluster
from tests.unit.client.scripted_server import (
    Handler,
    Peer,
    Script,
    ScriptedServer,
    brokerlike,
    nested,
    response,
)
from tests.waiting import until_async as until


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
