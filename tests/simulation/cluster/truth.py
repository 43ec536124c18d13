"""Who sees everything: what was acknowledged and shown, and whether the invariants hold.

1. A record acknowledged with acks=all is never lost while one member of the in-sync set survives.
2. Below the high watermark all replicas hold the same records.
3. An offset that was committed never holds another record.
4. Two controllers never both succeed in changing the same partition in the same epoch.

A loss of power, or a disk that fails a flush, may take records that were committed but flushed nowhere. As
long as one in-sync member was not interrupted (or was stopped in order), its copy counts; once all were,
nobody can tell which of them lost something, and a record that some of them lost is *excused*. So is what a
leader shows that stood still while all who had it from there were interrupted and others took its offsets, or
lead without it: it had their word before that. A record that was excused may be there all the same: who has
it may show it, and once it is acknowledged again it is promised again. With `visibility=flushed` nothing is
ever excused: an offset that a consumer saw is never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tests.simulation.cluster.disk import Stored, VirtualLog

if TYPE_CHECKING:
    from millrace.broker.replication.partition import PartitionState


class Violation(AssertionError):
    """An invariant is broken."""


class Truth:
    """See the module. `logs` gives every broker's log of a partition, also of brokers that are down."""

    def __init__(self, logs: Mapping[int, Mapping[int, VirtualLog]], *, only_flushed: bool) -> None:
        self._logs = logs
        self._only_flushed = only_flushed
        self.is_uninterrupted: Callable[[int, int], bool] = lambda broker, partition: True
        self.is_running: Callable[[int, int], bool] = lambda broker, partition: True
        """Whether it lives and does not leave, the cluster knows it for long enough to have reckoned with it,
        and it can use its log: a frozen one is gone when its session is over."""
        self.on_committed: Callable[[int, int, Stored], None] = lambda partition, offset, record: None
        """Told of every committed record once, in the order of offsets, while nothing was excused."""
        self._told_up_to: dict[int, int] = {}
        self.committed: dict[int, dict[int, Stored]] = {}
        self.acknowledged: dict[int, dict[int, object]] = {}
        self.excused_count = 0
        self.states: dict[int, PartitionState] = {}
        self._followers: dict[tuple[int, int], tuple[frozenset[int], set[int]]] = {}
        """By partition and leader: who was in sync beside it, and who of them was not interrupted since."""
        self._shown_again: set[tuple[int, int, Stored]] = set()
        self._excused: set[tuple[int, int, Stored]] = set()
        self._controllers: dict[int, int] = {}
        self._latest_controller_epoch = 0

    # -- what happens -------------------------------------------------------------------------------

    def shown(self, broker: int, partition: int, start: int, end: int) -> None:
        """A leader's high watermark has moved from `start` to `end`."""
        committed = self.committed.setdefault(partition, {})
        log = self._logs[broker][partition]
        for offset in range(max(start, log.start_offset), end):
            record = log.get(offset)
            if record is None:
                raise Violation(f"broker {broker} shows {partition}@{offset}, which its log has not")
            known = committed.get(offset)
            if known is None and self._is_had_by_all(partition, offset, record):
                known = record
            if known != record and self._has_outlived_its_followers(broker, partition):
                self._shown_again.add((partition, offset, record))
                self.excused_count += 1
                continue
            if committed.setdefault(offset, record) != record:
                raise Violation(
                    f"invariant 3: {partition}@{offset} was {known} and is {record} on broker {broker}"
                )
            if offset == self._told_up_to.get(partition, 0) and not self.excused_count:
                self._told_up_to[partition] = offset + 1
                self.on_committed(partition, offset, record)

    def _has_outlived_its_followers(self, broker: int, partition: int) -> bool:
        had, left = self._followers.get((partition, broker), (frozenset(), set()))
        is_replaced = self.states[partition].leader != broker
        return bool(is_replaced and had and not left and not self._only_flushed)

    def _is_had_by_all(self, partition: int, offset: int, record: Stored) -> bool:
        """By all who are in sync now: what an earlier leader shows is then no more than the truth."""
        return all(self._holds(each, partition, offset, record) for each in self.states[partition].isr)

    def consumed(self, partition: int, offset: int, records: Sequence[Stored]) -> None:
        committed = self.committed.get(partition, {})
        for at, record in enumerate(records, start=offset):
            if committed.get(at, record) == record:
                continue
            seen = (partition, at, record)
            if seen not in self._shown_again and seen not in self._excused:
                raise Violation(f"invariant 3: a consumer reads {record} at {partition}@{at}")

    def acknowledge(self, partition: int, offset: int, payloads: Sequence[object]) -> None:
        """A leader says with acks=all that these records are written."""
        for at, payload in enumerate(payloads, start=offset):
            record = self.committed.get(partition, {}).get(at)
            if record is None:
                record = self._still_there(partition, at)
            if record is None or record.payload != payload:
                if any(
                    (partition, at, payload) == (number, offset, again.payload)
                    for number, offset, again in self._shown_again
                ):
                    continue
                raise Violation(f"acknowledged but not committed: {payload} at {partition}@{at}")
            self.acknowledged.setdefault(partition, {})[at] = payload

    def _still_there(self, partition: int, offset: int) -> Stored | None:
        """What was excused and is in the leader's log nevertheless is committed once more."""
        leader = self.states[partition].leader
        record = self._logs[leader][partition].get(offset) if leader in self._logs else None
        if record is None or (partition, offset, record) not in self._excused:
            return None
        self.committed[partition][offset] = record
        return record

    def interrupted(self) -> None:
        """Some broker was killed, has lost power, or has ended with a log that had failed. While an in-sync
        member that was not interrupted holds a record, or every member does, it must survive; else it is
        excused."""
        if self._only_flushed:
            return
        for (partition, _), (_, left) in self._followers.items():
            left.intersection_update([each for each in left if self.is_uninterrupted(each, partition)])
        for partition, committed in self.committed.items():
            state = self.states.get(partition)
            if state is None:
                continue
            lost = []
            for offset, record in committed.items():
                holders = [broker for broker in state.isr if self._holds(broker, partition, offset, record)]
                is_safe = any(self.is_uninterrupted(broker, partition) for broker in holders)
                if len(holders) < len(state.isr) and not is_safe:
                    lost.append(offset)
            self._excuse(partition, lost)

    def _holds(self, broker: int, partition: int, offset: int, record: Stored) -> bool:
        log = self._logs[broker][partition]
        return offset < log.start_offset or log.get(offset) == record

    def state_written(self, partition: int, state: PartitionState, replicas: tuple[int, ...]) -> None:
        """A state stands in ZooKeeper now, whoever wrote it, beside these replicas."""
        known = self.states.get(partition)
        if not state.isr:
            raise Violation(f"the in-sync set of {partition} is empty")
        if not set(state.isr) <= set(replicas):
            raise Violation(f"in sync are {state.isr}, and {partition} is kept by {replicas}")
        if known is not None and state.leader_epoch < known.leader_epoch:
            raise Violation(f"the leader epoch of {partition} goes back to {state.leader_epoch}")
        if known is not None and known.leader_epoch == state.leader_epoch and known.leader != state.leader:
            raise Violation(f"two leaders of {partition} in epoch {state.leader_epoch}")
        if known is not None and not self._only_flushed and set(state.isr) < set(known.isr):
            self._excuse_departed(partition, known, state, replicas)
        self.states[partition] = state
        others = frozenset(state.isr) - {state.leader}
        self._followers[partition, state.leader] = (others, set(others))

    def _excuse_departed(
        self, partition: int, before: PartitionState, after: PartitionState, replicas: tuple[int, ...]
    ) -> None:
        """A member is out of the in-sync set in favour of ones that, as nobody knew yet, were interrupted: it
        had stopped in order, hands over to do so, or is no replica any more; or the leader was interrupted
        while its word of who is late was on its way. What is certain to be had by none who is in sync now is
        excused, where it went of itself unless one of the living that stay has it."""
        committed = self.committed.get(partition, {})
        # By the leader itself, which led when it sent that: who is interrupted sends nothing (see `Broker`).
        is_overtaken = (after.leader, after.leader_epoch) == (before.leader, before.leader_epoch) and (
            not self.is_uninterrupted(after.leader, partition)
        )
        for offset, record in list(committed.items()):
            left = [broker for broker in after.isr if self._holds(broker, partition, offset, record)]
            is_safe = any(self.is_uninterrupted(broker, partition) for broker in left)
            if len(left) == len(after.isr) or is_safe:
                continue
            staying = [broker for broker in before.isr if broker in replicas]
            holders = [broker for broker in staying if self._holds(broker, partition, offset, record)]
            if is_overtaken or not any(self.is_running(broker, partition) for broker in holders):
                self._excuse(partition, [offset])

    def _excuse(self, partition: int, offsets: Iterable[int]) -> None:
        for offset in offsets:
            self._excused.add((partition, offset, self.committed[partition].pop(offset)))
            self.acknowledged.get(partition, {}).pop(offset, None)
            self.excused_count += 1

    def controller_wrote(self, broker: int, epoch: int) -> None:
        """A write by the office of `epoch` has succeeded."""
        holder = self._controllers.setdefault(epoch, broker)
        if holder != broker or epoch < self._latest_controller_epoch:
            raise Violation(
                f"invariant 4: broker {broker} writes as controller of epoch {epoch}, which is {holder}'s; "
                f"the latest is {self._latest_controller_epoch}"
            )

    def controller_elected(self, epoch: int) -> None:
        self._latest_controller_epoch = epoch

    # -- the end ------------------------------------------------------------------------------------

    def check_replicas(self, partition: int, high_watermarks: Mapping[int, int]) -> None:
        """Invariants 1 and 2, on every broker that has a replica; what was excused, too, all have alike."""
        committed = self.committed.get(partition, {})
        shown = {
            broker: range(log.start_offset, min(high_watermark, log.end_offset))
            for broker, high_watermark in high_watermarks.items()
            for log in (self._logs[broker][partition],)
        }
        for offset in range(max(offsets.stop for offsets in shown.values())):
            held = {
                broker: self._logs[broker][partition].get(offset)
                for broker, offsets in shown.items()
                if offset in offsets
            }
            if len(set(held.values())) > 1:
                raise Violation(f"invariant 2: {partition}@{offset} is one thing and another: {held}")
        for broker, high_watermark in high_watermarks.items():
            log = self._logs[broker][partition]
            for offset in range(log.start_offset, min(high_watermark, log.end_offset)):
                record = committed.get(offset)
                if record is not None and log.get(offset) != record:
                    raise Violation(
                        f"invariant 2: broker {broker} has {log.get(offset)} at {partition}@{offset}, "
                        f"committed is {record}"
                    )

    def check_nothing_lost(self, partition: int, leader: int, members: Iterable[int]) -> None:
        """What was committed is in the logs of the leader and of everyone in sync."""
        for broker in (leader, *members):
            log = self._logs[broker][partition]
            for offset, record in self.committed.get(partition, {}).items():
                if offset >= log.start_offset and log.get(offset) != record:
                    word = "acknowledged" if offset in self.acknowledged.get(partition, {}) else "committed"
                    raise Violation(
                        f"invariant 1: {word} {record} at {partition}@{offset} is {log.get(offset)} on "
                        f"broker {broker}"
                    )
