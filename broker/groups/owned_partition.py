"""The groups of one partition of the offsets topic, as its leader keeps them in memory.

`coordinator.py` holds one `OwnedPartition` for each partition that its broker leads: filled from the log when
leadership begins, thrown away when it ends. Here is what concerns a partition's groups together: what a read
of the log makes of them, which of them a transaction has offsets in, and what of them is to be removed.
Nothing here waits or writes; removals are handed out for the journal to write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from millrace.broker.groups.config import GroupConfig
from millrace.broker.groups.journal import Removal
from millrace.broker.groups.membership import Group
from millrace.broker.groups.offset_commits import offset_removal
from millrace.broker.groups.offsets import ExpiryRule, OffsetStore, expired_offsets
from millrace.broker.groups.offsets_replay import Memory
from millrace.broker.groups.record_layout import encode_group_key
from millrace.broker.groups.subscriptions import CONSUMER_PROTOCOL_TYPE
from millrace.broker.groups.values import GroupState, Moment
from millrace.broker.replication.off_loop import Pauses


@dataclass(slots=True)
class Entry:
    """What is kept of one group."""

    group: Group
    offsets: OffsetStore = field(default_factory=OffsetStore)


@dataclass(slots=True)
class OwnedPartition:
    """See the module. Until `take_over` it is being loaded, and nobody may be answered from it."""

    config: GroupConfig
    loaded: bool = False
    groups: dict[str, Entry] = field(default_factory=dict)
    _open_transactions: dict[int, set[str]] = field(default_factory=dict)
    """Which groups have pending offsets, by producer id."""
    _ended_while_loading: list[tuple[int, bool, int]] = field(default_factory=list)
    """Transactions whose markers may have come after the point up to which the log is being read."""
    _forgotten_while_loading: set[str] = field(default_factory=set)
    """Topics that were deleted meanwhile."""

    def goes_on_from(self, before: OwnedPartition) -> None:
        """The same partition is loaded another time: topics that `before` had no memory to take out of are
        still to be taken out."""
        if not before.loaded:
            self._forgotten_while_loading |= before._forgotten_while_loading

    def restored(self, memory: Memory, now: Moment) -> dict[str, Entry]:
        """The groups that the log remembers; members have a whole session to be heard of again. Changes
        nothing: it may run on a thread."""
        pauses = Pauses()
        groups = {}
        for group_id in sorted(memory.snapshots.keys() | memory.offsets.keys()):
            pauses.maybe()
            snapshot = memory.snapshots.get(group_id)
            if snapshot is not None:
                group = Group.restore(group_id, snapshot, self.config, now)
            else:
                group = Group(group_id, self.config, state_since_ms=now.now_ms)
            groups[group_id] = Entry(group, memory.offsets.get(group_id, OffsetStore()))
        return groups

    def take_over(self, groups: dict[str, Entry], memory: Memory) -> list[Removal]:
        """From here on they may be answered for, when what is handed out has been written."""
        self.groups = groups
        self._open_transactions = memory.open_transactions
        self.loaded = True
        for ended in self._ended_while_loading:
            self.transaction_ended(*ended)
        forgotten = self._forgotten_while_loading
        return self.removal_of_topics(forgotten) if forgotten else []

    def create(self, group_id: str, now_ms: int) -> Entry:
        entry = self.groups[group_id] = Entry(Group(group_id, self.config, state_since_ms=now_ms))
        return entry

    # -- transactions --------------------------------------------------------------------------------

    def transaction_has(self, producer_id: int, group_id: str) -> None:
        """The producer's open transaction has offsets in this group."""
        self._open_transactions.setdefault(producer_id, set()).add(group_id)

    def transaction_ended(self, producer_id: int, committed: bool, marker_offset: int) -> None:
        """Its marker is in the log, at this place. While the log is being read, this is kept for
        afterwards."""
        if not self.loaded:
            self._ended_while_loading.append((producer_id, committed, marker_offset))
            return
        still_open = set()
        for group_id in self._open_transactions.pop(producer_id, ()):
            entry = self.groups.get(group_id)
            if entry is not None and entry.offsets.end_transaction(producer_id, committed, marker_offset):
                still_open.add(group_id)
        if still_open:
            self._open_transactions[producer_id] = still_open

    # -- removals ------------------------------------------------------------------------------------

    def deletion(self, entry: Entry, now_ms: int) -> list[Removal]:
        """All that the log has of an empty group."""
        group_id = entry.group.group_id
        removals = [offset_removal(group_id, entry.offsets, gone) for gone in entry.offsets.partitions()]
        return [*removals, self._group_removal(entry, now_ms)]

    def removal_of_topics(self, topics: Collection[str]) -> list[Removal]:
        """Every offset in these topics. Out of memory at once, as in Apache Kafka, also if the log does not
        take the removal: a new topic of the same name may be there already. While the log is being read, this
        is kept for afterwards."""
        if not self.loaded:
            self._forgotten_while_loading.update(topics)
            return []
        removals = []
        for group_id, entry in self.groups.items():
            for gone in entry.offsets.partitions_of(topics):
                entry.offsets.remove(gone)
                removals.append(offset_removal(group_id, entry.offsets, gone))
        return removals

    def expired(self, group_ids: Iterable[str], now_ms: int) -> list[Removal]:
        """Of these groups, offsets that nobody has used for the retention time, and groups with nothing
        left."""
        removals: list[Removal] = []
        for group_id in group_ids:
            entry = self.groups.get(group_id)
            if entry is None:
                continue  # it went while others were looked at
            group, store = entry.group, entry.offsets
            gone = expired_offsets(store, _expiry_rule(group), self.config.offsets_retention_ms, now_ms)
            removals += [offset_removal(group_id, store, partition) for partition in gone]
            if len(gone) < len(store) or store.has_unstable or not group.is_forgettable():
                continue
            if group.generation > 0:
                removals.append(self._group_removal(entry, now_ms))
            elif gone:
                # A consumer that assigns itself has no record of its own: it goes with its last offset.
                removals[-1] = _followed_by(removals[-1], partial(self._drop_unused, entry, now_ms))
            else:
                self._drop_unused(entry, now_ms)
        return removals

    def _group_removal(self, entry: Entry, now_ms: int) -> Removal:
        """The tombstone of a group without members. From its append on the group is Dead: whoever joins
        meanwhile is asked to come again, and so is not lost with it."""
        group = entry.group

        def apply(_log_offset: int) -> None:
            if self.groups.get(group.group_id) is entry:
                del self.groups[group.group_id]

        return Removal(encode_group_key(group.group_id), apply, appended=partial(group.bury, now_ms))

    def _drop_unused(self, entry: Entry, now_ms: int) -> None:
        """Forget a group of which the log has nothing, unless someone has come meanwhile."""
        group = entry.group
        if entry.offsets.is_empty and group.is_forgettable() and self.groups.get(group.group_id) is entry:
            group.bury(now_ms)
            del self.groups[group.group_id]


def _followed_by(removal: Removal, then: Callable[[], None]) -> Removal:
    def apply(log_offset: int) -> None:
        removal.apply(log_offset)
        then()

    return replace(removal, apply=apply)


def _expiry_rule(group: Group) -> ExpiryRule:
    """KIP-211: offsets age from when the group became empty; those of a group without members, or of
    a topic that no consumer of the group reads any more, from their commit; others not at all."""
    if group.protocol_type is None:
        return ExpiryRule(lambda committed: committed.commit_timestamp_ms)
    if group.state is GroupState.EMPTY:
        since_ms = group.state_since_ms
        return ExpiryRule(lambda committed: since_ms if since_ms >= 0 else committed.commit_timestamp_ms)
    if group.state is GroupState.STABLE and group.protocol_type == CONSUMER_PROTOCOL_TYPE:
        return ExpiryRule(lambda committed: committed.commit_timestamp_ms, group.subscribed_topics())
    return ExpiryRule(lambda committed: committed.commit_timestamp_ms, kept_topics=None)
