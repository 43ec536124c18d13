"""The commit rules where workers have names (KIP-345): histories as those of `test_mirror_transactions`, with
a group whose members keep their seats. New processes take over the names of others, dead, frozen or running,
in the same generation; and the group begins generations without a member that is late, by its old claim.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from millrace.mirror.sharing.assignment import Claim, Share
from tests import seeds
from tests.simulation import histories
from tests.simulation.mirror_group import Group
from tests.simulation.mirror_history import History
from tests.simulation.mirror_workers import Worker

HISTORY_COUNT = seeds.runs(150)
MUTATION_HISTORY_COUNT = 500


class NamedWorker(Worker):
    """A process with a name. `generation` is set by the answer to a join, as in `GroupMember`."""

    def __init__(self, world: Any, name: str) -> None:
        self._generation = -1
        self.name = name
        self.inherits = False
        super().__init__(world)

    @property
    def generation(self) -> int:
        return self._generation

    @generation.setter
    def generation(self, value: int) -> None:
        if 0 <= self._generation < value - 1 and self.world.broken != "passed_over":
            member = self.member
            self.lost()  # the group went by an old claim of it
            self.member, self.must_rejoin = member, self.world.broken != "no_new_claim"
        self._generation = value

    def lost(self) -> None:
        group: NamedGroup = self.world.group
        holder = group.members.get(group.seats.get(self.name, ""))
        is_fenced = bool(self.member) and holder not in (None, self)
        super().lost()
        if is_fenced:
            self.is_alive = False  # another process has the name: this one ends

    def take_share(self, share: Share) -> None:
        super().take_share(share)
        if self.inherits:
            self.inherits, self.must_rejoin = False, True


class NamedGroup(Group):
    """The coordinator's side of static membership."""

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.seats: dict[str, str] = {}  # name -> member
        self.claims: dict[str, Claim] = {}  # as of the member's last join
        self.given: dict[str, tuple[int, Share]] = {}

    def join(self, worker: Worker) -> None:
        assert isinstance(worker, NamedWorker)
        if worker.member and worker.member not in self.members:
            worker.lost()
            if not worker.is_alive:
                return
        old = self.seats.get(worker.name, "")
        if worker.member or old not in self.members:
            super().join(worker)
        elif self._take_over(worker, old):
            return
        self.seats[worker.name] = worker.member
        self.claims[worker.member] = self.joined[worker.member][1]

    def _take_over(self, worker: NamedWorker, old: str) -> bool:
        """Whether the seat comes with its share, and nobody is asked anew."""
        target = self.world.target
        self.next_member += 1
        new = worker.member = self.seats[worker.name] = f"m{self.next_member}"
        del self.members[old]
        self.members[new] = worker
        self.joined.pop(old, None)
        target.members = (target.members - {old}) | {new}  # the fence refuses the old one from now on
        self.answers = [each for each in self.answers if each[0] is not worker]
        self.shares = [each for each in self.shares if each[0] is not worker]
        self.claims[new] = worker.claim()
        generation, share = self.given.pop(old, (-1, Share()))
        if self.is_rebalancing or self.waiting_for_leader or generation != target.generation:
            self.is_rebalancing = True
            self.joined[new] = (worker, self.claims[new])
            return False
        self.given[new] = generation, share
        self.answers.append((worker, new, generation))
        self.shares.append((worker, new, generation, share))
        worker.inherits = True
        return True

    def complete(self, rng: random.Random) -> None:
        if not self.is_rebalancing or not self.joined:
            return
        late = [member for member in self.members if member not in self.joined]
        if late and rng.random() > self.world.impatience:
            return
        target = self.world.target
        target.generation += 1
        target.members = set(self.members)
        self.is_rebalancing = False
        self.answers = [(worker, member, target.generation) for member, (worker, _) in self.joined.items()]
        self.shares.clear()
        by_old_claims: Mapping[str, tuple[Worker, Claim]] = {
            member: (self.members[member], self.claims.get(member, Claim())) for member in late
        }
        self.waiting_for_leader = (min(self.joined), {**self.joined, **by_old_claims})
        self.joined.clear()

    def share_out(self) -> None:
        was_waiting = self.waiting_for_leader is not None
        super().share_out()
        if was_waiting and self.waiting_for_leader is None:
            for _, member, generation, share in self.shares:
                self.given[member] = generation, share


class NamedHistory(History):
    """`impatience`: how often the group begins without those that are late."""

    def __init__(self, seed: int, broken: str = "") -> None:
        self.impatience = 0.3 if broken else random.Random(seed).choice([0.05, 0.3])
        super().__init__(seed, broken)
        if broken:  # rare as it is, what the rule is against must come about
            self.notices, self.rare_share = 0.05, 0.08

    def start(self) -> None:
        if not isinstance(self.group, NamedGroup):
            self.group = NamedGroup(self)
        if sum(worker.is_alive for worker in self.workers) >= 3:
            return
        names = sorted({worker.name for worker in self.workers if isinstance(worker, NamedWorker)})
        is_new = not names or (len(names) < 3 and self.random.random() < 0.4)
        name = f"worker-{len(names)}" if is_new else self.random.choice(names)
        self.workers.append(NamedWorker(self, name))

    def rebalance(self) -> None:
        group, generation = self.group, self.target.generation
        for worker in self.running():
            is_waiting = worker.member in group.joined or any(each[0] is worker for each in group.answers)
            if worker.member not in group.members or worker.generation == generation or is_waiting:
                continue
            if worker.generation < 0:
                worker.must_rejoin = True  # its join was overtaken
            elif self.random.random() < self.notices:
                worker.lost()  # by a heartbeat
            else:
                worker.must_rejoin |= self.random.random() < 0.5
        super().rebalance()


def run(seed: int, broken: str = "") -> None:
    try:
        NamedHistory(seed, broken).run()
    except Exception as error:
        raise AssertionError(f"NamedHistory(seed={seed}, broken={broken!r}) broke a rule: {error}") from error
    if not broken:
        histories.went_through("transactions of named workers")


def test_random_histories_of_named_workers_bring_each_record_once() -> None:
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        run(seed)


@pytest.mark.parametrize(
    ("broken", "what_happens"),
    [("passed_over", "is not the start of"), ("no_new_claim", "not delivered in the end")],
)
def test_each_rule_is_needed(broken: str, what_happens: str) -> None:
    for seed in range(MUTATION_HISTORY_COUNT):
        try:
            run(seed, broken)
        except AssertionError as error:
            if what_happens in str(error):
                return
    raise AssertionError(f"{MUTATION_HISTORY_COUNT} histories without {broken} look sound")
