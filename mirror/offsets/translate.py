"""Where consumer groups of a source go on at the target: `millrace mirror translate`.

`Translator` answers for `run` (the command) and for `group_sync`. It looks at the clusters and at what the
mirror has written about itself; which offset belongs to which is `translation`'s rule. Nothing is changed but
by `apply`, which commits as kafka-consumer-groups.sh does: only while the group has no members there.

Where several source partitions feed one target partition, no single offset means the same: the translation
is refused, or (asked for) is the smallest that leaves nothing out, with re-reads.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.client.groups import describe_group
from millrace.broker.client.offsets import EARLIEST, LATEST, ListedOffset
from millrace.broker.errors import FatalError, NonEmptyGroup, UnknownTopicOrPartition
from millrace.broker.protocol.mirror_positions import NO_TOPIC_ID, Position
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.wording import count_of
from millrace.mirror.config import ClusterConfig, MirrorConfig, load_config
from millrace.mirror.delivery.checkpoints import Positions
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.offsets.feeds import Feeds, has_left
from millrace.mirror.offsets.log_starts import log_starts
from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.translation import Answer, PartitionMap, Scope, Translation
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

Commits: TypeAlias = Mapping[str, Mapping[TopicPartition, CommittedOffset]]
"""Source cluster -> partition -> what a group has committed there."""

CLIENT_ID = "millrace-cli"
REQUEST_TIMEOUT_MS = 15_000


class Outcome(StrEnum):
    """How a partition's offset translates; the values are those of the column and of the JSON."""

    EXACT = "exact"
    REREADS = "with re-reads"
    TOO_OLD = "too old"
    NOT_MIRRORED_YET = "not mirrored yet"
    MERGED = "merged"
    ANOTHER_LOG = "another log"
    NOT_CARRIED = "not carried"
    NO_LEADER = "no leader"
    UNREADABLE = "unreadable"
    NOTHING = "nothing carried"  # on the way only: the target's log has the answer


@dataclass(slots=True)
class Row:
    """One partition that a group has committed. `target_offset` is None where `outcome` says why."""

    source: SourcePartition
    target: TargetPartition
    committed: CommittedOffset
    outcome: Outcome
    target_offset: int | None = None
    note: str = ""
    lag: int | None = None
    target_lag: int | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` did with rows that have a target offset."""

    committed: Mapping[TopicPartition, CommittedOffset]
    ahead: Mapping[TopicPartition, int] = field(default_factory=dict)  # already there, or further


@dataclass(frozen=True, slots=True)
class _Shared:
    """One target partition of several sources: where its log began, where its stable end was before anything
    was read of the mirror, and the sources of which nothing is left but what comes behind that."""

    start: int
    end: int
    read_out: set[SourcePartition]


class Translator:
    """See the module's text. `keeps_all`: the reader follows the whole map, for many questions, and reads on
    when it is told to (`refresh`); otherwise it reads what the one question needs."""

    def __init__(
        self,
        config: MirrorConfig,
        target: Cluster,
        sources: Mapping[str, Cluster],
        reader: MapReader,
        *,
        keeps_all: bool = False,
    ) -> None:
        self._feeds = Feeds(config)
        self._naming = config.naming_rule
        self._target = target
        self._sources = sources
        self._reader = reader
        self._keeps_all = keeps_all
        # At least once, records are at the target for a while before map and position tell of them.
        self._is_told_at_once = config.delivery == "exactly_once"
        self._positions = Positions()  # as they were before the map was read

    def selects(self, source: str, topic: str) -> bool:
        """Whether this mirror carries the topic."""
        return self._feeds.selects(source, topic)

    def target_of(self, partition: SourcePartition) -> TargetPartition:
        return self._naming.target_partition(partition.source, partition.topic, partition.partition)

    async def refresh(self, targets: Collection[TargetPartition] = ()) -> None:
        """Reads what the mirror has written since; all of it, or what is about these targets. Raises what the
        target says."""
        await self._reader.refresh_positions()
        self._positions = self._reader.positions.copy()
        topics = None
        if not self._keeps_all:
            candidates = self._feeds.candidates(targets, self._positions)
            topics = {(each.source, each.topic) for of_target in candidates.values() for each in of_target}
        await self._reader.refresh_map(topics)
        # Who began to go there before the map was read: the place of a record that came since is behind that.
        await self._reader.refresh_positions()

    async def rows(self, commits: Commits, *, allow_rereads: bool = False) -> list[Row]:
        """A row for each of a group's commits in a topic that the mirror carries, in order.

        `commits` must have been read before this is called, and before `refresh` where that is the caller's:
        what they name is then looked for in a map that is younger. Raises what the clusters say.
        """
        wanted = {
            SourcePartition(source, topic, number): committed
            for source, of_source in commits.items()
            for (topic, number), committed in of_source.items()
            if self.selects(source, topic)
        }
        if not wanted:
            return []
        targets = {self.target_of(partition) for partition in wanted}
        ends: Mapping[TopicPartition, ListedOffset] = {}
        if allow_rereads:
            assert not self._keeps_all, "the ends must be older than what was read of the mirror"
            ends = await _ends(self._target, targets)
        if not self._keeps_all:
            await self.refresh(targets)
        candidates = self._feeds.candidates(targets, self._positions)
        for target, begun in self._feeds.candidates(targets, self._reader.positions).items():
            candidates[target] |= begun
        feeders = await self._feeders(candidates)
        logs = await self._logs(wanted)
        shared: dict[TargetPartition, _Shared] = {}
        if allow_rereads:
            merged = {target: of_target for target, of_target in feeders.items() if len(of_target) > 1}
            shared = await self._shared(merged, wanted, ends)
        rows = []
        for partition in sorted(wanted):
            target = self.target_of(partition)
            of_target = feeders[target] | {partition}
            rows.append(self._row(partition, target, wanted, of_target, logs, shared.get(target)))
        await self._compare_with_target(rows)
        return rows

    async def add_lags(self, rows: Sequence[Row]) -> None:
        """Fills in what the group has left to read: records of the source, offsets of the target."""
        for source in {row.source.source for row in rows}:
            of_source = [row for row in rows if row.source.source == source]
            keys = [(row.source.topic, row.source.partition) for row in of_source]
            ends = await _ends(self._sources[source], keys)
            for row, key in zip(of_source, keys, strict=True):
                if key in ends:
                    row.lag = max(0, ends[key].offset - row.committed.offset)
        found = [row for row in rows if row.target_offset is not None]
        keys = [(row.target.topic, row.target.partition) for row in found]
        ends = await _ends(self._target, keys)
        for row, key in zip(found, keys, strict=True):
            if key in ends:
                row.target_lag = max(0, ends[key].offset - (row.target_offset or 0))

    def _known_end(self, row: Row) -> int:
        """How far the target's log went, at least, as the map says."""
        map_of = self._reader.maps.get(row.source, PartitionMap())
        return map_of.last_target(self._scope(row.source, row.target)) or 0

    # --- one partition ---------------------------------------------------------------------------

    def _row(
        self,
        partition: SourcePartition,
        target: TargetPartition,
        commits: Mapping[SourcePartition, CommittedOffset],
        feeders: Collection[SourcePartition],
        logs: Mapping[SourcePartition, object],
        shared: _Shared | None,
    ) -> Row:
        """`shared`: what is there, where re-reads are allowed."""
        committed = commits[partition]
        row = Row(partition, target, committed, Outcome.NOT_CARRIED)
        others = sorted(each for each in feeders if each != partition)
        position = self._positions.known.get(partition)
        if position is None:
            row.note = "the mirror has no position of it"
        elif _is_another_log(position, logs[partition]):
            row.outcome = Outcome.ANOTHER_LOG
            row.note = "the topic was made anew at the source, and the mirror is still at the old one"
        elif others and shared is None:
            row.outcome = Outcome.MERGED
            named = ", ".join(map(str, others[:3]))
            feed_now = all(self._feeds.feeds_now(each, target) for each in others[:3])
            row.note = f"{named} go there as well" if feed_now else f"records of {named} may be there as well"
        elif others and shared is not None:
            self._least(row, [partition, *others], commits, shared)
        elif committed.offset > position.next_offset:
            # Though the map, which is younger, may know it: who began to go there since is not known yet.
            row.outcome, row.note = _in_words(Translation(Answer.NOT_YET, bound=position.next_offset))
        else:
            found = self._translate(partition, committed.offset, target)
            row.outcome, row.note = _in_words(found)
            row.target_offset = found.target
        return row

    def _least(
        self,
        row: Row,
        feeders: Iterable[SourcePartition],
        commits: Mapping[SourcePartition, CommittedOffset],
        shared: _Shared,
    ) -> None:
        """The smallest offset of all that feed the target partition: behind it nothing is left out."""
        row.outcome, row.note = Outcome.REREADS, "the smallest of the sources that go there"
        places: list[int] = []
        for feeder in feeders:
            committed = commits.get(feeder)
            map_of = self._reader.maps.get(feeder, PartitionMap())
            found = self._translate(feeder, committed.offset if committed else 0, row.target)
            at = self._scope(feeder, row.target)
            place = found.target
            if found.answer is Answer.UNREADABLE:
                row.outcome, row.note = _in_words(found)
                return
            if found.answer is Answer.TOO_OLD:
                began = self._began(feeder)
                if found.went_elsewhere:
                    # Who feeds another one now has left nothing here but what its map tells.
                    is_left_out = self._feeds.feeds_now(feeder, row.target)
                else:
                    is_left_out = 0 <= began < found.bound
                if committed is not None and is_left_out:
                    row.outcome, row.note = _in_words(found)
                    row.note = f"of {feeder}, {row.note}"
                    return
                place = map_of.first_target(at)
                is_unknown = place is None and not map_of.chunks and not self._has_only_begun(feeder)
                if is_unknown or (committed is not None and began < 0 and not found.went_elsewhere):
                    row.outcome, row.note = Outcome.NOTHING, ""
                    return
            elif found.answer is Answer.NOT_YET:
                place = map_of.last_target(at)
            is_read_out = found.is_end and feeder in shared.read_out
            if is_read_out or (place is None and self._is_told_at_once):
                # What it brings comes behind what was there before.
                place = max(place or 0, shared.end)
            elif place is None:
                place = shared.start
            elif committed is None:
                # What the group has never read of a source begins with the first record that is there of it.
                place = max(place, shared.start)
            places.append(place)
        row.target_offset = min(places)

    def _translate(self, partition: SourcePartition, offset: int, target: TargetPartition) -> Translation:
        position = self._positions.known.get(partition)
        map_of = self._reader.maps.get(partition)
        if position is None:
            return Translation(Answer.TOO_OLD)
        if map_of is None:
            map_of = PartitionMap()
        scope = self._scope(partition, target)
        return map_of.translate(offset, position.next_offset, position.topic_id, scope)

    def _has_only_begun(self, partition: SourcePartition) -> bool:
        """Whether the position says that nothing was carried. Otherwise there was, or had been, a map."""
        position = self._positions.known.get(partition)
        return position is not None and position.began == position.next_offset

    def _began(self, partition: SourcePartition) -> int:
        """From where on it was carried, as far as that is known; otherwise -1."""
        position = self._positions.known.get(partition)
        return -1 if position is None else position.began

    def _scope(self, partition: SourcePartition, target: TargetPartition) -> Scope:
        return self._feeds.scope(partition, target, self._positions)

    # --- the clusters ----------------------------------------------------------------------------

    async def _shared(
        self,
        feeders: Mapping[TargetPartition, Collection[SourcePartition]],
        commits: Mapping[SourcePartition, CommittedOffset],
        ends: Mapping[TopicPartition, ListedOffset],
    ) -> dict[TargetPartition, _Shared]:
        """`ends` were asked before the positions were read."""
        starts = await log_starts(self._target, feeders.keys())
        read_out = await self._read_out(
            {each for of_target in feeders.values() for each in of_target}, commits
        )
        return {
            target: _Shared(
                starts.get(target, 0), ends[target].offset if target in ends else 0, read_out & set(of_target)
            )
            for target, of_target in feeders.items()
        }

    async def _read_out(
        self, feeders: Collection[SourcePartition], commits: Mapping[SourcePartition, CommittedOffset]
    ) -> set[SourcePartition]:
        """Those of which everything that their source has is carried, or was read there by the group."""
        found: set[SourcePartition] = set()
        logs = await self._logs([each for each in feeders if each.source in self._sources])
        for source, cluster in self._sources.items():
            of_source = {each for each in logs if each.source == source}
            ends = await _ends(cluster, [(each.topic, each.partition) for each in of_source])
            for each in of_source:
                position, end = self._positions.known.get(each), ends.get((each.topic, each.partition))
                if position is None or end is None or _is_another_log(position, logs[each]):
                    continue
                read_to = commits[each].offset if each in commits else 0
                if end.offset <= max(position.next_offset, read_to):
                    found.add(each)
        return found

    async def _feeders(
        self, candidates: Mapping[TargetPartition, Collection[SourcePartition]]
    ) -> dict[TargetPartition, set[SourcePartition]]:
        """Without those that go there no more, and whose records have all left the target."""
        past = {
            target: [each for each in of_target if not self._feeds.feeds_now(each, target)]
            for target, of_target in candidates.items()
        }
        starts = await log_starts(self._target, [target for target in past if past[target]])
        return {
            target: set(of_target)
            - {each for each in past[target] if self._has_left(each, target, starts.get(target, -1))}
            for target, of_target in candidates.items()
        }

    def _has_left(self, partition: SourcePartition, target: TargetPartition, log_start: int) -> bool:
        map_of = self._reader.maps.get(partition)
        if map_of is None or map_of.unreadable:
            return False
        return has_left(map_of.chunks.values(), self._scope(partition, target), log_start)

    async def _logs(self, partitions: Collection[SourcePartition]) -> dict[SourcePartition, object]:
        """The topic id of each partition's log at its source, now."""
        by_source: dict[str, set[str]] = {}
        for partition in partitions:
            by_source.setdefault(partition.source, set()).add(partition.topic)
        ids: dict[tuple[str, str], object] = {}
        for source, topics in by_source.items():
            view = await self._sources[source].metadata(sorted(topics), max_age_ms=60_000)
            ids |= {(source, name): topic.topic_id for name, topic in view.topics.items()}
        return {each: ids.get((each.source, each.topic), NO_TOPIC_ID) for each in partitions}

    async def _compare_with_target(self, rows: Iterable[Row]) -> None:
        """Takes back what the target's log does not hold (any more), or nobody can be asked about; finds a
        place where the map knows of nothing: the beginning of the log, which is exact where that is empty."""
        found = [row for row in rows if row.target_offset is not None or row.outcome is Outcome.NOTHING]
        keys = [(row.target.topic, row.target.partition) for row in found]
        if not keys:
            return
        led = await _led(self._target, keys)
        begins = await self._target.list_offsets(dict.fromkeys(led, EARLIEST)) if led else {}
        ends = await self._target.list_offsets(dict.fromkeys(led, LATEST)) if led else {}
        for row, key in zip(found, keys, strict=True):
            offset = row.target_offset or 0
            if key not in begins:
                row.outcome, row.target_offset = Outcome.NO_LEADER, None
                row.note = f"the target names no leader of {row.target}"
            elif row.outcome is Outcome.NOTHING:
                row.target_offset = begins[key].offset
                is_empty = begins[key].offset == ends[key].offset
                row.outcome = Outcome.EXACT if is_empty else Outcome.REREADS
                row.note = "" if is_empty else "the map does not speak of what is there: its beginning"
            elif offset < begins[key].offset:
                row.outcome, row.target_offset = Outcome.TOO_OLD, None
                row.note = f"the target has dropped it; its log begins at {begins[key].offset}"
            elif max(offset, self._known_end(row)) > ends[key].offset:
                row.outcome, row.target_offset = Outcome.ANOTHER_LOG, None
                row.note = f"the target's log ends at {ends[key].offset}: it was made anew or cut"


def _is_another_log(position: Position, topic_id: object) -> bool:
    """Whether the source's topic, which has this id now, is not the one that the mirror is at."""
    return NO_TOPIC_ID not in (position.topic_id, topic_id) and position.topic_id != topic_id


async def _led(cluster: Cluster, keys: Collection[TopicPartition]) -> list[TopicPartition]:
    """Those that have a leader to be asked: one without holds up no other."""
    view = await cluster.metadata(sorted({topic for topic, _ in keys}), max_age_ms=0)
    return [key for key in keys if view.leader(*key) is not None]


async def _ends(cluster: Cluster, keys: Collection[TopicPartition]) -> dict[TopicPartition, ListedOffset]:
    """The stable ends of those that have a leader."""
    led = await _led(cluster, keys) if keys else []
    return await cluster.list_offsets(dict.fromkeys(led, LATEST), read_committed=True) if led else {}


def _in_words(found: Translation) -> tuple[Outcome, str]:
    match found.answer:
        case Answer.EXACT:
            return Outcome.EXACT, ""
        case Answer.NOTHING:
            return Outcome.NOTHING, ""
        case Answer.SAFE:
            return Outcome.REREADS, "the smallest offset that leaves nothing out"
        case Answer.NOT_YET:
            return Outcome.NOT_MIRRORED_YET, f"the mirror is at {found.bound}"
        case Answer.UNREADABLE:
            return Outcome.UNREADABLE, "the map was written by another version, or is damaged"
        case Answer.TOO_OLD:
            since = f"offset {found.bound}" if found.bound >= 0 else "its next record"
            return Outcome.TOO_OLD, f"the map begins with {since}"


async def apply(
    target: Cluster,
    group: str,
    rows: Iterable[Row],
    *,
    allow_rereads: bool = False,
    backwards: bool = False,
) -> Applied:
    """Commits the rows' target offsets for the group on the target: exact ones, and forwards only, unless
    asked.

    Raises NonEmptyGroup while the group has members there, and what the cluster says.
    """
    wanted: dict[TopicPartition, CommittedOffset] = {}
    for row in rows:
        if row.target_offset is not None and (row.outcome is Outcome.EXACT or allow_rereads):
            key = (row.target.topic, row.target.partition)
            wanted[key] = CommittedOffset(row.target_offset, -1, row.committed.metadata)
    if not wanted:
        return Applied({})
    current = await fetch_offsets(target, group, wanted, require_stable=True)
    ahead = {
        key: current[key].offset
        for key, offset in wanted.items()
        if key in current
        and (current[key].offset == offset.offset or (current[key].offset > offset.offset and not backwards))
    }
    left = {key: offset for key, offset in wanted.items() if key not in ahead}
    if left:
        members = len((await describe_group(target, group)).members)
        if members:
            raise NonEmptyGroup(
                f"{target}: group {group} has {count_of(members, 'member')} there; stop them first"
            )
        await commit_offsets(target, group, left)
    return Applied(left, ahead)


# --- the command -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """What `millrace mirror translate` was asked."""

    group: str
    source: str | None = None
    topics: tuple[str, ...] = ()
    apply: bool = False
    allow_rereads: bool = False
    backwards: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    rows: list[Row]
    applied: Applied | None
    allow_rereads: bool = False

    @property
    def exit_status(self) -> int:
        """0 when every partition has an exact place at the target, or one with re-reads where they are
        allowed; otherwise 1."""
        allowed = (Outcome.EXACT, Outcome.REREADS) if self.allow_rereads else (Outcome.EXACT,)
        return int(any(row.outcome not in allowed for row in self.rows))


async def answer(config: MirrorConfig, question: Question) -> Reply:
    """Raises FatalError for a question that this mirror cannot answer, and what the clusters say."""
    named = [each for each in config.sources if question.source in (None, each.cluster)]
    if not named:
        known = ", ".join(each.cluster for each in config.sources)
        raise FatalError(f"no source {question.source} in the config; its sources are {known}")
    target = _connect(config.target)
    sources = {each.cluster: _connect(each) for each in config.sources}
    try:
        commits = {}
        # Of all sources and topics: they may share a target partition with those that were asked about.
        for name, cluster in sources.items():
            commits[name] = await fetch_offsets(cluster, question.group, require_stable=True)
        translator = Translator(config, target, sources, MapReader(target, config.name))
        rows = await translator.rows(commits, allow_rereads=question.allow_rereads)
        names = {each.cluster for each in named}
        rows = [
            row
            for row in rows
            if row.source.source in names and (not question.topics or row.source.topic in question.topics)
        ]
        if not rows:
            raise UnknownTopicOrPartition(
                f"group {question.group} has committed nothing on {', '.join(sorted(names))} that mirror "
                f"{config.name} carries"
            )
        await translator.add_lags(rows)
        applied = None
        if question.apply:
            applied = await apply(
                target,
                question.group,
                rows,
                allow_rereads=question.allow_rereads,
                backwards=question.backwards,
            )
        return Reply(rows, applied, question.allow_rereads)
    finally:
        for cluster in (target, *sources.values()):
            await cluster.close()


def run(config: Path, question: Question) -> Reply | int:
    """What the command prints; or, after a line on stderr, the exit status of a failure."""
    try:
        return asyncio.run(answer(load_config(config), question))
    except FatalError as error:
        sys.stderr.writelines(f"millrace mirror translate: {line}\n" for line in error.lines())
        return error.exit_status
    except CLUSTER_FAILURES as error:
        sys.stderr.write(f"millrace mirror translate: {error}\n")
        return getattr(error, "exit_status", 1)


def _connect(config: ClusterConfig) -> Cluster:
    return Cluster(
        config.cluster,
        config.bootstrap,
        client_id=CLIENT_ID,
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        awaits_start=False,
        security=config.security,
    )
