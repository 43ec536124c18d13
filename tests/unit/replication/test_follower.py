"""Rules of a replica that fetches."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.broker.errors import (
    FencedLeaderEpoch,
    KafkaStorageError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
)
from millrace.broker.replication.follower import (
    Answer,
    Append,
    AskBounds,
    AskLater,
    FollowerState,
    Outdated,
    StartAnew,
    Truncate,
    decide,
    realign,
    start_to_follow,
    truncation_offset,
)
from millrace.broker.replication.partition import PartitionState, Replica
from millrace.broker.storage.leader_epochs import LeaderEpochCache

POSITION = FollowerState(leader_epoch=4, start_offset=0, end_offset=100, high_watermark=90)


class History:
    """A log as the epochs of its records, one record an offset: all that truncation looks at."""

    def __init__(self, folder: Path, epochs: list[int]) -> None:
        self.epochs = epochs
        self._folder = folder

    @property
    def cache(self) -> LeaderEpochCache:
        entries = [
            (epoch, offset)
            for offset, epoch in enumerate(self.epochs)
            if offset == 0 or self.epochs[offset - 1] != epoch
        ]
        return LeaderEpochCache(self._folder, entries)

    @property
    def end(self) -> int:
        return len(self.epochs)

    def diverging(self, offset: int, last_epoch: int) -> tuple[int, int] | None:
        """What a leader with this history answers (KIP-595)."""
        epoch, end = self.cache.end_offset_for(last_epoch, self.end)
        return (epoch, end) if epoch < last_epoch or end < offset else None


def answer(**fields: object) -> Answer:
    asked = {"leader_epoch": 4, "fetch_offset": 100, "last_fetched_epoch": 0}
    return Answer(**{**asked, **fields})  # type: ignore[arg-type]


def test_answer_of_another_epoch_or_to_another_question_is_not_used() -> None:
    cache = LeaderEpochCache(Path(), [(0, 0)])
    assert decide(answer(), POSITION, cache) == Append()
    assert decide(answer(leader_epoch=3), POSITION, cache) == Outdated()
    assert decide(answer(fetch_offset=99), POSITION, cache) == Outdated()
    assert decide(answer(diverging=(0, 5), leader_epoch=3), POSITION, cache) == Outdated()


def test_answer_to_a_question_about_the_log_before_it_was_cut_is_not_used() -> None:
    """It ended at the same offset, was cut as an earlier answer said, and has the leader's records since."""
    cache = LeaderEpochCache(Path(), [(0, 0), (4, 99)])
    assert decide(answer(diverging=(0, 99)), POSITION, cache) == Outdated()
    assert decide(answer(last_fetched_epoch=4), POSITION, cache) == Append()


@pytest.mark.parametrize(
    ("code", "decision"),
    [
        (OffsetOutOfRange.code, AskBounds()),
        (NotLeaderOrFollower.code, AskLater(NotLeaderOrFollower.code, True)),
        (FencedLeaderEpoch.code, AskLater(FencedLeaderEpoch.code, True)),
        (KafkaStorageError.code, AskLater(KafkaStorageError.code, False)),
    ],
)
def test_errors(code: int, decision: object) -> None:
    assert decide(answer(error_code=code), POSITION, LeaderEpochCache(Path(), [(0, 0)])) == decision


def test_log_is_cut_where_the_common_epoch_ends_on_either_side() -> None:
    cache = LeaderEpochCache(Path(), [(1, 0), (3, 40), (5, 70)])
    assert truncation_offset((5, 80), cache, 100) == 80
    assert truncation_offset((3, 60), cache, 100) == 60
    assert truncation_offset((3, 90), cache, 100) == 70
    # The leader's epoch is not known here: back to the end of the next older one, and ask again.
    assert truncation_offset((4, 65), cache, 100) == 70
    assert truncation_offset((2, 30), cache, 100) == 40
    # Older than all that is known here.
    assert truncation_offset((0, 20), LeaderEpochCache(Path(), [(3, 40)]), 100) == 20
    assert truncation_offset((0, 20), LeaderEpochCache(Path(), []), 100) == 20


def test_offset_outside_the_leaders_log() -> None:
    assert realign(POSITION, 120, 200) == StartAnew(120)
    assert realign(POSITION, 10, 80) == Truncate(80)
    assert realign(POSITION, 10, 100) == Outdated()
    assert realign(POSITION, 100, 100) == Outdated()


def test_log_start_follows_the_leader_but_never_past_what_is_committed() -> None:
    assert start_to_follow(POSITION, 30) == 30
    assert start_to_follow(POSITION, 0) is None
    assert start_to_follow(POSITION, 95) == 90


def test_high_watermark_follows_the_leader_as_far_as_the_log_reaches() -> None:
    replica = Replica(2)
    replica.apply(PartitionState(1, 0, (1, 2), 1), 0)
    assert replica.follow(10, 7)
    assert replica.high_watermark == 7
    assert not replica.follow(5, 9)  # a new leader that does not know better yet
    assert replica.high_watermark == 7
    replica.truncated(4)
    assert replica.high_watermark == 4
    replica.begun_anew(50)
    assert replica.high_watermark == 50


def histories() -> st.SearchStrategy[tuple[list[int], list[int]]]:
    """Two logs that were one once: each went on with epochs of leaders that the other did not have."""

    def grow(common: list[int], seed: int) -> tuple[list[int], list[int]]:
        random = Random(seed)
        leader, follower = list(common), list(common)
        epoch = common[-1] if common else 0
        for _ in range(random.randrange(6)):
            epoch += random.randrange(1, 3)
            random.choice((leader, follower)).extend([epoch] * random.randrange(1, 4))
        if random.random() < 0.3 and common:
            follower += [common[-1]] * 2  # more of the last common epoch than the leader has
            follower.sort()
        return leader, follower

    return st.builds(grow, st.lists(st.integers(0, 4), max_size=8).map(sorted), st.integers(0, 2**32))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(histories())
def test_cutting_ends_with_a_prefix_of_the_leaders_history(logs: tuple[list[int], list[int]]) -> None:
    """However two histories parted: after finitely many questions the follower has nothing that the leader
    has not, and it kept everything they have in common."""
    leader, follower = History(Path(), logs[0]), History(Path(), list(logs[1]))
    common = 0
    while common < min(leader.end, follower.end) and leader.epochs[common] == follower.epochs[common]:
        common += 1
    for _ in range(20):
        last_epoch = follower.cache.latest_epoch
        parted = leader.diverging(follower.end, last_epoch) if last_epoch >= 0 else None
        position = FollowerState(9, 0, follower.end, 0)
        decision = decide(Answer(9, follower.end, last_epoch, diverging=parted), position, follower.cache)
        if decision == Append():
            break
        assert isinstance(decision, Truncate)
        assert decision.offset < follower.end, "each cut makes the log shorter"
        follower.epochs = follower.epochs[: decision.offset]
    assert follower.epochs == leader.epochs[:common]
