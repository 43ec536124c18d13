"""What a run is at, told when a step begins and, while it lasts, from time to time.

Called by `job`, whose steps are a table of contents; the longest of them (reconciling, the report) read no
cluster, so `read_meter` has nothing to say of them. Spark's own tasks are told where it has any under way: of
the stages that run now, for nobody knows how many will come.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

from py4j.protocol import Py4JError
from pyspark import SparkContext

from millrace.audit.report.sentences import duration
from millrace.audit.spark.read_meter import EVERY_S

Tasks = tuple[int, int]
"""(tasks that ended, all tasks) of the stages under way"""


class RunSteps:
    """Call it with each step; `tell` is for lines within one. Nothing is said twice in `every_s`.

    A context manager: no more is said when it has ended.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        tasks: Callable[[], Tasks | None] | None = None,
        every_s: float = EVERY_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._every_s, self._clock_s = say, every_s, clock_s
        self._tasks = tasks or tasks_under_way
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._step, self._begun_s, self._said_s = "", 0.0, 0.0
        self._thread = threading.Thread(target=self._watch, name="audit-steps", daemon=True)

    def __call__(self, step: str) -> None:
        """Begin a step."""
        with self._lock:
            self._step, self._begun_s = step, self._clock_s()
        self.tell(step)

    def tell(self, line: str) -> None:
        """Say a line of the step."""
        with self._lock:
            self._said_s = self._clock_s()
            self._say(line)

    def __enter__(self) -> RunSteps:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            now_s = self._clock_s()
            with self._lock:
                step, begun_s, is_due = self._step, self._begun_s, now_s - self._said_s >= self._every_s
            if not step or not is_due:
                continue
            line = step_line(step, now_s - begun_s, self._tasks())
            if step == self._step and not self._ended.is_set():
                self.tell(line)


def step_line(step: str, seconds: float, tasks: Tasks | None) -> str:
    """`reconciling: 40 s so far, 60 of 200 tasks done`. Pure."""
    line = f"{step}: {duration(1000 * seconds)} so far"
    return line if tasks is None else f"{line}, {tasks[0]:,} of {tasks[1]:,} tasks done"


def tasks_under_way() -> Tasks | None:
    """Those of the running Spark session's stages; None where there is no session, or no stage."""
    context = SparkContext._active_spark_context
    if context is None:
        return None
    ended = count = 0
    with contextlib.suppress(Py4JError, OSError, AttributeError):  # it may be stopping
        tracker = context.statusTracker()
        for number in tracker.getActiveStageIds():
            stage = tracker.getStageInfo(number)
            if stage is not None:
                ended, count = ended + stage.numCompletedTasks, count + stage.numTasks
    return (ended, count) if count else None
