"""Who reads what in the old model: the vectors of the design note, then any group, then Algorithm 1."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions, checked_name
from millrace.broker.coordination.zookeeper_consumer.rules import (
    Claim,
    GroupView,
    Pattern,
    Pause,
    ReadGroup,
    RebalanceFailed,
    RebalanceLimits,
    Register,
    ReleaseAll,
    Share,
    StartStreams,
    StopStreams,
    Subscription,
    ThreadId,
    assign_range,
    consumer_id,
    filter_subscription,
    rebalance,
    share_of,
    static_subscription,
    threads_of,
)
from millrace.broker.errors import ConfigError

TOPIC = "orders"


def group(streams: dict[str, int]) -> dict[str, Subscription]:
    return {name: Subscription(Pattern.STATIC, {TOPIC: count}) for name, count in streams.items()}


def ranges(partitions: int, streams: dict[str, int]) -> str:
    """`01|23`: the partitions of each thread in order, threads without any left out."""
    threads = threads_of(TOPIC, group(streams), True)
    given = assign_range(range(partitions), threads)
    return "|".join("".join(map(str, given[thread])) for thread in threads if given[thread])


@pytest.mark.parametrize(
    ("partitions", "streams", "expected"),
    [
        (4, {"a": 1, "b": 1}, "01|23"),
        (4, {"a": 1, "b": 1, "c": 1}, "01|2|3"),
        (4, {"a": 2, "b": 2, "c": 2}, "0|1|2|3"),
        (5, {"a": 1, "b": 1}, "012|34"),
        (5, {"a": 2, "b": 2}, "01|2|3|4"),
        (1, {"a": 1, "b": 1}, "0"),
        (10, {"a": 1, "b": 1, "c": 1}, "0123|456|789"),
    ],
)
def test_the_vectors_of_the_design_note(partitions: int, streams: dict[str, int], expected: str) -> None:
    assert ranges(partitions, streams) == expected


def test_of_six_threads_over_four_partitions_the_last_two_are_idle() -> None:
    threads = threads_of(TOPIC, group({"a": 2, "b": 2, "c": 2}), True)
    given = assign_range(range(4), threads)
    assert [given[thread] for thread in threads] == [(0,), (1,), (2,), (3,), (), ()]
    assert [str(thread) for thread in threads] == ["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"]


def test_threads_are_sorted_as_text_as_kafka_sorts_them() -> None:
    """Kafka's own consumers compare "consumer-thread": with numbers, a mixed group would never agree."""
    threads = threads_of(TOPIC, group({"g_b": 1, "g_a": 11}), True)
    assert [str(thread) for thread in threads][:4] == ["g_a-0", "g_a-1", "g_a-10", "g_a-2"]
    assert str(threads[-1]) == "g_b-0"
    # Java compares UTF-16 units: a surrogate pair is before U+FF5E.
    assert [thread.consumer for thread in threads_of(TOPIC, group({"\uff5e": 1, "\U0001f600": 1}), True)] == [
        "\U0001f600",
        "\uff5e",
    ]


def test_a_consumer_id_is_group_host_timestamp_and_eight_digits() -> None:
    unique = uuid.UUID("deadbeef-1234-5678-9abc-def012345678")
    assert consumer_id("billing", "web1", 1411294187842, unique) == "billing_web1-1411294187842-deadbeef"


names = st.text("ab-_.019", min_size=1, max_size=6)
groups = st.dictionaries(names, st.integers(1, 12), min_size=1, max_size=8)


@given(st.sets(st.integers(0, 200), max_size=40), groups, st.randoms(use_true_random=False))
def test_every_partition_has_one_owner_and_shares_differ_by_one(
    partitions: set[int], streams: dict[str, int], rng: Any
) -> None:
    shuffled = list(streams.items())
    rng.shuffle(shuffled)
    order = list(partitions)
    rng.shuffle(order)
    view = GroupView(group(dict(shuffled)), {TOPIC: order})
    owners: dict[int, ThreadId] = {}
    for consumer in streams:
        for (topic, partition), thread in share_of(consumer, view).items():
            assert topic == TOPIC and thread.consumer == consumer
            assert partition not in owners, "two owners"
            owners[partition] = thread
    assert set(owners) == partitions
    counts = [
        list(owners.values()).count(ThreadId(name, number))
        for name, count in streams.items()
        for number in range(count)
    ]
    assert max(counts) - min(counts) <= 1
    # Ranges in the order of threads, and the same whatever order the registry was read in.
    by_partition = [str(owners[partition]) for partition in sorted(partitions)]
    assert by_partition == sorted(by_partition)
    again = GroupView(group(streams), {TOPIC: sorted(partitions)})
    assert all(share_of(name, again) == share_of(name, view) for name in streams)


@given(groups, st.integers(1, 30))
def test_the_first_thread_keeps_the_first_partition_whoever_joins_behind_it(
    streams: dict[str, int], partitions: int
) -> None:
    view = GroupView(group(streams), {TOPIC: range(partitions)})
    joined = GroupView(group({**streams, "zz": 1}), {TOPIC: range(partitions)})
    first = threads_of(TOPIC, view.members, True)[0].consumer
    before, after = share_of(first, view), share_of(first, joined)
    assert before[TOPIC, 0] == after[TOPIC, 0]


def test_topics_are_shared_one_by_one_among_those_who_subscribe() -> None:
    members = {
        "a": static_subscription({"x": 1, "y": 1}),
        "b": static_subscription({"y": 2}),
        "c": filter_subscription("x|z", None, 1),
        "d": filter_subscription(None, "x", 1),
    }
    view = GroupView(members, {"x": range(4), "y": range(4), "z": range(2)})
    assert set(share_of("a", view)) == {("x", 0), ("x", 1), ("y", 0)}
    assert share_of("b", view) == {("y", 1): ThreadId("b", 0), ("y", 2): ThreadId("b", 1)}
    assert set(share_of("c", view)) == {("x", 2), ("x", 3), ("z", 0)}
    assert set(share_of("d", view)) == {("y", 3), ("z", 1)}
    assert share_of("stranger", view) == {}


def test_filters_match_whole_names_and_leave_internal_topics_out() -> None:
    white = filter_subscription("log-.*", None, 2)
    assert (white.pattern, dict(white.streams)) == (Pattern.WHITE_LIST, {"log-.*": 2})
    assert [white.count_for(topic) for topic in ("log-a", "my-log-a", "log")] == [2, 0, 0]
    black = filter_subscription(None, "log-.*", 1)
    assert [black.count_for(topic) for topic in ("log-a", "other", "__consumer_offsets")] == [0, 1, 0]
    assert black.count_for("__consumer_offsets", exclude_internal=False) == 1
    assert static_subscription({"__consumer_offsets": 1}).count_for("__consumer_offsets") == 1


@pytest.mark.parametrize(
    ("raw", "cleaned"), [("a,b", "a|b"), (' "a.* , b" ', "a.*|b"), ("'x'", "x"), ("plain", "plain")]
)
def test_a_filter_is_cleaned_as_kafka_cleans_it(raw: str, cleaned: str) -> None:
    assert list(filter_subscription(raw, None, 1).streams) == [cleaned]


@pytest.mark.parametrize(
    "make",
    [
        lambda: filter_subscription("a(", None, 1),
        lambda: filter_subscription(None, None, 1),
        lambda: filter_subscription("a", "b", 1),
        lambda: filter_subscription("a", None, 0),
        lambda: static_subscription({}),
        lambda: static_subscription({"a": 0}),
        lambda: static_subscription({"a/b": 1}),
        lambda: checked_name("group", "a/b"),
        lambda: checked_name("group", ""),
        lambda: ConsumerOptions(auto_offset_reset="latest"),
        lambda: ConsumerOptions(queued_max_bytes=0),
        # A killed consumer's znodes outlive the patience of the others.
        lambda: ConsumerOptions(rebalance_max_retries=2, rebalance_backoff_ms=2_000),
    ],
)
def test_wrong_settings_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


# -- Algorithm 1, step by step ---------------------------------------------------------------------------

VIEW = GroupView(group({"me": 1, "you": 1}), {TOPIC: range(4)})
MINE: Share = {(TOPIC, 0): ThreadId("me", 0), (TOPIC, 1): ThreadId("me", 0)}
LIMITS = RebalanceLimits(max_retries=4, backoff_ms=2_000)


def walk(
    held: Share | None, answers: Sequence[Any], limits: RebalanceLimits = LIMITS
) -> tuple[list[Any], Any]:
    """The steps that are asked for, given these answers to the ones that have one; and the outcome."""
    steps = rebalance("me", held, LIMITS)
    given = iter(answers)
    seen: list[Any] = []
    try:
        step = next(steps)
        while True:
            seen.append(step)
            has_answer = isinstance(step, ReadGroup | Claim | Pause)
            step = steps.send(next(given) if has_answer else None)
    except StopIteration as end:
        return seen, end.value


def test_a_first_share_is_claimed_before_it_is_read() -> None:
    seen, owned = walk(None, [VIEW, ()])
    assert seen == [ReadGroup(), StopStreams(), ReleaseAll(), Claim(MINE), StartStreams(MINE)]
    assert owned == MINE


def test_one_who_is_not_registered_registers_and_looks_again() -> None:
    without_me = GroupView(group({"you": 1}), VIEW.partitions)
    seen, _ = walk(None, [without_me, VIEW, ()])
    assert seen[:3] == [ReadGroup(), Register(), ReadGroup()]


def test_an_unchanged_share_moves_nothing() -> None:
    assert walk(MINE, [VIEW]) == ([ReadGroup()], MINE)


def test_a_changed_share_is_stopped_and_given_back_whole_first() -> None:
    alone = GroupView(group({"me": 1}), VIEW.partitions)
    everything = {(TOPIC, number): ThreadId("me", 0) for number in range(4)}
    seen, owned = walk(MINE, [alone, ()])
    assert seen == [ReadGroup(), StopStreams(), ReleaseAll(), Claim(everything), StartStreams(everything)]
    assert owned == everything


def test_on_a_conflict_everything_is_released_and_the_registry_read_anew() -> None:
    seen, owned = walk(None, [VIEW, [(TOPIC, 1)], 2_000, VIEW, ()])
    assert seen == [
        ReadGroup(),
        StopStreams(),
        ReleaseAll(),
        Claim(MINE),
        ReleaseAll(),
        Pause(2_000, ((TOPIC, 1),)),
        ReadGroup(),
        Claim(MINE),
        StartStreams(MINE),
    ]
    assert owned == MINE


def test_after_a_conflict_even_the_old_share_is_claimed_again() -> None:
    """It was given back: that the view is the old one again does not make it owned."""
    changed = GroupView(group({"me": 1, "you": 1, "he": 1}), VIEW.partitions)
    seen, owned = walk(MINE, [changed, [(TOPIC, 1)], 100, VIEW, ()])
    assert seen[-2:] == [Claim(MINE), StartStreams(MINE)] and owned == MINE


def test_conflicts_may_last_for_all_retries_and_no_longer() -> None:
    rounds = [VIEW, [(TOPIC, 0), (TOPIC, 1)], 2_000]
    with pytest.raises(RebalanceFailed, match=re.escape("orders-0 and 1 more")):
        walk(None, [*rounds * 4, VIEW, [(TOPIC, 0), (TOPIC, 1)]])
    _, owned = walk(None, [*rounds * 4, VIEW, ()])
    assert owned == MINE


def test_pauses_cut_short_do_not_use_up_the_retries_but_end_too() -> None:
    rounds = [VIEW, [(TOPIC, 0)], 0]
    _, owned = walk(None, [*rounds * 50, VIEW, ()])
    assert owned == MINE
    with pytest.raises(RebalanceFailed):
        walk(None, [*rounds * 80, VIEW, [(TOPIC, 0)]])
