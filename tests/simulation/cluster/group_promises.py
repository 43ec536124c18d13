"""What the members of groups were promised, checked against what the offsets topic comes to hold.

Invariant 5 and what goes with it. A member's commit carries in its metadata who makes it and in which
generation; members commit only forward. So in the committed records of the offsets topic

- the offset of a partition never goes backwards;
- generations never go backwards, and a commit stands after its generation's record and before the next one's;
- in one generation a partition has one owner;

and what clients hear fits: an assignment that was given to a member is in the log, a commit that was
acknowledged too, and a coordinator in office never shows an offset older than one that it, or another in
office before it, has acknowledged or shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.groups.record_layout import (
    GroupKey,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
)
from tests.simulation.cluster.disk import Stored
from tests.simulation.cluster.truth import Truth, Violation


def signed(who: str, generation: int) -> str:
    """The metadata of a commit. A static member signs with its instance id, another with its member id."""
    return f"{who}|{generation}"


@dataclass(slots=True)
class _Group:
    """What is known of one group; the first three are what the committed records say."""

    generation: int = 0
    offsets: dict[int, int] = field(default_factory=dict)
    owners: dict[tuple[int, int], str] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    """By partition, the latest offset that any client was told of."""


class GroupPromises:
    """See the module."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._groups: defaultdict[str, _Group] = defaultdict(_Group)
        self.is_current_leader: Callable[[int, int], bool] = lambda broker, partition: True
        self.commits_promised = 0

    @property
    def is_judged(self) -> bool:
        return not self._truth.excused_count

    def _break(self, text: str) -> None:
        if self.is_judged:
            raise Violation(text)

    # -- what members hear ---------------------------------------------------------------------------

    def assigned(self, group_id: str, generation: int, who: str, partitions: Iterable[int]) -> None:
        group = self._groups[group_id]
        if generation > group.generation:
            self._break(
                f"{who} is given an assignment of generation {generation} of {group_id}; the log has "
                f"{group.generation}"
            )
        for partition in partitions:
            self._own(group_id, generation, partition, who)

    def acknowledged(self, group_id: str, partition: int, offset: int) -> None:
        group = self._groups[group_id]
        self.commits_promised += 1
        if group.offsets.get(partition, 0) < offset:
            self._break(
                f"{group_id}'s commit of {offset} in {partition} was acknowledged before it is committed"
            )
        group.told[partition] = max(offset, group.told.get(partition, 0))

    def shown(self, group_id: str, partition: int, offset: int) -> None:
        """A coordinator in office answers OffsetFetch."""
        group = self._groups[group_id]
        told = group.told.get(partition, 0)
        if offset < told:
            self._break(f"invariant 5: {group_id} stood at {told} in {partition}, and is shown at {offset}")
        group.told[partition] = offset

    # -- what is committed ---------------------------------------------------------------------------

    def committed(self, record: Stored) -> None:
        """A record of the offsets topic."""
        if record.batch is None or record.batch.header.producer_id >= 0:
            return  # a transaction's: `exactly_once.py`
        assert isinstance(record.payload, tuple)
        key, value = record.payload
        match decode_key(key):
            case GroupKey(group_id):
                snapshot = decode_group_value(value) if value is not None else None
                if snapshot is not None:
                    self._generation(group_id, snapshot.generation)
            case OffsetKey(group_id, _, partition):
                commit = decode_offset_value(value, 0) if value is not None else None
                if commit is not None:
                    self._offset(group_id, partition, commit)

    def _generation(self, group_id: str, generation: int) -> None:
        group = self._groups[group_id]
        if generation < group.generation:
            self._break(f"the generation of {group_id} goes from {group.generation} back to {generation}")
        group.generation = generation

    def _offset(self, group_id: str, partition: int, commit: CommittedOffset) -> None:
        group = self._groups[group_id]
        who, _, generation = commit.metadata.partition("|")
        if int(generation) != group.generation:
            self._break(
                f"a commit of generation {generation} of {group_id} stands after the record of generation "
                f"{group.generation}"
            )
        self._own(group_id, int(generation), partition, who)
        if commit.offset < group.offsets.get(partition, 0):
            self._break(
                f"invariant 5: {group_id} goes from {group.offsets[partition]} back to {commit.offset} "
                f"in {partition}, by {commit.metadata}"
            )
        group.offsets[partition] = commit.offset

    def _own(self, group_id: str, generation: int, partition: int, who: str) -> None:
        owner = self._groups[group_id].owners.setdefault((generation, partition), who)
        if owner != who:
            self._break(f"{owner} and {who} both own {partition} in generation {generation} of {group_id}")
