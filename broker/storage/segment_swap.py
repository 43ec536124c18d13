"""Putting a compacted segment in the place of those it was made from, so that a crash at any point leaves one
or the other, never both and never neither.

File names are Apache Kafka's, so either program finishes what the other began:

    1  `.cleaned` files are written and made durable                    a crash: they are removed
    2  indexes, then the log, are renamed to `.swap`                    from the log's rename on, it counts
    3  the old segments are removed, each one's indexes before its log
    4  indexes, then the log, get their final names

A start that finds a `.log.swap` does steps 3 and 4 again. What is to be removed follows from the new segment
itself: every old one that begins in its range of offsets; so the cleaner always keeps the last batch of what
it replaces, if need be as an empty one. In step 3 an old log that is still there shows that the indexes of
its name are its own; once it is gone they are the new one's. The directory is synced between the steps.

Called by the log (`commit`, `remove_replaced`, `finish`) and by recovery (`resume`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from millrace.broker.errors import CorruptMessage, KafkaStorageError
from millrace.broker.storage.checkpoints import sync_directory
from millrace.broker.storage.segment import LOG_SUFFIX, SIDE_SUFFIXES, Segment

CLEANED_SUFFIX = ".cleaned"
SWAP_SUFFIX = ".swap"


def begin(directory: Path, base_offset: int, now_ms: int) -> Segment:
    """An empty segment to write compacted batches to. Leftovers of an attempt that failed are removed."""
    for suffix in (LOG_SUFFIX, *SIDE_SUFFIXES):
        for state in (CLEANED_SUFFIX, SWAP_SUFFIX):
            (directory / f"{base_offset:020d}{suffix}{state}").unlink(missing_ok=True)
    return Segment(directory, base_offset, now_ms=now_ms, create=True, suffix=CLEANED_SUFFIX)


def abandon(cleaned: Segment) -> None:
    """Removes a segment that was not committed. Raises OSError."""
    for path in cleaned.paths():
        path.unlink(missing_ok=True)


def commit(cleaned: Segment) -> None:
    """Steps 1 and 2: from the return on the segment counts, also after a power loss. Raises OSError."""
    cleaned.close_indexes()
    cleaned.sync(with_indexes=True)
    sync_directory(cleaned.directory)
    cleaned.rename_indexes(SWAP_SUFFIX)
    sync_directory(cleaned.directory)
    cleaned.rename_log(SWAP_SUFFIX)
    sync_directory(cleaned.directory)


def remove_replaced(old: Sequence[Segment]) -> None:
    """Step 3. Readers that hold an old segment finish on its open file. Raises OSError."""
    for segment in old:
        segment.file.hold()
        _remove(segment.directory, segment.base_offset)
    sync_directory(old[0].directory)


def finish(cleaned: Segment) -> None:
    """Step 4, quick; the caller syncs the directory afterwards. Raises OSError."""
    cleaned.rename_indexes("")
    cleaned.rename_log("")


def resume(directory: Path, names: Sequence[str]) -> list[str]:
    """Finishes the swaps that a crash interrupted and removes what was not committed; lines for the operator.

    `names` are the directory's files. Raises KafkaStorageError when a committed segment cannot be read,
    nothing being changed then; OSError.
    """
    for name in names:
        if name.endswith(CLEANED_SUFFIX):
            (directory / name).unlink(missing_ok=True)
    swapped = [name for name in names if name.endswith(SWAP_SUFFIX)]
    if not swapped:
        return []
    notes = []
    bases = sorted(int(name[:20]) for name in names if _is_log(name))
    for name in sorted(swapped):
        if _is_log(name.removesuffix(SWAP_SUFFIX)):
            notes.append(_resume_one(directory, int(name[:20]), bases))
            swapped = [other for other in swapped if other[:20] != name[:20]]
    for name in swapped:  # indexes whose log never got there
        (directory / name).unlink(missing_ok=True)
    sync_directory(directory)
    return notes


def _resume_one(directory: Path, base_offset: int, bases: Sequence[int]) -> str:
    cleaned = Segment(directory, base_offset, now_ms=0, suffix=SWAP_SUFFIX)
    try:
        end_offset = base_offset
        for at in cleaned.batches():
            end_offset = at.header.next_offset
    except CorruptMessage as error:
        raise KafkaStorageError(
            f"{cleaned.path} is damaged ({error}); nothing was changed: restore the file, "
            "or remove it to keep the segments that it was to replace"
        ) from None
    replaced = [base for base in bases if base_offset <= base < end_offset]
    for base in replaced:
        _remove(directory, base)
    sync_directory(directory)
    finish(cleaned)
    sync_directory(directory)
    return f"{cleaned.path}: a compaction was interrupted and has been finished"


def _remove(directory: Path, base_offset: int) -> None:
    log = directory / f"{base_offset:020d}{LOG_SUFFIX}"
    for suffix in SIDE_SUFFIXES:
        log.with_suffix(suffix).unlink(missing_ok=True)
    os.unlink(log)


def _is_log(name: str) -> bool:
    return len(name) == 24 and name.endswith(LOG_SUFFIX) and name[:20].isdigit()
