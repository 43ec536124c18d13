"""Sharing out by weight: nothing twice, nothing left, loads bounded, few moves, one answer everywhere."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.mirror.sharing.balance import PARTITION_WEIGHT, WORTH, level_out, weights_of
from millrace.mirror.sharing.rates import level_of, rate_of
from millrace.mirror.topics.routes import SourcePartition

Kept = dict[str, list[SourcePartition]]

_partitions = st.builds(
    SourcePartition,
    st.sampled_from(["ewr", "jfk"]),
    st.sampled_from(["flights", "orders", "clicks"]),
    st.integers(0, 40),
)
_rates = st.one_of(st.just(0.0), st.floats(1e3, 1e9))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Kept, dict[SourcePartition, float], list[SourcePartition]]:
    """Workers with what they carry, rates of some partitions, and all partitions."""
    everything = draw(st.lists(_partitions, unique=True, max_size=60))
    names = draw(st.lists(st.sampled_from("abcdefg"), unique=True, min_size=1))
    kept: Kept = {name: [] for name in names}
    for partition in everything:
        owner = draw(st.sampled_from([*names, None]))
        if owner is not None:
            kept[owner].append(partition)
    rates = {partition: draw(_rates) for partition in everything if draw(st.booleans())}
    return kept, rates, everything


@given(situations())
@settings(max_examples=120, deadline=None)
def test_one_owner_each_and_even_loads(
    situation: tuple[Kept, dict[SourcePartition, float], list[SourcePartition]],
) -> None:
    kept, rates, everything = situation
    shares = level_out(everything, kept, rates)
    assert set(shares) == set(kept)
    assert sorted(each for share in shares.values() for each in share) == sorted(everything)

    # A worker has about a tenth too much, or one partition that no other could carry more easily.
    weights = weights_of(everything, rates)
    loads = {name: sum(weights[each] for each in share) for name, share in shares.items()}
    for name, share in shares.items():
        largest = max((weights[each] for each in share), default=0.0)
        assert loads[name] - min(loads.values()) <= largest + loads[name] * 2 * WORTH * 1.000001

    # Nobody's order, and no second look, changes anything.
    backwards = {name: list(reversed(kept[name])) for name in reversed(list(kept))}
    assert level_out(list(reversed(everything)), backwards, rates) == shares
    assert level_out(everything, shares, rates) == shares


@given(situations(), st.integers(0, 1 << 30))
@settings(max_examples=80, deadline=None)
def test_what_is_measured_anew_moves_nothing_while_it_is_about_the_same(
    situation: tuple[Kept, dict[SourcePartition, float], list[SourcePartition]], seed: int
) -> None:
    kept, rates, everything = situation
    rng = random.Random(seed)
    shares = level_out(everything, kept, rates)
    # Workers that are even to a few per cent stay as they are when everything is a few per cent different.
    loads = [sum(weights_of(share, rates).values()) for share in shares.values()]
    if max(loads) - min(loads) > max(loads) * 0.04:
        return
    again = {partition: rate * rng.uniform(0.98, 1.02) for partition, rate in rates.items()}
    assert level_out(everything, shares, again) == shares


@given(situations())
@settings(max_examples=80, deadline=None)
def test_when_a_worker_leaves_only_its_partitions_find_new_owners_if_that_is_even(
    situation: tuple[Kept, dict[SourcePartition, float], list[SourcePartition]],
) -> None:
    kept, _, everything = situation
    shares = level_out(everything, kept, {})
    if len(shares) < 2:
        return
    gone = sorted(shares)[0]
    left = {name: share for name, share in shares.items() if name != gone}
    after = level_out(everything, left, {})
    for name, share in left.items():
        assert set(share) <= set(after[name])


def test_without_measurements_the_numbers_are_even() -> None:
    everything = [SourcePartition("ewr", "flights", number) for number in range(100)]
    shares = level_out(everything, {"a": everything, "b": [], "c": []}, {})
    sizes = sorted(len(share) for share in shares.values())
    assert sizes[2] - sizes[0] <= 100 / 3 * WORTH + 1
    moved = 100 - len(shares["a"])
    assert moved <= 67  # each went once, to where it stays


def test_a_busy_partition_counts_for_many_idle_ones() -> None:
    busy = SourcePartition("ewr", "busy", 0)
    idle = [SourcePartition("ewr", "idle", number) for number in range(30)]
    rates = {busy: rate_of(level_of(30e6))}
    shares = level_out([busy, *idle], {"a": [], "b": []}, rates)
    carrier = "a" if busy in shares["a"] else "b"
    assert shares[carrier] == [busy]
    # The other is not disturbed by the idle ones that it has; when the busy one goes quiet they are shared.
    quiet = level_out([busy, *idle], shares, {})
    assert abs(len(quiet["a"]) - len(quiet["b"])) <= 4
    assert busy in quiet[carrier]


def test_a_small_difference_moves_nothing() -> None:
    everything = [SourcePartition("ewr", "flights", number) for number in range(100)]
    kept = {"a": everything[:53], "b": everything[53:]}
    assert level_out(everything, kept, {}) == kept
    rates = {partition: rate_of(level_of(1e6)) for partition in everything}
    assert level_out(everything, kept, rates) == kept


def test_idle_partitions_are_not_moved_away_from_a_busy_one() -> None:
    # All three together are a thousandth of what their worker carries.
    busy, *idle = [SourcePartition("ewr", "flights", number) for number in range(4)]
    kept = {"a": [busy, *idle], "b": []}
    assert level_out([busy, *idle], kept, {busy: 50e6}) == kept


def test_many_partitions_are_shared_in_bounded_work() -> None:
    rng = random.Random(7)
    everything = [SourcePartition(f"dc{n % 5}", f"t{n % 97}", n) for n in range(5_000)]
    rates = {each: rng.paretovariate(1.2) * 1e4 for each in everything}
    kept: Kept = {f"w{n}": everything[n::10] for n in range(10)} | {"new": []}
    shares = level_out(everything, kept, rates)
    moved = sum(len(set(kept[name]) - set(share)) for name, share in shares.items())
    assert moved <= len(everything) * 0.4
    loads = [sum(weights_of(share, rates).values()) for share in shares.values()]
    largest = max(rates.values()) + PARTITION_WEIGHT
    assert max(loads) - min(loads) <= max(largest, max(loads) * WORTH * 1.01)


@given(situations(), st.dictionaries(st.sampled_from("abcdefg"), st.sets(st.sampled_from(["ewr", "jfk"]))))
@settings(max_examples=80, deadline=None)
def test_nobody_is_given_what_it_cannot_carry_and_nothing_is_left_that_somebody_can(
    situation: tuple[Kept, dict[SourcePartition, float], list[SourcePartition]], sources: dict[str, set[str]]
) -> None:
    kept, rates, everything = situation
    able = {name: sources.get(name, {"ewr", "jfk"}) for name in kept}
    kept = {name: [each for each in share if each.source in able[name]] for name, share in kept.items()}
    shares = level_out(everything, kept, rates, sources)
    for name, share in shares.items():
        assert {each.source for each in share} <= able[name]
    given_out = sorted(each for share in shares.values() for each in share)
    assert given_out == sorted(each for each in everything if any(each.source in of for of in able.values()))
    assert level_out(everything, shares, rates, sources) == shares
