"""Wishes: the newest word about a partition counts, and a skip lets one gap pass and no other."""

from __future__ import annotations

import random

import pytest

from millrace.mirror.control.wishes import (
    Scope,
    Wishes,
    WishKind,
    WishRecord,
    encode_key,
    encode_value,
    retry_record,
    skip_record,
    skipped_record,
    throttle_record,
)
from millrace.mirror.gaps.gaps import Gap, GapClass
from millrace.mirror.topics.routes import SourcePartition

EWR_0 = SourcePartition("ewr", "flights", 0)
EWR_1 = SourcePartition("ewr", "flights", 1)
EWR_ORDERS = SourcePartition("ewr", "orders", 0)
LHR = SourcePartition("lhr", "flights", 0)
PARTITIONS = (EWR_0, EWR_1, EWR_ORDERS, LHR)
SCOPES = (
    Scope(),
    Scope("ewr"),
    Scope("lhr"),
    Scope("ewr", "flights"),
    Scope(None, "flights"),
    Scope("ewr", "flights", 0),
    Scope("ewr", "orders", 0),
)


class Topic:
    """A control topic: what is written is applied, and kept as compaction would keep it."""

    def __init__(self) -> None:
        self.wishes = Wishes()
        self.log: list[WishRecord] = []

    def write(self, *records: WishRecord) -> None:
        for record in records:
            self.log.append(record)
            self.wishes.apply(*record)

    def say(self, scope: Scope, paused: bool) -> None:
        self.write(*self.wishes.pause_records(scope, paused=paused, at_ms=1))

    def compacted(self) -> list[WishRecord]:
        newest = {key: index for index, (key, _) in enumerate(self.log)}
        return [
            record
            for index, record in enumerate(self.log)
            if newest[record[0]] == index and record[1] is not None
        ]

    def paused(self) -> set[SourcePartition]:
        return {partition for partition in PARTITIONS if self.wishes.is_paused(partition)}


def test_the_newest_word_about_a_partition_counts() -> None:
    topic = Topic()
    assert topic.paused() == set()
    topic.say(Scope("ewr"), True)
    assert topic.paused() == {EWR_0, EWR_1, EWR_ORDERS}
    topic.say(Scope("ewr", "flights"), False)
    assert topic.paused() == {EWR_ORDERS}
    topic.say(Scope("ewr", "flights", 1), True)
    assert topic.paused() == {EWR_ORDERS, EWR_1}
    topic.say(Scope("ewr"), True)
    assert topic.paused() == {EWR_0, EWR_1, EWR_ORDERS}
    topic.say(Scope(), False)
    assert topic.paused() == set()
    assert topic.wishes.paused_scopes == {}


def test_what_goes_on_of_what_is_paused_is_told_with_it() -> None:
    topic = Topic()
    topic.say(Scope("ewr"), True)
    topic.say(Scope("lhr"), False)
    topic.say(Scope("ewr", "flights", 0), False)
    topic.say(Scope(None, "orders"), False)
    assert topic.wishes.paused_scopes == {
        Scope("ewr"): [Scope(None, "orders"), Scope("ewr", "flights", 0)],
    }
    topic.say(Scope("ewr", "flights", 0), True)
    assert topic.wishes.paused_scopes == {
        Scope("ewr"): [Scope(None, "orders")],
        Scope("ewr", "flights", 0): [],
    }
    topic.say(Scope("ewr"), True)
    assert topic.wishes.paused_scopes == {Scope("ewr"): []}
    # Of two that were said at once: neither took the other's record away.
    topic.wishes.apply(encode_key(WishKind.PAUSE, Scope()), encode_value(1, paused=False))
    assert topic.wishes.paused_scopes == {}


def test_random_histories_agree_with_a_model_and_survive_compaction() -> None:
    for seed in range(300):
        choose = random.Random(seed)
        topic, truth = Topic(), dict.fromkeys(PARTITIONS, False)
        for _ in range(choose.randrange(1, 12)):
            scope, paused = choose.choice(SCOPES), choose.random() < 0.5
            topic.say(scope, paused)
            truth.update({partition: paused for partition in PARTITIONS if scope.covers(partition)})
        expected = {partition for partition, paused in truth.items() if paused}
        assert topic.paused() == expected, f"seed {seed}"
        told = {
            partition
            for scope, resumed in topic.wishes.paused_scopes.items()
            for partition in PARTITIONS
            if scope.covers(partition) and not any(each.covers(partition) for each in resumed)
        }
        assert told == expected, f"seed {seed}"
        after_restart = Wishes()
        for record in topic.compacted():
            after_restart.apply(*record)
        seen = {partition for partition in PARTITIONS if after_restart.is_paused(partition)}
        assert seen == expected, f"seed {seed}, after compaction"
        assert len(topic.compacted()) <= len(SCOPES)


def test_narrower_words_are_removed_by_a_wider_one() -> None:
    topic = Topic()
    topic.say(Scope("ewr", "flights", 0), True)
    topic.say(Scope("lhr"), True)
    topic.say(Scope("ewr"), True)
    keys = [key for key, _ in topic.compacted()]
    assert keys == [encode_key(WishKind.PAUSE, Scope("lhr")), encode_key(WishKind.PAUSE, Scope("ewr"))]


def gap(partition: SourcePartition = EWR_0, first: int = 7, kind: GapClass = GapClass.EXPIRED) -> Gap:
    return Gap(partition, first, first + 5, kind, "for people", 1)


def test_a_skip_lets_one_gap_pass_and_no_other() -> None:
    topic = Topic()
    topic.write(skip_record(EWR_0, 7, "expired", 1))
    assert topic.wishes.skips(gap())
    assert not topic.wishes.skips(gap(first=12))
    assert not topic.wishes.skips(gap(kind=GapClass.RECREATED))
    assert not topic.wishes.skips(gap(partition=EWR_1))
    assert topic.wishes.skipped_partitions == {EWR_0: 7}
    topic.write(skipped_record(EWR_0))
    assert not topic.wishes.skips(gap())
    assert topic.wishes.skipped_partitions == {}


def test_a_rate_is_of_one_source_and_can_be_lifted() -> None:
    topic = Topic()
    topic.write(throttle_record("ewr", 1_000_000, 1), throttle_record("lhr", 5, 1))
    assert topic.wishes.rate_of("ewr") == 1_000_000
    assert topic.wishes.rate_of("agg") is None
    topic.write(throttle_record("ewr", None, 2))
    assert (topic.wishes.rate_of("ewr"), topic.wishes.rate_of("lhr")) == (None, 5)


def test_a_retry_is_told_and_leaves_nothing_behind() -> None:
    wishes = Wishes()
    wish = wishes.apply(*retry_record(Scope("ewr", "flights"), 1))
    assert wish is not None
    assert (wish.kind, wish.scope, wish.is_removal) == (WishKind.RETRY, Scope("ewr", "flights"), False)
    assert not wishes.is_paused(EWR_0)


@pytest.mark.parametrize(
    "record",
    [
        (None, b"{}"),
        (b"not json", b"{}"),
        (b'{"wish":"fly","source":"ewr"}', encode_value(1)),
        (b'{"wish":"pause","source":1,"topic":null,"partition":null}', encode_value(1, paused=True)),
        (b'{"wish":"pause","source":"ewr","topic":null,"partition":"0"}', encode_value(1, paused=True)),
        (b"[]", b"{}"),
        (encode_key(WishKind.PAUSE, Scope("ewr")), b'{"version":2,"paused":true}'),
        (encode_key(WishKind.PAUSE, Scope("ewr")), encode_value(1, paused="yes")),
        (encode_key(WishKind.PAUSE, Scope("ewr")), encode_value(1)),
        (encode_key(WishKind.THROTTLE, Scope("ewr")), encode_value(1, bytes_per_second=0)),
        (encode_key(WishKind.THROTTLE, Scope("ewr")), encode_value(1, bytes_per_second=float("nan"))),
        (encode_key(WishKind.THROTTLE, Scope("ewr")), encode_value(1, bytes_per_second=10**400)),
        (encode_key(WishKind.THROTTLE, Scope("ewr")), b'{"version":1,"bytes_per_second":1e999}'),
        (encode_key(WishKind.THROTTLE, Scope("ewr")), encode_value(1, bytes_per_second=2**53 + 2)),
        (encode_key(WishKind.THROTTLE, Scope("ewr")), encode_value(1, bytes_per_second=5e-324)),
        (encode_key(WishKind.SKIP, Scope("ewr", "flights", 0)), b'{"version":1,"from":1e999,"class":"x"}'),
        (encode_key(WishKind.SKIP, Scope("ewr", "flights", 0)), encode_value(1)),
        (encode_key(WishKind.PAUSE, Scope("ewr")), b"\xff"),
    ],
)
def test_what_is_not_understood_is_no_wish(record: tuple[bytes | None, bytes]) -> None:
    wishes = Wishes()
    assert wishes.apply(*record) is None
    assert not any(wishes.is_paused(partition) for partition in PARTITIONS)
    assert wishes.rate_of("ewr") is None
    assert wishes.skipped_partitions == {}


@pytest.mark.parametrize(
    ("scope", "text"),
    [
        (Scope(), "all"),
        (Scope("ewr"), "ewr"),
        (Scope("ewr", "flights"), "ewr/flights"),
        (Scope("ewr", "flights", 3), "ewr/flights:3"),
        (Scope(None, "flights"), "*/flights"),
    ],
)
def test_a_scope_reads_as_it_is_typed(scope: Scope, text: str) -> None:
    assert str(scope) == text
