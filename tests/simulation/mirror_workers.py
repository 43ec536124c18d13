"""Workers of an exactly-once mirror over a model target: processes with a seat, with lanes and partitions.

Used by `mirror_history` and `test_mirror_names`, seated by `mirror_group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.mirror.delivery.progress import PartitionProgress
from millrace.mirror.sharing.assignment import Claim, Share
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.simulation.mirror_lanes import Lane, Pipeline
from tests.simulation.mirror_model import POSITIONS, Record, Refused

LANE_COUNT = 2


@dataclass(eq=False)
class Call:
    """A request under way. `answer` is None where it got lost."""

    worker: Worker
    kind: str
    execute: Callable[[], Any]
    take: Callable[[Any], None]
    arrives_at_ms: int = 0  # a late one, later than others
    is_executed: bool = False
    was_slow: bool = False
    result: Any = None
    records: list[Record] = field(default_factory=list)

    def arrive(self) -> None:
        """The target works on it, once."""
        if not self.is_executed:
            self.is_executed = True
            try:
                self.result = (self.execute(), None)
            except Refused as refusal:
                self.result = (None, refusal.reason)


class Worker:
    """One process. `member` is "" while it has no seat."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.member = ""
        self.generation = -1
        self.claim_generation = -1
        self.slot: int | None = None
        self.slots: dict[int, int] = {}
        self.lanes: list[Lane] = []
        self.owned: dict[SourcePartition, Pipeline] = {}
        self.coming: set[SourcePartition] = set()
        self.is_alive = True
        self.is_frozen = False
        self.must_rejoin = False
        self.reading: list[tuple[int, Callable[[Mapping[SourcePartition, int]], None]]] = []

    @property
    def runs(self) -> bool:
        return self.is_alive and not self.is_frozen

    @property
    def is_assigning(self) -> bool:
        """It still does what its last share asks for; it joins again only after that."""
        return bool(self.coming) or any(each.is_draining for each in self.owned.values())

    def call(
        self,
        kind: str,
        execute: Callable[[], Any],
        take: Callable[[Any], None],
        records: Iterable[Record] = (),
    ) -> None:
        self.world.calls.append(Call(self, kind, execute, take, records=list(records)))

    # --- positions -------------------------------------------------------------------------------

    def read_positions(self, take: Callable[[Mapping[SourcePartition, int]], None]) -> None:
        """Notes the end now; gives the positions once everything before it is decided."""
        self.reading.append((self.world.positions_end(), take))

    def poll_positions(self) -> None:
        log = self.world.target.log(POSITIONS)
        for end, take in list(self.reading):
            if log.last_stable_offset() >= end:
                self.reading.remove((end, take))
                take(dict(log.committed(end)))

    # --- the group -------------------------------------------------------------------------------

    def claim(self) -> Claim:
        return Claim(frozenset(self.owned), self.claim_generation, self.slot, LANE_COUNT, self.slots)

    def lost(self) -> None:
        """The seat is gone: nothing that is under way may be committed."""
        for pipeline in list(self.owned.values()):
            self.drop(pipeline)
        for lane in self.lanes:
            lane.era += 1
        self.world.forget_calls(self)
        self.lanes.clear()
        self.reading.clear()
        self.coming.clear()
        self.slot = None
        self.member, self.generation = "", -1

    def take_share(self, share: Share) -> None:
        self.claim_generation = self.generation
        self.slots = dict(share.slots)
        if self.slot != share.slot:
            self.slot = share.slot
            self.lanes = [Lane(self, f"{self.slot}.{number}") for number in range(LANE_COUNT)]
        going = [each for key, each in self.owned.items() if key not in share.partitions]
        for pipeline in going:
            pipeline.is_draining = True
        coming = [key for key in share.partitions if key not in self.owned]
        if coming:
            self.coming.update(coming)
            self.read_positions(lambda positions: self.begin(coming, positions))

    def begin(self, coming: list[SourcePartition], positions: Mapping[SourcePartition, int]) -> None:
        for partition in coming:
            if partition not in self.coming:
                continue
            self.coming.discard(partition)
            lane = min(self.lanes, key=lambda each: len(each.pipelines))
            progress = PartitionProgress(positions.get(partition, 0), transactional=True)
            pipeline = Pipeline(partition, TargetPartition("t", partition.partition), progress, lane)
            self.owned[partition] = lane.pipelines[partition] = pipeline

    def release(self) -> None:
        """Gives up what drains, once it is settled, or when patience ends."""
        draining = [each for each in self.owned.values() if each.is_draining]
        is_impatient = self.world.random.random() < 0.02
        if draining and (is_impatient or all(each.is_settled for each in draining)):
            for pipeline in draining:
                self.drop(pipeline)
            self.must_rejoin = True

    def drop(self, pipeline: Pipeline) -> None:
        del self.owned[pipeline.partition]
        pipeline.lane.remove(pipeline)

    def isolate(self, lane: Lane, blamed: frozenset[TargetPartition]) -> None:
        if not blamed:
            return
        for pipeline in [each for each in lane.pipelines.values() if each.target not in blamed]:
            other = next((each for each in self.lanes if each is not lane), lane)
            del lane.pipelines[pipeline.partition]
            other.pipelines[pipeline.partition] = pipeline
            pipeline.lane = other
