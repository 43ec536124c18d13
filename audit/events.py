"""The events by which producers and mirrors testify, and the ledger that merges them. Pure.

Built by `session` (stream, count), the mirror (gap) and online consumers (tier); read by the job from the
events topic of every cluster. The same event may come several times and from several clusters: all are
cumulative and numbered, so that the newest replaces the older ones and the order of reading does not
matter.

Keys and values are a documented contract (UTF-8, compact JSON):

    stream/<stream>                    opened, heartbeat, closed: how far sequences were assigned and settled
    count/<stream>/<window_start_ms>   what was acknowledged in one window, `report` numbers the revisions
    gap/<mirror>/<source>/<topic>/<partition>/<from>
    tier/<group>/<stream>/<window_start_ms>

Invariant: `EventLedger.add` never raises for what a stranger wrote; what cannot be trusted is counted in
`untrusted` with a sentence, and its stream is marked so that no PROVEN can come out of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap64

from millrace.audit import sequence_set
from millrace.audit.header import MAX_CREATED_MS, MAX_PRODUCER_NAME_SIZE, MAX_SEQUENCE
from millrace.broker.errors import MillraceError

EVENT_VERSION = 1
OPENED, HEARTBEAT, CLOSED = "opened", "heartbeat", "closed"
UNANNOUNCED = "unannounced"
_STATE_RANK = {OPENED: 0, HEARTBEAT: 1, CLOSED: 2}
MAX_UNTRUSTED_KEPT = 1000
MAX_SENTENCES_A_STREAM = 10


class InvalidEvent(MillraceError):
    """An event that breaks the contract."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What a producer says of its stream as a whole. All times in ms."""

    state: str
    stream: str
    session: str
    topic: str
    producer: str
    host: str
    application: str
    datacenter: str
    window_ms: int
    last_assigned: int
    last_settled: int
    no_earlier_than_ms: int | None
    lease_ms: int
    at_ms: int

    @property
    def key(self) -> str:
        return f"stream/{self.stream}"


@dataclass(frozen=True, slots=True)
class CountEvent:
    """One window's cumulative report. `count` and `byte_count` are of the acknowledged records."""

    stream: str
    session: str
    topic: str
    producer: str
    window_start_ms: int
    window_ms: int
    report: int
    count: int
    byte_count: int
    acknowledged: BitMap64
    ambiguous: BitMap64
    failed: BitMap64
    at_ms: int
    digest: int | None = None
    sequenced: bool = True

    @property
    def key(self) -> str:
        return f"count/{self.stream}/{self.window_start_ms}"


@dataclass(frozen=True, slots=True)
class GapEvent:
    """Source offsets [from_offset, to_offset) that a mirror could not carry, with the class of the cause."""

    mirror: str
    source: str
    topic: str
    partition: int
    from_offset: int
    to_offset: int
    cause: str
    at_ms: int

    @property
    def key(self) -> str:
        return f"gap/{self.mirror}/{self.source}/{self.topic}/{self.partition}/{self.from_offset}"


@dataclass(frozen=True, slots=True)
class TierEvent:
    """What an online consumer group saw of one stream and window; cumulative like a count."""

    tier: str
    stream: str
    topic: str
    producer: str
    window_start_ms: int
    window_ms: int
    report: int
    count: int
    byte_count: int
    seen: BitMap64
    at_ms: int

    @property
    def key(self) -> str:
        return f"tier/{self.tier}/{self.stream}/{self.window_start_ms}"


Event = StreamEvent | CountEvent | GapEvent | TierEvent


def encode_event(event: Event) -> tuple[bytes, bytes]:
    """(record key, record value)."""
    body = _BODIES[type(event)](event)
    return event.key.encode(), json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _stream_body(event: StreamEvent) -> dict[str, Any]:
    return {
        "version": EVENT_VERSION,
        "type": "stream",
        "state": event.state,
        "stream": event.stream,
        "session": event.session,
        "topic": event.topic,
        "producer": event.producer,
        "host": event.host,
        "application": event.application,
        "datacenter": event.datacenter,
        "window_ms": event.window_ms,
        "last_assigned": event.last_assigned,
        "last_settled": event.last_settled,
        "no_earlier_than_ms": event.no_earlier_than_ms,
        "lease_ms": event.lease_ms,
        "at_ms": event.at_ms,
    }


def _count_body(event: CountEvent) -> dict[str, Any]:
    body: dict[str, Any] = {
        "version": EVENT_VERSION,
        "type": "count",
        "stream": event.stream,
        "session": event.session,
        "topic": event.topic,
        "producer": event.producer,
        "window_start_ms": event.window_start_ms,
        "window_ms": event.window_ms,
        "report": event.report,
        "count": event.count,
        "bytes": event.byte_count,
        "acknowledged": sequence_set.to_json(event.acknowledged),
        "ambiguous": sequence_set.to_json(event.ambiguous),
        "failed": sequence_set.to_json(event.failed),
        "digest": None if event.digest is None else f"{event.digest:016x}",
        "at_ms": event.at_ms,
    }
    if not event.sequenced:
        body["sequenced"] = False
    return body


def _gap_body(event: GapEvent) -> dict[str, Any]:
    return {
        "version": EVENT_VERSION,
        "type": "gap",
        "mirror": event.mirror,
        "source": event.source,
        "topic": event.topic,
        "partition": event.partition,
        "from": event.from_offset,
        "to": event.to_offset,
        "class": event.cause,
        "at_ms": event.at_ms,
    }


def _tier_body(event: TierEvent) -> dict[str, Any]:
    return {
        "version": EVENT_VERSION,
        "type": "tier",
        "tier": event.tier,
        "stream": event.stream,
        "topic": event.topic,
        "producer": event.producer,
        "window_start_ms": event.window_start_ms,
        "window_ms": event.window_ms,
        "report": event.report,
        "count": event.count,
        "bytes": event.byte_count,
        "seen": sequence_set.to_json(event.seen),
        "at_ms": event.at_ms,
    }


_BODIES: dict[type, Any] = {
    StreamEvent: _stream_body,
    CountEvent: _count_body,
    GapEvent: _gap_body,
    TierEvent: _tier_body,
}


class _Fields:
    """A JSON object read field by field; every wrong one raises InvalidEvent with its name."""

    def __init__(self, body: dict[str, Any]):
        self._body = body

    def text(self, name: str, default: str | None = None) -> str:
        value = self._body.get(name, default)
        if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > MAX_PRODUCER_NAME_SIZE:
            raise InvalidEvent(f"field {name} is not a text of at most {MAX_PRODUCER_NAME_SIZE} bytes")
        if not value.isprintable():
            raise InvalidEvent(f"field {name} has control characters")
        return value

    def identifier(self, name: str) -> str:
        value = self.text(name)
        if len(value) != 16 or any(digit not in "0123456789abcdef" for digit in value):
            raise InvalidEvent(f"field {name} is not 16 hexadecimal digits")
        return value

    def integer(self, name: str, low: int = 0, high: int = MAX_SEQUENCE) -> int:
        value = self._body.get(name)
        if type(value) is not int or not low <= value <= high:
            raise InvalidEvent(f"field {name} is not a whole number from {low} to {high}")
        return value

    def time_ms(self, name: str) -> int:
        return self.integer(name, 0, MAX_CREATED_MS)

    def sequences(self, name: str) -> BitMap64:
        try:
            return sequence_set.from_json(self._body.get(name, []))
        except sequence_set.InvalidSequenceSet as error:
            raise InvalidEvent(f"field {name}: {error}") from error

    def raw(self, name: str) -> Any:
        return self._body.get(name)


def decode_event(value: bytes | memoryview | None) -> Event | None:
    """Read a record's value; None for a tombstone and for a type not known here. Raises InvalidEvent."""
    if value is None:
        return None
    try:
        body = json.loads(bytes(value))
    except (ValueError, RecursionError) as error:
        raise InvalidEvent("not JSON") from error
    if not isinstance(body, dict):
        raise InvalidEvent("not a JSON object")
    fields = _Fields(body)
    if fields.raw("version") != EVENT_VERSION:
        raise InvalidEvent(f"version {str(fields.raw('version'))[:20]}, this reader knows {EVENT_VERSION}")
    reader = _READERS.get(fields.text("type"))
    return None if reader is None else reader(fields)


def _read_stream(fields: _Fields) -> StreamEvent:
    state = fields.text("state")
    if state not in _STATE_RANK:
        raise InvalidEvent(f"unknown stream state {state}")
    last_assigned = fields.integer("last_assigned")
    promise = None if fields.raw("no_earlier_than_ms") is None else fields.time_ms("no_earlier_than_ms")
    return StreamEvent(
        state=state,
        stream=fields.identifier("stream"),
        session=fields.identifier("session"),
        topic=fields.text("topic"),
        producer=fields.text("producer"),
        host=fields.text("host", ""),
        application=fields.text("application", ""),
        datacenter=fields.text("datacenter", ""),
        window_ms=fields.integer("window_ms", 1, MAX_CREATED_MS),
        last_assigned=last_assigned,
        last_settled=fields.integer("last_settled", 0, last_assigned),
        no_earlier_than_ms=promise,
        lease_ms=fields.time_ms("lease_ms"),
        at_ms=fields.time_ms("at_ms"),
    )


def _read_count(fields: _Fields) -> CountEvent:
    sequenced = fields.raw("sequenced") is not False
    window_ms = fields.integer("window_ms", 1, MAX_CREATED_MS)
    event = CountEvent(
        stream=fields.identifier("stream"),
        session=fields.identifier("session"),
        topic=fields.text("topic"),
        producer=fields.text("producer"),
        window_start_ms=_read_window_start(fields, window_ms),
        window_ms=window_ms,
        report=fields.integer("report"),
        count=fields.integer("count"),
        byte_count=fields.integer("bytes"),
        acknowledged=fields.sequences("acknowledged"),
        ambiguous=fields.sequences("ambiguous"),
        failed=fields.sequences("failed"),
        at_ms=fields.time_ms("at_ms"),
        digest=_read_digest(fields.raw("digest")),
        sequenced=sequenced,
    )
    sets = (event.acknowledged, event.ambiguous, event.failed)
    if sequenced and len(event.acknowledged) != event.count:
        raise InvalidEvent(
            f"count is {event.count}, but {len(event.acknowledged)} sequences are acknowledged"
        )
    if len(sets[0] | sets[1] | sets[2]) != sum(map(len, sets)):
        raise InvalidEvent("a sequence is acknowledged, ambiguous and failed at once")
    return event


def _read_window_start(fields: _Fields, window_ms: int) -> int:
    start_ms = fields.time_ms("window_start_ms")
    if start_ms % window_ms != 0:
        raise InvalidEvent(f"window_start_ms {start_ms} is no multiple of window_ms {window_ms}")
    return start_ms


def _read_digest(value: Any) -> int | None:
    if value is None:
        return None
    try:
        digest = int(value, 16) if isinstance(value, str) else -1
    except ValueError as error:
        raise InvalidEvent("field digest is not hexadecimal") from error
    if not 0 <= digest < 1 << 64:
        raise InvalidEvent("field digest is not a 64-bit number")
    return digest


def _read_gap(fields: _Fields) -> GapEvent:
    from_offset = fields.integer("from")
    return GapEvent(
        mirror=fields.text("mirror"),
        source=fields.text("source"),
        topic=fields.text("topic"),
        partition=fields.integer("partition", 0, (1 << 31) - 1),
        from_offset=from_offset,
        to_offset=fields.integer("to", from_offset),
        cause=fields.text("class"),
        at_ms=fields.time_ms("at_ms"),
    )


def _read_tier(fields: _Fields) -> TierEvent:
    window_ms = fields.integer("window_ms", 1, MAX_CREATED_MS)
    return TierEvent(
        tier=fields.text("tier"),
        stream=fields.identifier("stream"),
        topic=fields.text("topic"),
        producer=fields.text("producer", ""),
        window_start_ms=_read_window_start(fields, window_ms),
        window_ms=window_ms,
        report=fields.integer("report"),
        count=fields.integer("count"),
        byte_count=fields.integer("bytes"),
        seen=fields.sequences("seen"),
        at_ms=fields.time_ms("at_ms"),
    )


_READERS: dict[str, Any] = {
    "stream": _read_stream,
    "count": _read_count,
    "gap": _read_gap,
    "tier": _read_tier,
}


@dataclass(slots=True)
class StreamFacts:
    """Everything the events say of one stream, merged. `state` is `unannounced` while no stream event was
    read.

    `conflicts` are sentences; any of them makes the stream's windows UNKNOWN at best. `distrusted` tells of
    its events that could not be read: for numbered records a hole in the reports shows what they hid, but
    for a count-only producer nothing else would.
    """

    stream: str
    topic: str = ""
    producer: str = ""
    session: str = ""
    host: str = ""
    application: str = ""
    datacenter: str = ""
    state: str = UNANNOUNCED
    last_assigned: int = 0
    last_settled: int = 0
    no_earlier_than_ms: int | None = None
    lease_ms: int = 0
    at_ms: int = 0
    opened_at_ms: int | None = None
    closed_at_ms: int | None = None
    alive_at_ms: int = 0
    windows: dict[int, CountEvent] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    distrusted: list[str] = field(default_factory=list)

    @property
    def sequenced(self) -> bool:
        """False for a count-only producer, which says so in its reports: in all of them."""
        return not self.windows or any(report.sequenced for report in self.windows.values())

    def learn_stream(self, event: StreamEvent) -> None:
        """Merge a stream event; the order of calls does not matter."""
        self._learn_identity(event)
        if (event.at_ms, _STATE_RANK[event.state]) >= (self.at_ms, _STATE_RANK.get(self.state, -1)):
            self.at_ms, self.lease_ms = event.at_ms, event.lease_ms
        if _STATE_RANK[event.state] > _STATE_RANK.get(self.state, -1):
            self.state = event.state
        self.last_assigned = max(self.last_assigned, event.last_assigned)
        self.last_settled = max(self.last_settled, event.last_settled)
        if event.no_earlier_than_ms is not None:
            self.no_earlier_than_ms = max(self.no_earlier_than_ms or 0, event.no_earlier_than_ms)
        # A later word says nothing of the start, when this one was lost or compacted.
        if event.state == OPENED:
            self.opened_at_ms = min(event.at_ms, self.opened_at_ms or event.at_ms)
        if event.state == CLOSED:
            self.closed_at_ms = min(event.at_ms, self.closed_at_ms or event.at_ms)
        else:
            self.alive_at_ms = max(event.at_ms, self.alive_at_ms)
        # A clock that was set back may make the last beat look a little younger than the end.
        if self.closed_at_ms is not None and self.alive_at_ms > self.closed_at_ms + event.lease_ms:
            self._conflict("the stream goes on after its end: two producers use one stream id")

    def learn_count(self, event: CountEvent) -> None:
        """Merge a window's report: the highest number wins."""
        self._learn_identity(event)
        known = self.windows.get(event.window_start_ms)
        if any(report.sequenced != event.sequenced for report in self.windows.values()):
            self._conflict("some reports number the records, others only count them")
        if known is not None and known.report != event.report:
            older, newer = sorted((known, event), key=lambda report: report.report)
            if not older.acknowledged.issubset(newer.acknowledged):
                self._conflict("a newer report takes back what an older one acknowledged")
        if known is None or event.report > known.report:
            self.windows[event.window_start_ms] = event
        elif event.report == known.report and _says(event) != _says(known):
            self._conflict(f"two different reports with number {event.report} for one window")

    def _learn_identity(self, event: StreamEvent | CountEvent) -> None:
        if not self.topic:
            self.topic, self.producer, self.session = event.topic, event.producer, event.session
        elif (self.topic, self.producer, self.session) != (event.topic, event.producer, event.session):
            self._conflict("two producers use one stream id")
        if isinstance(event, StreamEvent):
            self.host = self.host or event.host
            self.application = self.application or event.application
            self.datacenter = self.datacenter or event.datacenter

    def _conflict(self, sentence: str) -> None:
        if sentence not in self.conflicts:
            self.conflicts.append(sentence)

    def lapsed(self, now_ms: int, grace_ms: int) -> bool:
        """No word for longer than the lease: nothing more is to be expected."""
        return self.state != UNANNOUNCED and now_ms > self.at_ms + self.lease_ms + grace_ms


def _says(event: CountEvent) -> tuple[object, ...]:
    return (event.window_ms, event.count, event.acknowledged, event.ambiguous, event.failed, event.digest)


class EventLedger:
    """All events read so far, merged by stream; gaps and online tiers beside them."""

    def __init__(self) -> None:
        self.streams: dict[str, StreamFacts] = {}
        self.gaps: dict[str, GapEvent] = {}
        self.tiers: dict[str, TierEvent] = {}
        self._distrusted: dict[str, list[str]] = {}
        self.untrusted_count = 0
        self.untrusted: list[str] = []

    def add(self, key: bytes | None, value: bytes | memoryview | None, origin: str = "") -> None:
        """Learn a record of the events topic; `origin` (cluster, offset) is named when it is not trusted."""
        try:
            event = decode_event(value)
        except InvalidEvent as error:
            self._distrust(key, origin, str(error))
            return
        if event is None:
            return
        if key is not None and bytes(key) != event.key.encode():
            self._distrust(key, origin, f"the key should be {event.key}")
            return
        self.learn(event)

    def learn(self, event: Event) -> None:
        """Merge one valid event."""
        match event:
            case StreamEvent():
                self.facts(event.stream).learn_stream(event)
            case CountEvent():
                self.facts(event.stream).learn_count(event)
            case GapEvent():
                known = self.gaps.get(event.key)
                if known is None or event.at_ms >= known.at_ms:
                    self.gaps[event.key] = event
            case TierEvent():
                before = self.tiers.get(event.key)
                if before is None or event.report > before.report:
                    self.tiers[event.key] = event

    def learn_all(self, events: Iterable[Event]) -> None:
        for event in events:
            self.learn(event)

    def facts(self, stream: str) -> StreamFacts:
        """A stream's facts; empty ones (unannounced) for a stream that no event names."""
        facts = self.streams.get(stream)
        if facts is None:
            # The list is shared, so that an unreadable event counts whether it came before the others or
            # after.
            distrusted = self._distrusted.setdefault(stream, [])
            facts = self.streams[stream] = StreamFacts(stream, distrusted=distrusted)
        return facts

    def _distrust(self, key: bytes | None, origin: str, sentence: str) -> None:
        """Count it, and tell the stream that the key names: its newest report may be the unreadable one."""
        self.untrusted_count += 1
        name = "" if key is None else bytes(key[:80]).decode("utf-8", "replace")
        if len(self.untrusted) < MAX_UNTRUSTED_KEPT:
            self.untrusted.append(f"event {name!r} {origin}: {sentence}".replace("  ", " "))
        kind, _, rest = name.partition("/")
        stream = rest.partition("/")[0]
        if kind == "count" and stream:
            known = self._distrusted.setdefault(stream, [])
            if sentence not in known and len(known) < MAX_SENTENCES_A_STREAM:
                known.append(sentence)
