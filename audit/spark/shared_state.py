"""Whether Spark's executors wrote their cells to where the driver looks for them.

Called by `spark_cells` on clusters. A state folder is a path; on executors of other machines the same path
is another disk unless it is shared. Spark does not notice: every task writes its file, and the driver finds
those of its own machine, or none. Cells that are not found look like records that are not there, so the audit
would call a loss what is only a wrong folder. Hence the rows written are compared with the rows found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from millrace.broker.errors import ConfigError


def require_shared(state: object, written: int, files: Sequence[Path]) -> None:
    """Raises ConfigError when the files hold another number of rows than the executors wrote."""
    found = sum(pq.read_metadata(path).num_rows for path in files)
    if found != written:
        raise ConfigError(
            "state",
            str(state),
            f"a place that every executor shares with the driver: {written} rows of cells were written "
            f"there, {found} are found here; use a network folder, or a file system such as hdfs:// or s3a://",
        )
