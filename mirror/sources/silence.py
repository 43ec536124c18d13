"""What a source does not give although its log goes on, and says nothing of. Pure.

Held by `source`, which makes a trouble of it. Apache Kafka ends a fetch with nothing where its remote store
(KIP-405) does not answer for as long as a fetch waits, or its quota of remote reads is used up, and any
server may where it does not find its batches, as behind a wrong length. No error says so, and the position
stands still. For a moment that is nobody's business, and it never is where

    records follow, but none may be read   the last stable offset is the position: a transaction is open
    others had the room of the answer      a server fills it in the order in which it reads, so what counts
                                           is to stand before the first partition that it gives something
                                           (`FetchSession.had_room`)
    nothing is asked for                   a paused partition, or a source over whose quota this client is

An answer tells no reason, so compaction is a possible one too: where it has taken out all that followed,
nothing is given up to the next record.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from millrace.mirror.troubles import LASTING_AFTER_MS, Failure

K = TypeVar("K", bound=Hashable)

MIN_ANSWERS = 3
"""Fewer are no row, however far apart."""


@dataclass(slots=True)
class _Silence:
    offset: int
    since_ms: int
    answer_count: int = 0


class Silences(Generic[K]):
    """Of the partitions of one source."""

    def __init__(self) -> None:
        self._silences: dict[K, _Silence] = {}

    def answered(
        self, key: K, offset: int, stable_end: int, *, gives: bool, had_room: bool, now_ms: int
    ) -> Failure | None:
        """A good answer to a fetch at `offset`, which gives records or none where the log is stable up to
        `stable_end`, and had room for some or others took it: what is to be told of it now."""
        if gives or stable_end <= offset:
            self.over(key)
            return None
        silence = self._silences.get(key)
        if silence is None or silence.offset != offset:
            silence = self._silences[key] = _Silence(offset, now_ms)
        silence.answer_count += had_room
        silence.since_ms = min(silence.since_ms, now_ms)  # a clock may be set back
        if silence.answer_count < MIN_ANSWERS or now_ms - silence.since_ms < LASTING_AFTER_MS:
            return None
        reason = (
            f"the source gives nothing at offset {offset}, without an error, though its log goes on to "
            f"{stable_end}; see the broker's remote store (tiered storage), its quota of "
            "remote reads and what it logs. Where compaction has taken out all that followed, the next "
            "record ends this"
        )
        return Failure(reason, silence.since_ms)

    def over(self, key: K) -> None:
        """It is not fetched any more, or not now."""
        if self._silences:
            self._silences.pop(key, None)
