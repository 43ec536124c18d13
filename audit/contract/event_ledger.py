"""The ledger: events of any origin, in any order, any number of times, merged into what is known. Pure.

Filled by the job's capture from the events topics of all clusters and from the kept state; read by
`reconcile`, `watermark`, `group_counts` and the report. All events are cumulative, so that one replaces the
others of its key: the newest by its number, or of a mirror's gap, which has none, the one that reaches
farthest.

Invariant: `EventLedger.add` never raises for what a stranger wrote; what cannot be trusted is counted in
`untrusted` with a sentence, and the stream or group that it speaks of is marked so that no PROVEN, and no
LOSS that an unreadable event would explain, can come out of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pyroaring import AbstractBitMap64, FrozenBitMap64

from millrace.audit.contract.event_json import decode_event
from millrace.audit.contract.event_values import (
    CLOSED,
    OPENED,
    STATE_RANK,
    CountEvent,
    Event,
    GapEvent,
    InvalidEvent,
    StreamEvent,
    TierEvent,
)
from millrace.audit.contract.window_reports import PlainText, Teller, WindowReports, read_plain

UNANNOUNCED = "unannounced"
MAX_UNTRUSTED_KEPT = 1000
MAX_SENTENCES_A_STREAM = 10
MAX_NAME_KEPT = 1024
_NOTHING = FrozenBitMap64()


@dataclass(slots=True)
class StreamFacts:
    """Everything the events say of one stream, merged. `state` is `unannounced` while no stream event was
    read.

    `conflicts` are sentences; any of them makes the stream's windows UNKNOWN at best. `distrusted` tells of
    its events that could not be read: for numbered records a hole in the reports shows what they hid, but
    for a count-only producer nothing else would. `accounted` are numbers of windows whose evidence is pruned:
    who reconciles knows no more of them.
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
    untold: tuple[int, ...] = ()
    windows: WindowReports = field(default_factory=WindowReports)
    conflicts: list[str] = field(default_factory=list)
    distrusted: list[str] = field(default_factory=list)
    accounted: AbstractBitMap64 = _NOTHING
    _numbered: bool = False
    _only_counted: bool = False
    _window_ms: int | None = None

    @property
    def sequenced(self) -> bool:
        """False for a count-only producer, which says so in its reports: in all of them."""
        return self._numbered or not self._only_counted

    def learn_stream(self, event: StreamEvent) -> None:
        """Merge a stream event; the order of calls does not matter."""
        self._learn_identity(event)
        if (event.at_ms, STATE_RANK[event.state]) >= (self.at_ms, STATE_RANK.get(self.state, -1)):
            self.at_ms, self.lease_ms, self.untold = event.at_ms, event.lease_ms, event.untold
        if STATE_RANK[event.state] > STATE_RANK.get(self.state, -1):
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
            self.conflict("the stream goes on after its end: two producers use one stream id")

    def learn_count(self, event: CountEvent) -> None:
        """Merge a window's report: the highest number wins."""
        self._learn_identity(event)
        self._learn_manner(event)
        known = self.windows.get(event.window_start_ms)
        if known is None:
            self.windows[event.window_start_ms] = event
            return
        if known.report != event.report:
            older, newer = sorted((known, event), key=lambda report: report.report)
            if not older.acknowledged.issubset(newer.acknowledged) or newer.count < older.count:
                self.conflict("a newer report takes back what an older one acknowledged")
            self.windows[event.window_start_ms] = newer
        elif says(event) != says(known):
            self.conflict(f"two different reports with number {event.report} for one window")

    def learn_plain(self, told: PlainText) -> bool:
        """The same for a report from which no rule can learn more: like one before, of a new window, or what
        is known already. False, and nothing learnt, for any other."""
        return self._numbered and self.windows.take(told)

    def adopt_reports(self, packed: bytes) -> None:
        """Take over the plain reports that an earlier run packed, before any other is learnt."""
        teller = self.windows.adopt(packed, self.stream)
        self._numbered, self._window_ms = True, teller.window_ms
        if not self.topic:
            self.topic, self.producer, self.session = teller.topic, teller.producer, teller.session

    def frame_reports(self) -> None:
        """Once it is known how long the stream's windows are."""
        if self._window_ms is not None:
            self.windows.are_of(Teller(self.stream, self.session, self.topic, self.producer, self._window_ms))

    def conflict(self, sentence: str) -> None:
        """Never to be PROVEN, and why. Of very many sentences the first are kept: one is enough."""
        if sentence not in self.conflicts and len(self.conflicts) < MAX_SENTENCES_A_STREAM:
            self.conflicts.append(sentence)

    def lapsed(self, now_ms: int, grace_ms: int) -> bool:
        """No word for longer than the lease: nothing more is to be expected."""
        return self.state != UNANNOUNCED and now_ms > self.at_ms + self.lease_ms + grace_ms

    def _learn_identity(self, event: StreamEvent | CountEvent) -> None:
        if not self.topic:
            self.topic, self.producer, self.session = event.topic, event.producer, event.session
        elif (self.topic, self.producer, self.session) != (event.topic, event.producer, event.session):
            self.conflict("two producers use one stream id")
        if isinstance(event, StreamEvent):
            self.host = self.host or event.host
            self.application = self.application or event.application
            self.datacenter = self.datacenter or event.datacenter

    def _learn_manner(self, event: CountEvent) -> None:
        """What all reports of a stream have in common: numbers or none, and the length of the windows."""
        self._numbered = self._numbered or event.sequenced
        self._only_counted = self._only_counted or not event.sequenced
        if self._numbered and self._only_counted:
            self.conflict("some reports number the records, others only count them")
        if self._window_ms is None:
            self._window_ms = event.window_ms
            self.frame_reports()
        elif self._window_ms != event.window_ms:
            self.conflict("the length of the windows changed under way: a stream keeps the one it began with")


def says(event: CountEvent) -> tuple[object, ...]:
    """All that a report says of its window's records."""
    sets = (event.acknowledged, event.ambiguous, event.failed)
    return (event.window_ms, event.count, event.ambiguous_count, event.digest, *sets)


@dataclass(frozen=True, slots=True)
class Distrusted:
    """What was not believed of a record of the events topic, as far as the next run needs it (`recall`).

    `told` is the whole sentence with its key and place; "" for two events of a group that contradict each
    other, which can be read. `named` is the stream or group that the key (`kind`) names, `is_of_key` whether
    what it says is of its key.
    """

    sentence: str
    told: str = ""
    kind: str = ""
    named: str = ""
    is_of_key: bool = True

    @property
    def names_stream(self) -> bool:
        return self.kind in ("count", "stream") and bool(self.named)


class EventLedger:
    """All events read so far, merged by stream; gaps (by key, topic id and target) and what online consumers
    got beside them.

    `untrusted` are the sentences of what could not be read (the first MAX_UNTRUSTED_KEPT of
    `untrusted_count`), `untrusted_streams` {sentence: stream that its key names}.
    `distrusted_groups` has, by group, the sentences of its events that could not be read: what they counted
    would look lost.
    """

    def __init__(self) -> None:
        self.streams: dict[str, StreamFacts] = {}
        self.gaps: dict[str, GapEvent] = {}
        self.tiers: dict[str, TierEvent] = {}
        self.distrusted_groups: dict[str, list[str]] = {}
        self._distrusted: dict[str, list[str]] = {}
        self.untrusted_count = 0
        self.untrusted: list[str] = []
        self.untrusted_streams: dict[str, str] = {}
        self._doubted: list[Distrusted] = []

    def add(self, key: bytes | None, value: bytes | memoryview | None, origin: str = "") -> None:
        """Learn a record of the events topic; `origin` (cluster, offset) is named when it is not trusted."""
        if self.add_plain(key, value):
            return
        try:
            event = decode_event(value)
        except InvalidEvent as error:
            self._distrust(key, origin, str(error))
            return
        if event is None:
            return
        if isinstance(event, GapEvent) and key is not None and bytes(key) == event.place_key.encode():
            event = replace(event, older_key=True)
        if key is not None and bytes(key) != event.key.encode():
            self._distrust(key, origin, f"the key should be {event.key}", is_of_key=False)
            return
        self.learn(event)

    def add_plain(self, key: bytes | None, value: bytes | memoryview | None) -> str:
        """Learn a report from which no rule can learn more (`StreamFacts.learn_plain`), and return the stream
        that it is of; "" and nothing learnt where it is any other record."""
        plain = None if value is None else read_plain(key, value)
        facts = None if plain is None else self.streams.get(plain.stream)
        return facts.stream if plain and facts and facts.learn_plain(plain) else ""

    def learn(self, event: Event) -> None:
        """Merge one valid event."""
        match event:
            case StreamEvent():
                self.facts(event.stream).learn_stream(event)
            case CountEvent():
                self.facts(event.stream).learn_count(event)
            case GapEvent():
                self._learn_gap(event)
            case TierEvent():
                self._learn_tier(event)

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

    def _learn_gap(self, event: GapEvent) -> None:
        """Of one beginning the farthest end counts, and one that is open: workers tell of a gap anew as it
        grows, each by its own clock, and what one of them could not carry no later word has carried."""
        place = f"{event.key} {event.topic_id} {event.target}"
        known = self.gaps.get(place, event)
        farthest = max(known, event, key=lambda gap: (gap.to_offset, gap.at_ms, gap.cause))
        has_open_end = known.has_open_end or event.has_open_end
        self.gaps[place] = replace(farthest, has_open_end=has_open_end)

    def _learn_tier(self, event: TierEvent) -> None:
        known = self.tiers.get(event.key)
        if known is None:
            self.tiers[event.key] = event
            return
        older, newer = sorted((known, event), key=lambda report: report.report)
        if not older.seen.issubset(newer.seen) or newer.count < older.count:
            self._doubt_group(event.tier, "a newer report takes back what an older one had seen")
        elif older.report == newer.report and (older.seen, older.count) != (newer.seen, newer.count):
            self._doubt_group(event.tier, "two different reports with one number")
        self.tiers[event.key] = newer

    def adopt(self, facts: StreamFacts) -> None:
        """Take over what is known of a stream of which nothing was read yet."""
        self.streams[facts.stream] = facts
        self._distrusted[facts.stream] = facts.distrusted

    def take_doubted(self) -> list[Distrusted]:
        """What was not believed since this was asked last, the first MAX_UNTRUSTED_KEPT of it."""
        if not self._doubted:
            return self._doubted
        doubted, self._doubted = self._doubted, []
        return doubted

    def recall(self, doubt: Distrusted) -> None:
        """What an earlier run read and did not believe."""
        if doubt.told:
            self.untrusted_count += 1
            if len(self.untrusted) < MAX_UNTRUSTED_KEPT:
                self.untrusted.append(doubt.told)
                if doubt.is_of_key and doubt.names_stream:
                    self.untrusted_streams[doubt.told] = doubt.named
        if doubt.kind == "count":
            _note(self._distrusted, doubt.named, doubt.sentence)
        elif doubt.kind == "tier":
            _note(self.distrusted_groups, doubt.named, doubt.sentence)

    def forget_doubts(self) -> None:
        """All events are read anew, and what cannot be read is told then."""
        self.untrusted_count, self.untrusted, self.untrusted_streams = 0, [], {}

    def _doubt_group(self, group: str, sentence: str) -> None:
        self._doubt(Distrusted(sentence, kind="tier", named=group[:MAX_NAME_KEPT]))

    def _doubt(self, doubt: Distrusted) -> None:
        self.recall(doubt)
        if self.untrusted_count <= MAX_UNTRUSTED_KEPT:
            self._doubted.append(doubt)

    def _distrust(self, key: bytes | None, origin: str, sentence: str, *, is_of_key: bool = True) -> None:
        """Count it, and tell whom the key names: the newest report of it may be the unreadable one. Unless
        `is_of_key`, what it says is of another stream than its key."""
        name = "" if key is None else bytes(key).decode("utf-8", "replace")
        told = f"{sentence}: event {name[:80]!r} {origin}".rstrip()  # the cause first: lines get cut
        kind, _, rest = name.partition("/")
        if kind in ("count", "stream"):
            named = rest.partition("/")[0]
        else:  # a group's name may have slashes; what follows it has none
            named = rest.rsplit("/", 4)[0] if kind == "tier" else ""
        kind = kind if named else ""
        self._doubt(Distrusted(sentence, told, kind, named[:MAX_NAME_KEPT], is_of_key))


def _note(sentences: dict[str, list[str]], name: str, sentence: str) -> None:
    known = sentences.setdefault(name[:MAX_NAME_KEPT], [])
    if sentence not in known and len(known) < MAX_SENTENCES_A_STREAM:
        known.append(sentence)
