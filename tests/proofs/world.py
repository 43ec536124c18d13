"""A source and an aggregate on brokers of their own, filled by `hashed_load`, for this folder's proofs."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from confluent_kafka import Producer

from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position, encode_key, encode_value
from tests.proofs.hashed_load import (
    MERGED,
    POSITIONS_TOPIC,
    SENT,
    TOPIC,
    Sending,
    Written,
    make_topic,
    tell,
    write,
)
from tests.servers import BrokerProcess, ZooKeeper

BUILD = Path(__file__).resolve().parents[2] / "build"


class World:
    """Two clusters of a broker each, `src` and `agg`; use as a context manager. `host` is where others reach
    them. The data lies in the folder and is removed with it."""

    def __init__(self, folder: Path, *, partitions: int, host: str = "127.0.0.1") -> None:
        self.folder, self.partitions = folder, partitions
        self.brokers: dict[str, BrokerProcess] = {}
        self._host = host
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> World:
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            zookeeper = ZooKeeper(self.folder / "zookeeper")
            undo.callback(zookeeper.stop)
            zookeeper.start()
            for name in ("src", "agg"):
                broker = BrokerProcess(zookeeper.chroot(), self.folder / name)
                if self._host != "127.0.0.1":
                    broker.advertised_host = self._host
                undo.callback(broker.kill)
                self.brokers[name] = broker.start()
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    @property
    def bootstraps(self) -> Mapping[str, str]:
        return {name: f"{self._host}:{broker.port}" for name, broker in self.brokers.items()}

    def make_topics(self, tiers: Iterable[str] = ("src", "agg")) -> None:
        for tier in tiers:
            asyncio.run(make_topic(self.bootstraps[tier], TOPIC, self.partitions))

    def send(
        self,
        sending: Sending,
        tier: str,
        *,
        without: Collection[int] = (),
        twice: Collection[int] = (),
        only: Collection[int] | None = None,
        layout: str | None = None,
    ) -> Written:
        """Records, as producers leave them in the source, or as a mirror does in the aggregate."""
        layout = layout or (SENT if tier == "src" else MERGED)
        place = self.bootstraps[tier]
        return asyncio.run(write(place, sending, layout, without=without, twice=twice, only=only))

    def tell(self, events: Iterable[tuple[bytes, bytes]]) -> int:
        return tell(self.bootstraps["src"], events)

    def position(self, next_offsets: Mapping[int, int]) -> None:
        """What a mirror that has carried so much keeps in the aggregate."""
        producer = Producer({"bootstrap.servers": self.bootstraps["agg"]})
        for partition, next_offset in next_offsets.items():
            value = encode_value(Position(next_offset, "", NO_TOPIC_ID, -1, 0))
            producer.produce(POSITIONS_TOPIC, value, key=encode_key("src", TOPIC, partition))
        if producer.flush(60.0):
            raise RuntimeError("positions were not acknowledged within 60 s")

    def ends(self, tier: str) -> dict[int, int]:
        """{partition: end of its log}"""
        from millrace.broker.client.cluster import Cluster
        from millrace.broker.client.offsets import LATEST

        async def ask() -> dict[int, int]:
            async with Cluster("load", [self.bootstraps[tier]]) as cluster:
                keys = {(TOPIC, partition): LATEST for partition in range(self.partitions)}
                return {key[1]: each.offset for key, each in (await cluster.list_offsets(keys)).items()}

        return asyncio.run(ask())
