"""Whether Spark's executors wrote their cells to where the driver looks for them, and all of them.

Called by `spark_cells`. A state folder is a path; on executors of other machines the same path is another
disk unless it is shared. Spark does not notice: every task writes its file, and the driver finds those of its
own machine, or none. Cells that are not found look like records that are not there, so the audit would call a
loss what is only a wrong folder. Hence the rows written are compared with the rows found, and the offsets
that tasks say they went through with those that were planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pyarrow.parquet as pq

from millrace.broker.errors import ConfigError, FatalError


class CellsIncomplete(FatalError):
    """The cells of a run are not those of the offsets that it was to count; nothing of it is kept."""

    exit_status: ClassVar[int] = 3

    def __init__(self, state: str, planned: int, missing: int, too_many: int) -> None:
        told = [f"{missing:,} were not counted"] if missing else []
        told += [f"{too_many:,} were counted beside the plan or twice"] if too_many else []
        super().__init__(
            f"state {state}: of {planned:,} offsets {' and '.join(told)}, by the cells that are found there; "
            "nothing of this run was kept, run it again"
        )


def rows_in(files: Sequence[Path]) -> int:
    return sum(pq.read_metadata(path).num_rows for path in files)


def require_shared(state: str, written: int, found: int, what: str = "cells") -> None:
    """Raises ConfigError when another number of rows is found than the executors wrote."""
    if found != written:
        raise ConfigError(
            "state",
            state,
            f"a place that every executor shares with the driver: {written} rows of {what} were written "
            f"there, {found} are found here; use a network folder, or a file system such as hdfs:// or s3a://",
        )
