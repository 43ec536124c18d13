"""The clusters at both ends of a mirror under measurement: Apache Kafka as it ships, or Millrace, on one
core.

Durability is alike: both write to the page cache. Old timestamps expire nowhere. An end that is behind a
long link advertises the address of the relay, so that every client that asks for metadata goes through it;
the load goes to `port` directly.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from millrace.broker.client.admin import create_topic, delete_topic
from millrace.broker.client.cluster import Cluster
from tests.benchmarks.peers.servers import KAFKA_JVM_OPTIONS
from tests.peers.kafka import KafkaPeer
from tests.ports import free_port
from tests.servers import BrokerProcess, ZooKeeper

SETTINGS = {
    "log.retention.ms": "-1",
    "log.retention.check.interval.ms": "5000",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "5",
    "transaction.state.log.num.partitions": "5",
}
SMALL_HEAP = ("-Xms192M", "-Xmx384M", "-XX:+UseSerialGC", "-Xshare:auto")
"""Of each of many sources."""


class End:
    """A running broker: the load goes to `port`, mirrors to `address`."""

    kind = ""
    port = 0
    advertised: int | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.advertised or self.port}"

    def stop(self) -> None:
        raise NotImplementedError


class KafkaEnd(End):
    kind = "kafka"

    def __init__(self, folder: Path, *, advertised: int | None = None, is_small: bool = False) -> None:
        self._peer = _Peer(
            folder,
            settings=SETTINGS,
            jvm_options=SMALL_HEAP if is_small else KAFKA_JVM_OPTIONS,
        )
        self.advertised = advertised
        self.port = self._peer.listen_at_free_ports(advertised)
        self._peer.start()

    def stop(self) -> None:
        self._peer.kill()


class _Peer(KafkaPeer):
    def listen_at_free_ports(self, advertised: int | None) -> int:
        self._broker_port, self._controller_port = free_port(), free_port()
        if advertised is not None:
            controller = f"CONTROLLER://127.0.0.1:{self._controller_port}"
            self.settings["advertised.listeners"] = f"PLAINTEXT://127.0.0.1:{advertised},{controller}"
        return self._broker_port


class MillraceEnd(End):
    kind = "millrace"

    def __init__(self, folder: Path, zookeeper: ZooKeeper, *, advertised: int | None = None) -> None:
        settings = {"zookeeper.session.timeout.ms": 18_000, **SETTINGS}
        self._broker = _Broker(zookeeper.chroot(), folder, settings=settings)
        self._broker.advertised = self.advertised = advertised
        self._broker.start()
        self.port = self._broker.port

    def stop(self) -> None:
        self._broker.kill()


class _Broker(BrokerProcess):
    advertised: int | None = None

    def command(self) -> list[str]:
        words = super().command()
        return [*words, "--advertised", f"127.0.0.1:{self.advertised}"] if self.advertised else words


class Ends:
    """Some sources and a target of one kind; `with` ends them all."""

    def __init__(self, kind: str, folder: Path, sources: int = 1, *, advertised: int | None = None) -> None:
        self.kind = kind
        self.sources: dict[str, End] = {}
        self._all: list[End] = []
        self._zookeeper = ZooKeeper(folder / "zookeeper").start() if kind == "millrace" else None
        try:
            self.target = self._start(folder / "target")
            for number in range(1, sources + 1):
                self.sources[f"s{number}"] = self._start(
                    folder / f"source-{number}", advertised=advertised, is_small=sources > 1
                )
        except BaseException:
            self.stop()
            raise

    def _start(self, folder: Path, *, advertised: int | None = None, is_small: bool = False) -> End:
        folder.mkdir(parents=True, exist_ok=True)
        end: End
        if self._zookeeper is not None:
            end = MillraceEnd(folder, self._zookeeper, advertised=advertised)
        else:
            end = KafkaEnd(folder, advertised=advertised, is_small=is_small)
        self._all.append(end)
        return end

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for end in self._all:
            end.stop()
        if self._zookeeper is not None:
            self._zookeeper.stop()

    def create(self, topic: str, partitions: int) -> None:
        """At every source."""

        async def create() -> None:
            for name, end in self.sources.items():
                async with Cluster(name, [end.address]) as cluster:
                    await create_topic(cluster, topic, partitions, 1, {"retention.ms": "-1"})

        asyncio.run(create())

    def clear(self) -> None:
        """Deletes every topic at both ends but the coordinators' own."""

        async def clear() -> None:
            for name, end in [*self.sources.items(), ("target", self.target)]:
                async with Cluster(name, [end.address]) as cluster:
                    for topic in (await cluster.metadata(max_age_ms=0)).topics:
                        if not topic.startswith("__"):
                            await delete_topic(cluster, topic)

        asyncio.run(clear())
