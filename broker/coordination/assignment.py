"""Which brokers keep the replicas of a new partition. Pure.

Apache Kafka's rule (AdminUtils.assignReplicasToBrokers): partition `n` of a topic starts at the
`start + n`-th broker and goes round; further replicas follow at a shift that grows by one each time round,
so that the load of a lost broker spreads over all the others. Where racks are named, the brokers are first
put in an order that alternates between racks, and no rack gets a second replica of a partition before every
rack has one.

Brokers without a rack, where others have one, count as one more rack (as in Kafka since 3.0; before, such
clusters could make no topics). The caller draws `start` at random, once for each topic. Called by
`controller_client.py` for new topics and partitions and by `millrace topics reassign` for moved ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millrace.broker.errors import InvalidPartitions, InvalidReplicationFactor

NO_RACK = ""


def assign_replicas(
    brokers: Sequence[int],
    partition_count: int,
    replication_factor: int,
    *,
    start: int,
    first: int = 0,
    shift: int | None = None,
    racks: Mapping[int, str | None] | None = None,
) -> dict[int, tuple[int, ...]]:
    """Replicas for partitions `first` .. `first + partition_count - 1`; the first is the preferred leader.

    `start` and `shift` (default: `start`) say where leaders and followers begin; `racks` names the racks of
    the brokers. Raises InvalidPartitions, InvalidReplicationFactor.
    """
    if partition_count < 1:
        raise InvalidPartitions("the number of partitions must be at least 1")
    if replication_factor < 1:
        raise InvalidReplicationFactor("the replication factor must be at least 1")
    if replication_factor > len(brokers):
        raise InvalidReplicationFactor(
            f"replication factor {replication_factor} with {len(brokers)} live "
            f"broker{'s' if len(brokers) != 1 else ''}: start more brokers or ask for fewer replicas"
        )
    rack_of = {broker: (racks or {}).get(broker) or NO_RACK for broker in brokers}
    ring = alternate_racks(rack_of)
    first_shift = start if shift is None else shift
    assignment = {}
    for number in range(first, first + partition_count):
        turn = first_shift + number // len(ring)
        assignment[number] = _replicas(ring, rack_of, (start + number) % len(ring), turn, replication_factor)
    return assignment


def alternate_racks(rack_of: Mapping[int, str]) -> list[int]:
    """Brokers in an order that takes one of each rack in turn; with one rack, the order of their ids."""
    by_rack: dict[str, list[int]] = {}
    for broker in sorted(rack_of):
        by_rack.setdefault(rack_of[broker], []).append(broker)
    longest = max((len(members) for members in by_rack.values()), default=0)
    return [
        by_rack[rack][place]
        for place in range(longest)
        for rack in sorted(by_rack)
        if place < len(by_rack[rack])
    ]


def _replicas(
    ring: Sequence[int], rack_of: Mapping[int, str], leader: int, turn: int, count: int
) -> tuple[int, ...]:
    """The `count` replicas of one partition whose first is `ring[leader]`."""
    replicas = [ring[leader]]
    rack_count = len(set(rack_of.values()))
    racks = {rack_of[ring[leader]]}
    # With several racks a turn goes past a whole round of racks, or it would meet the same ones again.
    turn = turn * rack_count if rack_count > 1 else turn
    nth = 0
    while len(replicas) < count:
        candidate = ring[(leader + 1 + (turn + nth) % (len(ring) - 1)) % len(ring)]
        nth += 1
        fresh_rack = rack_of[candidate] not in racks or len(racks) == rack_count
        if fresh_rack and candidate not in replicas:
            replicas.append(candidate)
            racks.add(rack_of[candidate])
    return tuple(replicas)
