"""A lane's side of a fetch session against the leader's own: whatever comes between them, the leader reads
what the lane wants, and the lane knows what it would know had it asked for everything each time."""

from __future__ import annotations

import random

import pytest

from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionData, PartitionFetch
from millrace.broker.protocol.session_epochs import ENDED, FULL, LARGEST_EPOCH
from millrace.broker.replication.follower_session import FollowerSession
from millrace.broker.server.fetch_sessions import FetchSessionCache

TOPIC = "t"
COUNT = 6


class Follower:
    """Who asks for a partition: one that was let go of and is back is another."""

    def __init__(self) -> None:
        self.offset = 0
        self.high_watermark = -1


class Pair:
    """A lane and its leader."""

    def __init__(self, *, slots: int = 10, seed: int = 0) -> None:
        self.lane = FollowerSession[Follower]()
        self.cache = FetchSessionCache(slots, random.Random(seed))
        self.followers = [Follower() for _ in range(COUNT)]
        self.high_watermarks = [100] * COUNT
        self.named: list[int] = []
        """What the last request named."""
        self.full_count = 0
        self.unheard_count = 0
        """Of sessions that were opened by answers which did not arrive."""

    def question(self, number: int) -> PartitionFetch:
        return PartitionFetch(TOPIC, number, self.followers[number].offset, 1)

    def round(self, due: list[int], *, lost: bool = False, not_taken: frozenset[int] = frozenset()) -> None:
        wanted = self.lane.want((self.followers[number], self.question(number)) for number in due)
        self.named = [asked.partition for asked in wanted.partitions]
        self.full_count += wanted.session_epoch == FULL
        request = FetchRequest(
            0, 1, 1, False, wanted.partitions, wanted.session_id, wanted.session_epoch, wanted.forgotten,
            replica_id=2,
        )  # fmt: skip
        fetch = self.cache.resolve(request, True, 0)
        if isinstance(fetch, tuple):
            assert fetch[0] in ENDED
            assert wanted.session_epoch != FULL
            self.lane.end()
            return
        read = {asked.partition: asked for asked in fetch.partitions}
        assert read == {number: self.question(number) for number in due}, "the leader reads what is wanted"
        answers = [PartitionData(TOPIC, number, 0, self.high_watermarks[number]) for number in read]
        code, session_id, told = fetch.finish(answers, 0)
        assert code == 0
        assert len(self.cache) <= 1 + self.unheard_count, "a session that nobody will use stays behind"
        if lost:
            self.unheard_count += wanted.session_epoch == FULL
            self.lane.end()
            return
        self.lane.answered(session_id)
        for given in told:
            known = self.lane.asked((given.topic, given.partition))
            assert known is not None
            assert known[0] is self.followers[given.partition]
            if given.partition in not_taken:
                self.lane.let_go((given.topic, given.partition))
            else:
                known[0].high_watermark = given.high_watermark
        for number in set(due) - not_taken:
            assert self.followers[number].high_watermark == self.high_watermarks[number]


def test_a_round_in_which_nothing_is_new_names_nothing() -> None:
    pair = Pair()
    everyone = list(range(COUNT))
    pair.round(everyone)
    assert pair.named == everyone
    pair.round(everyone)
    assert pair.named == []
    pair.followers[3].offset = 7
    pair.round(everyone)
    assert pair.named == [3]
    pair.round([0, 1])
    assert pair.named == []
    pair.round(everyone)
    assert pair.named == [2, 3, 4, 5]
    assert pair.full_count == 1


def test_what_was_not_taken_is_asked_for_anew() -> None:
    pair = Pair()
    everyone = list(range(COUNT))
    pair.round(everyone, not_taken=frozenset({4}))
    assert pair.followers[4].high_watermark == -1
    pair.round(everyone)  # looks that it knows now
    assert pair.full_count == 2


def test_what_was_not_taken_and_rests_is_a_new_one_when_it_is_back() -> None:
    pair = Pair()
    everyone = list(range(COUNT))
    pair.round(everyone, not_taken=frozenset({4}))
    pair.round([0, 1, 2, 3, 5])
    pair.round(everyone)
    assert pair.named == [4]
    assert pair.full_count == 1


def test_who_takes_a_partition_over_is_told_everything() -> None:
    pair = Pair()
    everyone = list(range(COUNT))
    pair.round(everyone)
    pair.followers[2] = Follower()
    pair.round(everyone)
    assert pair.full_count == 2


def test_a_lost_answer_is_asked_for_again() -> None:
    pair = Pair()
    everyone = list(range(COUNT))
    pair.round(everyone)
    pair.high_watermarks[1] = 5
    pair.round(everyone, lost=True)
    pair.round(everyone)
    assert pair.full_count == 2


def test_without_room_for_a_session_every_request_is_a_full_one() -> None:
    pair = Pair(slots=0)
    everyone = list(range(COUNT))
    for _ in range(3):
        pair.round(everyone)
        assert pair.named == everyone
    assert pair.full_count == 3


def test_epochs_go_round_on_both_sides() -> None:
    pair = Pair()
    pair.round([0])
    pair.lane._epochs.epoch = next(iter(pair.cache._sessions.values())).epoch = LARGEST_EPOCH
    for _ in range(3):
        pair.round([0])
    assert pair.full_count == 1


def test_an_owner_that_was_let_go_of_is_not_held() -> None:
    lane = FollowerSession[Follower]()
    owner = Follower()
    lane.want([(owner, PartitionFetch(TOPIC, 0, 0, 1))])
    lane.let_go((TOPIC, 0))
    assert lane.asked((TOPIC, 0)) == (None, PartitionFetch(TOPIC, 0, 0, 1))
    lane.let_go((TOPIC, 1))
    assert lane.asked((TOPIC, 1)) is None


@pytest.mark.parametrize("seed", range(40))
def test_the_lane_knows_what_full_requests_would_have_told(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(seed=seed)
    for _ in range(200):
        match rng.randrange(8):
            case 0 | 1:
                pair.high_watermarks[rng.randrange(COUNT)] += rng.choice((1, -1))
            case 2:
                pair.followers[rng.randrange(COUNT)].offset += 1
            case 3:
                number = rng.randrange(COUNT)
                pair.lane.let_go((TOPIC, number))
                pair.followers[number] = Follower()
            case 4 if rng.random() < 0.2:
                pair.cache = FetchSessionCache(rng.choice((0, 10)), random.Random(rng.random()))
        due = [number for number in range(COUNT) if rng.random() < 0.9] or [0]
        pair.round(
            due,
            lost=rng.random() < 0.03,
            not_taken=frozenset(number for number in due if rng.random() < 0.03),
        )
    assert pair.full_count > 3
