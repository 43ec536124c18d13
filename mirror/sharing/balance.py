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

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from millrace.mirror.topics.routes import SourcePartition

# What a partition weighs besides its bytes, in bytes/s: it is fetched and looked after, busy or not. New and
# idle partitions weigh this alone, so that without any measurement workers carry equal numbers.
PARTITION_WEIGHT = 16 << 10
# The part of its load by which moves must lighten a worker in all, or none is made.
WORTH = 0.1

Topic = tuple[str, str]
"""A source and a topic of it."""


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
        self.of_topic: Counter[Topic] = Counter()
        self.of_source: Counter[str] = Counter()
        for partition in partitions:
            self.take(partition)

    def may_carry(self, source: str) -> bool:
        return self._sources is None or source in self._sources

    def may_carry_of(self, other: _Carrier) -> bool:
        return any(count and self.may_carry(source) for source, count in other.of_source.items())

    def take(self, partition: SourcePartition) -> None:
        self.partitions.add(partition)
        self.load += self.weights[partition]
        self.of_topic[partition.source, partition.topic] += 1
        self.of_source[partition.source] += 1

    def give(self, partition: SourcePartition, to: _Carrier) -> None:
        self.partitions.remove(partition)
        self.load -= self.weights[partition]
        self.of_topic[partition.source, partition.topic] -= 1
        self.of_source[partition.source] -= 1
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
        able = [each for each in carriers if each.may_carry(partition.source)]
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
    offers = _Offers(heavy)
    while heavy.load > even:
        able = [each for each in carriers if each.may_carry_of(heavy)]
        if not able:
            break
        lightest = min(able, key=lambda each: (each.load, len(each.partitions)))
        if heavy.load - lightest.load <= before * WORTH / 2:
            break
        partition = offers.next_for(lightest, even)
        if partition is None:
            break
        offers.taken(partition)
        heavy.give(partition, lightest)
        given.append((partition, lightest))
    heaviest = max([heavy.load, *(carrier.load for _, carrier in given)])
    if given and before - heaviest >= before * WORTH:
        return True
    for partition, carrier in given:
        carrier.give(partition, heavy)
    return False


class _Offers:
    """What a worker has to give, by weight and topic: there may be thousands, each of which could be next."""

    def __init__(self, giver: _Carrier) -> None:
        self._giver = giver
        self._of_weight: dict[float, dict[Topic, list[SourcePartition]]] = {}
        for each in sorted(giver.partitions):
            topics = self._of_weight.setdefault(giver.weights[each], {})
            topics.setdefault((each.source, each.topic), []).append(each)
        self._weights = sorted(self._of_weight)

    def taken(self, partition: SourcePartition) -> None:
        """What `next_for` has told of last."""
        weight, topic = self._giver.weights[partition], (partition.source, partition.topic)
        topics = self._of_weight[weight]
        topics[topic].pop()
        if not topics[topic]:
            del topics[topic]
        if not topics:
            del self._of_weight[weight]
            self._weights.remove(weight)

    def next_for(self, lightest: _Carrier, even: float) -> SourcePartition | None:
        """The heaviest partition that leaves the giver with its even share and gives the receiver no more
        than its own; otherwise the lightest that still makes the two more even; None when there is none."""
        fitting = min(self._giver.load - even, even - lightest.load)
        heavier = bisect_right(self._weights, fitting)
        for at in chain(range(heavier - 1, -1, -1), range(heavier, len(self._weights))):
            weight = self._weights[at]
            best = self._best_of(self._of_weight[weight], lightest)
            if best is not None:
                return best if weight < self._giver.load - lightest.load else None
        return None

    def _best_of(
        self, topics: Mapping[Topic, list[SourcePartition]], lightest: _Carrier
    ) -> SourcePartition | None:
        """Of equally heavy ones the topic that the giver has more of."""
        giver = self._giver
        able = (
            (giver.of_topic[topic] - lightest.of_topic[topic], partitions[-1])
            for topic, partitions in topics.items()
            if lightest.may_carry(topic[0])
        )
        return max(able, default=(0, None))[1]
