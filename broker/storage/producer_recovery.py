"""The state of producers, and the aborted transactions, as the log's batches left them.

The newest snapshot that may be trusted gives the state up to its offset; the headers of the batches after it
(and the records of markers) do the rest. What the transaction indexes hold of that stretch is dropped first
and written anew, so that index and state always come from the same batches.

Called when a log is opened and after a truncation. Reads, and writes transaction indexes; raises OSError and
CorruptMessage.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from millrace.broker.errors import CorruptMessage, InvalidRecord
from millrace.broker.protocol.batch import BatchHeader
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.control_records import Marker, parse_marker
from millrace.broker.storage import producer_snapshot
from millrace.broker.storage.producer_state import ProducerState
from millrace.broker.storage.segment import Segment


def load_producers(
    directory: Path,
    segments: Sequence[Segment],
    *,
    start_offset: int,
    end_offset: int,
    now_ms: int,
    trusted_offset: int | None = None,
    notes: list[str] | None = None,
) -> ProducerState:
    """The producer state at `end_offset`. Snapshots beyond `trusted_offset` (the recovery point after a
    crash) are not used: a name that a power loss brings back may tell of batches that are gone."""
    limit = end_offset if trusted_offset is None else min(trusted_offset, end_offset)
    snapshots = producer_snapshot.offsets(directory)
    for offset in snapshots:
        if offset > limit:
            producer_snapshot.snapshot_path(directory, offset).unlink(missing_ok=True)
    for segment in segments:
        problem = segment.aborted.problem()
        if problem is not None:
            limit = min(limit, segment.base_offset)
            if notes is not None:
                notes.append(f"{segment.aborted.path}: rebuilt, {problem}")
    state = producer_snapshot.load_newest(
        directory, start_offset=start_offset, end_offset=limit, now_ms=now_ms, known=snapshots
    )
    if state is None:
        state = ProducerState(end_offset=start_offset)
    from_offset = state.end_offset
    for segment in segments:
        # Also where nothing is to be replayed: an index may have outlived the end of its log.
        if segment.next_offset >= from_offset and segment.aborted.problem() is None:
            segment.aborted.truncate_from(from_offset)
    if from_offset < end_offset:
        for segment in segments:
            if segment.next_offset > from_offset:
                _replay(segment, state, from_offset, now_ms)
    state.end_offset = end_offset
    return state


def read_marker(batch: Buffer) -> Marker | None:
    """What a stored control batch says of a transaction; None when it says nothing (KRaft's own records, or
    compaction has emptied it)."""
    try:
        return parse_marker(batch)
    except InvalidRecord:
        return None


def _replay(segment: Segment, state: ProducerState, from_offset: int, now_ms: int) -> None:
    if segment.aborted.problem() is not None:
        segment.aborted.clear()
    segment.aborted.truncate_from(from_offset)
    first = segment.find(from_offset)
    if first is None:
        return
    for position, header in segment.headers(first.position):
        if header.producer_id >= 0:
            aborted = state.note(header, now_ms, _marker_at(segment, position, header))
            if aborted is not None:
                segment.aborted.append(aborted)


def _marker_at(segment: Segment, position: int, header: BatchHeader) -> Marker | None:
    if not header.is_control:
        return None
    batch = segment.file.read(position, header.size)
    if len(batch) < header.size:
        raise CorruptMessage(f"{segment.path}: the batch at byte {position} is cut")
    return read_marker(batch)
