"""Consumer groups as tiers, for one stream: what their events tell, and how far they have come. Pure.

Built by `job` from the capture, sent to Spark's workers inside `verdict_rows.Reconciler`, which adds a
stream's tiers `group:<group>` below the cluster that the group reads. `passed` is what the group committed,
read before the events: a group reports before it commits, so what lies below is told or was not got.

Which topics a group reads is told by the config, or else by what it committed and told: of a topic that is
none of these, nobody can say whether the group should have got it. That is named (`TierReading.idle`), and
proves nothing.

A group's first report says when it began to count. What was appended before may have been passed unread
(`auto.offset.reset=latest`, a consumer that was audited later than it began): its absence is no loss. Where
its events tell the offset at which it began in a partition, what lies behind that is the group's to answer
for, however long ago it was created.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from millrace.audit.config import audited_topic
from millrace.audit.contract.event_values import TierEvent
from millrace.audit.contract.group_counts import GroupDoubt, seen_by_group, tier_name
from millrace.audit.reconciliation.tier_reading import ClusterPartition, Passage, TierReading, UnreadRange
from millrace.audit.scanning.cells import SeenByWindow

BEGAN = "the group's first report is later"
SILENT = "the group has not reported"
OTHER_LENGTH = "the group files its records in windows of another length"


@dataclass(frozen=True, slots=True)
class OnlineGroup:
    """One audited group. `began_ms` is when it got its first record, as far as its events tell, None when it
    never told; `doubts` are of testimony that is missing. `cluster_id` is Kafka's id of the cluster
    ("" = not known): events are mirrored, so those of a namesake that reads another cluster come along.
    `topics` are the audited topics that it is expected to read (None: not said, all), `told` the names of
    those that its events speak of, `began` the offset of the first record that it got of a partition."""

    group: str
    cluster: str
    passed: Mapping[ClusterPartition, Passage] = field(default_factory=dict)
    began_ms: int | None = None
    doubts: Sequence[GroupDoubt] = ()
    cluster_id: str = ""
    topics: Collection[str] | None = None
    told: Collection[str] = ()
    began: Mapping[ClusterPartition, int] = field(default_factory=dict)

    def is_expected(self, topic: str) -> bool:
        """Whether the group is a tier of the topic at all."""
        return self.topics is None or topic in self.topics

    def idle(self, topic: str, names: Iterable[str]) -> str:
        """A sentence where nothing shows that the group reads the topic, whose names are given; else ""."""
        if any(audited_topic(place[1]) == topic for place in self.passed) or set(names) & set(self.told):
            return ""
        if self.topics is not None:
            return (
                f"group {self.group} has committed nothing of topic {topic}, which the config says it reads"
            )
        return f"group {self.group} does not read topic {topic}; name its topics"

    def testimony(self, events: Iterable[TierEvent]) -> list[TierEvent]:
        """The group's own events among them."""
        return [
            event
            for event in events
            if event.tier == self.group and (not self.cluster_id or event.cluster_id in ("", self.cluster_id))
        ]

    def reading(
        self, upstream: str, topic: str, names: Iterable[str], lengths: Iterable[int], window_ms: int
    ) -> TierReading:
        """The tier of one stream of the topic, which has these names in its clusters; `lengths` are those of
        the windows that were told of it."""
        unread = [
            UnreadRange((self.cluster, topic, -1), 0, 0, each.sentence, each.until_ms, by_window=True)
            for each in self.doubts
        ]
        if any(window_ms % length for length in lengths):
            unread.append(UnreadRange((self.cluster, topic, -1), 0, 0, OTHER_LENGTH))
        if self.began_ms is None:
            unread.append(UnreadRange((self.cluster, topic, -1), 0, 0, SILENT))
        else:
            unread.append(UnreadRange((self.cluster, topic, -1), 0, 0, BEGAN, self.began_ms))
        passed = {place: each for place, each in self.passed.items() if audited_topic(place[1]) == topic}
        idle = self.idle(topic, names)
        began = {place: offset for place, offset in self.began.items() if place in passed}
        return TierReading(
            tier_name(self.group), upstream, passed=passed, unread=unread, idle=idle, began=began
        )


def online_groups(
    commits: Mapping[tuple[str, str], Mapping[ClusterPartition, int]],
    topic_ids: Mapping[ClusterPartition, str],
    events: Iterable[TierEvent],
    doubts: Mapping[str, Sequence[GroupDoubt]],
    cluster_ids: Mapping[str, str] | None = None,
    topics: Mapping[str, Collection[str] | None] | None = None,
) -> list[OnlineGroup]:
    """`commits` {(cluster, group): {place: next offset}} as in the config; `cluster_ids` by name; `topics`
    {group: audited topics that it is expected to read}."""
    events = list(events)
    groups = []
    for (cluster, name), offsets in commits.items():
        group = OnlineGroup(
            name,
            cluster,
            {place: Passage(offset, topic_ids.get(place, "")) for place, offset in offsets.items()},
            None,
            tuple(doubts.get(name, ())),
            (cluster_ids or {}).get(cluster, ""),
            (topics or {}).get(name),
        )
        testimony = group.testimony(events)
        # By the clock of who got it: a record that was created long ago says nothing of when the group began.
        began = min(
            (max(event.window_start_ms, event.first_append_ms or 0) for event in testimony),
            default=None,
        )
        told = frozenset(event.topic for event in testimony)
        groups.append(replace(group, began_ms=began, told=told))
    return groups


def add_groups(
    groups: Sequence[OnlineGroup],
    tiers: list[TierReading],
    clusters: Mapping[str, str],
    events: Sequence[TierEvent],
    topic: str,
    names: Sequence[str],
    window_ms: int,
) -> dict[str, SeenByWindow]:
    """Add a stream's online tiers after their upstreams; returns what each saw, by tier.

    `clusters` {cluster: name of its tier} of the stream's own chain; a group of another cluster says nothing
    of it. `names` are all names of the topic.
    """
    found: dict[str, SeenByWindow] = {}
    for each in groups:
        upstream = clusters.get(each.cluster)
        if upstream is None or not each.is_expected(topic):
            continue
        testimony = each.testimony(events)
        lengths = {event.window_ms for event in testimony}
        tiers.append(each.reading(upstream, topic, {topic, *names}, lengths, window_ms))
        windows: SeenByWindow = {}
        for stream in seen_by_group(testimony, {topic, *names}).get(each.group, {}).values():
            windows.update(stream)
        found[tier_name(each.group)] = windows
    return found
