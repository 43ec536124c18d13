"""The part of the worker that leads the group: from the claims of all to the share of each.

Held by every `worker`, used while it leads. The rules are `sharing.assignment`'s; here is what a leader
remembers from one rebalance to the next, which makes them hold over several:

- the level of each partition, as last claimed: a worker that has just begun to carry one has not measured it;
- which partitions were shared out, so that others than these are a reason for a rebalance, and only once;
- which workers' configs were told of as different from the leader's, so that each state is told of once.

A worker that begins to lead remembers nothing and shares out by what the claims say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import structlog

from millrace.mirror.sharing.assignment import (
    Claim,
    Share,
    assign,
    decode_claim,
    encode_share,
    give_slots,
    known_levels,
    uneven_sources,
    withhold_claimed,
)
from millrace.mirror.sharing.peers import add_crew
from millrace.mirror.topics.routes import SourcePartition

log = structlog.get_logger("millrace.mirror.worker")


class Assignor:
    """See the module's text."""

    def __init__(self) -> None:
        self._levels: dict[SourcePartition, int] = {}
        self._shared_out: frozenset[SourcePartition] = frozenset()
        self._uneven_sources: dict[str, tuple[list[str], list[str]]] = {}

    def share_out(
        self,
        members: Mapping[str, bytes],
        claims: Mapping[str, Claim],
        partitions: set[SourcePartition],
        *,
        sources: Collection[str],
        unseen: Collection[str],
        unfenced: Mapping[int, int],
    ) -> dict[str, bytes]:
        """Each member's share, as the group takes it.

        `members` are the claims as the group has them, `claims` the same as `read_claims` reads them;
        `partitions` are all that are to be carried, of the leader's `sources`. One of these that was never
        seen (`unseen`) keeps its partitions where they are. `unfenced`: slots of workers that have left, with
        their lanes, whose transactions could not be ended; they stay in use.
        """
        self._shared_out = frozenset(partitions)
        partitions = partitions | {
            partition for claim in claims.values() for partition in claim.owned if partition.source in unseen
        }
        levels = known_levels(claims, self._levels)
        self._levels = {partition: level for partition, level in levels.items() if partition in partitions}
        ideal = assign(partitions, claims, self._levels)
        self._tell_of_uneven_sources(claims, sources)
        log.info("sharing out", workers=len(members), partitions=len(partitions))
        now = withhold_claimed(ideal, claims)
        slots = give_slots(claims)
        in_use = {**unfenced, **{slot: claims[member].lane_count for member, slot in slots.items()}}
        return {
            member: add_crew(
                encode_share(Share(tuple(share), slots.get(member), in_use)), members, partitions
            )
            for member, share in now.items()
        }

    def is_news(self, partitions: Collection[SourcePartition]) -> bool:
        """Whether other partitions are to be carried than were shared out; said once of the same."""
        news = frozenset(partitions)
        is_other, self._shared_out = news != self._shared_out, news
        return is_other

    def _tell_of_uneven_sources(self, claims: Mapping[str, Claim], sources: Collection[str]) -> None:
        uneven = uneven_sources(claims, sources)
        if uneven != self._uneven_sources:
            self._uneven_sources = uneven
            for member, (missing, unknown) in sorted(uneven.items()):
                log.warning(
                    "a worker's config has other sources than the leader's; reload it everywhere",
                    worker=member,
                    carries_none_of=",".join(missing),
                    not_carried_at_all=",".join(unknown),
                )


def read_claims(members: Mapping[str, bytes]) -> dict[str, Claim]:
    """A worker whose claim cannot be read (another version) claims nothing; it is given work all the same."""
    return {member: _read_claim(member, data) for member, data in members.items()}


def _read_claim(member: str, data: bytes) -> Claim:
    try:
        return decode_claim(data)
    except ValueError as error:
        log.warning("a worker's claim cannot be read", member=member, error=str(error))
        return Claim()
