"""The old model's rules: who reads which partition, and Algorithm 1 of the Kafka paper, step by step.

Consumers of a group agree without a coordinator: each reads the same registry from ZooKeeper, sorts it in
the same way and takes its own share. A partition is read by the thread (stream) that holds its owner znode;
two consumers that see the registry at different moments collide on such a znode, and the one that comes
second gives everything back and tries again.

`rebalance` is that algorithm as a generator: it yields what is to be done (`Step`), is sent the answer, and
knows nothing of ZooKeeper or time. `connector.py` carries the steps out; the simulation
in the tests carries out those of many consumers in any order.

What must stay true:
- every consumer of a group computes the same owner for every partition from the same view, also Kafka's own
  0.8 consumers: threads are sorted as text, regexes are cleaned and matched as Kafka does;
- nothing is claimed before everything that was held is given back, and nothing is given back before the
  streams are stopped: a partition never feeds two streams of consumers whose sessions live.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from millrace.broker.errors import ConfigError, MillraceError
from millrace.broker.protocol.system_topics import INTERNAL_TOPICS
from millrace.broker.protocol.topic_partition import TopicPartition

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")

MIN_PAUSE_SHARE = 20
"""A pause that ends early, as what was in the way is gone, counts as at least this part of a back-off."""


class RebalanceFailed(MillraceError):
    """Partitions of this consumer's share stayed in another's hands for all retries."""


class ThreadId(NamedTuple):
    """One stream of one consumer: the value of an owner znode."""

    consumer: str
    stream: int

    def __str__(self) -> str:
        return f"{self.consumer}-{self.stream}"


Share: TypeAlias = Mapping[TopicPartition, ThreadId]
"""What one consumer owns: the stream that each of its partitions feeds."""


class Pattern(Enum):
    """How a registration names its topics; the values are what stands in ZooKeeper."""

    STATIC = "static"
    WHITE_LIST = "white_list"
    BLACK_LIST = "black_list"


@dataclass(frozen=True, slots=True)
class Subscription:
    """A consumer's registration: streams by topic, or for a filter one entry, streams by regex."""

    pattern: Pattern
    streams: Mapping[str, int]

    def count_for(self, topic: str, *, exclude_internal: bool = True) -> int:
        """How many streams take part in this topic; 0 when it is not subscribed."""
        if self.pattern is Pattern.STATIC or not self.streams:
            return self.streams.get(topic, 0)
        regex, count = next(iter(self.streams.items()))
        if exclude_internal and topic in INTERNAL_TOPICS:
            return 0
        matches = _compiled(regex).fullmatch(topic) is not None
        return count if matches == (self.pattern is Pattern.WHITE_LIST) else 0


def static_subscription(streams: Mapping[str, int]) -> Subscription:
    """Streams by topic. Raises ConfigError."""
    if not streams:
        raise ConfigError("streams", dict(streams), "at least one topic with its number of streams")
    for topic, count in streams.items():
        if count < 1:
            raise ConfigError(f"streams: {topic}", count, "a number of at least 1")
        if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            raise ConfigError("streams", topic, "a topic: letters, digits, '.', '_' and '-'")
    return Subscription(Pattern.STATIC, dict(streams))


def filter_subscription(include: str | None, exclude: str | None, streams: int) -> Subscription:
    """Topics that match `include` as a whole, or those that do not match `exclude`. Raises ConfigError."""
    if (include is None) == (exclude is None):
        raise ConfigError("topic filter", (include, exclude), "either include or exclude")
    if streams < 1:
        raise ConfigError("streams", streams, "a number of at least 1")
    pattern = Pattern.BLACK_LIST if include is None else Pattern.WHITE_LIST
    return Subscription(pattern, {clean_regex(exclude or "" if include is None else include): streams})


def clean_regex(raw: str) -> str:
    """A topic filter as Kafka registers it: commas are alternatives, blanks and outer quotes vanish.

    (So `{1,3}` cannot be written; Kafka's own consumers, which clean what they read, could not share it.)
    Raises ConfigError.
    """
    regex = raw.strip().replace(",", "|").replace(" ", "")
    regex = re.sub(r"^[\"']+|[\"']+$", "", regex)
    try:
        _compiled(regex)
    except re.error as error:
        raise ConfigError("topic filter", raw, f"a regular expression ({error})") from None
    return regex


@lru_cache(maxsize=256)
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


def consumer_id(group: str, host: str, now_ms: int, unique: uuid.UUID) -> str:
    """`group_host-timestamp-uuid`, with the first eight hex digits of the UUID."""
    return f"{group}_{host}-{now_ms}-{unique.hex[:8]}"


@dataclass(frozen=True, slots=True)
class GroupView:
    """The registry as read: members of the group by consumer id, and partitions by topic."""

    members: Mapping[str, Subscription]
    partitions: Mapping[str, Sequence[int]]


def _as_java_sorts(thread: ThreadId) -> bytes:
    # Kafka compares "consumer-stream" as Java strings, that is by UTF-16 units; "c-10" is before "c-2".
    return str(thread).encode("utf-16-be", "surrogatepass")


def threads_of(topic: str, members: Mapping[str, Subscription], exclude_internal: bool) -> list[ThreadId]:
    """Every stream of the group that takes part in the topic, in the order that all members agree on."""
    threads = [
        ThreadId(member, number)
        for member, subscription in members.items()
        for number in range(subscription.count_for(topic, exclude_internal=exclude_internal))
    ]
    return sorted(threads, key=_as_java_sorts)


def assign_range(partitions: Iterable[int], threads: Sequence[ThreadId]) -> dict[ThreadId, tuple[int, ...]]:
    """Ranges of the sorted partitions for the sorted threads: floor of the quotient each, and the remainder
    one each to the first. Threads beyond the number of partitions get nothing."""
    ordered = sorted(partitions)
    if not threads:
        return {}
    each, extra = divmod(len(ordered), len(threads))
    ranges: dict[ThreadId, tuple[int, ...]] = {}
    for place, thread in enumerate(threads):
        start = each * place + min(place, extra)
        ranges[thread] = tuple(ordered[start : start + each + (place < extra)])
    return ranges


def share_of(
    consumer: str, view: GroupView, *, exclude_internal: bool = True
) -> dict[TopicPartition, ThreadId]:
    """The partitions that this consumer must own in this view, each with the stream that it feeds."""
    own = view.members.get(consumer)
    if own is None:
        return {}
    share: dict[TopicPartition, ThreadId] = {}
    for topic, partitions in sorted(view.partitions.items()):
        if own.count_for(topic, exclude_internal=exclude_internal) == 0:
            continue
        threads = threads_of(topic, view.members, exclude_internal)
        for thread, numbers in assign_range(partitions, threads).items():
            if thread.consumer == consumer:
                share.update({(topic, number): thread for number in numbers})
    return share


@dataclass(frozen=True, slots=True)
class RebalanceLimits:
    """How long a conflict may last: `max_retries` pauses of `backoff_ms` (Kafka's `rebalance.max.retries`
    and `rebalance.backoff.ms`). Together they must outlast a session: a killed owner's znodes do."""

    max_retries: int = 4
    backoff_ms: int = 2_000


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """Read the registry, with watches. Answer: GroupView."""


@dataclass(frozen=True, slots=True)
class Register:
    """Write this consumer's registration: it is not there (first time, or the session was lost)."""


@dataclass(frozen=True, slots=True)
class StopStreams:
    """Stop fetching, empty the streams, commit what was consumed."""


@dataclass(frozen=True, slots=True)
class ReleaseAll:
    """Delete every owner znode that this consumer holds or may hold."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Create the owner znodes. Answer: the partitions (a collection) that another consumer holds."""

    share: Share


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait `ms`, or until all of `until_free` are without an owner. Answer: milliseconds waited."""

    ms: int
    until_free: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class StartStreams:
    """All is claimed: read the committed offsets and fetch."""

    share: Share


Step: TypeAlias = ReadGroup | Register | StopStreams | ReleaseAll | Claim | Pause | StartStreams


def rebalance(
    consumer: str, held: Share | None, limits: RebalanceLimits, *, exclude_internal: bool = True
) -> Generator[Step, Any, Share]:
    """Algorithm 1 for one consumer; returns the share that it owns at the end.

    `held` is what it owned before, None when that is not known (at the beginning, after a lost session or
    an interrupted attempt). A view that leaves the share as it is moves nothing: the others claim by the
    same view, so none of them wants it. Raises RebalanceFailed.
    """
    budget_ms = limits.max_retries * limits.backoff_ms
    waited_ms = 0.0
    stopped = False
    while True:
        view: GroupView = yield ReadGroup()
        if consumer not in view.members:
            yield Register()
            continue
        wanted = share_of(consumer, view, exclude_internal=exclude_internal)
        if not stopped:
            if held is not None and wanted == held:
                return held
            yield StopStreams()
            yield ReleaseAll()
            stopped = True
        conflicts = tuple(sorted((yield Claim(wanted))))
        if not conflicts:
            yield StartStreams(wanted)
            return wanted
        yield ReleaseAll()
        if waited_ms >= budget_ms:
            raise RebalanceFailed(_why_failed(consumer, conflicts, waited_ms))
        paused_ms = yield Pause(limits.backoff_ms, conflicts)
        waited_ms += max(paused_ms, limits.backoff_ms / MIN_PAUSE_SHARE)


def _why_failed(consumer: str, conflicts: Sequence[TopicPartition], waited_ms: float) -> str:
    topic, partition = conflicts[0]
    others = f" and {len(conflicts) - 1} more" if len(conflicts) > 1 else ""
    return (
        f"consumer {consumer}: {topic}-{partition}{others} of its share still belong to another consumer "
        f"after {waited_ms / 1000:.1f} s; raise rebalance_max_retries or rebalance_backoff_ms above the "
        "group's ZooKeeper session timeouts, or find the consumer that does not let go (its id is in the "
        "owner znode)"
    )
