"""What is on record of one partition, and what the next position is to say of it. Pure.

Held by `pipeline`. A position tells the next owner where to go on, and in which log; from where on all was
carried; where its records went; and what it could not find out any more. Whether one has to be written
although the offset is the same hangs on what the last one said.
"""

from __future__ import annotations

from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.mirror.delivery.progress import PartitionProgress
from millrace.mirror.gaps.gaps import Gap, GapClass
from millrace.mirror.gaps.open_gaps import Origin, Resume
from millrace.mirror.sources.lag import LagSamples
from millrace.mirror.topics.routes import TargetPartition


class OnRecord:
    """See the module's text. `written` is the position on record, `origin` the log that offsets belong to."""

    def __init__(self) -> None:
        self.written = Position(0, "", NO_TOPIC_ID, -1, 0)
        self.origin = Origin("")
        self._began = -1

    def go_on_from(self, position: Position) -> None:
        """It is on record: nothing else is known."""
        self.written = position
        self.origin = Origin.of(position)
        self._began = position.began

    def wrote(self, position: Position, leader_epoch: int) -> bool:
        """It is on record now; whether it says all that is known, of which there may be more by now (another
        log, or a jump)."""
        self.written = position
        told = Origin.of(position), position.leader_epoch, position.began
        return told == (self.origin, leader_epoch, self._began)

    def jump(self, to: Resume) -> bool:
        """Goes on there. Whether that is in another log, which is carried as a whole."""
        self._began = min(self._began, to.offset)  # what lies behind it in a shortened log is carried
        if to.origin is None or to.origin == self.origin:
            return False
        self.origin = to.origin
        self._began = 0
        return True

    def lacks_extent(self, gap: Gap, lag: LagSamples) -> bool:
        """How much a log that is gone still held is known to this owner alone: the position on record must
        tell the next one, or it would write the gap's event again and say less."""
        is_gone = gap.gap_class is GapClass.RECREATED
        return is_gone and self.written.log_end < min(gap.to_offset, lag.log_end)

    def next_position(
        self, progress: PartitionProgress, lag: LagSamples, target: TargetPartition, now_ms: int
    ) -> Position | None:
        """What is to be written; None while there is no news."""
        offset = progress.position_to_write()
        if offset is None:
            return None
        epoch = progress.position_leader_epoch
        waiting_since_ms = lag.first_seen_ms(offset)
        return Position(
            offset,
            self.origin.cluster_id,
            self.origin.topic_id,
            epoch,
            now_ms,
            lag.log_end,
            -1 if waiting_since_ms is None else waiting_since_ms,
            self._began,
            progress.epochs.begin_of(epoch),
            targets=tuple(dict.fromkeys((*self.written.targets, target))),
        )
