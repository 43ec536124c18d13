"""Which brokers keep the replicas of a new partition. Pure.

Partition `n` of a topic starts at the `start + n`-th broker and goes round; further replicas follow at a
shift that grows by one each time round, so that the load of a lost broker spreads over all the others.
The caller draws `start` at random, once for each topic.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.broker.errors import InvalidPartitions, InvalidReplicationFactor


def assign_replicas(
    brokers: Sequence[int], partition_count: int, replication_factor: int, *, start: int, first: int = 0
) -> dict[int, tuple[int, ...]]:
    """Replicas for partitions `first` .. `first + partition_count - 1`; the first is the preferred leader.

    Raises InvalidPartitions, InvalidReplicationFactor.
    """
    if partition_count < 1:
        raise InvalidPartitions("the number of partitions must be at least 1")
    if not 1 <= replication_factor <= len(brokers):
        raise InvalidReplicationFactor(
            f"replication factor {replication_factor} with {len(brokers)} live brokers"
        )
    ring = sorted(brokers)
    assignment = {}
    for number in range(first, first + partition_count):
        leader = start + number
        shift = 1 + number // len(ring)
        replicas = [ring[leader % len(ring)]]
        for nth in range(replication_factor - 1):
            distance = 1 + (shift + nth) % max(len(ring) - 1, 1)
            replicas.append(ring[(leader + distance) % len(ring)])
        assignment[number] = tuple(replicas)
    return assignment
