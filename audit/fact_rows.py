"""A stream's facts as one Parquet row: what producers said, kept beyond the events' own retention.

Written by `job` at each run (all streams, so one file is enough), read by Spark for reconciliation and by
`explain`. The row holds the events in their own documented JSON, merged: two stream events (first and newest
word) and the newest report per window; so a later version of the audit can read what an earlier one kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from millrace.audit.events import (
    OPENED,
    UNANNOUNCED,
    Event,
    EventLedger,
    StreamEvent,
    StreamFacts,
    decode_event,
    encode_event,
)

FACT_SCHEMA = pa.schema(
    [
        ("stream", pa.string()),
        ("topic", pa.string()),
        ("origins", pa.list_(pa.string())),
        ("facts", pa.binary()),
    ]
)
FACT_DDL = "stream string, topic string, origins array<string>, facts binary"


def encode_facts(facts: StreamFacts) -> bytes:
    """The stream's events, one JSON text a line, then its conflicts."""
    lines = [encode_event(event)[1] for event in events_of(facts)]
    lines.append(json.dumps({"conflicts": facts.conflicts, "distrusted": facts.distrusted}).encode())
    return b"\n".join(lines)


def decode_facts(stream: str, content: bytes) -> StreamFacts:
    """The facts again; raises InvalidEvent for what `encode_facts` never wrote."""
    facts = StreamFacts(stream)
    *events, last = content.split(b"\n")
    for line in events:
        event = decode_event(line)
        if isinstance(event, StreamEvent):
            facts.learn_stream(event)
        elif event is not None:
            facts.learn_count(event)  # type: ignore[arg-type]
    kept = json.loads(last)
    facts.conflicts.extend(each for each in kept["conflicts"] if each not in facts.conflicts)
    facts.distrusted.extend(each for each in kept["distrusted"] if each not in facts.distrusted)
    return facts


def events_of(facts: StreamFacts) -> Iterator[Event]:
    """Events that, merged, give the same facts."""
    if facts.state != UNANNOUNCED:
        newest = StreamEvent(
            state=facts.state,
            stream=facts.stream,
            session=facts.session,
            topic=facts.topic,
            producer=facts.producer,
            host=facts.host,
            application=facts.application,
            datacenter=facts.datacenter,
            window_ms=1,
            last_assigned=facts.last_assigned,
            last_settled=min(facts.last_settled, facts.last_assigned),
            no_earlier_than_ms=facts.no_earlier_than_ms,
            lease_ms=facts.lease_ms,
            at_ms=facts.at_ms,
        )
        if facts.opened_at_ms is not None and (facts.opened_at_ms, OPENED) != (facts.at_ms, facts.state):
            yield replace(
                newest,
                state=OPENED,
                at_ms=facts.opened_at_ms,
                last_assigned=0,
                last_settled=0,
                no_earlier_than_ms=None,
            )
        yield newest
    for start_ms in sorted(facts.windows):
        yield facts.windows[start_ms]


def facts_table(ledger: EventLedger, origins: Mapping[str, set[str]]) -> pa.Table:
    """Every stream that any event named, ordered, so that equal facts give equal tables."""
    streams = sorted(ledger.streams)
    return pa.table(
        {
            "stream": streams,
            "topic": [ledger.streams[stream].topic for stream in streams],
            "origins": [sorted(origins.get(stream, ())) for stream in streams],
            "facts": [encode_facts(ledger.streams[stream]) for stream in streams],
        },
        schema=FACT_SCHEMA,
    )


def restore(table: pa.Table, ledger: EventLedger) -> dict[str, set[str]]:
    """Teach a ledger what an earlier run knew; returns the streams' origins."""
    origins: dict[str, set[str]] = {}
    for row in table.to_pylist():
        kept = decode_facts(row["stream"], row["facts"])
        ledger.learn_all(events_of(kept))
        facts = ledger.facts(row["stream"])
        facts.conflicts.extend(each for each in kept.conflicts if each not in facts.conflicts)
        facts.distrusted.extend(each for each in kept.distrusted if each not in facts.distrusted)
        origins[row["stream"]] = set(row["origins"] or ())
    return origins


def digest(table: pa.Table) -> str:
    """Equal for equal facts: tells whether anything was learnt."""
    content = hashlib.sha256()
    for column in table.columns:
        for value in column.to_pylist():
            content.update(repr(value).encode())
    return content.hexdigest()
