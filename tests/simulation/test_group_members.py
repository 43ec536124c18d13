"""A member of a group and its seat (`client/group_member`), through histories in which the seat is lost in
every state: while the worker takes its share, works, gives back, or joins again.

Workers are cut off, lose requests and answers, stand still in what they do, die and come; the coordinator is
replaced by one that reads its log. What must hold:

- whoever is no member any more carries on for as long at most as it may take the coordinator to keep its
  seat: a session without a word and, once a request is out, a rebalance and another session;
- no two members of one generation name the same partition, and each is given what it names;
- when all is well again, each partition is carried by exactly one worker.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from structlog.testing import capture_logs

from millrace.broker.client.group_member import GroupMember
from tests import seeds, virtual_clock
from tests.simulation import histories
from tests.simulation.group_world import PARTITIONS, PHASES, Act, Office, Story, Worker

HISTORY_COUNT = seeds.runs(30)
MUTATION_HISTORY_COUNT = 100
MOST_WORKERS = 3
LOOK_S = 0.1
SLACK_S = 3.0
HEALED_WITHIN_S = 120.0


class History:
    """One seeded run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.office = Office(self.random)
        self.workers: list[Worker] = []
        self.lost_while: Counter[str] = Counter()
        """By what a worker was at when it heard that its seat is lost."""
        self.session_ms = self.random.choice((6_000, 10_000))
        self.rebalance_ms = self.random.choice((7_000, 20_000))
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def spawn(self, story: Story) -> None:
        task = asyncio.get_running_loop().create_task(story)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_alive]

    # --- what can happen -------------------------------------------------------------------------

    def start(self) -> None:
        if len(self.alive) < MOST_WORKERS:
            name = f"worker-{len(self.workers)}"
            self.workers.append(Worker(self, name, self.session_ms, self.rebalance_ms))

    def kill(self) -> None:
        if len(self.alive) > 1:
            self.random.choice(self.alive).kill()

    def cut(self) -> None:
        line = self.random.choice(self.alive).line
        if self.random.random() < 0.5:
            line.is_cut = True
        else:
            line.is_refused = True

    def heal(self) -> None:
        for worker in self.alive:
            worker.line.is_cut = worker.line.is_refused = False

    def lose_some(self) -> None:
        self.random.choice(self.alive).line.loss = self.random.choice((0.0, 0.1, 0.5))

    def stand_still(self) -> None:
        """In what it does next: it drains, or waits for positions."""
        self.random.choice(self.alive).stands_still_s = self.random.choice((5.0, 15.0, 60.0))

    def rejoin(self) -> None:
        self.random.choice(self.alive).member.rejoin()

    async def replace_coordinator(self) -> None:
        await self.office.close()
        await self.office.open()

    # --- running and checking --------------------------------------------------------------------

    async def run(self) -> None:
        await self.office.open()
        try:
            for _ in range(self.random.randint(1, 2)):
                self.start()
            await self._trouble()
            await self._calm()
        finally:
            for worker in self.alive:
                worker.kill()
            await self.office.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _trouble(self) -> None:
        acts: list[Act] = [self.cut, self.cut, self.heal, self.heal, self.lose_some, self.stand_still]
        acts += [self.rejoin, self.rejoin, self.start, self.start, self.kill]
        for _ in range(self.random.randint(10, 30)):
            if self.random.random() < 0.05:
                await self.replace_coordinator()
            else:
                self.random.choice(acts)()
            await self._watch(self.random.choice((0.5, 2.0, 6.0, 15.0)) * self.random.random())

    async def _calm(self) -> None:
        self.heal()
        for worker in self.alive:
            worker.line.loss = worker.stands_still_s = 0.0
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + HEALED_WITHIN_S
        while sorted(part for worker in self.alive for part in worker.carries) != sorted(PARTITIONS):
            assert loop.time() < deadline_s, f"carried in the end: {[each.carries for each in self.alive]}"
            await self._watch(1.0)

    async def _watch(self, length_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + length_s
        while loop.time() < end_s:
            await asyncio.sleep(LOOK_S)
            if self._failure is not None:
                raise self._failure
            self._check(loop.time())

    def _check(self, now_s: float) -> None:
        members = self.office.members
        longest_s = (2 * self.session_ms + self.rebalance_ms) / 1000 + SLACK_S
        seen: Counter[str] = Counter()
        for worker in self.alive:
            if not worker.carries or worker.member.member_id in members:
                worker.no_member_since_s = None
                seen.update(worker.carries)
                continue
            since_s = worker.no_member_since_s = worker.no_member_since_s or now_s
            assert now_s - since_s <= longest_s, (
                f"{worker.name} has been no member for {now_s - since_s:.1f} s and carries on, {worker.phase}"
            )
        assert not seen or max(seen.values()) == 1, f"two members carry the same: {seen}"


def run(seed: int, *, is_whole: bool = True) -> History:
    """`is_whole`: no rule is left out."""
    history = History(seed)
    try:
        with capture_logs():
            virtual_clock.run(history.run())
    except Exception as error:
        raise AssertionError(f"History(seed={seed}) broke a rule: {error}") from error
    if is_whole:
        histories.went_through("group members")
    return history


def test_whoever_loses_its_seat_hears_of_it_whatever_it_is_at() -> None:
    first_seed = seeds.given()
    lost_while: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        lost_while += run(seed).lost_while
    assert lost_while.keys() == PHASES, f"these histories show little of {PHASES - lost_while.keys()}"


# --- rules left out --------------------------------------------------------------------------------


def _who_cannot_join_again_keeps_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupMember, "_seat_ends_at", lambda _: math.inf)


def _work_goes_on_without_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    async def patient(work: Awaitable[None], _heartbeats: asyncio.Task[None]) -> None:
        await work

    monkeypatch.setattr(GroupMember, "_while_seated", staticmethod(patient))


@pytest.mark.parametrize("leave_out", [_who_cannot_join_again_keeps_its_seat, _work_goes_on_without_a_seat])
def test_history_fails_when_a_rule_is_left_out(
    leave_out: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(monkeypatch)
    for seed in range(MUTATION_HISTORY_COUNT):
        try:
            run(seed, is_whole=False)
        except AssertionError as error:
            assert "no member" in str(error)
            return
    raise AssertionError(f"{MUTATION_HISTORY_COUNT} histories look sound without it")
