"""Which brokers partitions should move to, so that a set of brokers carries them evenly. Pure.

As little as possible moves: a replica stays where it is while its broker is wanted and not overloaded, and
the preferred leader stays the first while that spreads leaderships evenly. No two replicas of a partition
share a rack while there are enough racks. Called by `millrace topics reassign`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from millrace.broker.errors import InvalidReplicationFactor
from millrace.broker.protocol.topic_partition import TopicPartition

Replicas = tuple[int, ...]


def plan_moves(
    partitions: Mapping[TopicPartition, Replicas],
    brokers: Mapping[int, str | None],
    replication_factor: int | None = None,
) -> dict[TopicPartition, Replicas]:
    """The replicas that each partition should have on `brokers` (id -> rack), also where nothing changes.

    `replication_factor` None keeps each partition's own. Raises InvalidReplicationFactor.
    """
    factors = {key: replication_factor or len(replicas) for key, replicas in partitions.items()}
    if factors and max(factors.values()) > len(brokers):
        raise InvalidReplicationFactor(
            f"{max(factors.values())} replicas of a partition cannot lie on {len(brokers)} "
            f"broker{'s' if len(brokers) != 1 else ''}: name more brokers or a smaller replication factor"
        )
    placement = _Placement(brokers, factors)
    for key in sorted(partitions):
        placement.keep(key, partitions[key])
    for key in sorted(partitions):
        placement.fill(key)
    placement.level()
    return placement.led(partitions)


class _Placement:
    """Replicas as they are being distributed: who has what, and how much."""

    def __init__(self, brokers: Mapping[int, str | None], factors: Mapping[TopicPartition, int]) -> None:
        self._racks = {broker: rack or "" for broker, rack in brokers.items()}
        self._rack_count = len(set(self._racks.values()))
        self._factors = factors
        self._held: dict[TopicPartition, list[int]] = {}
        self._load = Counter(dict.fromkeys(brokers, 0))

    def keep(self, key: TopicPartition, replicas: Replicas) -> None:
        """Keep what may stay: wanted brokers, as many as are to be, on racks that differ."""
        held: list[int] = []
        for broker in replicas:
            if broker in self._racks and len(held) < self._factors[key] and self._fits(key, held, broker):
                held.append(broker)
        self._held[key] = held
        self._load.update(held)

    def fill(self, key: TopicPartition) -> None:
        """Add replicas until there are enough, on the brokers with the least to carry."""
        held = self._held[key]
        while len(held) < self._factors[key]:
            broker = min(
                (broker for broker in self._racks if broker not in held),
                key=lambda one: (not self._fits(key, held, one), self._load[one], one),
            )
            held.append(broker)
            self._load[broker] += 1

    def level(self) -> None:
        """Move replicas from the fullest broker to emptier ones until they differ by one at most, as far as
        racks allow."""
        while True:
            by_load = sorted(self._racks, key=lambda one: (-self._load[one], one))
            moved = any(
                self._move_one(source, target)
                for source in by_load
                for target in reversed(by_load)
                if self._load[source] - self._load[target] > 1
            )
            if not moved:
                return

    def _move_one(self, source: int, target: int) -> bool:
        for key in sorted(self._held):
            held = self._held[key]
            if source not in held or target in held:
                continue
            rest = [broker for broker in held if broker != source]
            if self._fits(key, rest, target):
                held[held.index(source)] = target
                self._load[source] -= 1
                self._load[target] += 1
                return True
        return False

    def _fits(self, key: TopicPartition, held: Sequence[int], broker: int) -> bool:
        """Whether `broker` next to `held` leaves the partition on as many racks as can be."""
        racks = {self._racks[one] for one in held}
        if self._racks[broker] not in racks:
            return True
        still_to_come = self._factors[key] - len(held) - 1
        return len(racks) + still_to_come >= min(self._factors[key], self._rack_count)

    def led(self, old: Mapping[TopicPartition, Replicas]) -> dict[TopicPartition, Replicas]:
        """The replicas of every partition, the preferred leader first: the old one where leaderships are
        even with it."""
        leaders = {
            key: old[key][0] if old[key] and old[key][0] in held else held[0]
            for key, held in self._held.items()
        }
        while (passed_on := self._leaderships_to_pass_on(leaders)) is not None:
            leaders.update(passed_on)
        return {
            key: (leaders[key], *(broker for broker in held if broker != leaders[key]))
            for key, held in sorted(self._held.items())
        }

    def _leaderships_to_pass_on(
        self, leaders: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int] | None:
        """A chain of leaderships, each passed on to another replica of its partition, from a broker that
        leads at least two more partitions than the one where it ends; None when there is no such chain."""
        led = Counter(dict.fromkeys(self._racks, 0))
        led.update(leaders.values())
        heirs: dict[int, dict[int, TopicPartition]] = {broker: {} for broker in self._racks}
        for key in sorted(leaders):
            for broker in self._held[key]:
                if broker != leaders[key]:
                    heirs[leaders[key]].setdefault(broker, key)
        for source in sorted(self._racks, key=lambda one: (-led[one], one)):
            chains: dict[int, dict[TopicPartition, int]] = {source: {}}
            ahead = [source]
            for broker in ahead:
                for heir, key in heirs[broker].items():
                    if heir in chains:
                        continue
                    chains[heir] = {**chains[broker], key: heir}
                    if led[source] - led[heir] > 1:
                        return chains[heir]
                    ahead.append(heir)
        return None
