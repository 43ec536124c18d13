"""What a worker that ends could not hand over: named in one line, with an exit status of its own.

`worker` notes every partition that it gives up while it ends (`Handover.gave_up`), `daemon` asks for the
sentence at the very end. A partition is handed over when its next owner finds a position behind all that was
carried: nothing of it is under way, and nothing that the target has acknowledged waits to be put on record.
What is not handed over is not lost either: the next owner goes on at the last position on record, and under
exactly_once what was under way is aborted, or known to be committed, before that.

How the drain timeout is spent: most of it on what is under way (`deliver_s`) and on its positions
(`record_s`); the end of it is for leaving the group and aborting what is open (`LEAVE_S`), which is done also
where nothing else is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from millrace.broker.errors import FatalError
from millrace.broker.wording import count_of
from millrace.mirror.pipeline import PartitionPipeline

LEAVE_S = 2.0
# Of the time for the work itself: what positions get at least, so that a slow partition does not spoil the
# hand-over of the others.
_SHARE_FOR_DELIVERY = 0.8
_NAMED = 3


class WorkLeft(FatalError):
    """An orderly end whose time ran out: other workers, or the next start, carry what is left again."""

    exit_status: ClassVar[int] = 17


@dataclass(frozen=True, slots=True)
class DrainTimes:
    """Seconds. `total_s` holds everything."""

    deliver_s: float
    record_s: float
    total_s: float


def drain_times(drain_timeout_ms: int, limit_ms: int | None = None) -> DrainTimes:
    """How long the steps of an orderly end may take; `limit_ms`: the group waits no longer for a member."""
    total_s = drain_timeout_ms / 1000
    work_s = max(total_s - LEAVE_S, total_s / 2)
    if limit_ms is not None:
        work_s = min(work_s, limit_ms / 1000)
    return DrainTimes(work_s * _SHARE_FOR_DELIVERY, work_s, max(total_s, LEAVE_S))


def is_handed_over(pipeline: PartitionPipeline) -> bool:
    """Whether the next owner of a partition finds a position behind all that was carried of it."""
    progress = pipeline.progress
    return not pipeline.has_begun or (progress.is_drained and progress.position_to_write() is None)


@dataclass(slots=True)
class Handover:
    """The partitions that a worker gave up while it ended and could not hand over."""

    partitions: list[str] = field(default_factory=list)
    size: int = 0

    def gave_up(self, pipeline: PartitionPipeline) -> None:
        """Called just before the pipeline closes."""
        if not is_handed_over(pipeline):
            self.partitions.append(str(pipeline.partition))
            self.size += pipeline.progress.outstanding_size

    def work_left(self, drain_timeout_ms: int, target: str, trouble: str, delivery: str) -> WorkLeft | None:
        """None when everything was handed over. `trouble`: what the target's connections say, or nothing."""
        if not self.partitions:
            return None
        named = sorted(self.partitions)
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        repeats = "nothing is repeated" if delivery == "exactly_once" else "some records will be repeated"
        because = f" ({trouble})" if trouble else ""
        return WorkLeft(
            f"ended with work left: {count_of(len(named), 'partition')} ({', '.join(named[:_NAMED])}{more}), "
            f"{self.size / 1e6:.1f} MB under way; target {target} did not take it within drain_timeout_ms "
            f"{drain_timeout_ms}{because}. The next owner carries on from the last positions on record: "
            f"nothing is lost, {repeats}"
        )
