"""Whether a partition's files agree with each other and with themselves: for `millrace log verify`.

Everything is read: each batch's CRC, its records (how many, at which offsets), the order of offsets and
leader epochs, both sparse indexes against their log, the aborted transactions against their markers,
snapshots, the data folder's checkpoints. Nothing is locked and nothing written. A broker may be at work
meanwhile: what it removes or replaces while it is read is read again, and the end of the active segment,
which may be half written, is judged by a second look, as are leader epochs, which an election adds to.

A problem is a line of text that begins with a file's name.
"""

from __future__ import annotations

import errno
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from millrace.broker.errors import KafkaError
from millrace.broker.protocol.batch import NO_TIMESTAMP, BatchHeader, verify_crc
from millrace.broker.protocol.control_records import ABORT, control_type
from millrace.broker.protocol.records import records_section, scan_records
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage import checkpoints, file_dump, producer_snapshot
from millrace.broker.storage.leader_epochs import NO_EPOCH, LeaderEpochCache
from millrace.broker.storage.log import parse_directory_name
from millrace.broker.storage.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    newest_timestamp,
)
from millrace.broker.storage.segment_swap import SWAP_SUFFIX

_ATTEMPTS = 10
_SECOND_LOOK_S = 0.2
_MOST_PROBLEMS_A_FILE = 5


@dataclass
class Totals:
    """What has been read so far."""

    partitions: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    size: int = 0


@dataclass
class FolderFacts:
    """What a data folder's checkpoints say of its partitions."""

    recovery_points: dict[TopicPartition, int]
    start_offsets: dict[TopicPartition, int]
    cleaned_offsets: dict[TopicPartition, int]
    is_as_left: bool = False
    """As `DataFolder.is_as_left`."""

    @classmethod
    def read(cls, folder: Path) -> tuple[FolderFacts, list[str]]:
        """From the checkpoints in `folder`, which need not be there; and what is wrong with them."""
        problems: list[str] = []

        def offsets(name: str) -> dict[TopicPartition, int]:
            try:
                return checkpoints.read_offsets(folder / name)
            except ValueError as error:
                problems.append(str(error))
                return {}

        facts = cls(
            offsets(checkpoints.RECOVERY_POINT_CHECKPOINT),
            offsets(checkpoints.LOG_START_OFFSET_CHECKPOINT),
            offsets(checkpoints.CLEANER_CHECKPOINT),
        )
        signed = checkpoints.digest(facts.recovery_points, facts.cleaned_offsets)
        facts.is_as_left = checkpoints.read_digest(folder) == signed
        return facts, problems


def is_partition(directory: Path) -> bool:
    """Whether a directory has a partition's name and a log in it."""
    try:
        parse_directory_name(directory.name)
    except ValueError:
        return False
    return any(directory.glob("*" + LOG_SUFFIX))


def partitions_in(folder: Path) -> list[Path]:
    """The partitions of a data folder, by name; deleted ones are left out."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and is_partition(path))


def check_partition(
    directory: Path,
    facts: FolderFacts,
    totals: Totals,
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """The problems of one partition; `progress` is called now and then."""
    for attempt in range(_ATTEMPTS):
        counted = Totals()
        try:
            problems = list(_Check(directory, facts, counted, progress).run())
        except FileNotFoundError as error:
            # Retention or compaction came between.
            if not directory.exists():
                return []
            if attempt == _ATTEMPTS - 1:
                return [f"{error.filename}: comes and goes; try again"]
            time.sleep(_SECOND_LOOK_S)
            continue
        totals.partitions += 1
        totals.segments += counted.segments
        totals.batches += counted.batches
        totals.records += counted.records
        totals.size += counted.size
        return problems
    return []


class _Check:
    def __init__(
        self, directory: Path, facts: FolderFacts, totals: Totals, progress: Callable[[], None]
    ) -> None:
        self._directory = directory
        self._facts = facts
        self._totals = totals
        self._progress = progress
        self._key = parse_directory_name(directory.name)
        self._is_known_for_holes = self._key in facts.cleaned_offsets

    def _may_have_holes(self) -> bool:
        """Looked at again for every hole: the first compaction may run just now."""
        if not self._is_known_for_holes:
            self._is_known_for_holes = (self._directory / checkpoints.HOLES_MARKER).exists()
        return self._is_known_for_holes

    def _may_have_hole(self, hole: tuple[int, int], bases: list[int]) -> bool:
        """Between two of the segments at `bases`, as a start takes it (`offset_holes.py`). Raises
        FileNotFoundError where they have changed."""
        if not self._may_have_holes():
            return False
        if not self._facts.is_as_left:
            return True
        try:
            told = checkpoints.read_holes(self._directory / checkpoints.HOLES_MARKER)
        except (ValueError, FileNotFoundError):
            told = None
        if told is None or hole in told:
            return True
        # A compaction that puts its segment in the place of others has removed those for a moment.
        if any(self._directory.glob("*" + SWAP_SUFFIX)):
            return True
        if self._bases() != bases:
            raise FileNotFoundError(errno.ENOENT, "replaced meanwhile", str(self._path(hole[1])))
        return False

    def _bases(self) -> list[int]:
        return sorted(
            int(path.stem) for path in self._directory.glob("*" + LOG_SUFFIX) if path.stem.isdigit()
        )

    def run(self) -> Iterator[str]:
        bases = self._bases()
        epochs: _Epochs | None = None
        try:
            epochs = _Epochs(self._directory)
        except ValueError as error:
            yield str(error)
        end_offset, newest_epoch = bases[0] if bases else 0, NO_EPOCH
        for number, base in enumerate(bases):
            following = bases[number + 1] if number + 1 < len(bases) else None
            if number and base < end_offset:
                yield f"{self._path(base)}: begins at {base}, the segment before it reaches {end_offset}"
            elif base > end_offset and not self._may_have_hole((end_offset, base), bases):
                yield f"{self._path(base)}: offsets {end_offset} to {base - 1} are missing before it"
            segment = _SegmentCheck(self._path(base), base, following is None, self._may_have_holes, epochs)
            yield from segment.run(self._totals, self._progress)
            end_offset = max(base, segment.end_offset)
            newest_epoch = max(newest_epoch, segment.leader_epoch)
        is_deleted = end_offset <= self._facts.start_offsets.get(self._key, 0)
        if epochs is not None and newest_epoch > NO_EPOCH and not is_deleted and self._lacks_epochs(epochs):
            yield f"{epochs.path}: has no entries, and there are batches; a start makes them from those"
        yield from self._check_names(bases)
        yield from self._check_snapshots(end_offset)
        yield from self._check_folder(bases[0] if bases else 0, end_offset)

    def _lacks_epochs(self, epochs: _Epochs) -> bool:
        """Still: a follower's log may have been cut to nothing, with its epochs."""
        paths = self._directory.glob("*" + LOG_SUFFIX)
        return epochs.has_none() and any(path.stat().st_size for path in paths)

    def _path(self, base: int) -> Path:
        return self._directory / f"{base:020d}{LOG_SUFFIX}"

    def _check_names(self, bases: list[int]) -> Iterator[str]:
        known = set(bases)
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX):
            for path in sorted(self._directory.glob("*" + suffix)):
                if path.stem.isdigit() and int(path.stem) not in known and _is_alone(path):
                    yield f"{path}: belongs to no log; a start removes it"

    def _check_snapshots(self, end_offset: int) -> Iterator[str]:
        for offset in producer_snapshot.offsets(self._directory):
            path = producer_snapshot.snapshot_path(self._directory, offset)
            try:
                producer_snapshot.decode(path.read_bytes(), offset, 0)
            except FileNotFoundError:
                continue
            except ValueError as error:
                yield f"{path}: {error}; a start passes it over"
            if offset > end_offset and not self._has_grown(end_offset):
                yield f"{path}: lies beyond the log's end {end_offset}; a start removes it"

    def _has_grown(self, end_offset: int) -> bool:
        newest = max(self._directory.glob("*" + LOG_SUFFIX), default=None)
        return newest is not None and int(newest.stem) > end_offset

    def _check_folder(self, first_offset: int, end_offset: int) -> Iterator[str]:
        for name, offsets in (
            ("recovery point", self._facts.recovery_points),
            ("log start", self._facts.start_offsets),
        ):
            at = offsets.get(self._key, 0)
            if at > end_offset and self._totals.size:
                yield (
                    f"{self._directory}: the checkpointed {name} {at} lies beyond the log's end {end_offset}"
                )


class _Epochs:
    """The leader-epoch checkpoint of a partition. Raises ValueError when it is damaged."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / checkpoints.LEADER_EPOCH_CHECKPOINT
        self._directory = directory
        self._known = LeaderEpochCache.load(directory)
        self._has_waited = False

    def other_than(self, epoch: int, offset: int) -> int | None:
        """What the checkpoint says of an offset, when that is another epoch than its batch has."""
        if self._is_right(epoch, offset):
            return None
        self._known = LeaderEpochCache.load(self._directory)
        if not self._is_right(epoch, offset) and not self._has_waited:
            # Batch and checkpoint are not written in one step. One wait is enough for a damaged partition.
            self._has_waited = True
            time.sleep(_SECOND_LOOK_S)
            self._known = LeaderEpochCache.load(self._directory)
        return None if self._is_right(epoch, offset) else self._known.epoch_at(offset)

    def has_none(self) -> bool:
        """Whether nothing is on record, also now that there are batches."""
        if not self._known.entries:
            time.sleep(_SECOND_LOOK_S)  # a log's first batch is written before its epoch
            self._known = LeaderEpochCache.load(self._directory)
        return not self._known.entries

    def _is_right(self, epoch: int, offset: int) -> bool:
        return self._known.epoch_at(offset) in (NO_EPOCH, epoch)


def _is_alone(path: Path) -> bool:
    """Whether an index has no log, also at a second look: files are removed and made one after the other."""
    if path.with_suffix(LOG_SUFFIX).exists():
        return False
    time.sleep(_SECOND_LOOK_S)
    return path.exists() and not path.with_suffix(LOG_SUFFIX).exists()


class _SegmentCheck:
    """One segment. `end_offset` is where it ended, after the run, `leader_epoch` the newest in it, -1 where
    there is none. Raises FileNotFoundError when the segment
    is removed or replaced meanwhile: log and indexes would not be of one kind."""

    def __init__(
        self,
        path: Path,
        base: int,
        is_active: bool,
        may_have_holes: Callable[[], bool],
        epochs: _Epochs | None,
    ) -> None:
        self._path = path
        self._is_active = is_active
        self._may_have_holes = may_have_holes
        self._epochs = epochs
        # Of each batch, 24 bytes: a segment may have millions.
        self._last_offsets = array("q")
        self._positions = array("q")
        self._newest_so_far = array("q")
        self._aborts: set[tuple[int, int]] = set()  # (marker's offset, producer)
        self._newest = NO_TIMESTAMP
        self.leader_epoch = -1
        self._inode = path.stat().st_ino
        self.end_offset = base

    def run(self, totals: Totals, progress: Callable[[], None]) -> Iterator[str]:
        found = list(self._run(totals, progress))
        if self._path.stat().st_ino != self._inode:
            raise FileNotFoundError(errno.ENOENT, "replaced", str(self._path))
        yield from found

    def _run(self, totals: Totals, progress: Callable[[], None]) -> Iterator[str]:
        totals.segments += 1
        problem_count = 0
        position = 0
        try:
            for position, header, batch in file_dump.iterate_file(self._path):
                for problem in self._check_batch(header, batch):
                    problem_count += 1
                    if problem_count <= _MOST_PROBLEMS_A_FILE:
                        yield f"{self._path}: byte {position}, offset {header.base_offset}: {problem}"
                totals.batches += 1
                totals.records += header.record_count
                totals.size += header.size
                self._note(position, header, batch)
                progress()
        except ValueError as error:
            if not self._is_active or not self._is_being_written(position):
                yield f"{self._path}: {error}" + (
                    "; a start after a crash cuts it off" if self._is_active else ""
                )
        if problem_count > _MOST_PROBLEMS_A_FILE:
            yield f"{self._path}: {problem_count - _MOST_PROBLEMS_A_FILE} more problems"
        yield from self._check_index()
        yield from self._check_time_index()
        yield from self._check_transactions()

    def _is_being_written(self, position: int) -> bool:
        """Whether a batch that was cut at the end has become whole, or is still growing."""
        size = self._path.stat().st_size
        time.sleep(_SECOND_LOOK_S)
        if self._path.stat().st_size != size:
            return True
        try:
            for _ in file_dump.iterate_file(self._path, position):
                pass
        except ValueError:
            return False
        return True

    def _note(self, position: int, header: BatchHeader, batch: memoryview) -> None:
        self.end_offset = header.next_offset
        self._newest = max(self._newest, newest_timestamp(header))
        self._last_offsets.append(header.last_offset)
        self._positions.append(position)
        self._newest_so_far.append(self._newest)
        if header.is_control and header.record_count:
            try:
                if control_type(batch) == ABORT:
                    self._aborts.add((header.last_offset, header.producer_id))
            except KafkaError:
                return  # said by the check of its records

    def _check_batch(self, header: BatchHeader, batch: memoryview) -> Iterator[str]:
        try:
            verify_crc(batch, 0, header)
        except KafkaError as error:
            yield str(error)
            return
        if header.base_offset < self.end_offset or header.last_offset_delta < 0:
            yield f"it does not follow the batch before it, which ends at {self.end_offset - 1}"
        elif header.base_offset > self.end_offset and not self._may_have_holes():
            yield f"offsets {self.end_offset} to {header.base_offset - 1} are missing before it"
        if header.leader_epoch < self.leader_epoch:
            yield f"leader epoch {header.leader_epoch} follows {self.leader_epoch}"
        self.leader_epoch = max(self.leader_epoch, header.leader_epoch)
        if self._epochs is not None:
            known = self._epochs.other_than(header.leader_epoch, header.base_offset)
            if known is not None:
                yield f"it has leader epoch {header.leader_epoch}, the checkpoint says {known}"
        yield from self._check_records(header, batch)

    def _check_records(self, header: BatchHeader, batch: memoryview) -> Iterator[str]:
        if header.record_count == 0:
            return
        try:
            columns = scan_records(records_section(batch, header), header.record_count)
        except KafkaError as error:
            yield str(error)
            return
        deltas = columns.offset_delta
        if deltas[0] < 0 or deltas[-1] > header.last_offset_delta or (deltas[1:] <= deltas[:-1]).any():
            yield "the offsets of its records are not in order"
        elif header.record_count <= header.last_offset_delta and not self._may_have_holes():
            yield (
                f"it has {header.record_count} records for {header.last_offset_delta + 1} offsets, "
                "and the partition was never compacted"
            )

    def _check_index(self) -> Iterator[str]:
        path = self._path.with_suffix(INDEX_SUFFIX)
        yield from self._entries(
            path,
            ((row["offset"], row["position"]) for row in file_dump.dump_index(path)),
            lambda offset, position: self._of_batch(offset, self._positions) == position,
            "offset {} at byte {}",
        )

    def _check_time_index(self) -> Iterator[str]:
        path = self._path.with_suffix(TIME_INDEX_SUFFIX)
        yield from self._entries(
            path,
            ((row["offset"], row["timestamp"]) for row in file_dump.dump_time_index(path)),
            lambda offset, timestamp: (
                timestamp == NO_TIMESTAMP or self._of_batch(offset, self._newest_so_far) == timestamp
            ),
            "no record up to offset {} being newer than {}",
        )

    def _of_batch(self, last_offset: int, column: array[int]) -> int | None:
        number = bisect_left(self._last_offsets, last_offset)
        is_there = number < len(self._last_offsets) and self._last_offsets[number] == last_offset
        return column[number] if is_there else None

    def _check_transactions(self) -> Iterator[str]:
        path = self._path.with_suffix(TRANSACTION_INDEX_SUFFIX)
        yield from self._entries(
            path,
            ((row["last_offset"], row["producer_id"]) for row in file_dump.dump_transactions(path)),
            lambda offset, producer_id: (offset, producer_id) in self._aborts,
            "an abort marker at offset {} of producer {}",
        )

    def _entries(
        self,
        path: Path,
        entries: Iterator[tuple[int, int]],
        is_right: Callable[[int, int], bool],
        saying: str,
    ) -> Iterator[str]:
        wrong = []
        previous = -1
        try:
            for offset, other in entries:
                # What was appended since the log was read is not known here.
                if self._is_active and offset >= self.end_offset:
                    break
                if offset <= previous or not is_right(offset, other):
                    wrong.append(saying.format(offset, other))
                previous = offset
        except FileNotFoundError:
            return  # no entries
        except ValueError as error:
            yield f"{path}: {error}"
            return
        if wrong:
            more = f" and {len(wrong) - 1} more entries" if len(wrong) > 1 else ""
            yield f"{path}: does not fit its log: {wrong[0]}{more}"
