"""How far a foreign mirror came, from what arrived: the oracle's own reading of the rule. Pure.

Such a mirror tells nothing, and keeps the order within a partition: when a record is downstream, all before
it has passed. A record's own offset is not kept; it was counted together with those of its stream and window
that one look found in one stretch of one partition (`Shown.counted`), and these have the first and the last
offset in common. So a stretch of which all came proves its end, one of which some came its beginning, and of
what stands at several places nobody can tell which of them it was that came. A stretch is passed as a whole
or not at all.

Offsets that were given out twice (a log that was shortened) tell nothing, because no position says in which
of the two logs it is: what lies in them is explained, what lies across their bounds is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.audit_oracle import Shown

ClusterPartition = tuple[str, str, int]
Stretches = Mapping[ClusterPartition, Iterable[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted together: offsets [first, last] of one log, of one stream and window."""

    place: ClusterPartition
    topic_id: object
    first: int
    last: int
    sequences: Counter[int]
    stream: str
    window: int

    def touches(self, stretches: Stretches) -> bool:
        return any(first <= self.last and self.first < end for first, end in stretches.get(self.place, ()))

    def lies_in(self, stretches: Stretches) -> bool:
        return any(first <= self.first and self.last < end for first, end in stretches.get(self.place, ()))


def counted_together(copies: Iterable[Shown]) -> Iterator[tuple[Counted, list[Shown]]]:
    """The stretches that these copies were counted in."""
    for _, group in groupby(sorted(copies, key=_key), key=_key):
        members = list(group)
        one = members[0]
        offsets = [each.offset for each in members]
        yield (
            Counted(
                (one.cluster, one.name, one.partition), one.topic_id, min(offsets), max(offsets),
                Counter(each.rec.sequence for each in members), one.rec.stream, one.rec.window,
            ),
            members,
        )  # fmt: skip


def _key(copy: Shown) -> tuple:
    return (
        copy.rec.stream, copy.rec.window, copy.cluster, copy.name, copy.partition, str(copy.topic_id),
        *copy.counted,
    )  # fmt: skip


def passages(
    upstream: Iterable[Counted], downstream: Iterable[Shown]
) -> dict[tuple[ClusterPartition, str], int]:
    """{(partition, topic id): every offset below this one has passed}."""
    upstream = list(upstream)
    arrived = {(copy.rec.stream, copy.rec.window, copy.rec.sequence) for copy in downstream}
    places = Counter((each.stream, sequence) for each in upstream for sequence in each.sequences)
    found: dict[tuple[ClusterPartition, str], int] = {}
    for each in upstream:
        alone = {sequence for sequence in each.sequences if sequence and places[each.stream, sequence] == 1}
        came = {sequence for sequence in alone if (each.stream, each.window, sequence) in arrived}
        if not came:
            continue
        whole = len(came) == sum(each.sequences.values())
        key = (each.place, str(each.topic_id))
        found[key] = max(found.get(key, 0), each.last + 1 if whole else each.first)
    return found
