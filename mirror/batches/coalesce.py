"""What a fetch answer becomes: its batches walked once, compiled, and given on in steps. Pure.

Called by `pipeline.accept`. A step is what is handled at once: one batch that passes through or is rebuilt,
a stretch without data, or a *run*: small batches with the same codec that lie next to each other, which
become one batch. A produce request may hold one batch a partition, so batches of one record (producers
without linger) would otherwise cost a request each.

Only neighbours of one source partition, one codec and one leader epoch are merged, up to about `MERGED_SIZE`
or the target's limit. What lies between them and is not carried (control records, aborted data) ends no run:
source offsets are kept as runs without holes, so every record is still known by its own.

Checksums of small batches are checked in the walk. A large one's is not (`unchecked_crc`, otherwise -1): the
library is faster there, and it is called when the batch's turn comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.batch import (
    HEADER_SIZE,
    LOG_OVERHEAD,
    BatchHeader,
    parse_header,
)
from millrace.broker.protocol.records import load_compiler
from millrace.broker.protocol.rewrite import warm_kernels as warm_rewrite_kernels
from millrace.broker.telemetry.memory import release_compiler_pages
from millrace.mirror.batches.old_messages import NO_END, believed, claimed_offset, end_of_entries
from millrace.mirror.batches.placement import (
    Suspect,
    hole_before,
    is_first_contradicted,
    overlapping,
    start_at,
    suspect_at,
    verify,
    verify_batch,
)
from millrace.mirror.batches.unpack import warm_kernels as warm_unpack_kernels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COALESCE_BELOW = 32 << 10
"""Default size in bytes below which neighbours are merged: twice what Kafka's producers fill by default
(`batch.size`). On its way a batch costs 50 to 130 µs and a request to the target whatever its size, a record
that is copied 0.1: full batches of 16 KiB merged are three times as fast (`make bench-mirror ARGS="--small"`,
80 records)."""
# A compressed batch has to be unpacked and packed again: below which part of the limit that costs less than
# what it saves, by codec (gzip, snappy, lz4, zstd). 50 records of 200 bytes take 16 µs with snappy and lz4,
# 26 with zstd, 100 take 27 and 42, against 5 and the rest of a batch's way
# (`tests/benchmarks/mirror/bench_paths.py`).
COMPRESSED_SHARES = (32, 2, 2, 4)
# Merging is paid by the record, passing on by the batch.
MOST_RECORDS = 128
# The way of a batch and of its request is paid whatever its size: with 128 KiB a backlog of 200-byte records,
# 50 a batch, went at 86 MB/s and 4.2 CPU s/GB, with 256 KiB at 135 and 2.9, with 512 KiB at 234 and 2.2, with
# 900 KB at 183 and 2.2 (Apache Kafka at both ends, once each; `make bench-mirror` with `--vary`). It is half
# of what targets take by default, and of what consumers ask for of a partition.
MERGED_SIZE = 512 << 10

MAX_STEPS = 1024
MAX_SECTIONS = 8192


class OutOfOrder(CorruptMessage):
    """Offsets of neighbours that cannot all be right. A batch's base offset is not under its checksum."""


class BeyondTheEnd(CorruptMessage):
    """A batch that claims offsets which the log does not have."""


class Unvouched(CorruptMessage):
    """A whole batch (`suspect`) for which nothing in its answer speaks: alone and behind a hole, which may as
    well be a wrong offset; alone anywhere, in a log that is known to have one out of its place; or one that
    claims to begin before what is known to be another's end.

    Without `suspect`: an answer that does not tell which of its batches is wanted. One of `needed_size` bytes
    may, where that is known.
    """

    def __init__(self, message: str, suspect: Suspect | None = None, needed_size: int = 0) -> None:
        super().__init__(message)
        self.suspect = suspect
        self.needed_size = needed_size


class StepKind:
    """Numbers of `coalesce_kernels`; plain, as they are compared for every batch."""

    PASS_THROUGH, REBUILD, COALESCE, DROP = range(4)
    OLD = 5  # entries of message format 0 or 1
    UNREADABLE = 4  # a control batch whose checksum is right: nobody knows which transaction it ends


class Step(NamedTuple):
    """See the module. Bytes `[start, end)` of the answer, source offsets up to `next_offset`.

    `base_offset`, `attributes` and `max_timestamp` are those of the first batch with data; all have the
    same leader epoch. `batch_count` batches have data; `dropped_count` have none and lie between or behind
    them. Sections `[section, section_end)` of the walk describe the batches with data, in their order.
    """

    kind: int
    start: int
    end: int
    next_offset: int
    leader_epoch: int
    base_offset: int
    attributes: int
    max_timestamp: int
    record_count: int
    batch_count: int
    dropped_count: int
    section: int
    section_end: int
    unchecked_crc: int


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    from millrace.mirror.batches import coalesce_kernels

    return coalesce_kernels


def load_kernels() -> None:
    """Loads all that is compiled here and in `rebatch` (from numba's cache, or compiles it once: seconds),
    and gives back the memory that only loading needed. A mirror calls it before it has a seat to lose."""
    load_compiler()
    release_compiler_pages()
    _kernels()
    warm_rewrite_kernels()
    warm_unpack_kernels()
    release_compiler_pages()


class BatchWalk:
    """Walks fetch answers; its tables are used again for each, so one walk has to end before the next begins.

    `coalesce_below`: batches smaller than this many bytes are merged with their neighbours (snappy and lz4
    below a half of it, zstd a quarter, gzip a thirty-second); 0: never.
    """

    def __init__(self, coalesce_below: int = COALESCE_BELOW, merged_size: int = MERGED_SIZE) -> None:
        self.coalesce_below = coalesce_below
        self._merged_size = merged_size
        self.cut_off_size = 0
        """How much the answer that was walked last, to its end, had of a batch that it cuts off."""
        self._steps: Any = None

    def rows(
        self,
        data: memoryview,
        aborted: Iterable[tuple[int, int]],
        from_offset: int,
        max_batch_size: int,
        log_end: int = NO_END,
        passes_over: bool = False,
        trusts_hole: bool = True,
    ) -> Iterator[list[list[int]]]:
        """The steps of one partition's answer from `from_offset` on, as rows with the fields of `Step`, many
        at a time; a batch that is cut at the end is left for the next fetch, and so is one behind a hole
        whose successor the answer does not have, unless `log_end` is not given. Where it is all that there is
        it is believed only with `trusts_hole`, otherwise Unvouched is raised. `aborted` are the answer's
        own (producer id, first offset).

        A batch that contradicts the one after it is refused, unless it begins where it must. `passes_over`:
        this log is known to have one out of its place, so what stands before the one that is wanted is left
        out, and where the answer does not hold the wanted one, nothing is taken for it.

        Raises CorruptMessage at the first batch that cannot be trusted, after the steps before it:
        BeyondTheEnd and OutOfOrder where it is the offsets that are wrong.
        """
        self.cut_off_size = 0
        if not data:
            return
        import numpy

        kernels = _kernels()
        if self._steps is None:
            self._make_tables(numpy)
        buffer = numpy.frombuffer(data.toreadonly(), numpy.uint8)
        ended = sorted(aborted, key=lambda each: each[1])
        aborted_rows = numpy.array(ended, numpy.int64).reshape(-1, 2)
        aborting = numpy.empty(len(ended), numpy.int64)
        self._state[:] = 0
        self._state[kernels.STATE_EMPTIED] = -1
        self._state[kernels.STATE_OFFSET] = self._state[kernels.STATE_FROM_OFFSET] = from_offset
        # Where nobody knows so far, a position may be the very one that a batch claims which lies before it.
        if passes_over or (is_first_contradicted(data) and claimed_offset(data, 0) <= from_offset):
            self._state[kernels.STATE_POSITION] = _start(
                data, from_offset, log_end, passes_over=passes_over, trusts_hole=trusts_hole
            )
        self._limits[kernels.L_LOG_END] = log_end
        distrust = kernels.TRUSTS_NOTHING if passes_over else kernels.TRUSTS_NO_HOLE
        self._limits[kernels.L_TRUST] = kernels.TRUSTS_ALL if trusts_hole else distrust
        self._limits[kernels.L_MAX_BATCH_SIZE] = max_batch_size
        # Deltas may grow with the batch: with some room the merged batch need not be cut again.
        self._limits[kernels.L_MERGED_SIZE] = min(self._merged_size, max_batch_size - max_batch_size // 8)
        status = kernels.AGAIN
        while status == kernels.AGAIN:
            status, count = kernels.walk(
                buffer, self._state, aborted_rows, aborting, self._limits, self._steps, self._sections
            )
            yield self._steps[:count].tolist()
            position = int(self._state[kernels.STATE_POSITION])
            if status == kernels.EMPTIED:
                verify_batch(data, position, parse_header(data, position))
                self._state[kernels.STATE_EMPTIED] = position
                status = kernels.AGAIN
            if status == kernels.BAD_HEADER and (end := end_of_entries(data, position)) is not None:
                if end == position:
                    return  # the fetch has cut it off
                expected = int(self._state[kernels.STATE_OFFSET])
                behind = int(self._state[kernels.STATE_BEHIND])
                found = believed(
                    data, position, end, expected, behind,
                    from_offset=from_offset, log_end=log_end,
                    trusts_hole=trusts_hole, trusts_place=trusts_hole or not passes_over,
                )  # fmt: skip
                if found.end > position:
                    step = _old_step(position, found.end, expected, found.next_offset)
                    yield [list(step)]
                    self._state[kernels.STATE_POSITION] = found.end
                    self._state[kernels.STATE_BEHIND] = found.next_offset
                    self._state[kernels.STATE_OFFSET] = step.next_offset
                elif not found.waits:
                    raise _wrong_entry(claimed_offset(data, position), expected, log_end)
                elif expected == from_offset:
                    raise _alone(data, position, expected)
                if found.waits:
                    return
                status = kernels.AGAIN
        if status == kernels.BAD_CONTROL:
            header = parse_header(data, position)
            verify_batch(data, position, header)
            yield [list(_unreadable_step(header, position))]
        elif status == kernels.BEYOND_THE_END:
            claimed = parse_header(data, position).next_offset
            raise BeyondTheEnd(f"a batch claims to end at {claimed}, and the log ends at {log_end}")
        elif status == kernels.ALONE:
            raise _alone(data, position, int(self._state[kernels.STATE_OFFSET]))
        elif status == kernels.OUT_OF_ORDER:
            header, expected = parse_header(data, position), int(self._state[kernels.STATE_OFFSET])
            raise OutOfOrder(
                f"a batch claims offsets {header.base_offset}-{header.next_offset - 1} where {expected} is "
                "expected, and its neighbours say otherwise"
            )
        elif status != kernels.DONE:
            self._raise(data, position)
        elif _is_cut_off_before(data, position, int(self._state[kernels.STATE_BEHIND])):
            # Asked for again, the source would pass over it.
            raise OutOfOrder(
                f"a batch claims offset {parse_header(data, position).base_offset} behind others"
            )
        else:
            self.cut_off_size = len(data) - position

    def sections(self, step: Step) -> NDArray[np.int64]:
        """A row (as `rewrite.section_of` gives it) for each batch with data; its records are bytes of the
        answer, as they are compressed. Valid until the walk goes on."""
        rows: NDArray[np.int64] = self._sections[step.section : step.section_end]
        return rows

    def data_size(self, step: Step) -> int:
        """Bytes of a step's batches with data, as the source has them, without what lies between them."""
        if not step.dropped_count:
            return step.end - step.start
        kernels, rows = _kernels(), self.sections(step)
        records_size = int((rows[:, kernels.S_END] - rows[:, kernels.S_START]).sum())
        return records_size + HEADER_SIZE * step.batch_count

    def from_offset(self, step: Step) -> int:
        """The first source offset that is wanted of a step of one batch."""
        return int(self._sections[step.section, _kernels().S_FROM_OFFSET])

    def batches(self, step: Step) -> list[tuple[int, int]]:
        """Where each batch with data of a step begins in the answer, and the source offset after it (for the
        last: after what follows it without data). A copy: it stays true when the walk goes on."""
        kernels = _kernels()
        rows = self._sections[step.section : step.section_end]
        starts = [start - HEADER_SIZE for start in rows[:, kernels.S_START].tolist()]
        ends = [last + 1 for last in rows[:, kernels.S_LAST_OFFSET].tolist()]
        return list(zip(starts, [*ends[:-1], step.next_offset], strict=True))

    def _make_tables(self, numpy: Any) -> None:
        kernels = _kernels()
        self._steps = numpy.zeros((MAX_STEPS, kernels.STEP_COLUMNS), numpy.int64)
        self._sections = numpy.zeros((MAX_SECTIONS, kernels.SECTION_COLUMNS), numpy.int64)
        self._state = numpy.zeros(kernels.STATE_SIZE, numpy.int64)
        self._limits = numpy.zeros(kernels.LIMITS_SIZE, numpy.int64)
        self._limits[kernels.L_CRC_BELOW] = kernels.CRC_IN_KERNEL_BELOW
        self._limits[kernels.L_BELOW] = self.coalesce_below
        self._limits[kernels.L_MOST_RECORDS] = MOST_RECORDS
        for codec, share in enumerate(COMPRESSED_SHARES, 1):
            self._limits[kernels.L_BELOW + codec] = self.coalesce_below // share

    @staticmethod
    def _raise(data: memoryview, position: int) -> None:
        """Says in words what the walk stopped at."""
        verify_batch(data, position, parse_header(data, position))
        raise CorruptMessage("a batch was refused that nothing is wrong with")


def _start(data: memoryview, offset: int, log_end: int, *, passes_over: bool, trusts_hole: bool) -> int:
    start = start_at(data, offset, log_end)
    if start.position is not None:
        return start.position
    if start.needed_size is None or (passes_over and trusts_hole):
        raise OutOfOrder(f"which batch holds offset {offset} cannot be told, as one is out of its place")
    if not trusts_hole:
        message = f"which batch holds offset {offset} is not in the answer"
        raise Unvouched(message, needed_size=start.needed_size)
    return 0  # one that begins where it must is believed against the one behind it


def _is_cut_off_before(data: memoryview, position: int, behind: int) -> bool:
    """Whether the batch that the answer cuts off at `position` claims to begin before the last one ends."""
    return len(data) - position >= HEADER_SIZE and claimed_offset(data, position) < behind


def _alone(data: memoryview, position: int, expected: int) -> Unvouched:
    suspect = suspect_at(data, position)
    verify(data, suspect)
    message = f"a batch at offset {suspect.base_offset} stands alone where {expected} is expected"
    return Unvouched(message, suspect)


def refuse_overlap(data: memoryview, offset: int) -> None:
    """Raises Unvouched where a batch ends at `offset`, which is known, and the answer begins with one that
    claims to begin before that and to end behind it."""
    suspect = overlapping(data, offset)
    if suspect is not None:
        verify(data, suspect)
        claimed = f"{suspect.base_offset}-{suspect.next_offset - 1}"
        raise Unvouched(f"a batch claims offsets {claimed} where another ends at {offset}", suspect)


def refuse_hole(data: memoryview, offset: int) -> None:
    """Raises Unvouched where a batch ends at `offset`, which is known, and the answer begins behind that:
    with compaction, or because the source has passed over one that claims to lie before it."""
    suspect = hole_before(data, offset)
    if suspect is not None:
        verify(data, suspect)
        missing = f"{offset}-{suspect.base_offset - 1}"
        raise Unvouched(f"the source gives nothing of offsets {missing}", suspect)


def _wrong_entry(offset: int, expected: int, log_end: int) -> CorruptMessage:
    if offset >= log_end:
        return BeyondTheEnd(f"a message claims offset {offset}, and the log ends at {log_end}")
    return OutOfOrder(
        f"a message claims offset {offset} where {expected} is expected, and its neighbours say otherwise"
    )


def holds_whole_batch(data: memoryview) -> bool:
    """Whether at least the first batch of an answer, of whatever format, was not cut off."""
    return len(data) >= LOG_OVERHEAD and LOG_OVERHEAD + int.from_bytes(data[8:LOG_OVERHEAD], "big") <= len(
        data
    )


def _old_step(start: int, end: int, expected: int, behind: int) -> Step:
    """`base_offset` is the first offset that is wanted of it."""
    next_offset = max(expected, behind)
    return Step(StepKind.OLD, start, end, next_offset, -1, expected, 0, -1, 0, 0, 0, 0, 0, -1)


def _unreadable_step(header: BatchHeader, start: int) -> Step:
    return Step(
        StepKind.UNREADABLE,
        start,
        start + header.size,
        header.next_offset,
        header.leader_epoch,
        header.base_offset,
        header.attributes,
        header.max_timestamp,
        header.record_count,
        batch_count=0,
        dropped_count=0,
        section=0,
        section_end=0,
        unchecked_crc=-1,
    )


def section_rows(rows: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """A table of sections from rows of `rewrite.section_of`."""
    import numpy

    return numpy.array(rows, numpy.int64)
