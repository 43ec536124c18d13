"""The whole system against known truth: audited producers, brokers, a mirror and the audit job on Spark.

Each scenario is one random history; every row of every audit must equal what happened. One runs in
`make test`, the whole twenty by `make audit-end-to-end`; `MILLRACE_E2E_SEED=7` (or `7,9`) runs one,
`MILLRACE_E2E_RUNS=100` so many, and `MILLRACE_E2E_SEED_START=500` others: the long suite draws the first.
One runs where a source and the aggregate are Apache Kafka, the others on our own brokers;
`MILLRACE_E2E_KAFKA=ewr,jfk,agg` says for all which clusters are Apache Kafka's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.end_to_end_scenario import Scenario, plan
from tests.spark.end_to_end_world import AGGREGATE, World

# The last test looks at what the others found.
pytestmark = [pytest.mark.java, pytest.mark.safety, pytest.mark.random_order(disabled=True)]

GATE_RUNS = 1
DEFAULT_RUNS = 6
WHOLE_RUNS = 20
ONE = os.environ.get("MILLRACE_E2E_SEED")
FIRST = int(os.environ.get("MILLRACE_E2E_SEED_START", 1))
RUNS = int(os.environ.get("MILLRACE_E2E_RUNS", DEFAULT_RUNS))
SEEDS = [int(each) for each in ONE.split(",")] if ONE else list(range(FIRST, FIRST + RUNS))
KAFKA = [name for name in os.environ.get("MILLRACE_E2E_KAFKA", "").split(",") if name]
SEED_ON_KAFKA = 4

OF_MISHAPS = {"identity not to be read", "counts lost", "clock ahead", "clock behind"}
"""That every run has, also the short one."""
MUST_OCCUR = {
    "loss on the hop",
    "duplicate in the aggregate",
    "duplicate at the source",
    "in flight",
    "unreported",
    "unknown",
    "explained",
    "content",
    "count short",
    "count over",
    "count match",
    "proven",
    "open",
    "fell silent",
    "loss in the group",
    "loss behind a foreign mirror",
    "two names",
    *OF_MISHAPS,
}


@pytest.fixture(scope="module")
def world(zookeeper: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from _started(World(zookeeper, tmp_path_factory.mktemp("end-to-end"), KAFKA))


@pytest.fixture
def mixed_world(zookeeper: Any, tmp_path: Path) -> Iterator[World]:
    yield from _started(World(zookeeper, tmp_path / "mixed", ("ewr", AGGREGATE)))


def _started(world: World) -> Iterator[World]:
    try:
        yield world.start()
    finally:
        world.stop()


@pytest.fixture(scope="module")
def found() -> dict[int, Counter[str]]:
    """By seed: what the audits had to name, and did."""
    return {}


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.long] if number >= GATE_RUNS and ONE is None else [])
        for number, seed in enumerate(SEEDS)
    ],
)
def test_the_audit_says_exactly_what_happened(
    spark: Any, world: World, found: dict[int, Counter[str]], seed: int, tmp_path: Path
) -> None:
    found[seed] = _run(seed, world, tmp_path)


@pytest.mark.long
@pytest.mark.kafka
def test_the_audit_says_exactly_what_happened_to_apache_kafka(
    spark: Any, mixed_world: World, tmp_path: Path
) -> None:
    assert _run(SEED_ON_KAFKA, mixed_world, tmp_path)


def _run(seed: int, world: World, folder: Path) -> Counter[str]:
    """One history; what the audits named of it."""
    drawn = plan(seed)
    print(f"seed {seed}: {sorted(drawn.kinds)}, {drawn.partitions} partitions in {drawn.sources}")
    scenario = Scenario(world, folder, drawn)
    scenario.run()
    named = +scenario.found
    print(f"named: {dict(named)}")
    return named


def test_every_kind_of_finding_occurred(found: dict[int, Counter[str]]) -> None:
    """Among the usual twenty; of some, and of others, only that they found something."""
    occurred = sum(found.values(), Counter[str]())
    assert occurred
    if len(found) >= DEFAULT_RUNS:
        assert {kind for kind in OF_MISHAPS if not occurred[kind]} == set()
    if FIRST != 1 or len(found) < WHOLE_RUNS:
        return
    assert {kind for kind in MUST_OCCUR if not occurred[kind]} == set()
    assert occurred["killed when counted"] + occurred["killed when committed"] > 0
