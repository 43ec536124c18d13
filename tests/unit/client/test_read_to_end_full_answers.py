"""Reading a topic of several partitions whose server has no room for all of them in one answer."""

from __future__ import annotations

import asyncio
from typing import Any

from millrace.broker.client.offsets import EARLIEST, EARLIEST_LOCAL
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.frames import Api, RequestHead
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import nested, response
from tests.unit.client.test_read_to_end import batch

NAME = "events"


class NarrowServer:
    """Leads every partition and gives one batch an answer, of the first partition asked for that has one:
    what `fetch.max.bytes` of a server makes of a request for many. `ends`: of each partition, one record a
    batch; `holes`: of these nothing is left."""

    def __init__(self, ends: list[int], holes: frozenset[int] = frozenset()) -> None:
        self.ends = ends
        self.holes = holes
        self.fetch_count = 0

    def fetch(self, head: RequestHead, request: hot_fetch.FetchRequest) -> bytes:
        self.fetch_count += 1
        given, is_full = [], False
        for asked in request.partitions:
            end = self.ends[asked.partition]
            has_more = asked.fetch_offset < end and asked.partition not in self.holes
            records = batch(asked.fetch_offset) if has_more and not is_full else b""
            is_full = is_full or bool(records)
            given.append(
                hot_fetch.PartitionData(
                    NAME, asked.partition, 0, high_watermark=end, last_stable_offset=end, records=records
                )
            )
        return b"".join(hot_fetch.encode_response(head.version, head.correlation_id, given))

    def list_offsets(self, head: RequestHead, request: Any) -> Any:
        parts = tuple(
            nested(
                Api.LIST_OFFSETS,
                head.version,
                "ListOffsetsPartitionResponse",
                partition_index=asked.partition_index,
                error_code=0,
                timestamp=-1,
                offset=0
                if asked.timestamp in (EARLIEST, EARLIEST_LOCAL)
                else self.ends[asked.partition_index],
                leader_epoch=0,
            )
            for asked in request.topics[0].partitions
        )
        topic = nested(
            Api.LIST_OFFSETS, head.version, "ListOffsetsTopicResponse", name=NAME, partitions=parts
        )
        return response(Api.LIST_OFFSETS, head.version, topics=(topic,))

    def read(self) -> dict[int, list[int]]:
        """The offsets that are read, by partition."""

        async def main() -> dict[int, list[int]]:
            broker = FakeBroker({Api.FETCH: self.fetch, Api.LIST_OFFSETS: self.list_offsets})
            broker.topics = {NAME: dict.fromkeys(range(len(self.ends)), 1)}
            found: dict[int, list[int]] = {}
            async with broker, cluster(broker.server.address) as ewr:
                async for record in read_topic_to_end(ewr, NAME):
                    found.setdefault(record.partition, []).append(record.offset)
            return found

        return asyncio.run(main())


def test_partition_for_which_an_answer_has_no_room_is_read_later() -> None:
    """For many answers in a row the others' records fill them, and its own part is empty."""
    ends = [12, 9, 3]
    assert NarrowServer(ends).read() == {number: list(range(end)) for number, end in enumerate(ends)}


def test_hole_is_believed_once_the_others_are_read() -> None:
    server = NarrowServer([0, 6, 4], holes=frozenset({2}))
    assert server.read() == {1: list(range(6))}
    assert server.fetch_count > 6, "it was asked for alone, too"
