"""Reports of pruned windows are forgotten all at once: nothing differs from looking at each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from pyroaring import BitMap64

from millrace.audit.contract.events import EventLedger
from millrace.audit.keeping import upkeep
from millrace.audit.runs.fact_rows import PrunedWindows
from tests import seeds
from tests.unit.audit_job.upkeep_stage import STREAM, WINDOW_MS, ledger_of, plain_report

WINDOWS = 12


def reports_of(random: Random, first: int):
    """Reports of one window after the other, some of which are not plain, or share a number with another."""
    for number in range(WINDOWS):
        count = random.randint(1, 4)
        numbers = BitMap64(range(first, first + count))
        told = replace(plain_report(number * WINDOW_MS, first), acknowledged=numbers, count=count)
        first += count + random.choice((0, 0, 1))
        if random.random() < 0.15:
            told = replace(told, acknowledged=numbers | BitMap64([random.randint(1, 30)]))
            told = replace(told, count=len(told.acknowledged))
        if random.random() < 0.1:
            told = replace(told, ambiguous=BitMap64([random.randint(1, 30)]) - told.acknowledged)
        if random.random() < 0.1:
            told = replace(told, failed=BitMap64([random.randint(1, 30)]) - told.acknowledged)
        yield told


def test_all_at_once_nothing_is_forgotten_otherwise_than_one_by_one(monkeypatch) -> None:
    random = Random(seeds.given())
    met: Counter[str] = Counter()
    at_once = upkeep._forget_plain
    for _ in range(300):
        reports = list(reports_of(random, random.randint(1, 10)))
        random.shuffle(reports)
        left = PrunedWindows(WINDOW_MS)
        for number in random.sample(range(WINDOWS), random.randint(0, WINDOWS)):
            left.add(number * WINDOW_MS, WINDOW_MS)
        left.sequences |= BitMap64(random.sample(range(1, 40), random.choice((0, 5, 39))))
        for kind in (left.ambiguous, left.failed):
            kind |= BitMap64(random.sample(sorted(left.sequences), min(len(left.sequences), 3)))
        left.failed -= left.ambiguous
        left.first_report_ms = random.choice((None, 3 * WINDOW_MS))
        learn = random.random() < 0.5
        found = []
        for is_fast in (True, False):
            met_here: list[BitMap64] = []

            def forget(*given, fast=is_fast, met_here=met_here, **more):
                met_here.append(at_once(*given, **more) if fast else BitMap64())
                return met_here[-1]

            monkeypatch.setattr(upkeep, "_forget_plain", forget)
            ledger, pruned = ledger_with(reports), {STREAM: left.copy()}
            late = upkeep.forget_pruned(ledger, pruned, {STREAM: "flights"}, learn=learn)
            facts = ledger.streams[STREAM]
            found.append((late, pruned, dict(facts.windows), facts.conflicts))
            met["at once" if met_here[0] else "one by one"] += is_fast
        assert found[0] == found[1], learn
        met["late"] += bool(found[0][0])
        met["conflict"] += bool(found[0][3])
    assert min(met[each] for each in ("at once", "one by one", "late", "conflict")) >= 10, met


def ledger_with(reports) -> EventLedger:
    ledger = ledger_of()
    for told in reports:
        ledger.learn(told)
    return ledger
