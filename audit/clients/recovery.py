"""What a producer writes into its journal, and what the next start makes of it.

Called by `producer`. `ProducerJournal` turns a session's changes into blocks; `recover` turns the
blocks of a dead session into its last events. Every block names its stream by id:

    stream     the stream's description, what is settled, and when it told something last
    limit      numbers up to `limit` may be handed out from now on, first in `window`, which is then kept
    window     a window's whole state: when keeping it begins, and when records in it failed
    ack        sequences of a window that were acknowledged since, the `bytes` and the `digest` they add
    report     the number of a window's report that was sent, and when
    clear      that report was delivered and nothing has changed since: the window needs no more keeping
    gone       the stream's closing was delivered
    carry, carried           an event of an earlier session that waits for delivery; that was delivered

The numbers between the last settled one and `limit` are reported as ambiguous, whether they were handed out
or not: an ambiguous record is not missed, and if it exists it is expected from where it was first seen. So
are those of a transaction that was open, or on its way to an end, when the producer died.

A digest must be the sum over exactly the sequences beside it, wherever the kill cuts. So acknowledgements are
written as whole folds (`session.Fold`), and a `window` block is taken between two folds: a fold is in it
entirely or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

from pyroaring import BitMap64

from millrace.audit.clients.journal import Journal, JournalUnusable
from millrace.audit.clients.session import Fold, StreamSession, WindowCounts, describe
from millrace.audit.contract import sequence_set
from millrace.audit.contract.content_digest import DIGEST_MASK
from millrace.audit.contract.events import CLOSED, CountEvent, Event, StreamEvent, encode_event

_log = logging.getLogger("millrace.audit.clients.recovery")

# Numbers are reserved in steps, so that the journal is written once for many records.
RESERVE_COUNT = 1024


@dataclass(slots=True)
class _DeadWindow:
    acknowledged: BitMap64 = field(default_factory=BitMap64)
    ambiguous: BitMap64 = field(default_factory=BitMap64)
    failed: BitMap64 = field(default_factory=BitMap64)
    byte_count: int = 0
    digest: int = 0
    report: int = 0


@dataclass(slots=True)
class _DeadStream:
    description: dict[str, Any]
    limit: int
    settled: BitMap64
    limit_window_ms: int = 0
    at_ms: int = 0
    windows: dict[int, _DeadWindow] = field(default_factory=dict)


_own = partial(sequence_set.from_json, is_own=True)


def recover(blocks: Iterable[dict[str, Any]], now_ms: int, *, stale_because: str = "") -> dict[str, str]:
    """{key: value} of the events that the dead session still owes, in sending order.

    Of the streams of a stale journal nothing is told: it may lack numbers that were given out, which a
    closing would deny, and the events that were sent may say more than it does.
    """
    streams: dict[str, _DeadStream] = {}
    owed: dict[str, str] = {}
    for block in blocks:
        kind = block["t"]
        if kind == "carry":
            owed[block["key"]] = block["value"]
        elif kind == "carried":
            owed.pop(block["key"], None)
        elif kind == "stream":
            settled = _own(block["settled"])
            streams[block["stream"]] = _DeadStream(block, 0, settled, at_ms=block.get("at", 0))
        elif block["stream"] in streams:
            _apply(streams, block)
    if stale_because and streams:
        _log.warning(
            "the journal does not tell all that it did: %s. What %d streams had not reported stays UNKNOWN",
            stale_because,
            len(streams),
        )
        return owed
    for stream in streams.values():
        for event in _last_events(stream, now_ms):
            key, value = encode_event(event)
            owed[key.decode()] = value.decode()
    return owed


def _apply(streams: dict[str, _DeadStream], block: dict[str, Any]) -> None:
    stream, kind = streams[block["stream"]], block["t"]
    if kind == "gone":
        del streams[block["stream"]]
        return
    if kind == "limit":
        stream.limit, stream.limit_window_ms = block["limit"], block["window"]
        return
    if kind == "clear":
        stream.windows.pop(block["window"], None)
        return
    window = stream.windows.setdefault(block["window"], _DeadWindow())
    if kind == "report":
        window.report = block["report"]
        stream.at_ms = max(stream.at_ms, block.get("at", 0))
    elif kind == "window":
        window.acknowledged = _own(block["acknowledged"])
        window.ambiguous = _own(block["ambiguous"])
        window.failed = _own(block["failed"])
        window.byte_count, window.digest = block["bytes"], block["digest"]
        window.report = block["report"]
        stream.settled |= window.acknowledged | window.ambiguous | window.failed
    elif kind == "ack":
        sequences = _own(block["sequences"])
        if sequences.issubset(window.acknowledged):
            return  # the window's block was written after this fold, and has it
        window.acknowledged |= sequences
        window.ambiguous -= sequences
        stream.settled |= sequences
        window.byte_count += block["bytes"]
        window.digest = (window.digest + block["digest"]) & DIGEST_MASK


def _last_events(stream: _DeadStream, now_ms: int) -> list[Event]:
    """The reports of the windows kept, what was pending as ambiguous in one of them, and the closing."""
    about = stream.description
    # Else a clock that was set back would make the end older than the last sign of life.
    at_ms = max(now_ms, stream.at_ms)
    pending = sequence_set.from_ranges(sequence_set.complement_ranges(stream.settled, stream.limit))
    if pending:
        stream.windows[stream.limit_window_ms].ambiguous |= pending
    events: list[Event] = [
        CountEvent(
            stream=about["stream"],
            session=about["session"],
            topic=about["topic"],
            producer=about["producer"],
            window_start_ms=start_ms,
            window_ms=about["window_ms"],
            report=window.report + 1,
            count=len(window.acknowledged),
            byte_count=window.byte_count,
            acknowledged=window.acknowledged,
            ambiguous=window.ambiguous,
            failed=window.failed,
            at_ms=at_ms,
            digest=window.digest if about["content"] else None,
        )
        for start_ms, window in sorted(stream.windows.items())
    ]
    texts = ("stream", "session", "topic", "producer", "host", "application", "datacenter")
    events.append(
        StreamEvent(
            state=CLOSED,
            window_ms=about["window_ms"],
            last_assigned=stream.limit,
            last_settled=stream.limit,
            no_earlier_than_ms=None,
            lease_ms=about["lease_ms"],
            at_ms=at_ms,
            **{name: about[name] for name in texts},
        )
    )
    return events


def open_journal(path: str | None, now_ms: int) -> ProducerJournal | None:
    """A producer's journal with what earlier sessions owe; raises JournalInUse and JournalUnusable."""
    if path is None:
        return None
    journal = Journal(path)
    if journal.set_aside is not None:
        _log.warning("journal %s: %s; kept as %s", path, journal.set_aside_because, journal.set_aside)
    return ProducerJournal(journal, now_ms)


class ProducerJournal:
    """Follows the streams of one producer start. Safe to call from any thread.

    The window of a stream's last `limit` block is always followed in full, so that pending numbers can be
    filed in it without replacing a report by a smaller one.
    """

    def __init__(self, journal: Journal, now_ms: int):
        self._journal = journal
        self._lock = Lock()
        self._streams: dict[str, StreamSession] = {}
        self._limits: dict[str, tuple[int, int]] = {}
        self._closed = False
        # By stream: windows in which something is known not to be acknowledged, and not written yet.
        self._doubtful: dict[str, set[WindowCounts]] = {}
        self.owed = recover(journal.recovered, now_ms, stale_because=journal.stale_because)
        journal.rewrite(self._snapshot())

    def opened(self, stream: StreamSession) -> None:
        """Begin to follow a stream, before its first record is sent."""
        stream.keeps_folded = True
        stream.reserved = 0
        with self._lock:
            self._streams[stream.stream] = stream
            self._append(_stream_block(stream))

    def reserve(self, stream: StreamSession, window: WindowCounts, sequence: int) -> None:
        """Note that numbers up to some way beyond `sequence` may be handed out; before it is sent."""
        with self._lock:
            if sequence <= stream.reserved:
                return
            limit = sequence + RESERVE_COUNT - 1
            self._limits[stream.stream] = (limit, window.start_ms)  # a snapshot must hold this window too
            self._follow(stream, window)
            self._append(_limit_block(stream, limit, window.start_ms))
            stream.reserved = limit

    def settle(self) -> None:
        """Write down what the delivery callbacks of the last poll told."""
        with self._lock:
            for stream in self._streams.values():
                self._settle(stream)

    def not_acknowledged(self, stream: StreamSession, window: WindowCounts) -> None:
        """A record of the window became ambiguous or failed: written by the next `settle`, for all of them
        at once. A kill before leaves it pending, which is told as ambiguous."""
        with self._lock:
            self._doubtful.setdefault(stream.stream, set()).add(window)

    def reported(self, stream: StreamSession, event: CountEvent) -> None:
        """The report is about to be sent. What it tells is written down first.

        The report that a restart sends in its place must not say less.
        """
        with self._lock:
            self._settle(stream)
            self._follow(stream, stream.windows[event.window_start_ms])
            self._append(
                {
                    **_about(stream, event.window_start_ms),
                    "t": "report",
                    "report": event.report,
                    "at": event.at_ms,
                }
            )

    def delivered(self, stream: StreamSession, window: WindowCounts) -> None:
        """Everything in the window is in a delivered report."""
        with self._lock:
            if window.journaled and self._limits.get(stream.stream, (0, -1))[1] != window.start_ms:
                window.journaled = False
                self._append({**_about(stream, window.start_ms), "t": "clear"})

    def gone(self, stream: StreamSession) -> None:
        """The stream's closing was delivered."""
        with self._lock:
            self._streams.pop(stream.stream, None)
            self._limits.pop(stream.stream, None)
            self._doubtful.pop(stream.stream, None)
            self._append({"t": "gone", "stream": stream.stream})

    def carried(self, key: str) -> None:
        """An event of an earlier session was delivered."""
        with self._lock:
            if self.owed.pop(key, None) is not None:
                self._append({"t": "carried", "key": key})

    def abandon(self) -> None:
        """In a forked child: let go of the file without a lock or a write, for it is the parent's."""
        self._closed = True
        self._journal.abandon()

    def close(self) -> None:
        """Let go of the file; what is told afterwards is not kept."""
        with self._lock:
            self._closed = True
            self._journal.close()

    def _settle(self, stream: StreamSession) -> None:
        for window in self._doubtful.pop(stream.stream, ()):
            window.journaled = False
            self._follow(stream, window)
        for fold in stream.take_folded():
            if fold.window.journaled:
                self._append(_ack_block(stream, fold))
            else:
                self._follow(stream, fold.window)

    def _follow(self, stream: StreamSession, window: WindowCounts) -> None:
        if not window.journaled:
            window.journaled = True
            self._append(_window_block(stream, window))

    def _append(self, block: dict[str, Any]) -> None:
        # A snapshot already holds what the refused block says: sessions change before their journal does.
        if self._closed or self._journal.append(block):
            return
        try:
            self._journal.rewrite(self._snapshot())
        except JournalUnusable as error:
            # What it says ends here, and at the next start that would be taken for the streams' end.
            self._closed = True
            self._journal.wipe()
            _log.error("%s; until the next start nothing is kept: a kill leaves UNKNOWN windows", error)

    def _snapshot(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = [
            {"t": "carry", "key": key, "value": value} for key, value in self.owed.items()
        ]
        for stream in self._streams.values():
            blocks.append(_stream_block(stream))
            limit, limit_window_ms = self._limits.get(stream.stream, (0, -1))
            for window in list(stream.windows.values()):
                window.journaled = window.unreported or window.start_ms == limit_window_ms
                if window.journaled:
                    blocks.append(_window_block(stream, window))
            if limit:
                blocks.append(_limit_block(stream, limit, limit_window_ms))
        return blocks


def _about(stream: StreamSession, window_start_ms: int) -> dict[str, Any]:
    return {"stream": stream.stream, "window": window_start_ms}


def _stream_block(stream: StreamSession) -> dict[str, Any]:
    settled = sequence_set.to_json(stream.settled)
    return {"t": "stream", **describe(stream), "settled": settled, "at": stream.at_ms}


def _limit_block(stream: StreamSession, limit: int, window_start_ms: int) -> dict[str, Any]:
    return {**_about(stream, window_start_ms), "t": "limit", "limit": limit}


def _window_block(stream: StreamSession, window: WindowCounts) -> dict[str, Any]:
    return {**_about(stream, window.start_ms), "t": "window", **stream.state_of(window)}


def _ack_block(stream: StreamSession, fold: Fold) -> dict[str, Any]:
    return {
        **_about(stream, fold.window.start_ms),
        "t": "ack",
        "sequences": sequence_set.to_json(fold.sequences),
        "bytes": fold.byte_count,
        "digest": fold.digest,
    }
