"""Keeping the offset map small: what to merge and what to forget. Pure.

Called by `map_keeper`, for one source partition at a time.

- A chunk whose records have all left the target (its log begins behind them) is forgotten. One with a cut
  stays for as long as an older one does of which the cut makes something void.
- Neighbours that follow each other are joined into one of at most MAX_CHUNK_SIZE: ten million runs are then
  some two thousand records. Only where at least WORTH_JOINING of them, or half a full one, are together, so
  that what was joined is not written again and again.
- The youngest chunk is never touched: its assignment may be about to write it again. Nor is the youngest
  that has runs forgotten.

The order within the answer does not matter as long as it is one batch: a reader that sees a chunk twice gets
the same translation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID
from millrace.mirror.offsets.offset_map import Chunk, encode_key, encode_value, joined
from millrace.mirror.offsets.translation import living
from millrace.mirror.topics.routes import TargetPartition

MAX_CHUNK_SIZE = 16 << 10
WORTH_JOINING = 32


def plan_upkeep(
    chunks: Collection[Chunk],
    starts: Mapping[TargetPartition | None, int],
    untold: TargetPartition | None = None,
) -> list[list[tuple[bytes, bytes | None]]]:
    """Batches of records (a value of None removes the key), each to be written whole.

    `chunks` is all that the map has of one source partition, `starts` the first offset that each target
    partition still has (-1, or not there: not known). `untold` is where chunks went that do not say it (None:
    nobody knows).
    """
    if len(chunks) < 2:
        return []
    youngest = max(chunks, key=lambda chunk: (chunk.key.began_ms, chunk.from_offset))
    gone = [chunk for chunk in _expired(chunks, starts, untold) if chunk is not youngest]
    batches: list[list[tuple[bytes, bytes | None]]] = []
    if gone:
        batches.append([(encode_key(chunk.key), None) for chunk in gone])
    are_gone = {chunk.key for chunk in gone}
    for row in _rows([chunk for chunk in chunks if chunk.key not in are_gone], youngest):
        whole = joined(row)
        batch: list[tuple[bytes, bytes | None]] = [
            (encode_key(whole.key), encode_value(whole.head, whole.body))
        ]
        batch += [(encode_key(chunk.key), None) for chunk in row if chunk.key != whole.key]
        batches.append(batch)
    return batches


def _expired(
    chunks: Collection[Chunk],
    starts: Mapping[TargetPartition | None, int],
    untold: TargetPartition | None,
) -> list[Chunk]:
    """Without the last chunk that has runs: it says where the target's log goes on."""
    filled = [chunk for chunk in chunks if chunk.head.run_count]
    last = max(filled, key=lambda chunk: (chunk.key.began_ms, chunk.from_offset), default=None)
    by_target: dict[TargetPartition | None, list[Chunk]] = {}
    for chunk in chunks:
        by_target.setdefault(chunk.key.target or untold, []).append(chunk)
    gone: list[Chunk] = []
    for target, of_target in by_target.items():
        gone += _expired_at(starts.get(target, -1), of_target, last)
    return _without_cuts_in_force(chunks, gone)


def _expired_at(target_start: int, chunks: Collection[Chunk], last: Chunk | None) -> list[Chunk]:
    """Those of one target partition."""
    gone, unsure = [], []
    for chunk in chunks:
        if not chunk.head.run_count or chunk.head.last_unknown:
            unsure.append(chunk)
        elif chunk is not last and chunk.target_end <= target_start:
            gone.append(chunk)
    # Where one ends at the target that has no runs, or does not know, one behind it tells.
    answers_from = max((chunk.from_offset for chunk in gone), default=-1)
    return gone + [chunk for chunk in unsure if chunk is not last and chunk.from_offset <= answers_from]


def _without_cuts_in_force(chunks: Collection[Chunk], gone: list[Chunk]) -> list[Chunk]:
    """What stays is not to count again from a cut on, only because that was forgotten first."""
    are_gone = {chunk.key for chunk in gone}
    for chunk in sorted(gone, key=lambda chunk: chunk.key.began_ms):  # a cut that stays may be cut itself
        cut_from = chunk.head.cut_from
        if cut_from is not None and any(
            older.key.began_ms < chunk.key.began_ms and older.source_end > cut_from
            for older in chunks
            if older.key not in are_gone
        ):
            are_gone.discard(chunk.key)
    return [chunk for chunk in gone if chunk.key in are_gone]


def _rows(chunks: list[Chunk], youngest: Chunk) -> Iterator[list[Chunk]]:
    """Rows of neighbours that are worth joining."""
    row: list[Chunk] = []
    size = target_end = 0
    for chunk, limit in living(chunks, NO_TOPIC_ID):
        is_movable = chunk is not youngest and limit >= chunk.source_end and chunk.head.cut_from is None
        follows = (
            bool(row)
            and is_movable
            and chunk.head.topic_id == row[-1].head.topic_id
            and chunk.key.target == row[-1].key.target
            and chunk.key.began_ms >= row[-1].key.began_ms
            and chunk.from_offset >= row[-1].source_end
            and (chunk.head.base >= target_end or not chunk.head.run_count)
            and size + len(chunk.body) <= MAX_CHUNK_SIZE
        )
        if not follows:
            if _is_worth_it(row, size):
                yield row
            row, size, target_end = [], 0, 0
            if not is_movable:
                continue
        row.append(chunk)
        size += len(chunk.body)
        target_end = max(target_end, chunk.target_end if chunk.head.run_count else 0)
    if _is_worth_it(row, size):
        yield row


def _is_worth_it(row: list[Chunk], size: int) -> bool:
    return len(row) >= WORTH_JOINING or (len(row) > 1 and size >= MAX_CHUNK_SIZE // 2)
