"""What one consumer counted of what its application got: per stream and window, in numbers and sets. Pure.

Called by `consumer`: `take` for every record before the application gets it, `report` for the events to
publish, `report_again` for those that did not arrive. No clock, no I/O; the caller locks.

A session is one consumer start. Its counts are cumulative, so it keeps all its windows; one that has run for
long, or whose reports become large (`is_worn`), is retired by its owner: a new one begins, the old one is
kept until its last report is delivered, and the audit unites both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap64

from millrace.audit.clients.told_stream import LARGE_REPORT_BYTES
from millrace.audit.contract.content_digest import DIGEST_MASK, record_digest
from millrace.audit.contract.events import TierEvent, encode_event
from millrace.audit.contract.header import (
    FIXED_SIZE,
    HEADER_KEY,
    MAX_CREATED_MS,
    MAX_SEQUENCE,
    InvalidIdentity,
    RecordIdentity,
    decode_identity,
    window_start_ms,
)
from millrace.audit.contract.producer_names import disagreement

MAX_WINDOWS_A_SESSION = 10_000
MAX_SESSION_MS = 24 * 3_600_000
FOLD_SIZE = 1 << 16
MAX_RECENT = 10_000
NUMBERS_START = 9  # sequence and creation time, up to FIXED_SIZE
NO_IDENTITY = "record without an identity header"
MAX_REASONS = 100
OTHER_REASONS = "other reasons"
UNREADABLE = "record whose headers the client cannot read: a key is no UTF-8"

Headers = Iterable[tuple[str, bytes | None]]


@dataclass(slots=True)
class _Window:
    """One window of one stream. `fresh` numbers (and their digests) wait to be folded into the sets."""

    topic: str
    stream: str
    start_ms: int
    producer: str = ""
    fresh: list[int] = field(default_factory=list)
    fresh_digests: list[int] = field(default_factory=list)
    count: int = 0
    byte_count: int = 0
    unsequenced: int = 0
    seen: BitMap64 = field(default_factory=BitMap64)
    repeats: BitMap64 = field(default_factory=BitMap64)
    digest: int = 0
    first_ms: int = 0
    last_ms: int = 0
    report: int = 0
    reported_count: int = 0
    changed: bool = False
    began: dict[int, int] = field(default_factory=dict)

    def fold(self) -> None:
        numbers = BitMap64(self.fresh)
        again = self.seen & numbers
        if again or len(numbers) < len(self.fresh):
            self._fold_one_by_one()
        else:
            self.seen |= numbers
            self.digest = (self.digest + sum(self.fresh_digests)) & DIGEST_MASK
        self.fresh.clear()
        self.fresh_digests.clear()

    def _fold_one_by_one(self) -> None:
        """Some came again: each number's first copy is digested, the others are repeats."""
        digests = self.fresh_digests or [0] * len(self.fresh)
        for number, digest in zip(self.fresh, digests, strict=True):
            if number in self.seen:
                self.repeats.add(number)
            else:
                self.seen.add(number)
                self.digest = (self.digest + digest) & DIGEST_MASK


class SessionCounts:
    """The counts of one session of a group. `session` is 16 hexadecimal digits that nobody used before."""

    def __init__(
        self,
        group: str,
        session: str,
        *,
        window_ms: int,
        content: bool,
        now_ms: int,
        untrusted: dict[str, int] | None = None,
    ):
        self.group, self.session = group, session
        self.window_ms, self.content, self.began_ms = window_ms, content, now_ms
        self.untrusted: dict[str, int] = {} if untrusted is None else untrusted
        self.cluster_id = ""
        self._windows: dict[tuple[str, str, int], _Window] = {}
        self._changed: dict[tuple[str, str, int], _Window] = {}
        self._recent: dict[tuple[str, bytes, bytes], _Window] = {}
        self._told_count = 0
        self.first_offsets: dict[tuple[str, int], int] = {}
        self._began: dict[str, dict[int, int]] = {}
        self._is_large = False

    def take(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Headers | None, now_ms: int
    ) -> None:
        """Count a record that the application is about to get, at `now_ms` of the consumer's clock.

        Of several identity headers the last one counts, as everywhere: a program that copies the headers of
        what it read has its producer add one behind them. What has none, or none to be trusted, is counted
        in `untrusted` alone.
        """
        stamped: bytes | None = None
        is_stamped = False
        for name, content in headers or ():
            if name == HEADER_KEY:
                stamped, is_stamped = content, True
        if not is_stamped:
            self._distrust(NO_IDENTITY)
            return
        found = self._recent_window(topic, stamped) or self._window(topic, stamped, now_ms)
        if found is None:
            return
        window, sequence = found
        if not window.changed:
            window.changed = True
            self._changed[topic, window.stream, window.start_ms] = window
        window.count += 1
        window.byte_count += len(value or b"")
        if now_ms > window.last_ms:
            window.last_ms = now_ms
        elif now_ms < window.first_ms:
            window.first_ms = now_ms
        if sequence == 0:
            window.unsequenced += 1
            if self.content:
                digest = record_digest(0, key, value, headers or ())
                window.digest = (window.digest + digest) & DIGEST_MASK
            return
        window.fresh.append(sequence)
        if self.content:
            window.fresh_digests.append(record_digest(sequence, key, value, headers or ()))
        if len(window.fresh) >= FOLD_SIZE:
            window.fold()

    def take_unreadable(self) -> None:
        """Count a record whose headers the client cannot read. It may well have a number, so the session says
        from now on that it counted more than its reports tell of: what they lack is not lost but unknown."""
        self._distrust(UNREADABLE)
        self._told_count += 1

    def begin(self, topic: str, partition: int, offset: int) -> None:
        """The first record that the session got of the partition; the next report of the topic tells.

        It stays that: who looks back at older ones now and then does not answer for all that lies between.
        """
        self.first_offsets[topic, partition] = offset
        self._began.setdefault(topic, {})[partition] = offset

    def report(self, now_ms: int) -> list[TierEvent]:
        """The windows that changed since the last report, to be published in this order."""
        changed, self._changed = self._changed, {}
        for window in changed.values():
            window.began.update(self._began.pop(window.topic, ()))
        return [self._event(window, now_ms) for window in changed.values()]

    def encoded(self, event: TierEvent) -> tuple[bytes, bytes]:
        """(key, value) of an event of this session's, to be sent."""
        key, value = encode_event(event)
        self._is_large = self._is_large or len(value) >= LARGE_REPORT_BYTES
        return key, value

    def report_again(self, event: TierEvent) -> None:
        """The event was not delivered: its window is reported anew next time."""
        place = (event.topic, event.stream, event.window_start_ms)
        window = self._windows[place]
        window.changed = True
        self._changed[place] = window

    @property
    def told_count(self) -> int:
        """How many records all reports together tell of, those that are under way included; and those that
        none can tell of (`take_unreadable`)."""
        return self._told_count

    @property
    def is_told(self) -> bool:
        """Everything counted is in a report."""
        return not self._changed

    def is_worn(self, now_ms: int) -> bool:
        """Time for another session."""
        is_long = len(self._windows) > MAX_WINDOWS_A_SESSION or now_ms > self.began_ms + MAX_SESSION_MS
        return is_long or self._is_large

    def _event(self, window: _Window, now_ms: int) -> TierEvent:
        window.fold()
        window.changed = False
        window.report += 1
        self._told_count += window.count - window.reported_count
        window.reported_count = window.count
        for sequences in (window.seen, window.repeats):
            sequences.run_optimize()
        return TierEvent(
            tier=self.group,
            stream=window.stream,
            topic=window.topic,
            producer=window.producer,
            window_start_ms=window.start_ms,
            window_ms=self.window_ms,
            report=window.report,
            count=window.count,
            byte_count=window.byte_count,
            seen=window.seen.copy(),
            at_ms=now_ms,
            session=self.session,
            repeats=window.repeats.copy(),
            unsequenced=window.unsequenced,
            digest=window.digest if self.content else None,
            first_append_ms=window.first_ms,
            last_append_ms=window.last_ms,
            session_count=self._told_count,
            cluster_id=self.cluster_id,
            began=tuple(sorted(window.began.items())),
        )

    def _recent_window(self, topic: str, stamped: bytes | None) -> tuple[_Window, int] | None:
        """(window, sequence) where all but number and time is as in an earlier record: half the cost."""
        if stamped is None or len(stamped) < FIXED_SIZE:
            return None
        window = self._recent.get((topic, stamped[:NUMBERS_START], stamped[FIXED_SIZE:]))
        if window is None:
            return None
        numbers = int.from_bytes(stamped[NUMBERS_START:FIXED_SIZE], "big")
        sequence, created_ms = numbers >> 48, numbers & MAX_CREATED_MS
        if not window.start_ms <= created_ms < window.start_ms + self.window_ms or sequence > MAX_SEQUENCE:
            return None
        return window, sequence

    def _window(self, topic: str, stamped: bytes | None, now_ms: int) -> tuple[_Window, int] | None:
        """(window, sequence) of a header; None for one that cannot be trusted."""
        identity = self._identity(stamped)
        if identity is None or stamped is None:
            return None
        start_ms = window_start_ms(identity.created_ms, self.window_ms)
        place = (topic, identity.stream, start_ms)
        window = self._windows.get(place)
        if window is None:
            window = _Window(topic, identity.stream, start_ms, first_ms=now_ms, last_ms=now_ms)
            self._windows[place] = window
        window.producer = window.producer or identity.producer
        name = stamped[FIXED_SIZE:]
        if identity.producer and identity.producer != window.producer:
            self._distrust(disagreement(window.producer, identity.producer))
        elif identity.producer.encode() == name:
            if len(self._recent) >= MAX_RECENT:
                self._recent.clear()
            self._recent[topic, stamped[:NUMBERS_START], name] = window
        return window, identity.sequence

    def _identity(self, stamped: bytes | None) -> RecordIdentity | None:
        """As the scan reads it: a name that cannot be shown leaves the record countable, without a name."""
        try:
            return decode_identity(stamped)
        except InvalidIdentity as error:
            self._distrust(str(error))
        try:
            return decode_identity(stamped and stamped[:FIXED_SIZE])
        except InvalidIdentity:
            return None

    def _distrust(self, reason: str) -> None:
        if reason not in self.untrusted and len(self.untrusted) >= MAX_REASONS:
            reason = OTHER_REASONS  # they may hold what a stranger wrote
        self.untrusted[reason] = self.untrusted.get(reason, 0) + 1


def merge_commits(commits: Iterable[Iterable[Any]]) -> list[Any]:
    """The last word about every partition, of commits in their order (TopicPartition or alike)."""
    newest: dict[tuple[str, int], Any] = {}
    for offsets in commits:
        for place in offsets:
            newest[place.topic, place.partition] = place
    return list(newest.values())
