"""Where one run's temporary files lie, beside the state when that is on this machine, and whether it lives.

`job` works in such a folder; `state.sweep` removes those that dead runs left. A lock is the sign of life, for
Spark may change nothing there in all the hours of a long count. It ends with its process, however that ends;
where a file system has no locks, the age of the newest file must do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

_PREFIX = ".work-"
_IN_USE = "in-use"


@contextlib.contextmanager
def work_folder(state: Path | str) -> Iterator[Path]:
    """For Spark's temporary files: beside the state, or on this machine when the state is elsewhere."""
    if isinstance(state, Path):
        folder = state / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
    else:
        folder = Path(tempfile.mkdtemp(prefix="millrace-audit-"))
    try:
        with (folder / _IN_USE).open("wb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
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
