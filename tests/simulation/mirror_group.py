"""The group through which the workers of an exactly-once mirror share their work: its coordinator's side, and
its leader's part, by the real rules of `sharing.assignment`.

Driven by `mirror_history` and the histories of `test_mirror_names`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from millrace.mirror.delivery.transaction import CLOSING
from millrace.mirror.sharing.assignment import (
    Claim,
    Share,
    assign,
    departed_slots,
    give_slots,
    withhold_claimed,
)
from tests.simulation.mirror_model import Target
from tests.simulation.mirror_workers import LANE_COUNT, Worker

JOINING, WAITING, TAKING, GIVING, COMMITTING, WORKING = (
    "joining",
    "waiting for its share",
    "taking its share",
    "giving back",
    "committing",
    "working",
)
STATES = {JOINING, WAITING, TAKING, GIVING, COMMITTING, WORKING}
"""What a worker with a seat is at."""


@dataclass
class Group:
    """The workers' group: the coordinator's side, and the leader's part at every rebalance."""

    world: Any
    joined: dict[str, tuple[Worker, Claim]] = field(default_factory=dict)  # of the rebalance under way
    members: dict[str, Worker] = field(default_factory=dict)
    answers: list[tuple[Worker, str, int]] = field(default_factory=list)
    shares: list[tuple[Worker, str, int, Share]] = field(default_factory=list)
    is_rebalancing: bool = False
    waiting_for_leader: tuple[str, dict[str, tuple[Worker, Claim]]] | None = None
    next_member: int = 0

    def join(self, worker: Worker) -> None:
        if worker.member and worker.member not in self.members:
            worker.lost()
        if not worker.member:
            self.next_member += 1
            worker.member = f"m{self.next_member}"
            self.members[worker.member] = worker
        worker.must_rejoin = False
        # A member asks one thing after the other: a share that it has not taken by now it never takes.
        self.answers = [each for each in self.answers if each[0] is not worker]
        self.shares = [each for each in self.shares if each[0] is not worker]
        self.is_rebalancing = True
        self.joined[worker.member] = (worker, worker.claim())

    def state_of(self, worker: Worker) -> str:
        """One of STATES, the first that holds."""
        leader_has = self.waiting_for_leader[1] if self.waiting_for_leader is not None else {}
        if worker.member in self.joined:
            return JOINING
        if worker.member in leader_has or any(each[0] is worker for each in (*self.answers, *self.shares)):
            return WAITING
        if worker.coming:
            return TAKING
        if worker.is_assigning:
            return GIVING
        is_closing = any(each.phase in CLOSING for lane in worker.lanes for each in lane.rules.both)
        return COMMITTING if is_closing else WORKING

    def kick(self, member: str) -> None:
        """Its session is over."""
        self.members.pop(member, None)
        self.joined.pop(member, None)
        self.is_rebalancing = bool(self.members)

    def complete(self, rng: random.Random) -> None:
        """All members have joined, or those who have not are out."""
        if not self.is_rebalancing or not self.joined:
            return
        missing = [member for member in self.members if member not in self.joined]
        if missing and rng.random() > 0.05:
            return
        for member in missing:
            del self.members[member]
        target: Target = self.world.target
        target.generation += 1
        target.members = set(self.members)
        self.is_rebalancing = False
        self.answers = [(worker, member, target.generation) for member, (worker, _) in self.joined.items()]
        self.shares.clear()
        self.waiting_for_leader = (min(self.joined), dict(self.joined))
        self.joined.clear()

    def share_out(self) -> None:
        """The leader's part: fences those who left, then hands out."""
        if self.waiting_for_leader is None:
            return
        if self.is_rebalancing:
            self.waiting_for_leader = None  # the group has moved on: its leader is told so
            return
        leader, joined = self.waiting_for_leader
        worker = joined[leader][0]
        if leader not in self.members or worker.member != leader:
            self.waiting_for_leader = None
            self.is_rebalancing = True
            return
        if not worker.runs or worker.generation != self.world.target.generation:
            return
        self.waiting_for_leader = None
        claims = {member: claim for member, (_, claim) in joined.items()}
        unfenced = {
            slot: count
            for slot, count in departed_slots(claims, worker.slots).items()
            if not self.world.fence(slot, count)
        }
        slots = give_slots(claims)
        in_use = unfenced | dict.fromkeys(slots.values(), LANE_COUNT)
        now = withhold_claimed(assign(self.world.ends, claims), claims)
        self.shares = [
            (
                joined[member][0],
                member,
                self.world.target.generation,
                Share(tuple(given), slots[member], in_use),
            )
            for member, given in now.items()
        ]
