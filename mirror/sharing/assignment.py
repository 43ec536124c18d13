"""Which worker carries which source partition. Pure.

Called by the leader of the workers' group (`assignor`) at every rebalance, and by every worker to encode
what it owns. The same inputs give the same answer on any worker.

Invariants:
- every partition has exactly one owner, whose config has its source (none only where no worker's has);
- workers carry equal loads as far as that is worth a move (`balance`): by the measured rates that they tell
  each other, and by numbers where nothing is measured;
- a partition leaves its worker only where the balance asks for it.

Both messages are compact JSON, `{"version":1,"partitions":{source:{topic:[numbers]}}}`; a worker's metadata
adds `"generation"`, so that of two workers that claim one partition the newer claim wins, and `"rates"`, the
level (`rates.level_of`) of each partition that it has measured, and `"settling"` where they tell little yet.

With exactly-once delivery each worker has a *slot*, a number of its own that its transactional ids are made
of, and a count of lanes; the leader gives the slots out. Shares name all slots in use, claims repeat what the
last share named. So whoever leads next knows the slots whose holders have left (`departed_slots`), and can
end their open transactions before it hands out their partitions. What nobody remembers ends by its timeout.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeGuard

from millrace.broker.protocol.foreign_json import read_json
from millrace.mirror.sharing.balance import level_out
from millrace.mirror.sharing.rates import rate_of
from millrace.mirror.topics.routes import SourcePartition

VERSION = 1
# More is no mirror's: what stands in the group, anybody may have written.
MOST_LANES = 1_000
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker says about itself when it joins: what it carried, as of which generation."""

    owned: frozenset[SourcePartition] = frozenset()
    generation: int = -1
    slot: int | None = None
    lane_count: int = 0  # 0: delivers without transactions, and needs no slot
    seen_slots: Mapping[int, int] = field(default_factory=dict)  # slot -> lanes, as the last share named them
    levels: Mapping[SourcePartition, int] = field(default_factory=dict)  # of those that it has measured
    is_settling: bool = False  # its levels are not to be gone by yet (`rates`)
    # The sources of its config, which alone it can carry; None: it does not say (an older worker).
    sources: frozenset[str] | None = None
    # Of a worker that settles: each return to a seat makes another claim, or the group would answer with the
    # share that it has, which is again that of the worker before.
    member_id: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """What the leader hands to one worker."""

    partitions: tuple[SourcePartition, ...] = ()
    slot: int | None = None
    slots: Mapping[int, int] = field(default_factory=dict)  # all that are in use, or not yet fenced


def assign(
    partitions: Iterable[SourcePartition],
    workers: Mapping[str, Claim],
    levels: Mapping[SourcePartition, int] | None = None,
) -> dict[str, list[SourcePartition]]:
    """Sticky and balanced: worker id -> its partitions, sorted. What no worker's config has the source of
    is nobody's. `levels`: what was known of the rates before; what the workers claim now is newer. While a
    worker settles, only what nobody carries finds a worker."""
    wanted = set(partitions)
    is_level = not any(claim.is_settling for claim in workers.values())
    rates = {partition: rate_of(level) for partition, level in known_levels(workers, levels or {}).items()}
    sources = {name: claim.sources for name, claim in workers.items() if claim.sources is not None}
    return level_out(wanted, _settle_claims(wanted, workers), rates, sources, move=is_level)


def known_levels(
    workers: Mapping[str, Claim], before: Mapping[SourcePartition, int]
) -> dict[SourcePartition, int]:
    """The levels that the workers claim, the newest of each, laid over what was known before. A leader keeps
    them, as a partition that moves is measured by nobody for a while."""
    levels = dict(before)
    for worker in sorted(workers, key=lambda name: (workers[name].generation, name)):
        levels.update(workers[worker].levels)
    return levels


def uneven_sources(
    workers: Mapping[str, Claim], mine: Collection[str]
) -> dict[str, tuple[list[str], list[str]]]:
    """Workers whose configs have other sources than the leader's (`mine`): the ones that each lacks, which
    the others carry, and the ones that the leader's lacks, which nobody does."""
    return {
        worker: (sorted(set(mine) - claim.sources), sorted(claim.sources - set(mine)))
        for worker, claim in workers.items()
        if claim.sources is not None and claim.sources != set(mine)
    }


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


def departed_slots(workers: Mapping[str, Claim], remembered: Mapping[int, int]) -> dict[int, int]:
    """The slots (and how many lanes each has) whose holders are no longer in the group."""
    seen = dict(remembered)
    for claim in workers.values():
        for slot, lane_count in claim.seen_slots.items():
            seen[slot] = max(lane_count, seen.get(slot, 0))
    held = set(_held_slots(workers).values())
    return {slot: lane_count for slot, lane_count in sorted(seen.items()) if slot not in held}


def give_slots(workers: Mapping[str, Claim]) -> dict[str, int]:
    """A slot for each worker that delivers with transactions: its own, otherwise the lowest free one."""
    given = _held_slots(workers)
    free = (slot for slot in count() if slot not in set(given.values()))
    for worker in sorted(workers):
        if workers[worker].lane_count and worker not in given:
            given[worker] = next(free)
    return given


def _held_slots(workers: Mapping[str, Claim]) -> dict[str, int]:
    """Of two workers that claim one slot the newer claim has it."""
    held: dict[str, int] = {}
    for worker in sorted(workers, key=lambda name: (-workers[name].generation, name)):
        slot = workers[worker].slot
        if slot is not None and slot not in held.values():
            held[worker] = slot
    return held


def _settle_claims(
    wanted: set[SourcePartition], workers: Mapping[str, Claim]
) -> dict[str, list[SourcePartition]]:
    """Each wanted partition that is claimed, with the worker whose claim is the newest."""
    kept: dict[str, list[SourcePartition]] = {worker: [] for worker in sorted(workers)}
    taken: set[SourcePartition] = set()
    for worker in sorted(workers, key=lambda name: (-workers[name].generation, name)):
        sources = workers[worker].sources
        for partition in sorted(workers[worker].owned & wanted - taken):
            if sources is not None and partition.source not in sources:
                continue
            kept[worker].append(partition)
            taken.add(partition)
    return kept


def encode_claim(claim: Claim) -> bytes:
    message: dict[str, object] = {"generation": claim.generation, "partitions": _grouped(claim.owned)}
    if claim.lane_count:
        message |= {"slot": claim.slot, "lanes": claim.lane_count, "slots": _as_text(claim.seen_slots)}
    if claim.levels:
        message["rates"] = _grouped_levels(claim.levels)
    if claim.sources is not None:
        message["sources"] = sorted(claim.sources)
    if claim.is_settling:
        message |= {"settling": True, "member": claim.member_id}
    return _encode(message)


def decode_claim(data: bytes) -> Claim:
    """Raises ValueError when `data` is not a claim of a version known here."""
    message = _decode(data)
    generation = message.get("generation")
    if not isinstance(generation, int):
        raise ValueError("a worker's metadata has no generation")
    slot, lane_count = message.get("slot"), message.get("lanes", 0)
    return Claim(
        frozenset(_ungrouped(message)),
        generation,
        slot if isinstance(slot, int) else None,
        lane_count if _is_lane_count(lane_count) else 0,
        _as_slots(message.get("slots")),
        _ungrouped_levels(message.get("rates")),
        message.get("settling") is True,
        _as_names(message.get("sources")),
    )


def encode_share(share: Share) -> bytes:
    message: dict[str, object] = {"partitions": _grouped(share.partitions)}
    if share.slot is not None or share.slots:
        message |= {"slot": share.slot, "slots": _as_text(share.slots)}
    return _encode(message)


def decode_share(data: bytes) -> Share:
    """Raises ValueError when `data` is not a share of a version known here. Empty data: nothing."""
    if not data:
        return Share()
    message = _decode(data)
    slot = message.get("slot")
    return Share(
        tuple(sorted(_ungrouped(message))),
        slot if isinstance(slot, int) else None,
        _as_slots(message.get("slots")),
    )


def _as_text(slots: Mapping[int, int]) -> dict[str, int]:
    return {str(slot): lane_count for slot, lane_count in sorted(slots.items())}


def _as_slots(message: object) -> dict[int, int]:
    if not isinstance(message, dict):
        return {}
    return {
        int(slot): lanes
        for slot, lanes in message.items()
        if slot.isdecimal() and len(slot) <= _MOST_DIGITS and _is_lane_count(lanes)
    }


def _is_lane_count(lanes: object) -> TypeGuard[int]:
    """Each is fenced when its slot is given up."""
    return type(lanes) is int and 0 <= lanes <= MOST_LANES


def _as_names(message: object) -> frozenset[str] | None:
    return frozenset(map(str, message)) if isinstance(message, list) else None


def _encode(message: dict[str, object]) -> bytes:
    return json.dumps({"version": VERSION, **message}, separators=(",", ":"), sort_keys=True).encode()


def _decode(data: bytes) -> dict[str, object]:
    message = read_json(data)
    if not isinstance(message, dict) or message.get("version") != VERSION:
        raise ValueError(f"a group message of another version than {VERSION}: {data[:80]!r}")
    return message


def _grouped(partitions: Iterable[SourcePartition]) -> dict[str, dict[str, list[int]]]:
    grouped: dict[str, dict[str, list[int]]] = {}
    for item in sorted(partitions):
        grouped.setdefault(item.source, {}).setdefault(item.topic, []).append(item.partition)
    return grouped


def _grouped_levels(levels: Mapping[SourcePartition, int]) -> dict[str, dict[str, dict[str, int]]]:
    grouped: dict[str, dict[str, dict[str, int]]] = {}
    for item, level in sorted(levels.items()):
        grouped.setdefault(item.source, {}).setdefault(item.topic, {})[str(item.partition)] = level
    return grouped


def _ungrouped_levels(grouped: object) -> dict[SourcePartition, int]:
    """Empty where the claim tells of none, or in a way that is not known here: rates are a help, no more."""
    if not isinstance(grouped, dict):
        return {}
    return {
        SourcePartition(source, topic, int(number)): level
        for source, topics in grouped.items()
        if isinstance(topics, dict)
        for topic, numbers in topics.items()
        if isinstance(numbers, dict)
        for number, level in numbers.items()
        if number.isdecimal() and isinstance(level, int)
    }


def _ungrouped(message: dict[str, object]) -> list[SourcePartition]:
    grouped = message.get("partitions")
    if not isinstance(grouped, dict):
        raise ValueError("a group message has no partitions")
    found = []
    for source, topics in grouped.items():
        for topic, numbers in topics.items() if isinstance(topics, dict) else [("", None)]:
            if not isinstance(numbers, list) or any(type(number) is not int for number in numbers):
                raise ValueError(f"a group message with no list of partitions for {source}/{topic}")
            found += [SourcePartition(source, topic, number) for number in numbers]
    return found
