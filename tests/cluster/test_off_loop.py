"""No disk is waited for on the event loop: a whole life of a broker, with each sync's thread noted."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.config import BrokerConfig, parse_settings
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.server.broker import Broker
from tests.ports import free_port
from tests.raw_client import RawClient
from tests.servers import ZooKeeper
from tests.waiting import until

pytestmark = pytest.mark.java

SETTINGS = {
    "log.flush.interval.messages": 1,
    "log.flush.scheduler.interval.ms": 20,
    "log.flush.offset.checkpoint.interval.ms": 20,
    "replica.high.watermark.checkpoint.interval.ms": 20,
    "log.retention.check.interval.ms": 20,
    "log.retention.ms": -1,
    "log.cleaner.backoff.ms": 20,
    "offsets.topic.num.partitions": 1,
    "transaction.state.log.num.partitions": 1,
}
SYNCS = ("fsync", "fdatasync")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str]]:
    """(whether an event loop waited for it, where) of each call."""
    calls: list[tuple[bool, str]] = []

    def noted(sync: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            where = " < ".join(f"{frame.name} ({Path(frame.filename).name})" for frame in _own_frames())
            calls.append((asyncio._get_running_loop() is not None, where))
            sync(fd)

        return call

    for name in SYNCS:
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    return calls


def _own_frames() -> list[traceback.FrameSummary]:
    return [frame for frame in reversed(traceback.extract_stack()) if "/broker/" in frame.filename]


def live(port: int, data: Path) -> None:
    """Everything that makes a broker write, from a client's side."""
    with RawClient(port) as client:

        def ask(api: int, version: int, **fields: Any) -> Any:
            return client.ask(api, version, **fields)

        def create(name: str, **configs: str) -> None:
            named = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
            wanted = {"name": name, "num_partitions": 2, "replication_factor": 1, "configs": named}
            assert ask(Api.CREATE_TOPICS, 7, topics=[wanted], timeout=60_000).topics[0].error_code == 0

        def write(topic: str, count: int, **header: Any) -> None:
            for number in range(count):
                batch = build_batch([Record(b"%d" % (number % 5), bytes(500), (), 1)], **header)
                assert client.produce({(topic, 0): batch}, acks=-1)[0].error_code == 0

        create("rolled", segment_bytes="5000")
        write("rolled", 40)
        assert len(list((data / "rolled-0").glob("*.log"))) > 2
        create("compacted", cleanup_policy="compact", segment_bytes="5000", min_cleanable_dirty_ratio="0")
        write("compacted", 40)
        until(lambda: first_offset(client, "compacted") > 0, "a segment is compacted")
        for kind, key in ((0, "g"), (1, "app")):
            until(
                lambda kind=kind, key=key: (
                    ask(Api.FIND_COORDINATOR, 3, key=key, key_type=kind).error_code == 0
                ),
                "there is a coordinator",
            )
        offset = {"partition_index": 0, "committed_offset": 3, "committed_metadata": None}

        def commit() -> bool:
            answer = ask(
                Api.OFFSET_COMMIT,
                2,
                group_id="g",
                generation_id_or_member_epoch=-1,
                member_id="",
                topics=[{"name": "rolled", "partitions": [offset]}],
            )
            return bool(answer.topics[0].partitions[0].error_code == 0)

        until(commit, "an offset is committed")
        until(
            lambda: (
                ask(Api.INIT_PRODUCER_ID, 4, transactional_id="app", transaction_timeout=60_000).error_code
                == 0
            ),
            "a transactional id is known",
        )
        deleted = [{"name": "rolled", "partitions": [{"partition_index": 0, "offset": 35}]}]
        assert (
            ask(Api.DELETE_RECORDS, 2, topics=deleted, timeout=60_000).topics[0].partitions[0].error_code == 0
        )
        until(lambda: len(list((data / "rolled-0").glob("*.log"))) <= 2, "deleted segments go")
        names = [{"name": "rolled", "topic_id": None}]
        assert ask(Api.DELETE_TOPICS, 6, topics=names, timeout=60_000).responses[0].error_code == 0
        until(lambda: not list(data.glob("rolled-*")), "its folders go")


def first_offset(client: RawClient, topic: str) -> int:
    """The offset of the first batch that is there, -1 of none."""
    part = client.fetch(PartitionFetch(topic, 0, 0, 1)).partitions[0]
    return int.from_bytes(bytes(part.records[:8]), "big") if part.records else -1


def test_no_sync_is_waited_for_on_the_event_loop(
    zookeeper: ZooKeeper, tmp_path: Path, synced: list[tuple[bool, str]]
) -> None:
    data, port = tmp_path / "data", free_port()

    async def main() -> None:
        config = BrokerConfig(
            id=1,
            listen=Address("127.0.0.1", port),
            zookeeper=zookeeper.chroot(),
            data=[data],
            settings=parse_settings(SETTINGS),
        )
        broker = Broker(config)
        await broker.start()
        synced.clear()  # before that it serves nobody, and an identity is written where a folder is new
        try:
            await asyncio.to_thread(live, port, data)
        finally:
            await broker.stop()

    asyncio.run(main())
    assert len(synced) > 100
    assert {where for is_on_the_loop, where in synced if is_on_the_loop} == set()
