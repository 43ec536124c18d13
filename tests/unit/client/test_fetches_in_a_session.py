"""Fetches in a session: what goes out and what comes back, whatever the server says of the session."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias
from uuid import UUID

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.fetch_session import FetchPosition, FetchSession
from millrace.broker.client.raw_fetch import FetchedPartition, fetch
from millrace.broker.errors import (
    FetchSessionIdNotFound,
    FetchSessionTopicIdError,
    InvalidFetchSessionEpoch,
    KafkaError,
    NetworkException,
    NotLeaderOrFollower,
    ProtocolError,
)
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import Api, RequestHead
from millrace.broker.protocol.hot_fetch import PartitionData
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.fetch_sessions import FetchSessionCache
from tests.unit.client.scripted_server import ScriptedServer, brokerlike, metadata_answer

FLIGHTS = UUID(int=1)
Positions: TypeAlias = Mapping[TopicPartition, FetchPosition]
POSITIONS: Positions = {("flights", number): FetchPosition(5, topic_id=FLIGHTS) for number in range(3)}


class Broker:
    """Three partitions behind a scripted connection, with the cache of sessions of a real one."""

    def __init__(self, newest: int) -> None:
        self.cache = FetchSessionCache(10, random.Random(0))
        self.high_watermarks = [5, 5, 5]
        self.refused = 0
        """The error of partition 2."""
        self.says: list[int] = []
        """Errors of the next answers as a whole, in place of what the cache says."""
        self.throttles: list[int] = []
        """The next answers are empty, with these throttle times in ms."""
        self.hangs_up = False
        self.named: list[list[int]] = []
        """By each request."""
        self.topics: set[object] = set()
        self.server = ScriptedServer(
            brokerlike(
                {
                    Api.METADATA: lambda head, _: metadata_answer(head.version, {1: self.server.port}, {}),
                    Api.FETCH: self.answer,
                },
                {**{int(api): (0, 12) for api in Api}, int(Api.FETCH): (4, newest)},
            )
        )

    def answer(self, head: RequestHead, request: hot_fetch.FetchRequest) -> bytes:
        self.named.append([each.partition for each in request.partitions])
        self.topics |= {type(each.topic) for each in request.partitions}
        if self.hangs_up:
            raise ConnectionResetError
        uses_ids = head.version >= hot_fetch.FIRST_WITH_TOPIC_IDS
        resolved = self.cache.resolve(request, uses_ids, 0)
        throttle_ms = self.throttles.pop(0) if self.throttles else 0
        if self.says:
            code, session_id, told = self.says.pop(0), 0, []
        elif isinstance(resolved, tuple):
            (code, session_id), told = resolved, []
        elif throttle_ms:
            code, session_id, told = resolved.finish_empty()
        else:
            given = [
                PartitionData(
                    each.topic, each.partition, self.refused if each.partition == 2 else 0,
                    self.high_watermarks[each.partition],
                )
                for each in resolved.partitions
            ]  # fmt: skip
            code, session_id, told = resolved.finish(given, 0)
        frame = hot_fetch.encode_response(
            head.version, head.correlation_id, told,
            error_code=code, session_id=session_id, throttle_ms=throttle_ms,
        )  # fmt: skip
        return b"".join(map(bytes, frame))


UNKNOWN = (FetchSessionIdNotFound, InvalidFetchSessionEpoch, FetchSessionTopicIdError)

Ask = Callable[..., Awaitable[list[FetchedPartition]]]


def run(story: Callable[[Broker, Ask, FetchSession], Awaitable[None]], newest: int = 17) -> None:
    async def whole() -> None:
        broker, session = Broker(newest), FetchSession()
        async with broker.server, Cluster("ewr", [broker.server.address]) as cluster:

            async def ask(
                positions: Positions = POSITIONS,
            ) -> list[FetchedPartition]:
                return await fetch(cluster, 1, positions, session=session)

            await story(broker, ask, session)

    asyncio.run(whole())


@pytest.mark.parametrize("newest", [17, 13])
def test_only_what_is_new_is_asked_and_answered(newest: int) -> None:
    async def story(broker: Broker, ask: Ask, session: FetchSession) -> None:
        assert [each.partition for each in await ask()] == [0, 1, 2]
        assert await ask() == []
        assert list(session.quiet()) == list(POSITIONS)
        broker.high_watermarks[1] = 9
        (fetched,) = await ask({**POSITIONS, ("flights", 0): FetchPosition(6, topic_id=FLIGHTS)})
        assert (fetched.topic, fetched.partition, fetched.high_watermark) == ("flights", 1, 9)
        assert broker.named == [[0, 1, 2], [], [0]]
        assert broker.topics == {UUID}

    run(story, newest)


@pytest.mark.parametrize("newest", [12, 7, 6])
def test_server_without_ids_or_sessions_is_asked_for_all_each_time(newest: int) -> None:
    async def story(broker: Broker, ask: Ask, session: FetchSession) -> None:
        for _ in range(3):
            assert [each.partition for each in await ask()] == [0, 1, 2]
            assert session.quiet() == {}
        assert broker.named == [[0, 1, 2]] * 3

        assert (broker.topics, len(broker.cache)) == ({str}, 0)

    run(story, newest)


@pytest.mark.parametrize(
    "error", [FetchSessionIdNotFound, InvalidFetchSessionEpoch, FetchSessionTopicIdError]
)
def test_session_that_the_server_does_not_know_any_more_is_begun_anew(error: type[KafkaError]) -> None:
    async def story(broker: Broker, ask: Ask, _: FetchSession) -> None:
        await ask()
        broker.says = [error.code]
        assert [each.partition for each in await ask()] == [0, 1, 2]
        assert await ask() == []
        assert broker.named == [[0, 1, 2], [], [0, 1, 2], []]

    run(story)


def test_server_that_was_restarted_is_asked_for_all() -> None:
    async def story(broker: Broker, ask: Ask, _: FetchSession) -> None:
        await ask()
        broker.cache = FetchSessionCache(10, random.Random(1))
        assert [each.partition for each in await ask()] == [0, 1, 2]
        assert await ask() == []

    run(story)


def test_refusal_of_a_request_in_full_is_an_error_and_not_asked_again() -> None:
    async def story(broker: Broker, ask: Ask, _: FetchSession) -> None:
        broker.says = [FetchSessionIdNotFound.code]
        with pytest.raises(FetchSessionIdNotFound, match="fetch is refused"):
            await ask()
        assert len(broker.named) == 1

    run(story)


def test_after_a_refusal_as_a_whole_all_is_said() -> None:
    async def story(broker: Broker, ask: Ask, _: FetchSession) -> None:
        await ask()
        broker.says = [NotLeaderOrFollower.code]
        with pytest.raises(NotLeaderOrFollower):
            await ask()
        assert [each.partition for each in await ask()] == [0, 1, 2]

    run(story)


def test_after_a_lost_answer_all_is_said() -> None:
    async def story(broker: Broker, ask: Ask, _: FetchSession) -> None:
        await ask()
        broker.hangs_up = True
        with pytest.raises(NetworkException):
            await ask()
        broker.hangs_up = False
        assert [each.partition for each in await ask()] == [0, 1, 2]

    run(story)


def test_after_an_answer_that_is_not_about_what_was_asked_all_is_said() -> None:
    async def story(broker: Broker, ask: Ask, session: FetchSession) -> None:
        await ask()
        del session._asked["flights", 1]  # as if the server knew one more
        broker.high_watermarks[1] = 9
        with pytest.raises(ProtocolError, match="not asked for"):
            await ask({key: at for key, at in POSITIONS.items() if key[1] != 1})
        assert [each.partition for each in await ask()] == [0, 1, 2]

    run(story)


def test_error_of_a_partition_is_answered_each_time_and_its_end_too() -> None:
    async def story(broker: Broker, ask: Ask, session: FetchSession) -> None:
        broker.refused = NotLeaderOrFollower.code
        await ask()
        for _ in range(2):
            (fetched,) = await ask()
            assert (fetched.partition, fetched.error_code) == (2, NotLeaderOrFollower.code)
            assert list(session.quiet()) == [("flights", 0), ("flights", 1)]
        broker.refused = 0
        (fetched,) = await ask()
        assert (fetched.partition, fetched.error_code) == (2, 0)
        assert await ask() == []

    run(story)


def test_empty_answer_of_a_throttling_server_is_asked_again_where_all_were_asked_for() -> None:
    async def story(broker: Broker, ask: Ask, session: FetchSession) -> None:
        broker.throttles = [1]
        assert [each.partition for each in await ask()] == [0, 1, 2]
        broker.throttles, broker.high_watermarks[1] = [1], 9
        assert await ask() == []
        assert session.quiet() == {}, "nothing was said of anybody"
        (fetched,) = await ask()
        assert (fetched.partition, fetched.high_watermark) == (1, 9)

    run(story)


def test_fetch_that_is_cancelled_ends_the_session() -> None:
    async def story(_: Broker, ask: Ask, session: FetchSession) -> None:
        await ask()
        asking = asyncio.ensure_future(ask())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert [each.partition for each in await ask()] == [0, 1, 2]

    run(story)
