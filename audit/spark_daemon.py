"""The parent of Spark's Python workers on this machine: imports once what they need, then forks them.

Named by `spark_session` for local masters (`spark.python.daemon.module`). Spark starts one daemon for each kind
of worker and names the worker's module as the argument. Two things make it start in a third of the time that
PySpark's own daemon takes:

- Spark puts its zipped copy of PySpark first on the path, and Python compiles what it imports from a zip at
  every start; here the installed copy, the very one the driver runs, comes first;
- those that run tasks inherit the compiled scan and the client loaded, instead of each loading them.

No import of ours may start a thread before a fork. Arrow does, for its allocator only, and takes care of forks.
"""

from __future__ import annotations

import importlib
import sys

TASK_WORKER = "pyspark.worker"


def prefer_installed(path: list[str]) -> list[str]:
    """The import path with zipped packages last."""
    return [each for each in path if not each.endswith(".zip")] + [
        each for each in path if each.endswith(".zip")
    ]


def main() -> None:
    """Preload, then serve Spark until it closes standard input."""
    sys.path[:] = prefer_installed(sys.path)
    worker = sys.argv[1] if len(sys.argv) > 1 else TASK_WORKER
    importlib.import_module(worker)
    if worker == TASK_WORKER:
        importlib.import_module("millrace.audit.task_reader")
        importlib.import_module("millrace.audit.verdict_rows")
    else:
        importlib.import_module("millrace.audit.spark_source")
    from pyspark.daemon import manager

    manager()


if __name__ == "__main__":
    main()
