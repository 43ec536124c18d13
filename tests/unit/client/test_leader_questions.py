"""Asking the leaders of many partitions, by the epochs' question: who moves, who is gone, who refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from millrace.broker.client.leader_epochs import epoch_histories
from millrace.broker.errors import (
    LeaderNotAvailable,
    NotLeaderOrFollower,
    ProtocolError,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import Handler, nested, response
from tests.waiting import patience

NO_LEADER = -1
ENDS = {2: 90, 1: 60, 0: 20}
"""Where each epoch ended, 2 being the newest."""
HISTORY = ((0, 0), (1, 20), (2, 60))


def epochs(refused: dict[int, int] | None = None, asked: list[tuple[int, int]] | None = None) -> Handler:
    """Answers as a leader with the history above does; partitions in `refused` {number: code} are never
    answered. What was asked goes to `asked`: (partition, epoch)."""

    def answer(head: RequestHead, request: Any) -> Any:
        (topic,) = request.topics
        parts = []
        for part in topic.partitions:
            if asked is not None:
                asked.append((int(part.partition), int(part.leader_epoch)))
            error = (refused or {}).get(int(part.partition), 0)
            found = (NO_LEADER, -1) if error else (int(part.leader_epoch), ENDS[int(part.leader_epoch)])
            parts.append(
                nested(
                    Api.OFFSET_FOR_LEADER_EPOCH,
                    head.version,
                    "EpochEndOffset",
                    error_code=error,
                    partition=part.partition,
                    leader_epoch=found[0],
                    end_offset=found[1],
                )
            )
        given = nested(
            Api.OFFSET_FOR_LEADER_EPOCH,
            head.version,
            "OffsetForLeaderTopicResult",
            topic=topic.topic,
            partitions=tuple(parts),
        )
        return response(Api.OFFSET_FOR_LEADER_EPOCH, head.version, topics=(given,))

    return answer


def test_leader_that_moves_is_asked_where_it_is_then() -> None:
    async def main() -> None:
        asked: list[tuple[int, int]] = []
        one = FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: epochs({1: NotLeaderOrFollower.code}, asked)})
        two = FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: epochs({0: NotLeaderOrFollower.code})})
        async with one, two, cluster(one.server.address, request_timeout_ms=30_000) as ewr:
            one.brokers = two.brokers = {1: one.server.port, 2: two.server.port}
            await ewr.metadata(["flights"])
            one.topics["flights"] = two.topics["flights"] = {0: 1, 1: 2}
            found = await epoch_histories(ewr, {("flights", 0): (2, 0), ("flights", 1): (2, 0)})
            assert found == {("flights", 0): HISTORY, ("flights", 1): HISTORY}
        # The answer that was there already was not asked for again.
        assert sorted(asked) == [(0, 0), (0, 1), (0, 2), (1, 2)]

    asyncio.run(main())


def test_each_leader_is_asked_about_its_own_partitions_only() -> None:
    async def main() -> None:
        asked: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        one, two = (FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: epochs(asked=each)}) for each in asked)
        async with one, two, cluster(one.server.address, request_timeout_ms=30_000) as ewr:
            one.brokers = two.brokers = {1: one.server.port, 2: two.server.port}
            one.topics["flights"] = two.topics["flights"] = {0: 1, 1: 2}
            found = await epoch_histories(ewr, {("flights", 0): (2, 0), ("flights", 1): (2, 0)})
            assert found == {("flights", 0): HISTORY, ("flights", 1): HISTORY}
        assert [sorted(each) for each in asked] == [[(n, 0), (n, 1), (n, 2)] for n in (0, 1)]

    asyncio.run(main())


@pytest.mark.parametrize(("topic", "number"), [("deleted", 0), ("flights", 7)])
def test_what_is_not_there_is_unknown_and_not_without_a_leader(topic: str, number: int) -> None:
    async def main() -> None:
        broker = FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: epochs()})
        async with broker, cluster(broker.server.address, request_timeout_ms=1_000) as ewr:
            with pytest.raises(UnknownTopicOrPartition) as caught:
                await epoch_histories(ewr, {("flights", 0): (2, 0), (topic, number): (2, 0)})
        assert f"epochs of {topic}-{number}" in str(caught.value)
        assert "\n" not in str(caught.value)

    asyncio.run(main())


def test_partition_that_stays_without_a_leader_is_named() -> None:
    async def main() -> None:
        broker = FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: epochs()})
        broker.topics["flights"] = {0: 1, 1: NO_LEADER}
        async with broker, cluster(broker.server.address, request_timeout_ms=1_000) as ewr:
            with pytest.raises(LeaderNotAvailable, match="flights-1 has no leader now"):
                await epoch_histories(ewr, {("flights", 0): (2, 0), ("flights", 1): (2, 0)})

    asyncio.run(main())


def test_answer_that_leaves_a_partition_out_is_against_the_protocol() -> None:
    whole = epochs()

    def answer(head: RequestHead, request: Any) -> Any:
        (topic,) = request.topics
        return whole(head, replace(request, topics=(replace(topic, partitions=topic.partitions[:1]),)))

    async def main() -> None:
        broker = FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: answer})
        broker.topics["flights"] = {0: 1, 1: 1}
        async with broker, cluster(broker.server.address) as ewr:
            with pytest.raises(ProtocolError, match="leaves out the epochs of flights-1"):
                await epoch_histories(ewr, {("flights", 0): (2, 0), ("flights", 1): (2, 0)})

    asyncio.run(main())


def test_refusal_for_good_is_told_at_once_whatever_else_could_be_cured() -> None:
    async def main() -> None:
        one = FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: epochs({0: NotLeaderOrFollower.code})})
        two = FakeBroker({Api.OFFSET_FOR_LEADER_EPOCH: epochs({1: TopicAuthorizationFailed.code})})
        async with one, two, cluster(one.server.address, request_timeout_ms=3_600_000) as ewr:
            one.brokers = two.brokers = {1: one.server.port, 2: two.server.port}
            one.topics["flights"] = two.topics["flights"] = {0: 1, 1: 2}
            asked = epoch_histories(ewr, {("flights", 0): (2, 0), ("flights", 1): (2, 0)})
            with pytest.raises(TopicAuthorizationFailed, match="epochs of flights-1"):
                await asyncio.wait_for(asked, patience())

    asyncio.run(main())
