"""Which worker carries which source partition. Pure.

Called by the leader of the workers' group (`membership`) at every rebalance, and by every worker to encode
what it owns. The same inputs give the same answer on any worker.

Invariants:
- every partition has exactly one owner (none only when there are no workers);
- loads differ by at most one partition between any two workers;
- a partition leaves its worker only where the balance asks for it: with m workers and n partitions each
  worker keeps what it has up to its share.

Both messages are compact JSON, `{"version":1,"partitions":{source:{topic:[numbers]}}}`; a worker's metadata
adds `"generation"`, so that of two workers that claim one partition the newer claim wins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millrace.mirror.routes import SourcePartition

VERSION = 1


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker says about itself when it joins: what it carried, as of which generation."""

    owned: frozenset[SourcePartition] = frozenset()
    generation: int = -1


def assign(
    partitions: Iterable[SourcePartition], workers: Mapping[str, Claim]
) -> dict[str, list[SourcePartition]]:
    """Sticky and balanced: worker id -> its partitions, sorted."""
    wanted = sorted(set(partitions))
    if not workers:
        return {}
    kept = _settle_claims(set(wanted), workers)
    _release_surplus(kept, len(wanted))
    owned = {partition for partitions_of in kept.values() for partition in partitions_of}
    for partition in wanted:
        if partition not in owned:
            # The worker with the fewest, and among those the one with the fewest of this topic: partitions
            # of one busy topic then do not gather on one worker.
            worker = min(
                sorted(kept),
                key=lambda name: (len(kept[name]), _count_of_topic(kept[name], partition)),
            )
            kept[worker].append(partition)
    return {worker: sorted(partitions_of) for worker, partitions_of in kept.items()}


def withhold_claimed(
    assignment: Mapping[str, list[SourcePartition]], workers: Mapping[str, Claim]
) -> dict[str, list[SourcePartition]]:
    """The part of an assignment that can be handed out now.

    A partition that moves is given to nobody in this round: its owner sees that it is gone, delivers what is
    under way, writes the position and joins again without the claim; the round after that hands it out
    (KIP-429). So nothing else has to stop for a rebalance.
    """
    claimed_by: dict[SourcePartition, set[str]] = {}
    for worker, claim in workers.items():
        for partition in claim.owned:
            claimed_by.setdefault(partition, set()).add(worker)
    return {
        worker: [partition for partition in partitions if claimed_by.get(partition, {worker}) <= {worker}]
        for worker, partitions in assignment.items()
    }


def _settle_claims(
    wanted: set[SourcePartition], workers: Mapping[str, Claim]
) -> dict[str, list[SourcePartition]]:
    """Each wanted partition that is claimed, with the worker whose claim is the newest."""
    kept: dict[str, list[SourcePartition]] = {worker: [] for worker in sorted(workers)}
    taken: set[SourcePartition] = set()
    for worker in sorted(workers, key=lambda name: (-workers[name].generation, name)):
        for partition in sorted(workers[worker].owned & wanted - taken):
            kept[worker].append(partition)
            taken.add(partition)
    return kept


def _release_surplus(kept: dict[str, list[SourcePartition]], count: int) -> None:
    """Cuts each worker down to its share; the odd ones stay with those that already have them."""
    share, odd = divmod(count, len(kept))
    for worker in sorted(kept, key=lambda name: (-len(kept[name]), name)):
        allowed = share
        if odd and len(kept[worker]) > share:
            allowed, odd = share + 1, odd - 1
        while len(kept[worker]) > allowed:
            kept[worker].remove(_most_common_topic(kept[worker]))


def _most_common_topic(partitions: list[SourcePartition]) -> SourcePartition:
    return max(partitions, key=lambda partition: (_count_of_topic(partitions, partition), partition))


def _count_of_topic(partitions: Iterable[SourcePartition], like: SourcePartition) -> int:
    return sum(1 for other in partitions if (other.source, other.topic) == (like.source, like.topic))


def encode_claim(claim: Claim) -> bytes:
    return _encode({"generation": claim.generation, "partitions": _grouped(claim.owned)})


def decode_claim(data: bytes) -> Claim:
    """Raises ValueError when `data` is not a claim of a version known here."""
    message = _decode(data)
    generation = message.get("generation")
    if not isinstance(generation, int):
        raise ValueError("a worker's metadata has no generation")
    return Claim(frozenset(_ungrouped(message)), generation)


def encode_assignment(partitions: Iterable[SourcePartition]) -> bytes:
    return _encode({"partitions": _grouped(partitions)})


def decode_assignment(data: bytes) -> list[SourcePartition]:
    """Raises ValueError when `data` is not an assignment of a version known here. Empty data: nothing."""
    return sorted(_ungrouped(_decode(data))) if data else []


def _encode(message: dict[str, object]) -> bytes:
    return json.dumps({"version": VERSION, **message}, separators=(",", ":"), sort_keys=True).encode()


def _decode(data: bytes) -> dict[str, object]:
    message = json.loads(data)
    if not isinstance(message, dict) or message.get("version") != VERSION:
        raise ValueError(f"a group message of another version than {VERSION}: {data[:80]!r}")
    return message


def _grouped(partitions: Iterable[SourcePartition]) -> dict[str, dict[str, list[int]]]:
    grouped: dict[str, dict[str, list[int]]] = {}
    for item in sorted(partitions):
        grouped.setdefault(item.source, {}).setdefault(item.topic, []).append(item.partition)
    return grouped


def _ungrouped(message: dict[str, object]) -> list[SourcePartition]:
    grouped = message.get("partitions")
    if not isinstance(grouped, dict):
        raise ValueError("a group message has no partitions")
    return [
        SourcePartition(source, topic, int(number))
        for source, topics in grouped.items()
        for topic, numbers in topics.items()
        for number in numbers
    ]
