"""Where one run's temporary files lie, beside the state when that is on this machine, and whether it lives.

`job` works in such a folder; what dead runs left is removed by `state.sweep` beside a state, and here in this
machine's temporary folder. A lock is the sign of life, for
Spark may change nothing there in all the hours of a long count. It ends with its process, however that ends;
where a file system has no locks, the age of the newest file must do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".work-"
_PREFIX_ELSEWHERE = "millrace-audit-"
_IN_USE = "in-use"
LEFT_AFTER_S = 86_400
"""A run writes every few minutes; a day without leaves no doubt that it is dead."""


@contextlib.contextmanager
def work_folder(state: Path | str) -> Iterator[Path]:
    """For Spark's temporary files: beside the state, or on this machine when the state is elsewhere."""
    if isinstance(state, Path):
        folder = state / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
    else:
        _remove_left(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX_ELSEWHERE))
    try:
        with (folder / _IN_USE).open("wb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(temporary: Path) -> None:
    """What this user's runs left there that died a day ago or earlier."""
    horizon_s = time.time() - LEFT_AFTER_S
    for folder in temporary.glob(f"{_PREFIX_ELSEWHERE}*"):
        with contextlib.suppress(OSError):
            sign = (folder / _IN_USE).lstat()
            if sign.st_uid == os.getuid() and sign.st_mtime <= horizon_s and not is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def is_in_use(folder: Path) -> bool:
    """Whether a run has it, of this machine or another; True, too, where that may not be asked."""
    try:
        with (folder / _IN_USE).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False
