from __future__ import annotations

import random

import pytest

from millrace.mirror.assignor import read_claims
from millrace.mirror.sharing.assignment import (
    Claim,
    Share,
    assign,
    decode_claim,
    decode_share,
    departed_slots,
    encode_claim,
    encode_share,
    give_slots,
    known_levels,
    uneven_sources,
    withhold_claimed,
)
from millrace.mirror.sharing.balance import WORTH
from millrace.mirror.sharing.rates import level_of
from millrace.mirror.topics.routes import SourcePartition
from tests import seeds


def partitions(count: int, source: str = "ewr", topic: str = "flights") -> list[SourcePartition]:
    return [SourcePartition(source, topic, number) for number in range(count)]


def test_no_workers_gives_nothing() -> None:
    assert assign(partitions(3), {}) == {}


def test_new_worker_takes_only_its_share() -> None:
    everything = partitions(10)
    before = assign(everything, {"a": Claim(frozenset(everything), 1), "b": Claim()})
    assert {worker: len(share) for worker, share in before.items()} == {"a": 5, "b": 5}
    assert set(before["a"]) <= set(everything)


def test_partitions_of_a_dead_worker_go_to_the_others_and_nothing_else_moves() -> None:
    everything = partitions(9)
    shares = assign(everything, dict.fromkeys("abc", Claim()))
    claims = {worker: Claim(frozenset(shares[worker]), 1) for worker in "ab"}
    after = assign(everything, claims)
    for worker in "ab":
        assert set(shares[worker]) <= set(after[worker])


def test_newer_claim_wins() -> None:
    one = partitions(1)
    claims = {"a": Claim(frozenset(one), 3), "b": Claim(frozenset(one), 7)}
    assert assign(one, claims) == {"a": [], "b": one}


def test_worker_whose_config_lacks_a_source_is_given_nothing_of_it() -> None:
    """It would drop what it is given, and nobody would carry that."""
    everything = partitions(6) + partitions(6, source="jfk")
    claims = {
        "a": Claim(sources=frozenset({"ewr", "jfk"})),
        "b": Claim(sources=frozenset({"ewr"})),
        "c": Claim(),  # of an older version: it does not say
    }
    shares = assign(everything, claims)
    assert sorted(key for share in shares.values() for key in share) == sorted(everything)
    assert {key.source for key in shares["b"]} == {"ewr"}
    # The others take more of what it cannot carry.
    assert {worker: len(share) for worker, share in shares.items()} == {"a": 4, "b": 4, "c": 4}
    # What it carried of a source that a reload has taken from it goes to the others.
    claims["b"] = Claim(frozenset(partitions(6, source="jfk")), 3, sources=frozenset({"ewr"}))
    assert {key.source for key in assign(everything, claims)["b"]} == {"ewr"}


def test_workers_whose_sources_are_not_the_leaders_are_named() -> None:
    claims = {
        "leader": Claim(sources=frozenset({"ewr", "jfk"})),
        "less": Claim(sources=frozenset({"ewr"})),
        "other": Claim(sources=frozenset({"ewr", "jfk", "lhr"})),
        "old": Claim(),
    }
    assert uneven_sources(claims, {"ewr", "jfk"}) == {"less": (["jfk"], []), "other": ([], ["lhr"])}


def test_source_that_no_worker_has_is_nobodys() -> None:
    everything = partitions(2) + partitions(2, source="jfk")
    claims = {worker: Claim(sources=frozenset({"ewr"})) for worker in "ab"}
    shares = assign(everything, claims)
    assert sorted(key for share in shares.values() for key in share) == partitions(2)


@pytest.mark.parametrize("sources", [frozenset({"ewr", "jfk"}), frozenset[str](), None])
def test_claim_tells_the_sources_of_its_workers_config(sources: frozenset[str] | None) -> None:
    claim = Claim(frozenset(partitions(1)), 3, sources=sources)
    assert decode_claim(encode_claim(claim)) == claim


def test_topics_are_spread_over_workers() -> None:
    everything = partitions(4, topic="busy") + partitions(4, topic="quiet")
    shares = assign(everything, {"a": Claim(), "b": Claim()})
    assert sum(1 for partition in shares["a"] if partition.topic == "busy") == 2


def test_random_changes_stay_balanced_sticky_and_complete() -> None:
    seed = seeds.given()
    rng = random.Random(seed)
    everything = {
        SourcePartition(f"dc{rng.randrange(3)}", f"t{rng.randrange(5)}", rng.randrange(8)) for _ in range(60)
    }
    workers: dict[str, Claim] = {}
    for generation in range(200):
        if rng.random() < 0.4 or not workers:
            workers[f"w{rng.randrange(1000)}"] = Claim()
        elif rng.random() < 0.3:
            del workers[rng.choice(sorted(workers))]
        if rng.random() < 0.2:
            everything ^= {SourcePartition("dc9", "t", rng.randrange(10))}
        if not workers:
            continue
        shares = assign(everything, workers)
        where = f"seed {seed}, generation {generation}"
        owned = [partition for share in shares.values() for partition in share]
        assert sorted(owned) == sorted(everything), where
        sizes = [len(share) for share in shares.values()]
        assert max(sizes) - min(sizes) <= 2 * WORTH * max(sizes) + 1, where
        for worker, claim in workers.items():
            kept = claim.owned & set(shares[worker])
            share_limit = len(everything) // len(workers)
            assert len(kept) >= min(len(claim.owned & everything), share_limit), where
        workers = {worker: Claim(frozenset(share), generation) for worker, share in shares.items()}


def test_moving_partition_is_withheld_until_its_owner_lets_go() -> None:
    first, second = partitions(2)
    claims = {"a": Claim(frozenset({first, second}), 1), "b": Claim()}
    ideal = assign([first, second], claims)
    now = withhold_claimed(ideal, claims)
    assert len(now["a"]) == 1
    assert now["b"] == []
    claims = {"a": Claim(frozenset(now["a"]), 2), "b": Claim()}
    later = withhold_claimed(assign([first, second], claims), claims)
    assert later == {"a": now["a"], "b": ideal["b"]}


def test_measured_rates_count_also_of_a_partition_that_nobody_carries_now() -> None:
    # Three partitions, one of them as busy as the others together: it is alone on its worker.
    busy, *others = partitions(3)
    levels = {busy: level_of(20e6)} | dict.fromkeys(others, level_of(10e6))
    alone = Claim(frozenset([busy, *others]), 1, levels=levels)
    claims = {"a": alone, "b": Claim()}
    ideal = assign([busy, *others], claims)
    assert [busy] in ideal.values()
    # The round after: what moves is in nobody's claim, and the leader knows its rate from before.
    known = known_levels(claims, {})
    kept = withhold_claimed(ideal, claims)
    claims = {worker: Claim(frozenset(share), 2) for worker, share in kept.items()}
    assert assign([busy, *others], claims, known) == ideal


def test_the_newest_claim_knows_the_rate() -> None:
    (one,) = partitions(1)
    claims = {"a": Claim(generation=7, levels={one: 5}), "b": Claim(generation=3, levels={one: 9})}
    assert known_levels(claims, {one: 1}) == {one: 5}
    assert known_levels({}, {one: 1}) == {one: 1}


def test_messages_survive_the_wire() -> None:
    everything = frozenset(partitions(3) + partitions(2, "jfk", "orders"))
    assert decode_claim(encode_claim(Claim(everything, 7))) == Claim(everything, 7)
    measured = Claim(everything, 7, levels=dict.fromkeys(everything, 12))
    assert decode_claim(encode_claim(measured)) == measured
    assert decode_claim(b'{"version":1,"generation":1,"partitions":{},"rates":{"a":[1]}}').levels == {}
    assert decode_share(encode_share(Share(tuple(everything)))).partitions == tuple(sorted(everything))
    assert decode_share(b"") == Share()


def test_each_return_to_a_seat_makes_another_claim() -> None:
    """To the same one the group would answer with the share that it has, which is the former worker's."""
    first, second = (encode_claim(Claim(is_settling=True, member_id=each)) for each in "ab")
    assert first != second
    assert decode_claim(first).is_settling
    assert encode_claim(Claim(member_id="a")) == encode_claim(Claim(member_id="b")), (
        "settled, it is nothing new"
    )


@pytest.mark.parametrize("data", [b"{}", b"[]", b"\x00", b'{"version":2,"partitions":{}}', b'{"version":1}'])
def test_foreign_message_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_share(data)


@pytest.mark.parametrize(
    "partitions", ['{"ewr":[1]}', '{"ewr":{"t":1}}', '{"ewr":{"t":[null]}}', '{"ewr":7}']
)
def test_claim_that_names_its_partitions_in_another_way_is_none(partitions: str) -> None:
    claim = f'{{"version":1,"generation":1,"partitions":{partitions}}}'.encode()
    assert read_claims({"m": claim}) == {"m": Claim()}


def test_lanes_that_no_mirror_has_are_not_fenced() -> None:
    claim = b'{"version":1,"generation":1,"partitions":{},"slot":0,"lanes":%d,"slots":{"7":%d,"8":12}}'
    assert decode_claim(claim % (10**9, 10**9)) == Claim(frozenset(), 1, 0, 0, {8: 12})


def test_slots_are_kept_and_the_lowest_free_one_is_given() -> None:
    workers = {
        "a": Claim(slot=2, lane_count=12, generation=5),
        "b": Claim(lane_count=12),
        "c": Claim(slot=0, lane_count=12, generation=5),
        "d": Claim(),
    }
    assert give_slots(workers) == {"a": 2, "b": 1, "c": 0}


def test_slot_that_two_claim_stays_with_the_newer_claim() -> None:
    workers = {
        "a": Claim(slot=0, lane_count=12, generation=4),
        "b": Claim(slot=0, lane_count=12, generation=5),
    }
    assert give_slots(workers) == {"a": 1, "b": 0}


def test_slots_that_anybody_remembers_and_nobody_holds_have_departed() -> None:
    workers = {
        "a": Claim(slot=0, lane_count=12, seen_slots={0: 12, 1: 8}),
        "b": Claim(lane_count=12, seen_slots={3: 4}),
    }
    assert departed_slots(workers, {0: 12, 2: 6}) == {1: 8, 2: 6, 3: 4}


def test_slots_survive_the_messages() -> None:
    claim = Claim(frozenset(), 7, 3, 12, {3: 12, 4: 8})
    assert decode_claim(encode_claim(claim)) == claim
    share = Share((), 3, {3: 12, 4: 8})
    assert decode_share(encode_share(share)) == share
