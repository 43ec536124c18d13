"""Throttle times (KIP-219): a client over its quota sends nothing on a connection until they are over."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kio.static.primitive import i32Timedelta

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.connection import request_schema
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.client.raw_produce import produce
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import ClusterUnreachable, ProtocolError, RequestTimedOut
from millrace.broker.protocol import hot_fetch, hot_produce
from millrace.broker.protocol.frames import Api, RequestHead
from millrace.broker.protocol.records import Record, build_batch
from tests.unit.client.scripted_server import (
    ScriptedServer,
    brokerlike,
    coordinator_answer,
    metadata_answer,
    nested,
    response,
    waiting_count,
)
from tests.waiting import patience

THROTTLE_MS = 60


class Throttling:
    """A broker of one partition that throttles the next answers of each API as often as `times` says, and
    notes when its requests came."""

    def __init__(self, times: int = 1) -> None:
        self.times = times
        self.came_at: list[float] = []
        self.brokers: dict[int, int] = {}
        self.batch = build_batch([Record(b"k", b"v", timestamp_ms=1)])
        self.server = ScriptedServer(
            brokerlike(
                {
                    Api.METADATA: lambda head, _: metadata_answer(
                        head.version, self.brokers or {1: self.server.port}, {"flights": {0: 1}}
                    ),
                    Api.LIST_OFFSETS: self.offsets,
                    Api.FETCH: self.fetch,
                    Api.PRODUCE: self.produce,
                    Api.FIND_COORDINATOR: lambda head, request: self.find(head, request),
                },
                {**{int(api): (0, 12) for api in Api}, int(Api.PRODUCE): (3, 8)},
            )
        )

    def _next_ms(self) -> int:
        self.came_at.append(asyncio.get_running_loop().time())
        self.times -= 1
        return THROTTLE_MS if self.times >= 0 else 0

    def fetch(self, head: RequestHead, request: hot_fetch.FetchRequest) -> bytes:
        throttle_ms = self._next_ms()
        given = [] if throttle_ms else [hot_fetch.PartitionData("flights", 0, 0, 1, 1, 0, self.batch)]
        frame = hot_fetch.encode_response(head.version, head.correlation_id, given, throttle_ms=throttle_ms)
        return b"".join(map(bytes, frame))

    def produce(self, head: RequestHead, request: Any) -> bytes:
        answers = [hot_produce.PartitionAnswer("flights", 0, 0, 7)]
        frame = hot_produce.encode_response(
            head.version, head.correlation_id, answers, throttle_ms=self._next_ms()
        )
        return bytes(frame)

    def find(self, head: RequestHead, request: Any) -> Any:
        throttle_time = i32Timedelta.parse(datetime.timedelta(milliseconds=self._next_ms()))
        return coordinator_answer(head.version, self.server.port, throttle_time=throttle_time)

    def offsets(self, head: RequestHead, request: Any) -> Any:
        is_end = request.topics[0].partitions[0].timestamp == -1
        part = nested(
            Api.LIST_OFFSETS,
            head.version,
            "ListOffsetsPartitionResponse",
            partition_index=0,
            error_code=0,
            offset=int(is_end),
        )
        topic = nested(
            Api.LIST_OFFSETS, head.version, "ListOffsetsTopicResponse", name="flights", partitions=(part,)
        )
        return response(Api.LIST_OFFSETS, head.version, topics=(topic,))


async def fetch_once(cluster: Cluster) -> None:
    (answer,) = await fetch(cluster, 1, {("flights", 0): FetchPosition(0)})
    assert len(answer.records)


async def produce_once(cluster: Cluster) -> None:
    batch = build_batch([Record(b"k", b"v", timestamp_ms=1)])
    assert (await produce(cluster, 1, {("flights", 0): batch}))["flights", 0].base_offset == 7


async def ask_once(cluster: Cluster) -> None:
    schema = request_schema(Api.FIND_COORDINATOR, 3)
    await cluster.request(schema.FindCoordinatorRequest(key="g", key_type=0), node_id=1)


@pytest.mark.parametrize("ask", [fetch_once, produce_once, ask_once])
def test_nothing_is_sent_until_the_throttle_time_is_over(ask: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        broker = Throttling(times=2)
        async with broker.server, Cluster("ewr", [broker.server.address]) as cluster:
            while len(broker.came_at) < 3:
                await ask(cluster)
            first, second, third = broker.came_at[:3]
            assert min(second - first, third - second) >= THROTTLE_MS / 1000
            assert cluster.throttled_ms == 2 * THROTTLE_MS
            assert not cluster.is_throttled

    asyncio.run(main())


def test_throttled_fetch_holds_no_topics_and_is_asked_again() -> None:
    """Who reads a whole topic finds the records that were asked for, and nobody an answer about nothing."""

    async def main() -> None:
        broker = Throttling(times=2)
        async with broker.server, Cluster("ewr", [broker.server.address]) as cluster:
            read = [record.value async for record in read_topic_to_end(cluster, "flights")]
            assert (read, len(broker.came_at)) == ([b"v"], 3)

    asyncio.run(main())


def test_answer_of_a_throttle_time_alone_is_not_about_the_partitions() -> None:
    """A broker over whose quota a client is names no topic at all: nothing is wrong with that."""

    async def main() -> None:
        broker = Throttling(times=1)
        async with broker.server, Cluster("ewr", [broker.server.address]) as cluster:
            asked = fetch(cluster, 1, {("flights", 0): FetchPosition(0)})
            (answer,) = await asyncio.gather(asked, return_exceptions=True)
            assert not isinstance(answer, BaseException), answer
            assert [bytes(each.records) for each in answer] == [broker.batch]
            assert len(broker.came_at) == 2

    asyncio.run(main())


def test_requests_under_way_are_not_late_while_the_server_does_not_read_them() -> None:
    """Sent before the throttle time was told, and read by the server only when that is over."""

    async def main() -> None:
        broker = Throttling(times=0)
        times_out_ms = 80
        async with broker.server, Cluster("ewr", [broker.server.address]) as cluster:
            connection = await cluster.connection(1)
            schema = request_schema(Api.FIND_COORDINATOR, 3)
            held = asyncio.Event()
            find = broker.find

            async def later(head: RequestHead, request: Any) -> Any:
                await held.wait()
                return find(head, request)

            broker.find = later  # type: ignore[assignment]
            request = schema.FindCoordinatorRequest(key="g", key_type=0)
            asking = asyncio.create_task(connection.call(request, times_out_ms))
            while not waiting_count(connection):  # noqa: ASYNC110 - the request goes out
                await asyncio.sleep(0)
            connection.throttle(2 * times_out_ms)
            while cluster.is_throttled:  # noqa: ASYNC110 - nothing tells that time has passed
                await asyncio.sleep(0.005)
            held.set()
            assert (await asking).node_id == 1

    asyncio.run(main())


HOUR_MS = 3_600_000


def test_request_that_is_not_let_out_in_time_fails_alone_and_the_connection_stays() -> None:
    """KIP-599's throttle times have no bound."""

    async def main() -> None:
        broker = Throttling(times=0)
        async with broker.server, Cluster("ewr", [broker.server.address]) as cluster:
            connection = await cluster.connection(1)
            connection.throttle(HOUR_MS)
            schema = request_schema(Api.FIND_COORDINATOR, 3)
            request = schema.FindCoordinatorRequest(key="g", key_type=0)
            asking = [asyncio.create_task(connection.call(request, 20)) for _ in range(3)]
            await asyncio.wait(asking, timeout=patience())
            for each in asking:
                with pytest.raises(RequestTimedOut, match=r"not sent within 20 ms: .* wants nothing more"):
                    each.result()
            assert connection.is_open
            assert waiting_count(connection) == 0
            assert broker.came_at == [], "nothing was sent"
            connection._throttle_end.cancel()  # type: ignore[union-attr]
            connection._throttled_until = 0.0
            connection._unthrottle()
            assert (await connection.call(request, HOUR_MS)).node_id == 1, "the turn was given back"

    asyncio.run(main())


def test_metadata_come_from_a_broker_that_takes_requests_while_another_throttles() -> None:
    async def main() -> None:
        first, second = Throttling(times=0), Throttling(times=0)
        async with first.server, second.server:
            for broker in (first, second):
                broker.brokers = {1: first.server.port, 2: second.server.port}
            async with Cluster("ewr", [first.server.address]) as cluster:
                throttled = await cluster.connection(1)
                throttled.throttle(HOUR_MS)
                for _ in range(8):  # the order is random
                    await asyncio.wait_for(cluster.metadata(max_age_ms=0), patience())
                    assert await cluster.connection() is await cluster.connection(2)
                assert throttled.is_open

    asyncio.run(main())


def test_cluster_whose_only_broker_throttles_says_so_within_the_timeout() -> None:
    async def main() -> None:
        broker = Throttling(times=0)
        async with (
            broker.server,
            Cluster("ewr", [broker.server.address], request_timeout_ms=500) as cluster,
        ):
            connection = await cluster.connection(1)
            connection.throttle(HOUR_MS)
            with pytest.raises(ClusterUnreachable, match="wants nothing more for another"):
                await cluster.metadata(max_age_ms=0)
            assert connection.is_open

    asyncio.run(main())


def test_answer_without_a_partition_that_was_asked_for_is_a_breach() -> None:
    async def main() -> None:
        broker = Throttling(times=0)
        async with broker.server, Cluster("ewr", [broker.server.address]) as cluster:
            asked = {("flights", 0): FetchPosition(0), ("flights", 1): FetchPosition(0)}
            with pytest.raises(ProtocolError, match="not about the partitions that were asked for"):
                await fetch(cluster, 1, asked)

    asyncio.run(main())
