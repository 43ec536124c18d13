"""How the load of source partitions is shared among workers. Pure.

`assignment.assign` calls `level_out` with what each worker keeps; the weights come from `rates`. The same
inputs give the same answer on any worker.

Rules:
- every partition gets exactly one worker that may carry it (none only where there is none);
- what nobody carries goes to the lightest of these, heaviest partition first;
- a worker gives partitions away, to the lightest at each step, only when that lightens it by a tenth of its
  load (`WORTH`) in all, and then only until it has its even share or is within half of that of the lightest.

So two workers whose loads differ by less than that are left alone, however often the work is shared out: a
move costs a pause, and rates are never quite the same twice. That it ends: each worker that gives away makes
the loads more even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from millrace.mirror.topics.routes import SourcePartition

# What a partition weighs besides its bytes, in bytes/s: it is fetched and looked after, busy or not. New and
# idle partitions weigh this alone, so that without any measurement workers carry equal numbers.
PARTITION_WEIGHT = 16 << 10
# The part of its load by which moves must lighten a worker in all, or none is made.
WORTH = 0.1


class _Carrier:
    """One worker while the work is shared out."""

    def __init__(
        self,
        name: str,
        partitions: Iterable[SourcePartition],
        weights: Mapping[SourcePartition, float],
        sources: Collection[str] | None,
    ):
        self.name = name
        self._sources = sources
        self.weights = weights
        self.partitions: set[SourcePartition] = set()
        self.load = 0.0
        self.of_topic: Counter[tuple[str, str]] = Counter()
        for partition in partitions:
            self.take(partition)

    def may_carry(self, partition: SourcePartition) -> bool:
        return self._sources is None or partition.source in self._sources

    def take(self, partition: SourcePartition) -> None:
        self.partitions.add(partition)
        self.load += self.weights[partition]
        self.of_topic[partition.source, partition.topic] += 1

    def give(self, partition: SourcePartition, to: _Carrier) -> None:
        self.partitions.remove(partition)
        self.load -= self.weights[partition]
        self.of_topic[partition.source, partition.topic] -= 1
        to.take(partition)


def weights_of(
    partitions: Iterable[SourcePartition], rates: Mapping[SourcePartition, float]
) -> dict[SourcePartition, float]:
    """Bytes/s and a little for each partition itself."""
    return {partition: PARTITION_WEIGHT + max(0.0, rates.get(partition, 0.0)) for partition in partitions}


def level_out(
    partitions: Iterable[SourcePartition],
    kept: Mapping[str, Iterable[SourcePartition]],
    rates: Mapping[SourcePartition, float],
    sources: Mapping[str, Collection[str]] | None = None,
    *,
    move: bool = True,
) -> dict[str, list[SourcePartition]]:
    """Worker → its partitions, sorted. `kept`: all workers, each with those of `partitions` that it carries
    now, no partition twice; `rates` in bytes/s, as far as they are known; `sources`: of which alone a worker
    can carry partitions, where it cannot of all. `move`: whether a worker may give
    away what it carries."""
    weights = weights_of(partitions, rates)
    bound = sources or {}
    carriers = [_Carrier(name, kept[name], weights, bound.get(name)) for name in sorted(kept)]
    if not carriers:
        return {}
    carried = {partition for carrier in carriers for partition in carrier.partitions}
    for partition in sorted(set(weights) - carried, key=lambda each: (-weights[each], each)):
        topic = (partition.source, partition.topic)
        # Of equally light workers the one with the fewest of this topic: one busy topic does not gather.
        able = [each for each in carriers if each.may_carry(partition)]
        if able:
            min(able, key=lambda each: (each.load, each.of_topic[topic], len(each.partitions))).take(
                partition
            )
    while move and any(
        _lighten(heavy, carriers) for heavy in sorted(carriers, key=lambda each: (-each.load, each.name))
    ):
        pass
    return {carrier.name: sorted(carrier.partitions) for carrier in carriers}


def _lighten(heavy: _Carrier, carriers: list[_Carrier]) -> bool:
    """Gives away what makes the loads more even, if it is worth it in all; whether it was."""
    before = heavy.load
    # Of those that are no heavier: what one huge partition makes of another worker is nobody's even share.
    loads = [each.load for each in carriers if each.load <= before]
    even = sum(loads) / len(loads)
    given: list[tuple[SourcePartition, _Carrier]] = []
    while heavy.load > even:
        able = [each for each in carriers if any(map(each.may_carry, heavy.partitions))]
        if not able:
            break
        lightest = min(able, key=lambda each: (each.load, len(each.partitions)))
        if heavy.load - lightest.load <= before * WORTH / 2:
            break
        partition = _next_to_give(heavy, lightest, even)
        if partition is None:
            break
        heavy.give(partition, lightest)
        given.append((partition, lightest))
    heaviest = max([heavy.load, *(carrier.load for _, carrier in given)])
    if given and before - heaviest >= before * WORTH:
        return True
    for partition, carrier in given:
        carrier.give(partition, heavy)
    return False


def _next_to_give(heavy: _Carrier, lightest: _Carrier, even: float) -> SourcePartition | None:
    """The heaviest partition that leaves the giver with its even share and gives the receiver no more than
    its own; otherwise the lightest that still makes the two more even; None when there is none."""
    weights = heavy.weights
    fitting = min(heavy.load - even, even - lightest.load)

    def preference(each: SourcePartition) -> tuple[float, int, SourcePartition]:
        weight, topic = weights[each], (each.source, each.topic)
        # Of equal ones the topic that the giver has more of.
        surplus = heavy.of_topic[topic] - lightest.of_topic[topic]
        return (weight if weight <= fitting else fitting - weight), surplus, each

    best = max(filter(lightest.may_carry, heavy.partitions), key=preference, default=None)
    return best if best is not None and weights[best] < heavy.load - lightest.load else None
