"""One batch on its way to the target, from the fetch answer that it came in to the target's acknowledgement.

Made by `pipeline`, which hears what became of it. Until then it stands in a row of `lane`; `sink` sends it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from millrace.broker.errors import KafkaError
from millrace.broker.protocol.batch import LOG_APPEND_TIME_BIT, MAX_TIMESTAMP_POSITION
from millrace.mirror.batches.intake import Prepared
from millrace.mirror.batches.rebatch import Piece
from millrace.mirror.delivery.lane import Item
from millrace.mirror.delivery.progress import Span
from millrace.mirror.sources.fetch_memory import Frame
from millrace.mirror.sources.lag import LagSamples

# A record whose creation time is older than this is being replayed: latency cannot be told from it.
LIVE_DATA_MS = 3_600_000
_TIMESTAMP = struct.Struct(">q")


class Owner(Protocol):
    """Who a batch comes from, and who hears what became of it."""

    def delivered(self, outgoing: Outgoing, base_offset: int, now_ms: int, steady_ms: int) -> None:
        """`base_offset`: the target's offset of the first record, -1 unknown. The times are the answer's."""
        ...

    def refused(self, outgoing: Outgoing, error: KafkaError, now_ms: int) -> list[Outgoing]:
        """Batches to send in its place, in order; none when its gap has been taken up."""
        ...


class Outgoing(Item):
    """See the module's text. `batch` is writable: it is stamped in place."""

    __slots__ = (
        "batch",
        "corrupt_answers",
        "fault",
        "frame",
        "is_looked_at",
        "measured_from",
        "measured_from_ms",
        "offsets",
        "owner",
        "span",
    )

    def __init__(
        self,
        batch: memoryview,
        offsets: Sequence[int],
        span: Span,
        owner: Owner,
        measured_from_ms: int,
        measured_from: str,
        frame: Frame | None = None,
    ) -> None:
        """`offsets`: the source offset of each record. `measured_from` and its time: where the end-to-end
        latency begins (`metrics`). `frame` stands for the memory that `batch` keeps."""
        super().__init__(len(offsets), len(batch), *_TIMESTAMP.unpack_from(batch, MAX_TIMESTAMP_POSITION))
        self.batch = batch
        self.offsets = offsets
        self.span = span
        self.owner = owner
        self.measured_from_ms = measured_from_ms
        self.measured_from = measured_from
        self.frame = frame
        self.corrupt_answers = 0
        self.is_looked_at = False
        self.fault: KafkaError | None = None  # `rebatch.fault_of`, once it was looked at

    def part(self, piece: Piece, span: Span) -> Outgoing:
        """A half of it, which goes in its place."""
        if piece.batch is None:
            raise RuntimeError("half of a batch is larger than what the target takes of one")
        memory = None if self.frame is None else self.frame.apart(len(piece.batch))
        half = Outgoing(
            piece.batch, piece.offsets, span, self.owner, self.measured_from_ms, self.measured_from, memory
        )
        half.is_looked_at = True  # it was read and written here
        return half

    def leave_answer(self) -> None:
        """Goes on in memory of its own."""
        if self.frame is not None and self.frame.is_shared:
            self.batch = memoryview(bytearray(self.batch))
            self.frame = self.frame.apart(len(self.batch))


def to_be_stamped(
    batch: memoryview, answer: memoryview, frame: Frame | None
) -> tuple[memoryview, Frame | None]:
    """The batch in memory that may be stamped in place (a copy only where it is read-only), and what stands
    for that memory: `frame`, which is the answer's, or one of its own."""
    if batch.readonly:
        batch = memoryview(bytearray(batch))
    if frame is not None and batch.obj is not answer.obj:
        frame = frame.apart(len(batch))
    return batch, frame


def latency_start(ready: Prepared, lag: LagSamples, now_ms: int) -> tuple[int, str]:
    """Where the end-to-end latency of a batch begins, and how that is known: of the first of several.

    `append`: the source stamped its append time. `create`: the newest record's creation time, when the data
    is live. `seen`: replayed data; since this worker first saw that the source's log holds it.
    """
    if ready.attributes & LOG_APPEND_TIME_BIT:
        return ready.max_timestamp, "append"
    if 0 <= now_ms - ready.max_timestamp <= LIVE_DATA_MS:
        return ready.max_timestamp, "create"
    return lag.first_seen_ms(ready.base_offset) or now_ms, "seen"
