"""Uneven load, from the bytes that workers measure to the partitions that move: the group's rounds as workers
and their leader play them, with the messages that go over the wire."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from millrace.mirror.sharing.assignment import (
    Claim,
    Share,
    assign,
    decode_claim,
    decode_share,
    encode_claim,
    encode_share,
    known_levels,
    withhold_claimed,
)
from millrace.mirror.sharing.balance import WORTH
from millrace.mirror.sharing.rates import STALE_AFTER_MS, Workload, rate_of
from millrace.mirror.topics.routes import SourcePartition
from tests import seeds

SAMPLE_MS = 5_000
MEGABYTE = 1_000_000


@dataclass(eq=False)
class Worker:
    owned: set[SourcePartition] = field(default_factory=set)
    generation: int = -1
    workload: Workload = field(default_factory=Workload)


class Group:
    """Workers and what their leader remembers. `rates` are bytes a second of each partition, as they are."""

    def __init__(self, rates: dict[SourcePartition, float], workers: int) -> None:
        self.rates = rates
        self.workers = {f"w{number}": Worker() for number in range(workers)}
        self.now_ms = 0
        self.rounds = 0
        self.moves = 0
        self._levels: dict[SourcePartition, int] = {}

    def share_out(self) -> None:
        """Rounds until nobody has to give anything up."""
        is_over = False
        while not is_over:
            self.rounds += 1
            messages = {
                name: encode_claim(
                    Claim(
                        frozenset(each.owned),
                        each.generation,
                        levels=each.workload.tell(self.now_ms),
                        is_settling=each.workload.is_settling,
                    )
                )
                for name, each in self.workers.items()
            }
            claims = {name: decode_claim(message) for name, message in messages.items()}
            self._levels = known_levels(claims, self._levels)
            given = withhold_claimed(assign(self.rates, claims, self._levels), claims)
            is_over = True
            for name, worker in self.workers.items():
                share = set(decode_share(encode_share(Share(tuple(given[name])))).partitions)
                others = {key for other, claim in claims.items() if other != name for key in claim.owned}
                assert not share & others, "nobody is given what another one still carries"
                self.moves += len(worker.owned - share)
                is_over &= worker.owned <= share  # who gives something up joins again without it
                worker.owned, worker.generation = share, self.rounds
        carried = [partition for worker in self.workers.values() for partition in worker.owned]
        assert sorted(carried) == sorted(self.rates)

    def run(self, seconds: int, noise: random.Random | None = None) -> int:
        """Carries on; how often somebody asked for the work to be shared out anew. With `noise` the bytes of
        every few seconds are others, up to half as many again or as few."""
        asked = 0
        for _ in range(seconds * 1000 // SAMPLE_MS):
            self.now_ms += SAMPLE_MS
            for worker in self.workers.values():
                for partition in worker.owned:
                    size = self.rates[partition] * SAMPLE_MS / 1000
                    worker.workload.add(partition, int(size * (noise.uniform(0.5, 1.5) if noise else 1)))
            stale = [each.workload.sample(each.owned, self.now_ms) for each in self.workers.values()]
            if any(stale):
                asked += 1
                self.share_out()
        return asked

    def restart(self, name: str, backlog_s: int) -> None:
        """A worker with a name, the leader, is back on its partitions; so much had waited for it."""
        worker = self.workers[name]
        worker.workload = Workload()
        worker.workload.settle()
        self._levels = {}
        self.share_out()
        worker.workload.sample(worker.owned, self.now_ms)
        for partition in worker.owned:
            worker.workload.add(partition, int(self.rates[partition] * backlog_s))

    def load(self, name: str) -> float:
        return sum(self.rates[partition] for partition in self.workers[name].owned)


def test_a_worker_whose_partitions_become_busy_gives_some_of_them_away() -> None:
    partitions = [SourcePartition("ewr", "flights", number) for number in range(12)]
    group = Group(dict.fromkeys(partitions, 0.1 * MEGABYTE), 2)
    group.share_out()
    assert [len(worker.owned) for worker in group.workers.values()] == [6, 6]
    assert group.run(300) == 0, "even and steady: nobody is disturbed"

    busy = sorted(group.workers["w0"].owned)[:4]
    group.rates |= dict.fromkeys(busy, 5 * MEGABYTE)  # all of them are one worker's
    assert group.load("w0") > 20 * group.load("w1")
    moved_before = group.moves
    assert 1 <= group.run(900) <= 5
    assert abs(group.load("w0") - group.load("w1")) < 0.1 * (group.load("w0") + group.load("w1"))
    assert sum(partition in group.workers["w0"].owned for partition in busy) == 2
    assert group.moves - moved_before <= 4, "no more than that takes"

    settled = group.moves
    group.run(3600)
    assert group.moves == settled, "then it rests"


def test_one_hot_partition_comes_to_lie_apart_from_the_cold_ones_and_stays_there() -> None:
    seed = seeds.given()
    rng = random.Random(seed)
    for _ in range(6):
        partitions = [SourcePartition("ewr", "flights", number) for number in range(rng.randint(12, 16))]
        group = Group(dict.fromkeys(partitions, 0.0), 2)
        group.share_out()
        hot = rng.choice(partitions)
        (owner,) = (name for name, worker in group.workers.items() if hot in worker.owned)
        beside = len(group.workers[owner].owned) - 1
        group.rates |= dict.fromkeys(partitions, 1.0 * MEGABYTE) | {hot: 25.0 * MEGABYTE}
        rounds, moves = group.rounds, group.moves
        for seconds, most_rounds in ((180, 5), (3600, 40)):
            group.run(seconds, rng)
            # Cold ones make way: to move the hot one would only move the load.
            assert hot in group.workers[owner].owned, seed
            left = len(group.workers[owner].owned) - 1
            # What may stay beside it is not worth a pause: a tenth of its load, as far as levels tell.
            assert left <= 3, (seed, left)
            assert group.moves - moves == beside - left, (seed, "each of them once, and none back")
            # What a move takes, and rounds that only confirm what is: they stop nobody.
            assert group.rounds - rounds <= most_rounds, seed


def test_cold_partitions_that_weigh_nothing_beside_a_hot_one_are_not_moved_for_it() -> None:
    partitions = [SourcePartition("ewr", "flights", number) for number in range(12)]
    group = Group(dict.fromkeys(partitions, 0.01 * MEGABYTE), 2)
    group.share_out()
    group.rates[partitions[0]] = 25.0 * MEGABYTE
    group.run(3600, random.Random(1))
    assert group.moves == 0


def test_random_loads_are_levelled_and_rest() -> None:
    seed = seeds.given()
    rng = random.Random(seed)
    for _ in range(10):
        partitions = [
            SourcePartition("ewr", f"t{number % 3}", number) for number in range(rng.randint(20, 60))
        ]
        workers = rng.randint(2, 5)
        group = Group(dict.fromkeys(partitions, 0.0), workers)
        group.share_out()
        group.rates |= {partition: rng.uniform(0.05, 2) * MEGABYTE for partition in partitions}
        group.run(900)
        loads = [group.load(name) for name in group.workers]
        heaviest = max(group.rates.values())
        # A level is true within a fifth, what is not worth a tenth is left alone, and no partition is cut.
        assert max(loads) <= (1 + 0.25 + 2 * WORTH) * sum(loads) / workers + heaviest, (seed, loads)
        settled = group.moves
        group.run(10 * STALE_AFTER_MS // 1000)
        assert group.moves == settled, seed


def test_a_restart_of_the_leader_moves_nothing_although_nobody_knows_its_rates() -> None:
    seed = seeds.given()
    rng = random.Random(seed)
    for level in (14, 20, 26):  # from 90 KiB/s on; between two levels noise alone would tell them apart
        rate = rate_of(level)
        partitions = [SourcePartition("ewr", "flights", number) for number in range(24)]
        group = Group(dict.fromkeys(partitions, rate), 2)
        group.share_out()
        group.run(600, rng)
        moves = group.moves
        for name in group.workers:
            group.restart(name, backlog_s=5)
            group.run(30, rng)
            assert group.moves == moves, (seed, level, "with nothing known, and a backlog")
            group.run(600, rng)
            assert group.moves == moves, (seed, level, "nor when it is measured")
            assert not any(worker.workload.is_settling for worker in group.workers.values())


def test_while_a_worker_settles_a_new_one_gets_what_nobody_carries_and_its_share_afterwards() -> None:
    partitions = [SourcePartition("ewr", "flights", number) for number in range(12)]
    group = Group(dict.fromkeys(partitions, 1.0 * MEGABYTE), 2)
    group.share_out()
    group.run(300)
    group.restart("w0", backlog_s=5)
    group.workers["w2"] = Worker()
    new = [SourcePartition("ewr", "orders", number) for number in range(3)]
    group.rates |= dict.fromkeys(new, 0.0)
    moves = group.moves
    group.share_out()
    assert group.workers["w2"].owned == set(new) and group.moves == moves
    group.run(300)
    counts = [len(worker.owned & set(partitions)) for worker in group.workers.values()]
    assert counts == [4, 4, 4]
