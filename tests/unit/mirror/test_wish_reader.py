"""The control topic after an election that was not clean: wishes are those of the log as it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millrace.broker.protocol import hot_fetch
from millrace.broker.protocol.batch import stamp_offset_and_epoch
from millrace.broker.protocol.frames import Api, RequestHead
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.control import wish_reader
from millrace.mirror.control.wish_reader import WishReader
from millrace.mirror.control.wishes import Scope, Wishes
from tests.unit.client.cluster_stage import FakeBroker, cluster
from tests.unit.client.scripted_server import nested, response
from tests.waiting import until_async as until

TOPIC = "wishes"


def pause(offset: int, source: str, paused: bool, epoch: int = 0) -> bytes:
    records = Wishes().pause_records(Scope(source), paused=paused, at_ms=1)
    batch = build_batch([Record(key, value, (), 1) for key, value in records])
    stamp_offset_and_epoch(batch, offset, epoch)
    return bytes(batch)


class ControlLog:
    """A log of one-record batches. `told_end` is what ListOffsets says first, once."""

    def __init__(self, batches: Sequence[bytes], told_end: int | None = None) -> None:
        self.batches = list(batches)
        self.epochs = {0: len(batches)}  # epoch -> where it ends
        self.told_ends = [] if told_end is None else [told_end]

    def fetch(self, head: RequestHead, request: hot_fetch.FetchRequest) -> bytes:
        (asked,) = request.partitions
        end, code, diverging, records = len(self.batches), 0, None, b""
        newest = max((epoch for epoch in self.epochs if epoch <= asked.last_fetched_epoch), default=-1)
        if asked.last_fetched_epoch >= 0 and asked.fetch_offset > self.epochs.get(newest, 0):
            diverging = (newest, self.epochs.get(newest, 0))
        elif asked.fetch_offset > end:
            code = 1
        else:
            records = b"".join(self.batches[asked.fetch_offset :])
        given = hot_fetch.PartitionData(
            TOPIC, 0, code, high_watermark=end, last_stable_offset=end, records=records, diverging=diverging
        )
        return b"".join(hot_fetch.encode_response(head.version, head.correlation_id, [given]))

    def list_offsets(self, head: RequestHead, request: Any) -> Any:
        offset = 0
        if request.topics[0].partitions[0].timestamp != -2:
            offset = self.told_ends.pop() if self.told_ends else len(self.batches)
        part = nested(
            Api.LIST_OFFSETS,
            head.version,
            "ListOffsetsPartitionResponse",
            partition_index=0,
            error_code=0,
            timestamp=-1,
            offset=offset,
            leader_epoch=0,
        )
        topic = nested(
            Api.LIST_OFFSETS, head.version, "ListOffsetsTopicResponse", name=TOPIC, partitions=(part,)
        )
        return response(Api.LIST_OFFSETS, head.version, topics=(topic,))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[WishReader]:
        async def write(*_: object, **__: object) -> None:
            raise AssertionError("nothing is written")

        broker = self.broker = FakeBroker({Api.FETCH: self.fetch, Api.LIST_OFFSETS: self.list_offsets})
        broker.topics = {TOPIC: {0: 1}}
        async with broker, cluster(broker.server.address) as target:
            reader = WishReader(target, TOPIC, 1, write, lambda wishes: None, lambda scope: None)
            task = asyncio.create_task(reader.run())
            try:
                yield reader
            finally:
                task.cancel()
                await asyncio.wait([task])


def paused(reader: WishReader) -> list[str]:
    return [str(scope) for scope in reader.wishes.paused_scopes]


def test_end_that_was_cut_off_is_not_waited_for() -> None:
    async def main() -> None:
        control = ControlLog([pause(0, "ewr", True)], told_end=5)
        async with control.read() as reader:
            await until(lambda: reader.is_ready)
            assert paused(reader) == ["ewr"]

    asyncio.run(main())


def test_wishes_of_a_log_that_was_cut_and_grew_again_are_those_that_are_there() -> None:
    async def main() -> None:
        control = ControlLog([pause(0, "ewr", True), pause(1, "jfk", True)])
        async with control.read() as reader:
            await until(lambda: paused(reader) == ["ewr", "jfk"])
            # The new leader had the first record only, and has taken as many and more since.
            control.epochs = {0: 1, 1: 4}
            control.batches[1:] = [pause(offset, f"lga{offset}", True, 1) for offset in (1, 2, 3)]
            await until(lambda: paused(reader) == ["ewr", "lga1", "lga2", "lga3"])

    asyncio.run(main())


def test_topic_that_was_made_and_is_not_known_everywhere_yet_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The broker that is asked next may not have heard of it."""
    control, made_count = ControlLog([pause(0, "ewr", True)]), 0

    async def ensure_topic(target: Any, *_: object) -> None:
        nonlocal made_count
        made_count += 1
        if made_count > 1:
            control.broker.topics = {TOPIC: {0: 1}}

    async def main() -> None:
        async with control.read() as reader:
            control.broker.topics = {}
            await until(lambda: reader.is_ready)
            assert paused(reader) == ["ewr"]

    monkeypatch.setattr(wish_reader, "ensure_topic", ensure_topic)
    asyncio.run(main())
    assert made_count == 2
