"""Which topic a fetch is about: by id where everybody knows ids, by name where anybody does not."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.raw_fetch import FetchPosition, fetch
from millrace.broker.errors import ProtocolError, UnknownTopicId
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.scripted_server import ScriptedServer, brokerlike, metadata_answer

FLIGHTS, ORDERS, OTHER = UUID(int=1), UUID(int=2), UUID(int=3)
EARLIER = FetchPosition(5, topic_id=FLIGHTS)


async def asked_of_a_server(
    newest: int, positions: dict[tuple[str, int], FetchPosition], answer_with: UUID | None = None
) -> tuple[list[Any], int, list[Any]]:
    """What a server that speaks Fetch up to `newest` is asked (topics, version), and what comes back."""
    asked: list[Any] = []

    def answer(head: RequestHead, request: hot_fetch.FetchRequest) -> bytes:
        asked.append((head.version, [each.topic for each in request.partitions]))
        given = [
            hot_fetch.PartitionData(answer_with or each.topic, each.partition, UnknownTopicId.code)
            for each in request.partitions
        ]
        return b"".join(map(bytes, hot_fetch.encode_response(head.version, head.correlation_id, given)))

    server = ScriptedServer(
        brokerlike(
            {
                Api.METADATA: lambda head, _: metadata_answer(head.version, {1: server.port}, {}),
                Api.FETCH: answer,
            },
            {**{int(api): (0, 12) for api in Api}, int(Api.FETCH): (4, newest)},
        )
    )
    async with server, Cluster("ewr", [server.address]) as cluster:
        fetched = await fetch(cluster, 1, positions)
    ((version, topics),) = asked
    return topics, version, fetched


@pytest.mark.parametrize(("newest", "version"), [(18, 17), (13, 13)])
def test_topics_go_by_id_and_come_back_by_name(newest: int, version: int) -> None:
    positions = {("orders", 1): FetchPosition(0, topic_id=ORDERS), ("flights", 0): EARLIER}
    topics, spoken, fetched = asyncio.run(asked_of_a_server(newest, positions))
    assert (topics, spoken) == ([ORDERS, FLIGHTS], version)
    assert [(each.topic, each.partition) for each in fetched] == [("orders", 1), ("flights", 0)]
    assert fetched[0].error_code == UnknownTopicId.code


def test_older_server_is_asked_by_name() -> None:
    topics, spoken, fetched = asyncio.run(asked_of_a_server(12, {("flights", 0): EARLIER}))
    assert (topics, spoken, fetched[0].topic) == (["flights"], 12, "flights")


def test_one_topic_without_an_id_makes_it_names_for_all() -> None:
    positions = {("flights", 0): EARLIER, ("orders", 0): FetchPosition(0)}
    topics, spoken, _ = asyncio.run(asked_of_a_server(17, positions))
    assert (topics, spoken) == (["flights", "orders"], 12)


def test_answer_for_a_topic_that_was_not_asked_for_is_a_breach() -> None:
    with pytest.raises(ProtocolError, match="not asked for"):
        asyncio.run(asked_of_a_server(17, {("flights", 0): EARLIER}, OTHER))
