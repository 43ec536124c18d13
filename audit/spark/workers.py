"""Whether the workers of a Spark cluster can do an audit, asked before anything is read.

Called by `job` for masters whose workers are other machines. What would otherwise show after an hour, or
never, is one line at once: a worker without our libraries, one whose clock is off, a state folder that is
another one there. Each worker that takes a task is asked; one that joins later is not, so what it writes is
counted all the same (`shared_state`).

The clock matters although no verdict goes by a worker's: what a run has written and not yet committed is told
from what dead runs left behind by its age (`state.sweep`), and Kerberos and TLS refuse who is too far off.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql import SparkSession

from millrace.audit.keeping.state import StateFolder
from millrace.audit.spark.spark_cells import failing_in_one_line
from millrace.broker.errors import ConfigError, FatalError

MOST_SKEW_S = 300.0  # what Kerberos lets pass
TASKS_PER_WORKER = 4  # so that each gets one, as far as Spark lets that be known
_MOST_TASKS = 1000
_ANSWER = "host string, at_s double, finds boolean"


class ClockOff(FatalError):
    """A worker's clock differs from the driver's."""

    exit_status: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """One task's: where it ran, the time there, and whether it found the probe (True where none was laid)."""

    host: str
    at_s: float
    finds: bool


def check_workers(spark: SparkSession, state: StateFolder, clock_s: Callable[[], float] = time.time) -> None:
    """Raises ConfigError for a state folder that a worker does not find, ClockOff, and a MillraceError for
    a worker that cannot run our tasks."""
    folder = shared_folder(state.where)
    probe = f".probe-{uuid.uuid4().hex}"
    if folder is not None:
        state.files.write(probe, b"")
    try:
        asked_s = clock_s()
        answers = _ask(spark, None if folder is None else f"{folder}/{probe}")
        answered_s = clock_s()
    finally:
        if folder is not None:
            state.files.remove(probe)
    judge(answers, state.where, asked_s, answered_s)


def shared_folder(where: str) -> str | None:
    """The path that a `file:` state has on every machine; None on file systems that are one for all."""
    scheme, _, path = where.partition(":")
    return "/" + path.lstrip("/") if scheme.lower() == "file" else None


def judge(answers: list[Answer], where: str, asked_s: float, answered_s: float) -> None:
    """What the answers say of the cluster. Pure."""
    for each in answers:
        if not each.finds:
            raise ConfigError(
                "state",
                where,
                f"a folder that every worker shares with the driver: on {each.host} it is another one; "
                "mount it there, or use a file system such as hdfs:// or s3a://",
            )
    for each in answers:
        behind_s, ahead_s = asked_s - each.at_s, each.at_s - answered_s
        if max(behind_s, ahead_s) > MOST_SKEW_S:
            off_s, way = (behind_s, "behind") if behind_s > 0 else (ahead_s, "ahead of")
            raise ClockOff(
                f"the clock of Spark's worker {each.host} is {off_s:,.0f} s {way} the driver's; "
                "set both by NTP and run it again, nothing was read"
            )


def _ask(spark: SparkSession, probe: str | None) -> list[Answer]:
    context: Any = spark.sparkContext._jsc
    workers = max(1, int(context.sc().getExecutorMemoryStatus().size()) - 1)  # the driver is one of them
    tasks = min(TASKS_PER_WORKER * workers, _MOST_TASKS)

    def answer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import platform
        import time

        # What every later task needs, so that a worker without it says so now.
        import millrace.audit.reconciliation.verdict_rows
        import millrace.audit.spark.task_reader  # noqa: F401

        finds = probe is None or os.path.exists(probe)
        for batch in batches:
            count = batch.num_rows
            yield pa.RecordBatch.from_pydict(
                {"host": [platform.node()] * count, "at_s": [time.time()] * count, "finds": [finds] * count}
            )

    with failing_in_one_line():
        found = spark.range(0, tasks, 1, tasks).mapInArrow(answer, _ANSWER).toArrow().to_pylist()
    return [Answer(**each) for each in found]
