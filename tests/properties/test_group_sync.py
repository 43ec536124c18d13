"""The background sync of groups against a model of what a group has read.

Three sources feed one topic: `ewr` partition 0 of it, `jfk` partition 2, and `lga` joins `ewr` in partition 1
once it begins. A history is a run of steps: records (and control records) appear at sources, are carried,
come again after a worker's death, are put on record as map and position, or as map alone; the group commits
wherever it likes, reads at the target, has members there; the target's retention goes on, the map is tidied.

The model knows each record's copies by heart. After each round of the sync what is committed on the target is
the place of the next record that the group has not read at the source, or what was there before: where that
is further on, where members are there, and where no such place is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.client.group_offsets import CommittedOffset
from millrace.broker.client.groups import GroupList, ListedGroup
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.config import parse_config
from millrace.mirror.offsets import group_sync, map_upkeep, offset_map
from millrace.mirror.offsets.group_sync import GroupState, GroupSync
from millrace.mirror.offsets.map_upkeep import plan_upkeep
from millrace.mirror.offsets.offset_map import Runs, decode_chunk, decode_key
from millrace.mirror.topics.routes import SourcePartition, TargetPartition
from tests.unit.mirror.on_record import ID, Clusters, OnRecord

TOPIC, GROUP = "flights", "billing"
NOW_MS = 10**12
NOWHERE = CommittedOffset(-1)
OFFSETS = {"ewr": 0, "jfk": 2, "lga": 1}
EWR, SHARED, JFK, LATE = (
    SourcePartition("ewr", TOPIC, 0),
    SourcePartition("ewr", TOPIC, 1),
    SourcePartition("jfk", TOPIC, 0),
    SourcePartition("lga", TOPIC, 0),
)
PARTITIONS = (EWR, SHARED, JFK, LATE)
CONFIG = parse_config(
    {
        "name": "m",
        "target": {"cluster": "agg", "bootstrap": ["b:1"]},
        "sources": [
            {
                "cluster": name,
                "bootstrap": ["a:1"],
                "topics": {"include": [TOPIC]},
                "partition_offset": offset,
            }
            | {"groups": {"include": [GROUP]}}
            for name, offset in OFFSETS.items()
        ],
    }
)


def target_of(partition: SourcePartition) -> TargetPartition:
    return TargetPartition(TOPIC, partition.partition + OFFSETS[partition.source])


@dataclass
class Carried:
    """One source partition: its log (whether an offset has a record), and what the mirror did with it."""

    partition: SourcePartition
    runs: Runs
    log: list[bool] = field(default_factory=list)
    carried: int = 0
    position: int = 0  # on record
    pending: list[tuple[int, int]] = field(default_factory=list)  # copies (source, target) not on record
    copies: list[tuple[int, int]] = field(default_factory=list)


class History:
    """What happens, to the product's own sync and to the model beside it."""

    def __init__(self) -> None:
        self.on_record = OnRecord()
        self.target = Clusters("agg")
        self.sources = {name: Clusters(name) for name in OFFSETS}
        self.began_ms = 0
        self.parts: dict[SourcePartition, Carried] = {}
        self.starts: dict[TargetPartition, int] = {}
        self.ends = {target_of(partition): 0 for partition in PARTITIONS}
        self.committed: dict[SourcePartition, int] = {}
        self.there: dict[TopicPartition, CommittedOffset] = {}
        self.has_members = False
        for partition in (EWR, SHARED, JFK):
            self.begin(partition)
        clusters: Any = self.sources
        target: Any = self.target
        self.sync = GroupSync(target, lambda: NOW_MS, lambda: True, lambda: (CONFIG, clusters), lambda: 0.0)
        self.sync._take_settings()

    # --- steps -----------------------------------------------------------------------------------

    def begin(self, partition: SourcePartition) -> None:
        if partition not in self.parts:
            self.parts[partition] = Carried(partition, self._runs(partition, 0))
            self.on_record.position(partition, 0, target_of(partition))

    def produce(self, partition: SourcePartition, count: int, has_marker: bool) -> None:
        self.begin(partition)
        self.parts[partition].log += [True] * count + [False] * has_marker

    def carry(self, partition: SourcePartition, count: int, gap: int) -> None:
        """Behind `gap` target offsets of somebody's markers."""
        self.begin(partition)
        part, target = self.parts[partition], target_of(partition)
        for offset in range(part.carried, min(part.carried + count, len(part.log))):
            if part.log[offset]:
                self.ends[target] += gap
                gap = 0
                part.runs.add(range(offset, offset + 1), self.ends[target])
                part.pending.append((offset, self.ends[target]))
                self.ends[target] += 1
            part.carried = offset + 1

    def bring(self, partition: SourcePartition, count: int, has_marker: bool, gap: int) -> None:
        """All the way, as mostly."""
        self.produce(partition, count, has_marker)
        self.carry(partition, len(self.parts[partition].log), gap)
        self.write(partition, True)

    def write(self, partition: SourcePartition, with_position: bool) -> None:
        self.begin(partition)
        part = self.parts[partition]
        self.on_record.write(part.runs, part.carried)
        part.copies += part.pending
        part.pending.clear()
        if with_position:
            part.position = part.carried
            self.on_record.position(partition, part.carried, target_of(partition))

    def die(self, partition: SourcePartition) -> None:
        """The next owner carries again what lies behind the position on record."""
        self.begin(partition)
        part = self.parts[partition]
        part.pending.clear()
        part.carried = part.position
        part.runs = self._runs(partition, part.position)

    def commit(self, partition: SourcePartition, back: int) -> None:
        """At the source, so far behind the mirror's position, or before it."""
        self.begin(partition)
        part = self.parts[partition]
        self.committed[partition] = max(0, min(part.position - back, len(part.log)))

    def read_at_target(self, number: int, back: int) -> None:
        """Members that have come and gone."""
        self.there[TOPIC, number] = CommittedOffset(max(0, self.ends[TargetPartition(TOPIC, number)] - back))

    def come_or_go(self) -> None:
        self.has_members = not self.has_members

    def expire(self, number: int, count: int) -> None:
        target = TargetPartition(TOPIC, number)
        self.starts[target] = min(self.ends[target], self.starts.get(target, 0) + count)

    def tidy(self) -> None:
        for partition, map_of in self.on_record.maps.items():
            starts = {target: self.starts.get(target, 0) for target in self.ends}
            for batch in plan_upkeep(list(map_of.chunks.values()), starts):
                for raw, value in batch:
                    key = decode_key(raw)
                    assert key is not None and key.partition == partition
                    if value is None:
                        map_of.remove(key)
                    else:
                        map_of.put(decode_chunk(key, value))

    def round(self) -> None:
        """Of the sync, and then everything is as the model says."""
        self.target.begins, self.target.ends = dict(self.starts), dict(self.ends)
        before = dict(self.there)
        states = {name: self._state(name, before) for name in OFFSETS}
        asyncio.run(self._round())
        shown = {each["source"]: each["state"] for each in self.sync.status()}
        assert shown == {name: state.value for name, state in states.items() if state is not None}, self
        for number in range(3):
            assert self.there.get((TOPIC, number), NOWHERE) == self._wanted(number, before), (number, self)

    def _runs(self, partition: SourcePartition, position: int) -> Runs:
        self.began_ms += 1
        return Runs(partition, position, self.began_ms, ID, target_of(partition))

    async def _round(self) -> None:
        for source in self.sync._sources:
            await self.sync._sync_source(source)

    # --- the servers -----------------------------------------------------------------------------

    async def fetch_offsets(self, cluster: Clusters, *_: object, **__: object) -> Any:
        if cluster is self.target:
            return dict(self.there)
        return {
            partition[1:]: CommittedOffset(offset, 3, f"read by {partition.source}")
            for partition, offset in self.committed.items()
            if partition.source == cluster.name
        }

    async def describe_group(self, *_: object) -> Any:
        return SimpleNamespace(members=range(self.has_members))

    async def commit_offsets(self, cluster: Clusters, _: str, offsets: dict[Any, CommittedOffset]) -> None:
        assert cluster is self.target and not self.has_members
        self.there |= {tuple(key): at for key, at in offsets.items()}

    # --- the model -------------------------------------------------------------------------------

    def _place(self, partition: SourcePartition) -> int | None:
        """Where the next record stands that the group has not read; None where that is not known, not one
        place, or no more."""
        part, target, read = self.parts[partition], target_of(partition), self.committed[partition]
        if target == target_of(SHARED) and LATE in self.parts:
            return None
        if read > part.position:
            return None
        unread = [copy for copy in part.copies if copy[0] >= read]
        if unread:
            place = min(copy for copy in unread)[1]
        elif part.copies:
            place = part.copies[-1][1] + 1
        else:
            return self.ends[target] if self.starts.get(target, 0) == self.ends[target] else None
        return place if place >= self.starts.get(target, 0) else None

    def _feeding(self, number: int) -> SourcePartition | None:
        """Of whose commits the target partition hears."""
        for partition in self.committed:
            if target_of(partition).partition == number and self._place(partition) is not None:
                return partition
        return None

    def _wanted(self, number: int, there: dict[TopicPartition, CommittedOffset]) -> CommittedOffset:
        """What the source's commit has with it goes along, but for the epoch, which is of another log."""
        before, partition = there.get((TOPIC, number), NOWHERE), self._feeding(number)
        place = None if partition is None or self.has_members else self._place(partition)
        if partition is None or place is None or place <= before.offset:
            return before
        return CommittedOffset(place, -1, f"read by {partition.source}")

    def _state(self, source: str, there: dict[TopicPartition, CommittedOffset]) -> GroupState | None:
        mine = [partition for partition in self.committed if partition.source == source]
        if not mine:
            return None
        places = {partition: self._place(partition) for partition in mine}
        at = {each: there.get(target_of(each), NOWHERE).offset for each in mine}
        known = {each: place for each, place in places.items() if place is not None}
        if self.has_members and any(place > at[each] for each, place in known.items()):
            return GroupState.ACTIVE
        if len(known) < len(mine):
            return GroupState.PARTLY
        is_ahead = any(place < at[each] for each, place in known.items())
        return GroupState.AHEAD if is_ahead else GroupState.SYNCED

    def __str__(self) -> str:
        return f"{self.parts} read {self.committed}, at the target {self.there} of {self.starts}-{self.ends}"


def a_step() -> st.SearchStrategy[tuple[Callable[..., None], tuple[Any, ...]]]:
    one_of, few, number = (
        st.sampled_from((EWR, EWR, EWR, SHARED, JFK, LATE)),
        st.integers(1, 6),
        st.integers(0, 2),
    )
    gap, back = st.sampled_from([0, 0, 1, 2]), st.integers(-3, 9)
    steps: list[tuple[int, Callable[..., None], tuple[st.SearchStrategy[Any], ...]]] = [
        (5, History.bring, (one_of, few, st.booleans(), gap)),
        (1, History.produce, (one_of, few, st.booleans())),
        (2, History.carry, (one_of, few, gap)),
        (2, History.write, (one_of, st.sampled_from([True, False]))),
        (5, History.commit, (one_of, back)),
        (5, History.round, ()),
        (1, History.die, (one_of,)),
        (1, History.read_at_target, (number, st.integers(0, 6))),
        (1, History.come_or_go, ()),
        (1, History.expire, (number, st.integers(0, 6))),
        (1, History.tidy, ()),
    ]
    return st.one_of(
        [st.tuples(st.just(step), st.tuples(*words)) for weight, step, words in steps for _ in range(weight)]
    )


@pytest.fixture(autouse=True, scope="module")
def servers() -> Iterator[dict[str, History]]:
    """The history that answers for them is put in for each example. Chunks are small, so that short histories
    fill and join them."""
    here: dict[str, History] = {}

    async def list_groups(_: object) -> GroupList:
        return GroupList((ListedGroup(GROUP, "consumer", "Empty", "classic", 1),))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offset_map, "MAX_TAIL_SIZE", 4)
        patch.setattr(map_upkeep, "WORTH_JOINING", 2)
        patch.setattr(map_upkeep, "MAX_CHUNK_SIZE", 40)
        patch.setattr(group_sync, "list_groups", list_groups)
        patch.setattr(group_sync, "MapReader", lambda *_, **__: here["now"].on_record)
        for name in ("fetch_offsets", "describe_group", "commit_offsets"):
            patch.setattr(
                group_sync, name, lambda *words, name=name, **__: getattr(here["now"], name)(*words)
            )
        yield here


@settings(max_examples=120, deadline=None)
@given(steps=st.lists(a_step(), min_size=10, max_size=40))
def test_group_stands_at_the_next_record_that_it_has_not_read(
    servers: dict[str, History], steps: list[tuple[Callable[..., None], tuple[Any, ...]]]
) -> None:
    history = servers["now"] = History()
    for step, words in steps:
        step(history, *words)
    history.round()
