"""The values of the audit's events: what producers, mirrors and online consumers testify. Pure values.

Built by `session` and `count_stream` (stream, count), the mirror (gap, `protocol.gap_events`) and `consumer`
(tier); written and read as JSON by `event_json`; merged by `event_ledger`. EVENTS.md is their contract for
other languages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyroaring import BitMap64

from millrace.broker.errors import MillraceError
from millrace.broker.protocol.gap_events import GapEvent

EVENT_VERSION = 1
OPENED, HEARTBEAT, CLOSED = "opened", "heartbeat", "closed"
STATE_RANK = {OPENED: 0, HEARTBEAT: 1, CLOSED: 2}


class InvalidEvent(MillraceError):
    """An event that breaks the contract."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """What a producer says of its stream as a whole. All times in ms. `untold` are the beginnings of windows
    whose reports the events topic does not take."""

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
    untold: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        return f"stream/{self.stream}"


@dataclass(frozen=True, slots=True)
class CountEvent:
    """One window's cumulative report. `count`, `byte_count`, `digest` are of the acknowledged records.

    Not `sequenced`: of a producer that cannot number its records; then all sets are empty, and
    `ambiguous_count` records more may exist.
    """

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
    ambiguous_count: int = 0

    @property
    def key(self) -> str:
        return f"count/{self.stream}/{self.window_start_ms}"


@dataclass(frozen=True, slots=True)
class TierEvent:
    """What one consumer of a group got of one stream and window; cumulative like a count.

    `tier` is the group, `session` one start of one of its consumers, so that members do not replace each
    other's word. `count` is every record that the application got, repeats included, `unsequenced` the part
    without a number; `seen` the distinct numbers, `repeats` those that came more than once to this session;
    `digest` the sum over the first copy of each. Times are the consumer's clock when it got the window's
    first and last record. `session_count` is what the session had counted in all its windows, so that a lost
    event shows. `cluster_id` is Kafka's id of the cluster that was read ("" = not known): groups of one name
    read several clusters, and a mirror carries their events along. `began` are (partition, offset) of the
    first record that the session got of partitions of the topic; one of the session's events tells each.
    """

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
    session: str = "0" * 16
    repeats: BitMap64 = field(default_factory=BitMap64)
    unsequenced: int = 0
    digest: int | None = None
    first_append_ms: int | None = None
    last_append_ms: int | None = None
    session_count: int = 0
    cluster_id: str = ""
    began: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        return f"tier/{self.tier}/{self.session}/{self.topic}/{self.stream}/{self.window_start_ms}"


Event = StreamEvent | CountEvent | GapEvent | TierEvent
