"""From a fetch answer to batches that are ready for the sink: every batch on its path. Pure.

Called by `pipeline.accept`. `coalesce` says what the answer's batches become, `rebatch` does it; here both
are put together, and every batch is counted under the path that it took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from millrace.broker.errors import KafkaError, RecordTooLarge
from millrace.broker.protocol.batch import (
    ATTRIBUTES_POSITION,
    COMPRESSION_MASK,
    BatchHeader,
    parse_header,
    verify_crc,
)
from millrace.broker.protocol.checksum import crc32c
from millrace.mirror.batches.coalesce import NO_END, BatchWalk, Step, StepKind
from millrace.mirror.batches.old_messages import Unreadable, as_batches
from millrace.mirror.batches.rebatch import BatchPath, Piece, choose_path, coalesce, rebuild
from millrace.mirror.gaps.gaps import GapClass


class Prepared(NamedTuple):
    """One batch that is ready to be sent, or what became of a stretch that is not sent.

    `offsets` are the source offsets of its records; none: nothing of the stretch up to `next_offset` is to be
    carried. `batch` is None for one record that is larger than the target takes, and for a whole batch that
    cannot be read though its checksum is right (`unreadable` says why): fetching it again would change
    nothing. `gap_class` is that of the gap which `offsets` are then. `base_offset`, `attributes` and
    `max_timestamp` are the header's of the source's (first) batch.
    """

    batch: memoryview | None
    offsets: Sequence[int]
    next_offset: int
    leader_epoch: int
    base_offset: int
    attributes: int
    max_timestamp: int
    unreadable: str = ""
    gap_class: GapClass = GapClass.TOO_LARGE


NOTHING = range(0)
PASS_THROUGH = StepKind.PASS_THROUGH

Count = Callable[[BatchPath, int, int, int], None]
"""Path, batches, their records, their bytes as the source has them (both 0 of what is not carried)."""


def prepare(
    walk: BatchWalk,
    data: memoryview,
    aborted: Iterable[tuple[int, int]],
    from_offset: int,
    max_batch_size: int,
    count: Count,
    log_end: int = NO_END,
    passes_over: bool = False,
    trusts_hole: bool = True,
) -> Iterator[Prepared]:
    """What one partition's fetch answer becomes, from `from_offset` on, in order and without a hole.

    `log_end`, `passes_over` and `trusts_hole` as in `BatchWalk.rows`, which says what is raised at a batch
    that cannot be trusted, after all that lies before it.
    """
    for rows in walk.rows(data, aborted, from_offset, max_batch_size, log_end, passes_over, trusts_hole):
        for row in rows:
            (
                kind, start, end, next_offset, leader_epoch, base_offset, attributes, max_timestamp,
                record_count, _, dropped_count, _, _, unchecked_crc,
            ) = row  # fmt: skip
            if unchecked_crc >= 0 and crc32c(data[start + ATTRIBUTES_POSITION : end]) != unchecked_crc:
                verify_crc(data, start, parse_header(data, start))  # says it in words
            if dropped_count:
                count(BatchPath.DROP, dropped_count, 0, 0)
            if kind == PASS_THROUGH:
                count(BatchPath.PASS_THROUGH, 1, record_count, end - start)
                yield Prepared(
                    data[start:end],
                    range(base_offset, base_offset + record_count),
                    next_offset,
                    leader_epoch,
                    base_offset,
                    attributes,
                    max_timestamp,
                )
            elif kind == StepKind.DROP:
                yield Prepared(
                    None, NOTHING, next_offset, leader_epoch, base_offset, attributes, max_timestamp
                )
            elif kind == StepKind.UNREADABLE:
                header = parse_header(data, start)
                count(BatchPath.UNREADABLE, 1, 0, 0)
                yield _unreadable(header, base_offset, "the end of a transaction cannot be read")
            elif kind == StepKind.OLD:
                before = (
                    base_offset - 1 if base_offset > from_offset else -1
                )  # a fetch may begin within a set
                yield from _old(data[start:end], base_offset, before, max_batch_size, count)
            else:
                yield from _rewritten(walk, data, Step._make(row), max_batch_size, count)


def _rewritten(
    walk: BatchWalk, data: memoryview, step: Step, max_batch_size: int, count: Count
) -> Iterator[Prepared]:
    if step.kind != StepKind.COALESCE:
        yield from _alone(data, step.start, walk.from_offset(step), step.next_offset, max_batch_size, count)
        return
    try:
        pieces = coalesce(data, walk.sections(step), step.attributes & COMPRESSION_MASK, max_batch_size)
    except KafkaError:
        # One of them cannot be read, or holds too much. By themselves, the others can be carried.
        for start, next_offset in walk.batches(step):
            yield from _alone(data, start, 0, next_offset, max_batch_size, count)
        return
    count(BatchPath.COALESCE, step.batch_count, step.record_count, walk.data_size(step))
    rest = (step.leader_epoch, step.base_offset, step.attributes, step.max_timestamp)
    yield from _in_order(pieces, step.next_offset, rest)


def _old(
    entries: memoryview, from_offset: int, before: int, max_batch_size: int, count: Count
) -> Iterator[Prepared]:
    """Entries of old message formats, all behind the offset `before`, rebuilt."""

    def as_rebuilt(path: BatchPath, batches: int, records: int, size: int) -> None:
        is_rebuilt = path is BatchPath.PASS_THROUGH  # as it stands now
        count(BatchPath.REBUILD if is_rebuilt else path, batches, records, size)

    for piece in as_batches(entries, before):
        if isinstance(piece, Unreadable):
            following = piece.offset + 1
            if following > from_offset:
                reason, gap_class = _told(piece.reason, piece.is_too_large)
                count(BatchPath.UNREADABLE, 1, 0, 0)
                lost = range(from_offset, following)
                yield Prepared(None, lost, following, -1, from_offset, 0, -1, reason, gap_class)
                from_offset = following
            continue
        # A walk of its own: the one that is under way here goes on behind the entries.
        for ready in prepare(BatchWalk(0), memoryview(piece), (), from_offset, max_batch_size, as_rebuilt):
            from_offset = ready.next_offset
            yield ready


def _alone(
    data: memoryview, start: int, from_offset: int, next_offset: int, max_batch_size: int, count: Count
) -> Iterator[Prepared]:
    """One batch on the path that it has without its neighbours, up to `next_offset`."""
    header = parse_header(data, start)
    batch = data[start : start + header.size]
    if choose_path(header, from_offset=from_offset, max_batch_size=max_batch_size) is BatchPath.PASS_THROUGH:
        count(BatchPath.PASS_THROUGH, 1, header.record_count, header.size)
        pieces = [Piece(batch, range(header.base_offset, header.next_offset))]
    else:
        try:
            pieces = rebuild(batch, header, from_offset=from_offset, max_batch_size=max_batch_size)
        except KafkaError as error:
            is_too_large = isinstance(error, RecordTooLarge)
            count(BatchPath.UNREADABLE, 1, 0, 0)
            lost = _unreadable(header, from_offset, str(error), is_too_large=is_too_large)
            yield lost._replace(next_offset=next_offset)
            return
        is_split = len(pieces) > 1 or header.size > max_batch_size
        path = BatchPath.SPLIT if is_split else BatchPath.REBUILD
        count(path, 1, header.record_count, header.size)
    rest = (header.leader_epoch, header.base_offset, header.attributes, header.max_timestamp)
    yield from _in_order(pieces, next_offset, rest)


def _told(reason: str, is_too_large: bool) -> tuple[str, GapClass]:
    if is_too_large:
        return f"it has to be written anew, and {reason}", GapClass.UNPACKED_TOO_LARGE
    return f"its checksum is right, but {reason}", GapClass.CORRUPT


def _unreadable(
    header: BatchHeader, from_offset: int, reason: str, *, is_too_large: bool = False
) -> Prepared:
    return Prepared(
        None,
        range(max(header.base_offset, from_offset), header.next_offset),
        header.next_offset,
        header.leader_epoch,
        header.base_offset,
        header.attributes,
        header.max_timestamp,
        *_told(reason, is_too_large),
    )


def _in_order(
    pieces: Sequence[Piece], next_offset: int, rest: tuple[int, int, int, int]
) -> Iterator[Prepared]:
    """The pieces with where each ends; the last one takes what follows it without a record. `rest` are the
    fields from `leader_epoch` on."""
    if not pieces:
        yield Prepared(None, NOTHING, next_offset, *rest)
    for place, piece in enumerate(pieces, 1):
        end = next_offset if place == len(pieces) else piece.offsets[-1] + 1
        yield Prepared(piece.batch, piece.offsets, end, *rest)
