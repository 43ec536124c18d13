"""Random histories of one group in virtual time: whatever clients do and lose, the rules hold.

Every history has a seed, printed on failure; `MILLRACE_SEED=<seed>` replays that one alone.
"""

from __future__ import annotations

import os
import random

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.groups.membership import Group
from millrace.broker.groups.roster import Tally
from millrace.broker.groups.values import GroupState, Protocol

SEEDS = [int(os.environ["MILLRACE_SEED"])] if "MILLRACE_SEED" in os.environ else range(150)
STEPS = 150
SESSION_TIMEOUT_MS = 10_000
PROTOCOLS = (
    lambda metadata: (Protocol("roundrobin", metadata),),
    lambda metadata: (Protocol("range", metadata), Protocol("roundrobin", metadata)),
    lambda metadata: (Protocol("roundrobin", metadata), Protocol("roundrobin", metadata)),
)


class Client:
    """A member's client: follows the protocol, but may lose answers, stall, or die without a word."""

    def __init__(self, name: str, rng: random.Random, driver) -> None:
        self.name = name
        self.rng = rng
        self.driver = driver
        self.instance_id = f"host-{name}" if rng.random() < 0.3 else None
        self.member_id = ""
        self.generation = -1
        self.assignment: bytes | None = None
        self.join_ticket: int | None = None
        self.sync_ticket: int | None = None
        self.metadata = 0

    def start_over(self) -> None:
        self.generation, self.assignment, self.join_ticket, self.sync_ticket = -1, None, None, None

    def join(self) -> None:
        self.start_over()
        self.join_ticket = self.driver.join(
            self.member_id,
            instance_id=self.instance_id,
            protocols=self.rng.choice(PROTOCOLS)(b"%d" % self.metadata),
            session_timeout_ms=SESSION_TIMEOUT_MS,
            known_id_required=True,
            can_skip_assignment=self.rng.random() < 0.5,
        )

    def step(self) -> None:
        """Take in an answer that came, otherwise do what a client would do next."""
        if self.join_ticket is not None:
            if self.join_ticket in self.driver.joins:
                self.joined(self.driver.joins[self.join_ticket])
            return
        if self.sync_ticket is not None:
            if self.sync_ticket in self.driver.syncs:
                self.synced(self.driver.syncs[self.sync_ticket])
            return
        if self.assignment is None:
            self.join()
            return
        error = self.driver.heartbeat(self.member_id, self.generation, self.instance_id)
        if error is not ErrorCode.none:
            self.refused(error)

    def joined(self, result) -> None:
        self.join_ticket = None
        if result.error is ErrorCode.member_id_required:
            self.member_id = result.member_id
            self.join()
            return
        if result.error is not ErrorCode.none:
            self.refused(result.error)
            return
        self.member_id, self.generation = result.member_id, result.generation
        assignments = {}
        if result.leader == self.member_id and not result.skip_assignment:
            assignments = {m.member_id: f"{result.generation}/{m.member_id}".encode() for m in result.members}
        self.sync_ticket = self.driver.sync(self.member_id, self.generation, assignments, self.instance_id)

    def synced(self, result) -> None:
        self.sync_ticket = None
        if result.error is ErrorCode.none:
            self.assignment = result.assignment
        else:
            self.refused(result.error)

    def refused(self, error: ErrorCode) -> None:
        self.start_over()
        if error in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id):
            self.member_id = ""


class History:
    """A group, its clients, and what was ever seen of it."""

    def __init__(self, seed: int, new_driver) -> None:
        self.rng = random.Random(seed)
        self.new_driver = new_driver
        self.driver = new_driver(initial_rebalance_delay_ms=self.rng.choice([0, 500, 3_000]))
        self.driver.saves_at_once = False
        self.unsaved: list = []
        self.seen_writes = 0
        self.clients = [Client(str(n), self.rng, self.driver) for n in range(self.rng.randint(1, 5))]
        self.assignments: dict[tuple[int, str], bytes] = {}
        self.generation = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choice(
                [self.let_time_pass, self.step, self.step, self.step, self.save, self.save, self.disturb]
            )()
            self.check()

    def step(self) -> None:
        self.rng.choice(self.clients).step()

    def let_time_pass(self) -> None:
        """Now and then somebody sets the clock meanwhile."""
        self.driver.now_ms += self.rng.choice([0, 0, 0, -3_600_000, 3_600_000])
        self.driver.advance(self.rng.choice([10, 200, 2_000, 6_000]))

    def save(self) -> None:
        """The log acknowledges a write; now and then it fails. Order is kept, as in the log."""
        self.unsaved += self.driver.writes[self.seen_writes :]
        self.seen_writes = len(self.driver.writes)
        if self.unsaved:
            failed = self.rng.random() < 0.1
            error = ErrorCode.not_enough_replicas if failed else ErrorCode.none
            self.driver.saved(self.unsaved.pop(0), error)

    def disturb(self) -> None:
        if self.rng.random() < 0.5:
            return
        client = self.rng.choice(self.clients)
        match self.rng.randrange(5):
            case 0:  # an answer is lost, the client asks again
                client.start_over()
            case 1:  # dies and comes back knowing nothing
                client.member_id = ""
                client.start_over()
            case 2:
                self.driver.leave(client.member_id, client.instance_id)
                client.member_id = ""
                client.start_over()
            case 3:  # subscribes to something else
                client.metadata += 1
                if client.assignment is not None:
                    client.join()
            case 4:
                self.restart_broker()

    def restart_broker(self) -> None:
        """What was saved comes back; who waited for an answer lost its connection."""
        group = self.driver.group
        if group.state is not GroupState.STABLE or self.unsaved:
            return
        self.driver.carry_out(group.close(ErrorCode.not_coordinator, self.driver.now_ms))
        restored = Group.restore(group.group_id, group.snapshot(), group.config, self.driver.moment())
        self.driver.group = restored

    def check(self) -> None:
        group = self.driver.group
        assert group.generation >= self.generation, "a generation went backwards"
        self.generation = group.generation
        assert (group.roster.leader in group.roster.members) or not len(group.roster), "led by a stranger"
        tally = Tally()
        for member in group.roster:
            tally.count(member)
        assert group.roster._tally == tally, "counted wrong"
        if group.state is GroupState.STABLE:
            for member in group.roster:
                who = member.instance_id or member.member_id
                known = self.assignments.setdefault((group.generation, who), member.assignment)
                assert known == member.assignment, "one generation, two assignments"
        for client in self.clients:
            if client.assignment:
                generation = int(client.assignment.split(b"/")[0])
                assert generation == client.generation, "an assignment of another generation was given out"
            if client.member_id and 0 <= client.generation < group.generation:
                refused = self.driver.check_commit(client.member_id, client.generation, client.instance_id)
                assert refused is not ErrorCode.none, "an old generation could commit"

    def settle(self) -> None:
        """Calm: nothing is lost any more, every client keeps stepping."""
        for _ in range(600):
            for client in self.clients:
                client.step()
            self.unsaved += self.driver.writes[self.seen_writes :]
            self.seen_writes = len(self.driver.writes)
            while self.unsaved:
                self.driver.saved(self.unsaved.pop(0))
            self.check()
            self.driver.advance(500)
        waiting = [c.name for c in self.clients if c.assignment is None]
        assert not waiting, f"clients without an assignment after five minutes of calm: {waiting}"
        assert self.driver.group.state is GroupState.STABLE
        assert {c.member_id for c in self.clients} == set(self.driver.group.roster.members)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_history_keeps_the_rules_and_ends_stable(seed, new_driver):
    print(f"seed {seed}: MILLRACE_SEED={seed} replays it")
    history = History(seed, new_driver)
    history.run(STEPS)
    history.settle()
