"""The parent of the Python workers that run Spark's tasks: imports once what they need, then forks them.

Named by `spark_session` for local masters (`spark.python.daemon.module`); Spark gives the worker's module as
the argument. Two things make the workers start sooner than from PySpark's own daemon:

- Spark puts its zipped copy of PySpark first on the path, and Python compiles what it imports from a zip at
  every start; here the installed copy, the very one that the driver runs, comes first;
- the compiled scan and the client are loaded once, not once in each worker.

Nothing imported here may leave a thread of ours behind: only the thread that forks lives on in the child.
Arrow's allocator has one, and makes itself a new one after a fork.
"""

from __future__ import annotations

import importlib
import sys

PRELOADED = (
    "pyspark.worker",
    "millrace.audit.spark.task_reader",
    "millrace.audit.reconciliation.verdict_rows",
    "millrace.audit.scanning.stream_cells",
)


def prefer_installed(path: list[str]) -> list[str]:
    """The import path with zipped packages last."""
    return [each for each in path if not each.endswith(".zip")] + [
        each for each in path if each.endswith(".zip")
    ]


def main() -> None:
    """Preload, then serve Spark until it closes standard input."""
    sys.path[:] = prefer_installed(sys.path)
    for name in PRELOADED:
        importlib.import_module(name)
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
