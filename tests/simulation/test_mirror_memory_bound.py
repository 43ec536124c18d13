"""The bound on what fetched batches keep: histories of several sources with one budget.

A history draws sources, brokers, partitions and batches, and lets them live: the target takes all, some or
nothing, or refuses; partitions come, are given up or get another leader; sources start and stop; fetches
fail; a transaction is aborted. It knows the rule (`fetch_memory`):

    no more is kept     than is allowed, and for each loop one answer, and one more for each doubling of the
                        seconds for which its target has not taken all
    who is taken from   gets on in every phase, once it is known
    in the end          when the target takes all again, everybody gets on, and nothing is left of it

One history again, by the seed that its failure names: `MILLRACE_TEST_SEED=<seed> MILLRACE_TEST_RUNS=1`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from math import log2

import pytest
import structlog

from millrace.mirror.sources import source as source_module
from millrace.mirror.sources.fetch_memory import MIN_FETCH_SIZE, FetchBudget
from millrace.mirror.sources.source import SourceReader
from tests import seeds, virtual_clock
from tests.simulation import histories
from tests.simulation.mirror_memory import Carried, World

HISTORY_COUNT = seeds.runs(6)
MEBIBYTE = 1 << 20
LIMIT = 32 * MEBIBYTE
PHASE_S = 6.0
STEPS_A_PHASE = 4
MOST_SOURCES, MOST_LOOPS, MOST_PHASES = 6, 6, 8
WITHOUT_END = 1 << 40


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "log", structlog.wrap_logger(structlog.ReturnLogger()))


def tell(
    monkeypatch: pytest.MonkeyPatch,
    story: Callable[[World], Awaitable[None]],
    limit: int = LIMIT,
    seed: int = 0,
) -> None:
    """Judges that nothing stays when all has ended."""

    async def whole() -> None:
        world = World(monkeypatch, FetchBudget(limit), seed)
        await story(world)
        await world.end()
        budget = world.budget
        assert (budget.held_size, budget.asked_size, budget.loop_count) == (0, 0, 0)

    virtual_clock.run(whole())


class History:
    """See the module's text."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        self.sizes = [draw.choice([3_000, 16_000, 100_000]) for _ in range(draw.randint(1, 5))]
        if draw.random() < 0.2:
            self.sizes.append(7 * MEBIBYTE)  # larger than most shares
        self.answer = max(MIN_FETCH_SIZE, *self.sizes)
        self.number = 0
        self.steady: list[tuple[SourceReader, Carried]] = []

    def partition(self) -> Carried:
        self.number += 1
        sizes = self.random.sample(self.sizes, len(self.sizes))
        end = WITHOUT_END if self.random.random() < 0.7 else self.random.randint(0, 400)
        return Carried(self.number, sizes, end)

    async def source(self, world: World) -> None:
        reader = world.start_source()
        await world.rest(0)
        steady = self.partition()
        steady.end = WITHOUT_END
        self.steady.append((reader, steady))
        world.add(reader, steady)
        for _ in range(self.random.choice([1, 3, 30])):
            world.add(reader, self.partition())

    async def step(self, world: World, mood: str) -> None:
        draw = self.random
        what = draw.choice(["come", "leave", "leader", "abort", "start", "stop", "nothing"])
        reader = draw.choice(world.readers)
        steady = [each for _, each in self.steady]
        others = [each for owner, each in world.all_carried() if owner is reader and each not in steady]
        one = draw.choice(others) if others else None
        if what == "start" and len(world.readers) < MOST_SOURCES:
            await self.source(world)
        elif what == "stop" and len(world.readers) > 1:
            await world.stop_source(reader)
            self.steady = [each for each in self.steady if each[0] is not reader]
        elif what == "come":
            for _ in range(draw.randint(1, 5)):
                world.add(reader, self.partition())
        elif one is not None and what == "leave":
            world.revoke(reader, one)
        elif one is not None and what == "leader":
            world.lead(reader, one, draw.randint(1, 2))
        elif one is not None and what == "abort":
            one.rewind()
        self.set_mood(world, mood)

    def set_mood(self, world: World, mood: str) -> None:
        steady = [each for _, each in self.steady]
        for _, each in world.all_carried():
            each.takes = mood == "all" or (
                mood == "some" and (each in steady or each.partition.partition % 3 > 0)
            )
            each.refuses = not each.takes and each.partition.partition % 2 == 0
        for gone, _ in world.left_behind:
            gone.takes = mood == "all"

    async def run(self, world: World) -> None:
        await self.source(world)
        stalled_s = 0.0
        for _ in range(self.random.randint(2, MOST_PHASES)):
            mood = self.random.choice(["all", "some", "nothing", "nothing"])
            world.lost_fetches = self.random.choice([0.0, 0.0, 0.05])
            self.set_mood(world, mood)
            if mood == "all":
                stalled_s = 0.0
            # Who was never heard of waits for its turn to try.
            counts = {id(each): each.delivered_count for _, each in self.steady if each.row or mood == "all"}
            for _ in range(STEPS_A_PHASE):
                await self.step(world, mood)
                world.most_held = 0
                await world.rest(PHASE_S / STEPS_A_PHASE)
                stalled_s += PHASE_S / STEPS_A_PHASE
                allowed = LIMIT + MOST_LOOPS * self.answer * (1 + log2(1 + stalled_s))
                assert world.most_held <= allowed, mood
            if mood != "nothing":
                for _, each in self.steady:
                    assert each.delivered_count > counts.get(id(each), -1), (mood, "starved")
        world.lost_fetches = 0.0
        self.set_mood(world, "all")
        before = {id(each): each.delivered_count for _, each in world.all_carried()}
        await world.rest(10.0)
        for _, each in world.all_carried():
            got = each.delivered_count > before[id(each)] or each.delivered_count >= each.end
            assert got, "who has data gets on"


def carried(count: int, size: int, *, refuses: bool = False) -> list[Carried]:
    """Of a target that takes nothing."""
    made = [Carried(number, [size], WITHOUT_END, takes=False) for number in range(count)]
    for each in made:
        each.refuses = refuses
    return made


async def source_of(world: World, partitions: list[Carried]) -> SourceReader:
    reader = world.start_source()
    await asyncio.sleep(0)
    for each in partitions:
        world.add(reader, each)
    return reader


@pytest.mark.parametrize("ahead_s", [0.0, 5.0])
def test_sources_that_start_while_the_target_stands_keep_an_answer_each(
    ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has the whole limit for itself, and has filled it or is about to. All the others ask at the
    same moment."""

    async def story(world: World) -> None:
        await source_of(world, carried(20, 16_000))
        await world.rest(ahead_s)
        for _ in range(9):
            await source_of(world, carried(20, 16_000))
        await world.rest(20)
        assert LIMIT * 3 // 4 < world.most_held <= LIMIT + 10 * MIN_FETCH_SIZE

    tell(monkeypatch, story)


@pytest.mark.parametrize("refuses", [False, True])
def test_partitions_without_number_do_not_each_keep_an_answer(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While their target takes nothing: it is silent, or refuses."""

    async def story(world: World) -> None:
        await source_of(world, carried(400, 100_000, refuses=refuses))
        await world.rest(60)
        assert LIMIT * 3 // 4 < world.most_held <= LIMIT + (7 if refuses else 1) * 100_000

    tell(monkeypatch, story)


@pytest.mark.parametrize("how", ["given up", "other leader"])
def test_batches_of_partitions_that_have_left_starve_nobody(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent of them keeps all that their loop may have."""

    async def story(world: World) -> None:
        standing = [Carried(number, [900_000], 11, takes=False) for number in range(1, 9)]
        reader = await source_of(world, standing)
        await world.rest(3)
        good = Carried(0, [100_000], WITHOUT_END)
        world.add(reader, good)
        for each in standing:
            if how == "given up":
                world.revoke(reader, each)
            else:
                world.lead(reader, each, 2)
        await world.rest(2)
        before = good.delivered_count
        await world.rest(10)
        assert world.budget.held_size > 7 * MEBIBYTE, "they have not gone"
        assert good.delivered_count > before + 20

    tell(monkeypatch, story, 8 * MEBIBYTE)


@pytest.mark.parametrize("number", range(HISTORY_COUNT))
def test_no_more_is_kept_than_is_allowed_and_nobody_starves(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = seeds.given() * 10_000 + number
    tell(monkeypatch, History(seed).run, seed=seed)
    histories.went_through("of memory")
