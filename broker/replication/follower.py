"""The rules of a replica that fetches: what to do with a leader's answer, and where to cut the own log.

Pure: values in, decisions out. `replica_fetcher.py` sends the fetches, gives each answer to `decide`, and
does what it says; the simulator drives the same function over a virtual network.

How histories are made to agree (KIP-101, KIP-279, KIP-595): a fetch names the epoch of the last record the
follower has. A leader whose history parts from that answers with the largest epoch it has that is not above
it, and where that epoch ended. The follower cuts its log back to where both have that epoch, or to the end
of its own next older epoch, and asks again, until nothing is diverging. The high watermark plays no part:
it may be behind what is committed, and cutting there has lost records in the past.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace.broker.errors import (
    FencedLeaderEpoch,
    InconsistentTopicId,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownLeaderEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

NO_EPOCH = -1


class Epochs(Protocol):
    """What is asked of the follower's own leader epochs (`LeaderEpochCache` has it)."""

    @property
    def latest_epoch(self) -> int: ...

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The greatest own epoch not above `epoch` and its end; (-1, -1) when there is none."""
        ...


@dataclass(frozen=True, slots=True)
class FollowerState:
    """The follower's side: the epoch it follows in now, its own log's bounds and high watermark."""

    leader_epoch: int
    start_offset: int
    end_offset: int
    high_watermark: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The leader's side, for a fetch made at `fetch_offset`, behind a record of `last_fetched_epoch`, in
    `leader_epoch`. `diverging` is (epoch, its end offset in the leader's history)."""

    leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    error_code: int = 0
    high_watermark: int = -1
    log_start_offset: int = -1
    diverging: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Outdated:
    """The world moved on while the answer was under way: ask anew from the present position."""


@dataclass(frozen=True, slots=True)
class Append:
    """Append the records (there may be none), then let the high watermark and the log's start follow with
    `Replica.follow` and `start_to_follow`."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut the own log to end at `offset`, and ask again: histories may part even further back."""

    offset: int


@dataclass(frozen=True, slots=True)
class AskBounds:
    """The fetch offset is not in the leader's log: ask where that begins and ends, then `realign`."""


@dataclass(frozen=True, slots=True)
class StartAnew:
    """Everything the follower has lies before the leader's log: drop it and begin at `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class AskLater:
    """Wait a little and ask again. `expected`: the usual course of a change of leaders, no fault."""

    error_code: int
    expected: bool


Decision = Outdated | Append | Truncate | AskBounds | StartAnew | AskLater

_EXPECTED_CODES = frozenset(
    error.code
    for error in (
        FencedLeaderEpoch,
        UnknownLeaderEpoch,
        NotLeaderOrFollower,
        UnknownTopicOrPartition,
        UnknownTopicId,
        InconsistentTopicId,
    )
)


def decide(answer: Answer, position: FollowerState, epochs: Epochs) -> Decision:
    """What a leader's answer asks the follower to do. One that comes late may be of another log that ended
    where the own one ends now: what it says of that would cut off what is committed by then."""
    asked = (answer.leader_epoch, answer.fetch_offset, answer.last_fetched_epoch)
    if asked != (position.leader_epoch, position.end_offset, epochs.latest_epoch):
        return Outdated()
    if answer.error_code == OffsetOutOfRange.code:
        return AskBounds()
    if answer.error_code:
        return AskLater(answer.error_code, answer.error_code in _EXPECTED_CODES)
    if answer.diverging is not None:
        return Truncate(truncation_offset(answer.diverging, epochs, position.end_offset))
    return Append()


def truncation_offset(diverging: tuple[int, int], epochs: Epochs, end_offset: int) -> int:
    """Where to cut a log that ends at `end_offset`, after the leader named (epoch, end offset).

    Where the follower has that epoch too: at the smaller of both ends. Where it has not: at the end of its
    next older epoch, and the next fetch names that one. Where it has none so old: at the leader's offset.
    """
    epoch, leader_end = diverging
    own_epoch, own_end = epochs.end_offset_for(epoch, end_offset)
    if own_epoch == NO_EPOCH:
        return min(leader_end, end_offset)
    if own_epoch != epoch:
        return min(own_end, end_offset)
    return min(leader_end, own_end, end_offset)


def realign(position: FollowerState, leader_start: int, leader_end: int) -> Decision:
    """After `AskBounds`: where the follower goes on.

    A follower that ends beyond the leader (an election that was not clean) is cut to the leader's end; one
    that ends before the leader's first record begins anew there; else it asks again from where it is.
    """
    if position.end_offset > leader_end:
        return Truncate(leader_end)
    if position.end_offset < leader_start:
        return StartAnew(leader_start)
    return Outdated()


def start_to_follow(position: FollowerState, leader_start: int) -> int | None:
    """The log start to take over from the leader, None to stay: never above what is known as committed."""
    start = min(leader_start, position.high_watermark, position.end_offset)
    return start if start > position.start_offset else None
