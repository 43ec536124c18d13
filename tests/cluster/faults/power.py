"""What a power failure takes from the files of a broker that was killed.

A disk may have lost whatever was not flushed: for each partition everything from its recovery point on. Here
a random part of it goes: the log of the last segment is cut anywhere, also within a batch, and its indexes
anywhere, too; now and then the last segment is gone altogether. What was flushed stays, and so do files that
are always flushed before they count.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path

from millrace.broker.protocol.batch import iterate_batches

CHECKPOINT = "recovery-point-offset-checkpoint"
SIDE_FILES = (".index", ".timeindex", ".txnindex")
WHOLE_SEGMENT_SHARE = 0.2


def fail(data: Path, draw: random.Random) -> int:
    """Takes unflushed bytes from every log in the folder; how many."""
    points = _recovery_points(data / CHECKPOINT)
    return sum(
        _cut(folder, points.get(folder.name, 0), draw) for folder in sorted(data.iterdir()) if folder.is_dir()
    )


def _recovery_points(path: Path) -> Mapping[str, int]:
    """By folder name."""
    if not path.exists():
        return {}
    lines = [line.split() for line in path.read_text().splitlines()[2:]]
    return {f"{topic}-{number}": int(offset) for topic, number, offset in lines}


def _cut(folder: Path, recovery_point: int, draw: random.Random) -> int:
    logs = sorted(folder.glob("*.log"))
    lost = 0
    if len(logs) > 1 and int(logs[-1].stem) > recovery_point and draw.random() < WHOLE_SEGMENT_SHARE:
        gone = logs.pop()
        lost += gone.stat().st_size
        for suffix in (".log", ".snapshot", *SIDE_FILES):
            gone.with_suffix(suffix).unlink(missing_ok=True)
    if not logs:
        return lost
    last = logs[-1]
    size = last.stat().st_size
    flushed = _flushed_size(last, recovery_point)
    if flushed < size:
        kept = draw.randint(flushed, size)
        os.truncate(last, kept)
        lost += size - kept
        for suffix in SIDE_FILES:
            side = last.with_suffix(suffix)
            if side.exists() and draw.random() < 0.5:
                os.truncate(side, draw.randint(0, side.stat().st_size))
    return lost


def _flushed_size(path: Path, recovery_point: int) -> int:
    """Bytes of a segment that lie below the recovery point."""
    content = path.read_bytes()
    for position, header in iterate_batches(content):
        if header.next_offset > recovery_point:
            return position
    return len(content)
