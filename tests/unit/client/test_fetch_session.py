"""A reader's side of a fetch session against a broker's: whatever comes between them, the broker reads what
the reader wants, in the order in which the reader believes it does, and who is not named has nothing new."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from uuid import UUID

import pytest

from millrace.broker.client.fetch_session import Answer, FetchPosition, FetchSession, LogEnds
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionData, PartitionFetch, Topic
from millrace.broker.protocol.session_epochs import ENDED, FINAL_EPOCH, FULL, LARGEST_EPOCH
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.server.fetch_sessions import FetchSessionCache

KEYS: list[TopicPartition] = [("a", 0), ("b", 0), ("b", 1), ("b", 2), ("a", 1), ("c", 0)]
AS_SAID: list[TopicPartition] = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]
"""A request lists them by topic."""

NO_ENDS = LogEnds(-1, -1)


class Pair:
    """A reader and its broker."""

    def __init__(self, *, by_id: bool = True, slots: int = 10, seed: int = 0) -> None:
        self.session = FetchSession()
        self.cache = FetchSessionCache(slots, random.Random(seed))
        self.by_id = by_id
        self.max_bytes = 100
        self.offsets = dict.fromkeys(KEYS, 0)
        self.ids = {topic: UUID(int=number) for number, topic in enumerate("abc", 1)}
        self.high_watermarks = dict.fromkeys(KEYS, 10)
        self.giving: set[TopicPartition] = set()
        """Who has records. An answer has room for those of one partition."""
        self.known: dict[TopicPartition, int] = {}  # high watermarks, as the reader was told
        self.said: list[TopicPartition] = []
        """By the last request."""
        self.told: list[TopicPartition] = []
        """By the last answer."""
        self.read: list[TopicPartition] = []
        """By the broker, in this order."""
        self.full_count = 0

    def topic(self, key: TopicPartition) -> Topic:
        return self.ids[key[0]] if self.by_id else key[0]

    def request(self, keys: Sequence[TopicPartition]) -> FetchRequest:
        positions = {key: FetchPosition(self.offsets[key], topic_id=self.ids[key[0]]) for key in keys}
        wanted = self.session.want(positions, self.max_bytes, by_id=self.by_id)
        self.said = [key for key, _ in wanted.partitions]
        self.full_count += wanted.session_epoch == FULL
        assert self.session.said_all is (wanted.session_epoch in (FULL, FINAL_EPOCH))
        asked = [
            PartitionFetch(at.topic_id if self.by_id else key[0], key[1], at.offset, self.max_bytes)
            for key, at in wanted.partitions
        ]
        return FetchRequest(
            0, 1, 1, True, asked, wanted.session_id, wanted.session_epoch, wanted.forgotten
        )  # fmt: skip

    def ask(
        self, keys: Sequence[TopicPartition] = KEYS, *, is_lost: bool = False, is_throttled: bool = False
    ) -> bool:
        """One fetch; whether the reader was answered."""
        request = self.request(keys)
        resolved = self.cache.resolve(request, self.by_id, 0)
        if isinstance(resolved, tuple):
            assert resolved[0] in ENDED
            assert not self.session.said_all
            self.session.end()
            return False
        names = {(self.topic(key), key[1]): key for key in keys}
        self.read = [names[asked.topic, asked.partition] for asked in resolved.partitions]
        assert sorted(self.read) == sorted(keys)
        assert all(
            (asked.fetch_offset, asked.max_bytes) == (self.offsets[key], self.max_bytes)
            for asked, key in zip(resolved.partitions, self.read, strict=True)
        )
        giving = next((key for key in self.read if key in self.giving), None)
        given = [
            PartitionData(
                self.topic(key), key[1], 0, self.high_watermarks[key], records=b"x" if key == giving else b""
            )
            for key in self.read
        ]
        if is_throttled and not self.session.said_all:
            self.hear(*resolved.finish_empty(), is_throttled=True)
            return True
        answer = resolved.finish(given, 0)
        if is_lost:
            self.session.end()
            return False
        self.hear(*answer)
        assert self.session.had_room() == set(takewhile(lambda key: key != giving, self.read))
        for key, ends in self.session.quiet().items():
            assert key != giving
            assert ends.high_watermark == self.high_watermarks[key]
        assert sorted([*self.session.quiet(), *self.told]) == sorted(keys)
        assert all(self.known[key] == self.high_watermarks[key] for key in keys), "as if all were told"
        return True

    def hear(
        self, code: int, session_id: int, told: Sequence[PartitionData], *, is_throttled: bool = False
    ) -> None:
        assert code == 0
        named: list[Answer] = []
        for each in told:
            key = self.session.key_of(each.topic, each.partition)
            assert key is not None
            self.known[key] = each.high_watermark
            named.append(Answer(key, LogEnds(each.high_watermark, -1), len(each.records) > 0))
        self.told = [each.key for each in named]
        was_about_it = self.session.answered(session_id, named, is_throttled=is_throttled)
        assert was_about_it or is_throttled


by_id_or_name = pytest.mark.parametrize("by_id", [True, False])


def test_only_what_is_another_than_last_time_is_said() -> None:
    pair = Pair()
    pair.ask()
    assert pair.said == pair.told == AS_SAID
    pair.ask()
    assert (pair.said, pair.told) == ([], [])
    assert sorted(pair.session.quiet()) == sorted(KEYS)
    pair.offsets["b", 1] = 7
    pair.ask()
    assert (pair.said, pair.told) == ([("b", 1)], [])
    pair.high_watermarks["c", 0] += 1
    pair.ask()
    assert (pair.said, pair.told) == ([], [("c", 0)])
    pair.ask(KEYS[:2])
    assert pair.said == []
    pair.ask()
    assert pair.said == pair.told == [("b", 1), ("b", 2), ("a", 1), ("c", 0)], "these were forgotten"
    pair.max_bytes = 50
    pair.ask()
    assert sorted(pair.said) == sorted(KEYS)
    assert pair.full_count == 1


def test_who_asks_by_name_says_all_each_time() -> None:
    """Brokers without ids may serve those first, again and again, of which they say anything."""
    pair = Pair(by_id=False)
    for turn in range(3):
        keys = KEYS[turn:] + KEYS[:turn]
        pair.ask(keys)
        assert sorted(pair.said) == sorted(pair.told) == sorted(KEYS)
        assert pair.read[0] == keys[0], "whose turn it is"
    assert (pair.full_count, len(pair.cache)) == (0, 0)


def test_topic_that_was_made_anew_is_asked_for_as_another() -> None:
    pair = Pair()
    pair.ask()
    pair.ids["b"] = UUID(int=9)
    request = pair.request(KEYS)
    assert [asked.topic for asked in request.partitions] == [UUID(int=9)] * 3
    assert list(request.forgotten) == [(UUID(int=2), number) for number in range(3)]
    assert pair.session.key_of(UUID(int=9), 1) == ("b", 1)
    assert pair.session.key_of(UUID(int=2), 1) is None
    pair.ids["b"] = UUID(int=10)
    pair.session.end()
    pair.ask()
    pair.ids["b"] = UUID(int=11)
    pair.ask()
    assert pair.full_count == 2


@by_id_or_name
def test_who_was_not_asked_for_is_nobody(by_id: bool) -> None:
    pair = Pair(by_id=by_id)
    pair.ask(KEYS[1:])
    assert pair.session.key_of(pair.topic(("a", 1)), 1) == ("a", 1)
    assert pair.session.key_of(pair.topic(("a", 0)), 0) is None
    assert pair.session.key_of(UUID(int=77), 0) is None
    assert pair.session.key_of("z", 0) is None
    assert not pair.session.answered(1, [Answer(("a", 0), NO_ENDS, False)])


def test_answer_in_full_that_leaves_one_out_is_not_about_what_was_asked_for() -> None:
    pair = Pair()
    pair.request(KEYS)
    assert not pair.session.answered(5, [Answer(key, NO_ENDS, False) for key in KEYS[1:]])


def test_answer_that_was_lost_or_not_taken_is_asked_for_anew() -> None:
    pair = Pair()
    pair.ask()
    pair.high_watermarks["b", 1] += 5
    assert not pair.ask(is_lost=True)
    pair.ask()
    assert pair.full_count == 2
    assert len(pair.cache) == 1, "the broker learns that the old one is over"


def test_answer_under_way_when_the_session_is_ended_is_one_to_what_was_asked() -> None:
    pair = Pair()
    pair.ask()
    pair.session.end()
    assert pair.session.key_of(pair.topic(("b", 1)), 1) == ("b", 1)
    pair.ask()
    assert pair.full_count == 2


def test_answer_that_is_empty_because_of_a_quota_tells_nothing_and_loses_nothing() -> None:
    pair = Pair()
    pair.ask()
    pair.high_watermarks["b", 1] += 5
    pair.ask(is_throttled=True)
    assert pair.session.quiet() == {}
    pair.ask()
    assert pair.told == [("b", 1)]
    assert pair.full_count == 1


def test_who_goes_over_to_names_has_no_session_any_more() -> None:
    pair = Pair()
    pair.ask()
    assert (pair.full_count, len(pair.cache)) == (1, 1)
    pair.by_id = False
    assert pair.ask()
    assert (pair.full_count, len(pair.cache)) == (1, 0), "the broker learns that the session is over"
    pair.by_id = True
    assert pair.ask()
    assert (pair.full_count, len(pair.cache)) == (2, 1)


def test_broker_without_room_for_a_session_is_told_all_each_time() -> None:
    pair = Pair(slots=0)
    for turn in range(3):
        keys = KEYS[turn:] + KEYS[:turn]
        pair.ask(keys)
        assert sorted(pair.said) == sorted(pair.told) == sorted(KEYS)
        assert pair.read[0] == keys[0], "whose turn it is"
    assert pair.full_count == 3


def test_one_fetch_alone_wants_no_session() -> None:
    pair = Pair()
    pair.session = FetchSession(lasts=False)
    for _ in range(2):
        pair.ask()
        assert sorted(pair.said) == sorted(KEYS)
    assert (pair.full_count, len(pair.cache)) == (0, 0)


def test_who_was_given_records_is_read_last_next_time() -> None:
    """Otherwise a busy one would starve the others, and who had no room would be taken for one that had."""
    pair = Pair()
    pair.giving = {("a", 1), ("b", 1)}
    given: list[TopicPartition] = []
    for _ in range(5):
        pair.ask()
        given += [key for key in pair.giving if key in pair.session._given]
    assert given == [("a", 1), ("a", 1), ("b", 1), ("a", 1), ("b", 1)], (
        "the first answer is of no session yet"
    )
    assert pair.full_count == 1


def test_whether_all_have_ids() -> None:
    pair = Pair()
    positions = {key: FetchPosition(0, topic_id=UUID(int=1)) for key in KEYS}
    assert pair.session.have_ids(positions)
    assert not pair.session.have_ids({**positions, ("z", 0): FetchPosition(0)})
    pair.session.want(positions, 1, by_id=True)
    assert pair.session.have_ids(positions)
    nameless = {**positions, ("z", 0): FetchPosition(0)}
    pair.session.want(nameless, 1, by_id=False)
    assert not pair.session.have_ids(nameless), "what was asked for by name has none still"


def test_new_ones_are_read_in_the_order_of_the_request_also_where_it_says_all_again() -> None:
    pair = Pair()
    pair.ask([("b", 0), ("c", 0)])
    pair.max_bytes = 50
    pair.giving = {("b", 2)}
    pair.ask([("a", 0), ("b", 1), ("a", 1), ("b", 0), ("c", 0), ("b", 2)])
    assert pair.said == [("b", 0), ("b", 1), ("b", 2), ("c", 0), ("a", 0), ("a", 1)]
    assert pair.read == [("b", 0), ("c", 0), ("b", 1), ("b", 2), ("a", 0), ("a", 1)]
    assert pair.full_count == 1


def test_somebody_whose_log_goes_on_and_who_gets_nothing_is_passed_over() -> None:
    session = FetchSession()
    wanted = {
        ("a", 0): FetchPosition(10, topic_id=UUID(int=1)),
        ("b", 0): FetchPosition(9, topic_id=UUID(int=2)),
    }
    ends = LogEnds(12, 10)
    session.want(wanted, 1, by_id=True)
    session.answered(5, [Answer(("a", 0), ends, False), Answer(("b", 0), ends, True)])
    assert not session.passes_over
    session.want(wanted, 1, by_id=True)
    session.answered(5, [])
    assert session.passes_over
    session.want({("a", 0): wanted["a", 0]}, 1, by_id=True)
    session.answered(5, [])
    assert not session.passes_over, "it is not asked for any more"


def test_epochs_go_round() -> None:
    pair = Pair()
    pair.ask()
    pair.session._epochs.epoch = next(iter(pair.cache._sessions.values())).epoch = LARGEST_EPOCH
    for _ in range(3):
        assert pair.ask()
    assert pair.full_count == 1


@pytest.mark.parametrize("seed", range(40))
def test_reader_knows_what_it_would_know_had_it_asked_for_all_each_time(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(seed=seed)
    answered_count = 0
    for _ in range(200):
        key = rng.choice(KEYS)
        match rng.randrange(10):
            case 0 | 1:
                pair.high_watermarks[key] += rng.choice((1, -1))
            case 2 | 3:
                pair.offsets[key] += 1
            case 4:
                pair.giving ^= {key}
            case 5:
                pair.max_bytes = rng.choice((50, 100))
            case 6 if rng.random() < 0.3:
                pair.ids[key[0]] = UUID(int=rng.getrandbits(100))
            case 7 if rng.random() < 0.2:
                pair.cache = FetchSessionCache(rng.choice((0, 10, 10, 10)), random.Random(rng.random()))
            case 8 if rng.random() < 0.2:
                pair.by_id = not pair.by_id
            case 9 if rng.random() < 0.3:
                pair.session.end()
        due = [each for each in rng.sample(KEYS, len(KEYS)) if rng.random() < 0.9] or KEYS[:1]
        chance = rng.random()
        answered_count += pair.ask(due, is_lost=chance < 0.03, is_throttled=0.03 < chance < 0.06)
    assert answered_count > 150
    assert 0 < pair.full_count < 190
