"""Faults that the demo puts into the mirror's path, and whether the audit named exactly those.

Pure but for two files. The choice is made before the replay from a seed, by (datacenter, producer, sequence):
a feed's n-th event has sequence n. What the sabotaged mirrors really did comes back as `Deeds` (they know the
stream, which exists only once a producer has started), and `Verification` compares those with what the audit
wrote to summary.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace.broker.errors import FatalError
from millrace.deploy.demo.events import Events

LOSE = "lose"
DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Target:
    """One record to drop or to repeat on its way through the mirror."""

    action: str
    datacenter: str
    topic: str
    producer: str
    sequence: int


@dataclass(frozen=True, slots=True, order=True)
class Injected:
    """One record as the audit must name it."""

    topic: str
    producer: str
    stream: str
    sequence: int


def choose_targets(events: Events, lose_count: int, duplicate_count: int, seed: int) -> list[Target]:
    """Random different events; the same for the same events, counts and seed."""
    wanted = lose_count + duplicate_count
    if wanted > events.count:
        raise FatalError(f"cannot lose or repeat {wanted} of {events.count} events: ask for fewer")
    chosen = random.Random(seed).sample(range(events.count), wanted)
    actions = [LOSE] * lose_count + [DUPLICATE] * duplicate_count
    return [_target(events, number, action) for number, action in zip(chosen, actions, strict=True)]


def _target(events: Events, number: int, action: str) -> Target:
    for feed, rows in events.feeds.items():
        if number < len(rows):
            return Target(action, feed.datacenter, events.topic, feed.producer, number + 1)
        number -= len(rows)
    raise ValueError(f"there is no event {number} past the last feed")


def write_targets(targets: Sequence[Target], path: Path) -> None:
    path.write_text(json.dumps([asdict(target) for target in targets]), encoding="utf-8")


def read_targets(path: Path) -> list[Target]:
    return [Target(**target) for target in json.loads(path.read_text(encoding="utf-8"))]


@dataclass(frozen=True, slots=True)
class Deeds:
    """What was done to records: sets, because a mirror may do the same again after a restart."""

    lost: frozenset[Injected] = frozenset()
    duplicated: frozenset[Injected] = frozenset()

    def as_json(self) -> dict[str, list[dict[str, Any]]]:
        return {
            "lost": [asdict(deed) for deed in sorted(self.lost)],
            "duplicated": [asdict(deed) for deed in sorted(self.duplicated)],
        }

    @classmethod
    def merge(cls, contents: Iterable[Mapping[str, list[dict[str, Any]]]]) -> Deeds:
        lost: set[Injected] = set()
        duplicated: set[Injected] = set()
        for content in contents:
            lost.update(Injected(**deed) for deed in content["lost"])
            duplicated.update(Injected(**deed) for deed in content["duplicated"])
        return cls(frozenset(lost), frozenset(duplicated))


@dataclass(frozen=True, slots=True)
class Verification:
    """The audit's findings beside the deeds; a killed mirror changes neither."""

    deeds: Deeds
    named: Deeds
    planned_lost: int
    planned_duplicated: int

    @property
    def holds(self) -> bool:
        done = len(self.deeds.lost) == self.planned_lost and (
            len(self.deeds.duplicated) == self.planned_duplicated
        )
        return done and self.named == self.deeds

    def sentence(self) -> str:
        if self.holds:
            losses = _counted(len(self.deeds.lost), "loss", "losses")
            duplicates = _counted(len(self.deeds.duplicated), "duplicate", "duplicates")
            return f"audit named all {losses} and {duplicates}, and nothing else"
        lost, repeated = self.named.lost, self.named.duplicated
        return (
            f"audit and sabotage disagree: {self.planned_lost} to lose, {len(self.deeds.lost)} lost, "
            f"{len(lost)} named ({len(lost & self.deeds.lost)} rightly); "
            f"{self.planned_duplicated} to repeat, {len(self.deeds.duplicated)} repeated, "
            f"{len(repeated)} named ({len(repeated & self.deeds.duplicated)} rightly)"
        )


def named_by_audit(summary: Mapping[str, Any]) -> Deeds:
    """Every single record that summary.json names as lost or as duplicated."""
    return Deeds(
        frozenset(_records(summary["losses"])),
        frozenset(_records(summary["duplicates"])),
    )


def _records(findings: Iterable[Mapping[str, Any]]) -> Iterable[Injected]:
    for finding in findings:
        for first, last in finding["sequences"]:
            for sequence in range(first, last + 1):
                yield Injected(finding["topic"], finding["producer"], finding["stream"], sequence)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
