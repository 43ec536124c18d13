"""Reading a topic to its pinned end: holes, cuts, retention, and answers with nothing in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millrace.broker.client import read_to_end
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import EARLIEST, EARLIEST_LOCAL
from millrace.broker.client.read_to_end import TopicRecord, read_topic_to_end
from millrace.broker.errors import (
    CorruptMessage,
    OffsetNotAvailable,
    OffsetOutOfRange,
    RequestTimedOut,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.frames import Api, RequestHead
from millrace.broker.protocol.records import Record, build_batch
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import nested, response
from tests.waiting import patience


def batch(offset: int, count: int = 1) -> bytes:
    records = [Record(b"k", b"%d" % (offset + delta), (), 1) for delta in range(count)]
    return bytes(build_batch(records, base_offset=offset))


class Topic:
    """Fetch and ListOffsets over batches written out by hand; `answers` come first, then the truth."""

    def __init__(self, batches: dict[int, bytes], begin: int, end: int, name: str = "flights") -> None:
        self.name = name
        self.batches = batches
        self.begin = begin
        self.end = end
        self.grown_end = end
        self.end_error = 0
        self.stable_ends: list[int] = []  # of the next fetches, the last for good
        self.errors: list[int] = []
        self.asked: list[int] = []
        self.local_begin = begin  # before it lies what the remote store has alone
        self.silent_count = 0  # so many fetches of the first are answered with nothing
        self.request_timeout_ms: int | None = None

    def fetch(self, head: RequestHead, request: hot_fetch.FetchRequest) -> bytes:
        (asked,) = request.partitions
        self.asked.append(asked.fetch_offset)
        code = self.errors.pop(0) if self.errors else 0
        if not code and not self.begin <= asked.fetch_offset <= self.grown_end:
            code = OffsetOutOfRange.code
        stable_end = self.grown_end
        if self.stable_ends:
            stable_end = self.stable_ends.pop(0) if len(self.stable_ends) > 1 else self.stable_ends[0]
        found = [data for last, data in sorted(self.batches.items()) if last >= asked.fetch_offset]
        if len(self.asked) <= self.silent_count:
            found = []
        if self.stable_ends:
            found = [data for data in found if parse_header(memoryview(data)).last_offset < stable_end]
        given = hot_fetch.PartitionData(
            self.name,
            0,
            code,
            high_watermark=-1 if code else self.grown_end,
            last_stable_offset=-1 if code else stable_end,
            records=b"" if code else b"".join(found[:2]),
        )
        return b"".join(hot_fetch.encode_response(head.version, head.correlation_id, [given]))

    def list_offsets(self, head: RequestHead, request: Any) -> Any:
        at = request.topics[0].partitions[0].timestamp
        stable_end = self.stable_ends[0] if self.stable_ends and request.isolation_level else self.end
        part = nested(
            Api.LIST_OFFSETS,
            head.version,
            "ListOffsetsPartitionResponse",
            partition_index=0,
            error_code=self.end_error,
            timestamp=-1,
            offset={EARLIEST: self.begin, EARLIEST_LOCAL: self.local_begin}.get(at, stable_end),
            leader_epoch=0,
        )
        topic = nested(
            Api.LIST_OFFSETS, head.version, "ListOffsetsTopicResponse", name=self.name, partitions=(part,)
        )
        return response(Api.LIST_OFFSETS, head.version, topics=(topic,))

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Cluster]:
        broker = FakeBroker({Api.FETCH: self.fetch, Api.LIST_OFFSETS: self.list_offsets})
        broker.topics = {self.name: {0: 1}}
        async with broker, cluster(broker.server.address) as ewr:
            ewr.request_timeout_ms = self.request_timeout_ms or ewr.request_timeout_ms
            yield ewr

    async def read(self, **options: Any) -> list[TopicRecord]:
        async with self.serve() as ewr:
            return [record async for record in read_topic_to_end(ewr, self.name, **options)]

    def offsets(self) -> list[int]:
        return [record.offset for record in asyncio.run(self.read())]


def test_everything_up_to_the_end_is_read_once() -> None:
    topic = Topic({4: batch(0, 5), 7: batch(5, 3), 8: batch(8)}, 0, 9)
    records = asyncio.run(topic.read())
    assert [record.offset for record in records] == list(range(9))
    assert records[6] == TopicRecord("flights", 0, 6, 1, b"k", b"6", ())
    assert topic.asked == [0, 8]


def test_it_may_begin_where_an_earlier_reading_ended() -> None:
    topic = Topic({4: batch(0, 5), 7: batch(5, 3), 8: batch(8)}, 0, 9)
    assert [record.offset for record in asyncio.run(topic.read(since={0: 6}))] == [6, 7, 8]
    assert topic.asked == [6]
    for at_its_end in (9, 12):
        assert asyncio.run(topic.read(since={0: at_its_end})) == [] and len(topic.asked) == 1
    gone = Topic({7: batch(5, 3)}, 5, 8)
    assert [record.offset for record in asyncio.run(gone.read(since={0: 2, 1: 7}))] == [5, 6, 7]


def test_it_may_end_where_the_caller_had_pinned_the_ends() -> None:
    topic = Topic({4: batch(0, 5), 7: batch(5, 3), 8: batch(8)}, 0, 9)
    assert [record.offset for record in asyncio.run(topic.read(since={0: 3}, until={0: 6}))] == [3, 4, 5]
    assert asyncio.run(topic.read(since={0: 6}, until={0: 6})) == []
    assert asyncio.run(topic.read(until={})) == [], "of a partition that was not pinned nothing is wanted"


def test_pinned_partition_that_is_not_known_is_no_empty_one() -> None:
    topic = Topic({4: batch(0, 5)}, 0, 5)
    with pytest.raises(UnknownTopicOrPartition, match="flights-1 does not exist now"):
        asyncio.run(topic.read(until={0: 5, 1: 5}))


def test_others_have_their_turn_within_one_answer() -> None:
    """A heartbeat's answer, for one, while a worker reads the positions."""
    size = 2 * read_to_end.RECORDS_A_TURN
    topic = Topic({size - 1: batch(0, size), 2 * size - 1: batch(size, size)}, 0, 2 * size)
    turns: set[int] = set()

    async def story() -> int:
        read = 0

        async def take_turns() -> None:
            while True:
                turns.add(read)
                await asyncio.sleep(0)

        async with topic.serve() as served:
            beside = asyncio.create_task(take_turns())
            async for _ in read_topic_to_end(served, topic.name):
                read += 1
            beside.cancel()
        return read

    assert asyncio.run(story()) == 2 * size
    assert len(topic.asked) == 1 and size in turns


def test_records_behind_the_pinned_end_are_left_out() -> None:
    topic = Topic({4: batch(0, 5), 9: batch(5, 5)}, 0, 7)
    topic.grown_end = 10
    assert topic.offsets() == list(range(7))


def test_holes_between_batches_are_passed() -> None:
    assert Topic({2: batch(2), 90: batch(90), 400: batch(400)}, 0, 401).offsets() == [2, 90, 400]


def test_hole_up_to_the_end_is_believed_when_nothing_comes() -> None:
    topic = Topic({2: batch(2)}, 0, 10)
    assert topic.offsets() == [2]
    assert len(topic.asked) > 2


def test_remote_store_that_gives_nothing_for_a_while_is_no_hole() -> None:
    topic = Topic({4: batch(0, 5), 9: batch(5, 5)}, 0, 10)
    topic.local_begin, topic.silent_count = 8, 10
    assert topic.offsets() == list(range(10))
    # What the leader still has on its own disk it would give: there a hole is one.
    topic.silent_count = len(topic.asked) + 1_000
    assert [record.offset for record in asyncio.run(topic.read(since={0: 8}))] == []


def test_remote_store_that_stays_away_is_an_error() -> None:
    topic = Topic({4: batch(0, 5)}, 0, 5)
    topic.local_begin, topic.silent_count = 5, 1_000_000
    topic.request_timeout_ms = int(patience(0.5) * 1000)  # of each request, which a busy machine holds up
    with pytest.raises(RequestTimedOut, match=r"flights-0: nothing .* remote store, at offset 0"):
        topic.offsets()


def test_first_batch_may_begin_before_the_beginning() -> None:
    assert Topic({4: batch(0, 5)}, 3, 5).offsets() == [3, 4]


def test_retention_on_the_way_skips_what_is_gone() -> None:
    topic = Topic({4: batch(0, 5), 9: batch(5, 5)}, 0, 10)
    original = topic.fetch

    def fetch(head: RequestHead, request: hot_fetch.FetchRequest) -> bytes:
        topic.begin = 5
        return original(head, request)

    topic.fetch = fetch  # type: ignore[method-assign]
    assert topic.offsets() == [5, 6, 7, 8, 9]


def test_partition_shorter_than_its_pinned_end_is_an_error() -> None:
    topic = Topic({4: batch(0, 5)}, 0, 10)
    topic.grown_end = 4
    with pytest.raises(OffsetOutOfRange, match=r"flights-0 ended at offset 10 .* now offset 5"):
        topic.offsets()


@pytest.mark.parametrize("is_clean", [True, False])
def test_end_that_readers_do_not_see_any_more_is_asked_for(
    is_clean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked from where a shorter log ends now, a leader says that there is nothing, and no error; so does one
    that has all of it and waits for others to have it too."""
    monkeypatch.setattr(read_to_end, "_SHORT_FOR_SECONDS", 0.05)
    topic = Topic({4: batch(0, 5)}, 0, 10)
    topic.grown_end = 5
    pinned, refusals = topic.list_offsets, []

    def list_offsets(head: RequestHead, request: Any) -> Any:
        if topic.asked and is_clean:
            refusals.append(len(topic.asked))
            if len(refusals) == 3:  # by now the others have it
                topic.grown_end, topic.batches[9] = 10, batch(5, 5)
            topic.end_error = OffsetNotAvailable.code
        elif topic.asked:
            topic.end = 5
        return pinned(head, request)

    monkeypatch.setattr(topic, "list_offsets", list_offsets)
    if is_clean:
        assert topic.offsets() == list(range(10))
        assert len(refusals) >= 3
    else:
        with pytest.raises(OffsetOutOfRange, match=r"flights-0 ended at offset 10 .* its end is 5: it was"):
            topic.offsets()


def test_leader_errors_are_waited_out() -> None:
    topic = Topic({0: batch(0)}, 0, 1)
    topic.errors = [6, 5]
    assert topic.offsets() == [0]


def test_damaged_batch_is_an_error() -> None:
    damaged = bytearray(batch(0))
    damaged[-1] ^= 1
    with pytest.raises(CorruptMessage):
        Topic({0: bytes(damaged)}, 0, 1).offsets()


def test_empty_topic_asks_for_nothing() -> None:
    topic = Topic({}, 5, 5)
    assert topic.offsets() == []
    assert topic.asked == []


def test_unknown_topic_is_an_error() -> None:
    async def main() -> None:
        async with FakeBroker() as broker, cluster(broker.server.address) as ewr:
            with pytest.raises(UnknownTopicOrPartition, match="cluster ewr: topic nowhere"):
                async for _ in read_topic_to_end(ewr, "nowhere"):
                    raise AssertionError("there are no records")

    asyncio.run(main())


def test_open_transaction_is_left_out_unless_it_is_to_be_waited_for() -> None:
    def topic() -> Topic:
        made = Topic({4: batch(0, 5), 7: batch(5, 3)}, 0, 8)
        made.stable_ends = [5, 5, 5, 5, 5, 8]
        return made

    assert [record.offset for record in asyncio.run(topic().read())] == list(range(5))
    waited = topic()
    assert [record.offset for record in asyncio.run(waited.read(until={0: 8}))] == list(range(8))
    assert waited.asked.count(5) >= 4, "it was waited for"
