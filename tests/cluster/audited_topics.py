"""Reads audited topics through a foreign client, and audits what is there, for tests of producers.

The real scan and job have tests of their own (`tests/spark`); this is the shortest way from records and
events on a server to verdicts.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from typing import Any

import numpy as np
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.audit.contract.content_digest import digest_sum, record_digest
from millrace.audit.contract.events import EventLedger, StreamFacts
from millrace.audit.contract.header import HEADER_KEY, decode_identity, window_start_ms
from millrace.audit.reconciliation.reconcile import TierReading, reconcile_stream
from millrace.audit.reconciliation.verdicts import WindowVerdict
from millrace.audit.scanning.cells import Cell, merge_cells
from tests.cells import again_of, count_repeats, encode_bitmaps
from tests.waiting import Deadline, patience, until

DEADLINE_S = 120.0
WINDOW_MS = 10_000


def unique(name: str) -> str:
    """A name that no other test on a shared server has."""
    return f"{name}-{secrets.token_hex(4)}"


def make_topic(bootstrap: str, name: str, partitions: int = 3) -> str:
    """A new topic of a name that no other test has."""
    topic, admin = unique(name), AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(patience(DEADLINE_S))
    until(
        lambda: (
            len(admin.list_topics(topic, timeout=patience(DEADLINE_S)).topics[topic].partitions) == partitions
        )
    )
    return topic


def read_all(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Any]:
    """Every committed record of a topic (or every one at all), up to its present end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": unique("reader"),
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
        }
    )
    partitions = consumer.list_topics(topic, timeout=patience(DEADLINE_S)).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    messages, ended = [], set()
    deadline = Deadline(f"{topic} is read to its end", within_s=DEADLINE_S)
    while len(ended) < len(partitions):
        deadline.check(ended)
        for message in consumer.consume(1000, 0.02):
            if message.error() is None:
                messages.append(message)
            else:
                ended.add(message.partition())
    consumer.close()
    return messages


def ledger_of(bootstrap: str, events_topic: str) -> EventLedger:
    """What the events topic tells; every event of it must be believed."""
    ledger = EventLedger()
    for message in read_all(bootstrap, events_topic):
        assert not message.headers()
        ledger.add(message.key(), message.value())
    assert ledger.untrusted == []
    return ledger


def facts_of(ledger: EventLedger, topic: str) -> StreamFacts:
    """The topic's one stream."""
    (facts,) = [facts for facts in ledger.streams.values() if facts.topic == topic]
    return facts


def fate(facts: Any, name: str) -> set[int]:
    """The sequences that all reports together, or all windows of a producer's own stream, call acknowledged,
    ambiguous or failed: a minute may end between two records."""
    return {sequence for report in facts.windows.values() for sequence in getattr(report, name)}


def cells_of(messages: list[Any], tier: str = "source") -> list[Cell]:
    """What a scan would count: one cell for each partition, stream and window."""
    groups: dict[tuple[str, int, str, int], list[Any]] = defaultdict(list)
    for message in messages:
        identity = decode_identity(dict(message.headers())[HEADER_KEY])
        start_ms = window_start_ms(identity.created_ms, WINDOW_MS)
        groups[message.topic(), message.partition(), identity.stream, start_ms].append((message, identity))
    return [_cell(tier, *group, members) for group, members in groups.items()]


def _cell(tier: str, topic: str, partition: int, stream: str, start_ms: int, members: list[Any]) -> Cell:
    numbers = np.array([identity.sequence for _, identity in members], dtype=np.uint64)
    distinct, repeats = count_repeats(numbers)
    pairs = encode_bitmaps(distinct)
    base, bitmap = pairs[0] if pairs else (0, b"")
    offsets = [message.offset() for message, _ in members]
    return Cell(
        tier=tier,
        cluster=tier,
        topic=topic,
        partition=partition,
        stream=stream,
        producer=members[0][1].producer,
        window_start_ms=start_ms,
        chunk_start=0,
        count=len(members),
        byte_count=sum(len(message) for message, _ in members),
        first_offset=min(offsets),
        last_offset=max(offsets),
        base=base,
        bitmap=bitmap,
        again=again_of(repeats),
        unsequenced_count=int(np.count_nonzero(numbers == 0)),
        digest=digest_sum(
            record_digest(identity.sequence, message.key(), message.value(), message.headers())
            for message, identity in members
        ),
    )


def audit(
    facts: StreamFacts, messages: list[Any], tiers: tuple[TierReading, ...] = (TierReading("source"),), **more
) -> list[WindowVerdict]:
    """The verdicts on one stream, an hour after its last word."""
    seen = merge_cells(cell for cell in cells_of(messages) if cell.stream == facts.stream)
    seen.update(more)
    return reconcile_stream(
        facts, seen, tiers, window_ms=WINDOW_MS, grace_ms=0, now_ms=facts.at_ms + 3_600_000
    )
