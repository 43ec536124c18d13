"""Kafka clusters in memory (librdkafka's mock: a Kafka that is not ours) and a small world to audit.

`world` has two source clusters and an aggregate. Its methods play the producers' and the mirror's parts
record by record, so that every test knows the truth that the audit must find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.contract.events import CLOSED, CountEvent, Event, StreamEvent, encode_event
from millrace.audit.contract.header import encode_identity, encode_prefix
from millrace.audit.contract.sequence_set import from_ranges
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position, encode_key, encode_value
from tests.waiting import patience

DAY_MS = 86_400_000
START_MS = 1_356_998_400_000  # 2013-01-01T00:00:00Z
NOW_MS = START_MS + 400 * DAY_MS


class MockCluster:
    """One in-memory cluster with one broker; partitions are made on first use."""

    def __init__(self, compression: str = "none") -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": "mock",
                "test.mock.num.brokers": 1,
                "compression.type": compression,
                "linger.ms": 20,
                "log_level": 2,
            }
        )
        (broker,) = self._producer.list_topics(timeout=60).brokers.values()
        self.bootstrap = f"{broker.host}:{broker.port}"

    def produce(self, topic: str, value: bytes, **more: Any) -> None:
        self._producer.produce(topic, value, **{"partition": 0, **more})
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer.flush(patience(60)) == 0


@dataclass
class Stream:
    """One audited producer in one source cluster."""

    source: str
    producer: str
    stream: str
    topic: str = "flights"
    partition: int = 0
    sent: list[int] = field(default_factory=list)


@dataclass
class World:
    clusters: dict[str, MockCluster]
    config: AuditConfig
    produced: dict[tuple[str, int], int] = field(default_factory=dict)

    def send(self, stream: Stream, sequences: Iterable[int], *, reaches_source: bool = True) -> None:
        """Produce records, one a window of ten sequences, into the source cluster."""
        for sequence in sequences:
            stream.sent.append(sequence)
            if reaches_source:
                self._put(stream.source, stream, sequence)

    def of_sixty(self) -> Stream:
        """One stream of 60 records, all told; what arrives of them is for the test to say."""
        stream = Stream("ewr", "UA@ewr", "00000000000000aa", "flights")
        self.send(stream, range(1, 61))
        self.report(stream)
        # Or a source cluster without events would be in doubt.
        self.report(Stream("jfk", "B6@jfk", "ee" * 8, "flights"))
        return stream

    def carry(self, stream: Stream, *, lose: Iterable[int] = (), repeat: Iterable[int] = ()) -> None:
        """Play the mirror for everything the stream sent."""
        lost, repeated = set(lose), set(repeat)
        for sequence in stream.sent:
            for _ in range((sequence not in lost) + (sequence in repeated)):
                self._put("agg", stream, sequence)

    def _put(self, cluster: str, stream: Stream, sequence: int) -> None:
        created_ms = self.created_ms(sequence)
        identity = encode_identity(
            encode_prefix(stream.stream), sequence, created_ms, stream.producer.encode()
        )
        self.clusters[cluster].produce(
            stream.topic,
            f"record {sequence}".encode(),
            partition=stream.partition,
            headers=[("_mr", identity)],
            timestamp=created_ms,
        )
        key = (cluster, stream.partition)
        self.produced[key] = self.produced.get(key, 0) + 1

    @staticmethod
    def created_ms(sequence: int) -> int:
        return START_MS + (sequence - 1) // 10 * DAY_MS

    def report(self, stream: Stream, *, report: int = 1, acknowledged: Iterable[int] | None = None) -> None:
        """The producer's events: counts of each window, then closed."""
        told = sorted(stream.sent if acknowledged is None else acknowledged)
        windows: dict[int, list[int]] = {}
        for sequence in told:
            windows.setdefault(self.created_ms(sequence), []).append(sequence)
        for start_ms, members in windows.items():
            self.event(stream.source, self.count_event(stream, start_ms, members, report))
        last = max(stream.sent, default=0)
        self.event(
            stream.source,
            StreamEvent(
                state=CLOSED,
                stream=stream.stream,
                session="a" * 16,
                topic=stream.topic,
                producer=stream.producer,
                host="host",
                application="feed",
                datacenter=stream.source,
                window_ms=DAY_MS,
                last_assigned=last,
                last_settled=last,
                no_earlier_than_ms=None,
                lease_ms=60_000,
                at_ms=START_MS + 399 * DAY_MS,
            ),
        )

    @staticmethod
    def count_event(stream: Stream, start_ms: int, members: list[int], report: int = 1) -> CountEvent:
        acknowledged = from_ranges(tuple((each, each) for each in members))
        return CountEvent(
            stream=stream.stream,
            session="a" * 16,
            topic=stream.topic,
            producer=stream.producer,
            window_start_ms=start_ms,
            window_ms=DAY_MS,
            report=report,
            count=len(members),
            byte_count=sum(len(f"record {each}") for each in members),
            acknowledged=acknowledged,
            ambiguous=from_ranges(()),
            failed=from_ranges(()),
            at_ms=START_MS + 399 * DAY_MS,
        )

    def event(self, cluster: str, event: Event) -> None:
        key, value = encode_event(event)
        self.clusters[cluster].produce("millrace.audit", value, key=key)

    def position(self, source: str, next_offset: int, partition: int = 0, topic: str = "flights") -> None:
        """What the mirror keeps in the aggregate."""
        value = encode_value(Position(next_offset, "", NO_TOPIC_ID, 0, 0))
        key = encode_key(source, topic, partition)
        self.clusters["agg"].produce("millrace.positions.test", value, key=key)

    def flush(self) -> None:
        for cluster in self.clusters.values():
            cluster.flush()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clusters = {"ewr": MockCluster("lz4"), "jfk": MockCluster(), "agg": MockCluster("zstd")}
    config = parse_config(
        {
            "clusters": {
                name: {
                    "bootstrap": [cluster.bootstrap],
                    "tier": "aggregate" if name == "agg" else "source",
                }
                for name, cluster in clusters.items()
            },
            "topics": ["flights"],
            "window": "1d",
            "grace": "1s",
            "state": str(tmp_path / "state"),
            "report": str(tmp_path / "report"),
        }
    )
    yield World(clusters, config)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One Spark for all tests: the job uses a running session as it is."""
    from tests.peers.spark_kafka import connector_jars
    from tests.spark_session import spark_session

    folder = tmp_path_factory.mktemp("spark")
    events = folder / "events"
    events.mkdir()
    settings = {  # what Spark tells about its work, for tests that look for what must not be in it
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    # With the Kafka connector where its jars can be had, so that a test may read through it.
    with contextlib.suppress(RuntimeError):
        settings["spark.jars"] = connector_jars()
    with spark_session("local[2]", folder, settings) as session:
        yield session
