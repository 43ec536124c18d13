from __future__ import annotations

import random

import pytest

from millrace.mirror.assignment import (
    Claim,
    assign,
    decode_assignment,
    decode_claim,
    encode_assignment,
    encode_claim,
    withhold_claimed,
)
from millrace.mirror.routes import SourcePartition


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


def test_topics_are_spread_over_workers() -> None:
    everything = partitions(4, topic="busy") + partitions(4, topic="quiet")
    shares = assign(everything, {"a": Claim(), "b": Claim()})
    assert sum(1 for partition in shares["a"] if partition.topic == "busy") == 2


def test_random_changes_stay_balanced_sticky_and_complete() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
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
        assert max(sizes) - min(sizes) <= 1, where
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


def test_messages_survive_the_wire() -> None:
    everything = frozenset(partitions(3) + partitions(2, "jfk", "orders"))
    assert decode_claim(encode_claim(Claim(everything, 7))) == Claim(everything, 7)
    assert decode_assignment(encode_assignment(everything)) == sorted(everything)
    assert decode_assignment(b"") == []


@pytest.mark.parametrize("data", [b"{}", b"[]", b"\x00", b'{"version":2,"partitions":{}}', b'{"version":1}'])
def test_foreign_message_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_assignment(data)
