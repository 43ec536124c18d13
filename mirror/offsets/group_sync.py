"""Keeps consumer groups' positions on the target in step with the sources': a group can move at any time.

Run by `worker`; it works in the worker that leads the mirror's group and rests in the others. For every
source with a `groups` section: the matching groups of the source are listed, what they have committed is
translated (`translate`), and committed on the target.

Rules:
- only exact translations are committed: where sources merge into one target partition nothing is;
- forwards only: a group that has read on at the target is never put back;
- only while the group has no members on the target: from then on its position is its own;
- only soon after its position there was read, and as the leader: a commit is sent whole or not at all, but
  one that is late, of a worker that stood still or tries for long, would put the group back behind what the
  next leader, or its own consumers, have committed;
- a position that does not move is committed again once a day, or the target would forget it.

A group that cannot be synced is logged when that begins and shown until it is over; the others go on. That
its broker, or its whole source, does not answer is such a reason, and no word that the group is gone.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets, fetch_offsets
from millrace.broker.client.groups import CONSUMER_PROTOCOL_TYPE, describe_group, list_groups
from millrace.broker.errors import NonEmptyGroup, RequestTimedOut, UnknownMemberId
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.mirror.config import GroupSyncConfig, MirrorConfig
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.offsets.map_reader import MapReader
from millrace.mirror.offsets.translate import Outcome, Row, Translator

log = structlog.get_logger("millrace.mirror.offsets.group_sync")

PURPOSE = "group sync"
CHECK_PAUSE_S = 0.5
FETCHES_AT_ONCE = 8
COMMIT_WITHIN_S = 5.0
# Kafka forgets the offsets of a group without members after a week (offsets.retention.minutes).
COMMIT_AGAIN_AFTER_MS = 86_400_000


TOO_LATE = (
    f"what the target said of it was {COMMIT_WITHIN_S:.0f} s old before it could be committed; trying again"
)


class GroupState(StrEnum):
    SYNCED = "synced"
    PARTLY = "partly"  # some partitions cannot be translated (now)
    ACTIVE = "active_on_target"
    AHEAD = "ahead_on_target"  # stands further on at the target, and is never put back
    FAILING = "failing"


@dataclass(slots=True)
class SyncedGroup:
    """What status shows of one group of one source."""

    state: GroupState
    at_ms: int
    partitions: int = 0
    committed: int = 0
    reason: str = ""


class GroupPatterns:
    """Which groups are meant: include and exclude patterns over whole names, never the mirror's own kind, and
    not the one that shows the mirror's progress (`own`)."""

    def __init__(self, config: GroupSyncConfig, own: str | None = None) -> None:
        self._own = own
        self._include = [re.compile(pattern) for pattern in config.include]
        self._exclude = [re.compile(pattern) for pattern in config.exclude]

    def selects(self, group: str, protocol_type: str) -> bool:
        """A group without members whose offsets were set by hand has no protocol type."""
        if protocol_type not in ("", CONSUMER_PROTOCOL_TYPE) or group == self._own:
            return False
        if not any(pattern.fullmatch(group) for pattern in self._include):
            return False
        return not any(pattern.fullmatch(group) for pattern in self._exclude)


def to_commit(
    rows: list[Row],
    current: Mapping[TopicPartition, CommittedOffset],
    committed_at_ms: Mapping[TopicPartition, int],
    now_ms: int,
) -> dict[TopicPartition, CommittedOffset]:
    """What has to be committed on the target now: forwards, or again what it may forget. Pure."""
    wanted: dict[TopicPartition, CommittedOffset] = {}
    for row in rows:
        if row.outcome is not Outcome.EXACT or row.target_offset is None:
            continue
        key = (row.target.topic, row.target.partition)
        there = current[key].offset if key in current else -1
        is_due = now_ms - committed_at_ms.get(key, now_ms) >= COMMIT_AGAIN_AFTER_MS
        if row.target_offset > there or (row.target_offset == there and is_due):
            wanted[key] = CommittedOffset(row.target_offset, -1, row.committed.metadata)
    return wanted


def first_ahead(rows: list[Row], current: Mapping[TopicPartition, CommittedOffset]) -> str:
    """Where the group stands further on at the target than its source says, in a sentence; "" if nowhere."""
    for row in rows:
        there = current.get((row.target.topic, row.target.partition))
        if row.target_offset is not None and there is not None and there.offset > row.target_offset:
            return (
                f"{row.target}: the target stands at {there.offset}, the source's position is "
                f"{row.target_offset} there; a group is never put back"
            )
    return ""


@dataclass
class _Source:
    """One source with a `groups` section."""

    name: str
    cluster: Cluster
    patterns: GroupPatterns
    interval_ms: int
    due_at: float = 0.0  # in seconds of the monotonic clock
    failure: str = ""  # why none of its groups can be read
    unlisted: str = ""  # why those of some brokers cannot be listed
    groups: dict[str, SyncedGroup] = field(default_factory=dict)


class GroupSync:
    """See the module's text. `run` goes on until it is cancelled."""

    def __init__(
        self,
        target: Cluster,
        now_ms: Callable[[], int],
        is_leader: Callable[[], bool],
        settings: Callable[[], tuple[MirrorConfig, Mapping[str, Cluster]]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settings`: the config and the sources' clusters as they are now; both may change."""
        self._target = target
        self._now_ms = now_ms
        self._is_leader = is_leader
        self._settings = settings
        self._monotonic = monotonic
        self._config, self._clusters = settings()
        self._sources: list[_Source] = []
        self._translator: Translator | None = None
        # By group and partition: when it was committed last, as far as this worker knows.
        self._committed_at_ms: dict[tuple[str, TopicPartition], int] = {}

    async def run(self) -> None:
        self._take_settings()
        while True:
            await asyncio.sleep(CHECK_PAUSE_S * random.uniform(0.8, 1.2))
            config, clusters = self._settings()
            # A source that a reload adds may be there later than the config that names it.
            if config is not self._config or clusters != self._clusters:
                self._take_settings()
            if not self._is_leader():
                self._rest()
                continue
            for source in self._sources:
                if self._monotonic() >= source.due_at:
                    await self._sync_source(source)
                    source.due_at = self._monotonic() + source.interval_ms / 1000

    def status(self) -> list[dict[str, Any]]:
        """For /status: by source and group; empty where another worker does it."""
        return [
            {
                "source": source.name,
                "group": name,
                "state": group.state.value,
                "partitions": group.partitions,
                "committed": group.committed,
                "at_ms": group.at_ms,
                **({"reason": group.reason} if group.reason else {}),
            }
            for source in self._sources
            for name, group in sorted(source.groups.items())
        ]

    def gauges(self) -> list[tuple[str, str, dict[str, str], float]]:
        """How many groups of each source are in each state, as rows of metrics."""
        return [
            (
                "millrace_mirror_groups",
                "Consumer groups that are kept in step, by state; 0 in workers that do not lead",
                {"source": source.name, "state": state.value},
                float(sum(group.state is state for group in source.groups.values())),
            )
            for source in self._sources
            for state in GroupState
        ]

    def _take_settings(self) -> None:
        self._config, clusters = self._settings()
        self._clusters = dict(clusters)
        self._sources = [
            _Source(
                each.cluster,
                self._clusters[each.cluster],
                GroupPatterns(each.groups, each.progress_group),
                each.groups.interval_ms,
            )
            for each in self._config.sources
            if each.groups is not None and each.cluster in self._clusters
        ]
        self._rest()

    def _rest(self) -> None:
        """Another worker leads: what was read may be old when this one leads again."""
        self._translator = None
        self._committed_at_ms.clear()
        for source in self._sources:
            source.groups.clear()
            source.due_at = 0.0

    async def _sync_source(self, source: _Source) -> None:
        commits: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        try:
            commits = await self._commits(source)
            if any(commits.values()):
                await self._translate().refresh()  # for all of them: it waits for open transactions
        except CLUSTER_FAILURES as error:
            if not source.failure:
                log.warning("groups cannot be read", source=source.name, error=str(error))
            source.failure = str(error)
            for name in {*source.groups, *commits}:
                self._note(source, name, GroupState.FAILING, reason=str(error))
            return
        source.failure = ""
        for name in source.groups.keys() - commits.keys():
            del source.groups[name]
        for name, committed in commits.items():
            try:
                await self._sync_group(source, name, committed)
            except CLUSTER_FAILURES as error:
                self._note(source, name, GroupState.FAILING, reason=str(error))

    async def _commits(self, source: _Source) -> dict[str, dict[TopicPartition, CommittedOffset]]:
        """What the groups that are meant have committed of topics that are carried; nothing of those known
        ones of which nobody can tell now, which are noted as failing."""
        listed = await list_groups(source.cluster)
        names = [
            each.group_id
            for each in listed.groups
            if source.patterns.selects(each.group_id, each.protocol_type)
        ]
        commits: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        if unlisted := "; ".join(listed.unreachable.values()):
            if not source.unlisted:
                log.warning("not all groups can be listed", source=source.name, error=unlisted)
            for name in source.groups.keys() - set(names):
                self._note(source, name, GroupState.FAILING, reason=unlisted)
                commits[name] = {}
        source.unlisted = unlisted
        translator = self._translate()
        limit = asyncio.Semaphore(FETCHES_AT_ONCE)

        async def of(name: str) -> dict[TopicPartition, CommittedOffset]:
            async with limit:
                found = await fetch_offsets(source.cluster, name, require_stable=True)
            return {key: at for key, at in found.items() if translator.selects(source.name, key[0])}

        answers = await asyncio.gather(*(of(name) for name in names), return_exceptions=True)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, CLUSTER_FAILURES):
                self._note(source, name, GroupState.FAILING, reason=str(answer))
                commits[name] = {}
            elif isinstance(answer, BaseException):
                raise answer
            elif answer:
                commits[name] = answer
        return commits

    async def _sync_group(
        self, source: _Source, name: str, committed: dict[TopicPartition, CommittedOffset]
    ) -> None:
        if not committed:
            return
        rows = await self._translate().rows({source.name: committed})
        keys = [(row.target.topic, row.target.partition) for row in rows]
        read_at = self._monotonic()
        current = await fetch_offsets(self._target, name, keys, require_stable=True)
        now_ms = self._now_ms()
        known_since = {key: self._committed_at_ms.setdefault((name, key), now_ms) for key in keys}
        wanted = to_commit(rows, current, known_since, now_ms)
        count = len(rows)
        if wanted:
            try:
                if (await describe_group(self._target, name)).members:
                    raise NonEmptyGroup
                if not self._is_leader():
                    return
                time_left_s = read_at + COMMIT_WITHIN_S - self._monotonic()
                if time_left_s <= 0:
                    raise RequestTimedOut(TOO_LATE)
                await self._commit(name, wanted, time_left_s)
            except (NonEmptyGroup, UnknownMemberId):
                self._note(source, name, GroupState.ACTIVE, count, reason="its members on the target read on")
                return
            self._committed_at_ms |= {(name, key): now_ms for key in wanted}
        left_out = [row for row in rows if row.outcome is not Outcome.EXACT]
        state, reason = GroupState.SYNCED, ""
        if left_out:
            state = GroupState.PARTLY
            reason = f"{left_out[0].source}: {left_out[0].outcome}: {left_out[0].note}"
        elif ahead := first_ahead(rows, current):
            state, reason = GroupState.AHEAD, ahead
        self._note(source, name, state, count, len(wanted), reason)

    async def _commit(
        self, name: str, wanted: Mapping[TopicPartition, CommittedOffset], time_left_s: float
    ) -> None:
        try:
            async with asyncio.timeout(time_left_s):
                await commit_offsets(self._target, name, wanted)
        except TimeoutError:
            raise RequestTimedOut(TOO_LATE) from None

    def _note(
        self,
        source: _Source,
        name: str,
        state: GroupState,
        partitions: int = 0,
        committed: int = 0,
        reason: str = "",
    ) -> None:
        before = source.groups.get(name)
        if state is GroupState.FAILING and (before is None or before.state is not state):
            log.warning("a group cannot be synced", source=source.name, group=name, error=reason)
        total = committed + (before.committed if before else 0)
        source.groups[name] = SyncedGroup(state, self._now_ms(), partitions, total, reason)

    def _translate(self) -> Translator:
        if self._translator is None:
            reader = MapReader(self._target, self._config.name, purpose=PURPOSE)
            self._translator = Translator(self._config, self._target, self._clusters, reader, keeps_all=True)
        return self._translator
