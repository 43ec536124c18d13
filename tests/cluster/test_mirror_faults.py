"""Two sources, two workers and a target through faults: the aggregate holds what was promised.

The gate has three events, always the same. What a seed draws is for the long suite, and a process of its own,
because it moves into network namespaces (see `mirror_faults/__init__.py`). Seed, number of events and pair
can be given: `make mirror-faults EVENTS=100 SEED=7 PAIR=kafka-kafka`. When a promise is broken, everything
that was said is the failure's text: the seed, what happened when, what is missing, and the ends of all logs.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from millrace.deploy.processes import spawn
from tests import root_rights
from tests.cluster.mirror_faults.plan import SAMPLE, Kind
from tests.cluster.mirror_faults.run import Run
from tests.pairs import PAIRS
from tests.waiting import patience

pytestmark = pytest.mark.java

EVENTS = int(os.environ.get("MILLRACE_MIRROR_FAULT_EVENTS", "30"))
SEED = int(os.environ.get("MILLRACE_MIRROR_FAULT_SEED", "5"))
START_S = 180
MOST_S_PER_EVENT = 120
"""A broken round may wait for each of its deadlines before it is called broken."""

BROKEN = 1

PROJECT = Path(__file__).resolve().parents[2]
# Nine of thirty bring every kind once (`plan.py` deals them like cards); `make test-pairs` has them all.
FEW = EVENTS * 3 // 10
CHOSEN = {"millrace-millrace": EVENTS, "kafka-kafka": FEW}
AT_LEAST_ONCE: tuple[str, ...] = ("kafka-millrace",)
if os.environ.get("MILLRACE_PAIRS") == "all":
    CHOSEN, AT_LEAST_ONCE = dict.fromkeys(PAIRS, EVENTS), PAIRS


def between(pairs: Iterable[str]) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=pytest.mark.kafka if "kafka" in name else ()) for name in pairs]
    return pytest.mark.parametrize("pair", marked)


@pytest.mark.safety
def test_a_killed_worker_a_killed_target_and_a_topic_made_anew_lose_and_repeat_nothing(
    tmp_path: Path,
) -> None:
    run = Run(
        tmp_path,
        SEED,
        pair="millrace-millrace",
        delivery="exactly_once",
        namespaces=False,
        events=SAMPLE,
        batches_per_s=60.0,
        say=print,
    )
    try:
        run.start()
        while run.round():
            pass
        kept = run.finish()
    finally:
        run.stop()
    assert kept, run.report()
    assert run.event_counts == {"KILL_WORKER": 1, "RECREATE": 1, "KILL_TARGET": 1}
    assert run.witness.record_count >= run.load.record_count - run.verdict.explained_count > 0


def run_faults(folder: Path, *options: str, events: int) -> tuple[int, str]:
    """Exit status, and all that it said."""
    words = [
        sys.executable,
        "-m",
        "tests.cluster.mirror_faults",
        "--folder",
        str(folder),
        "--events",
        str(events),
        "--no-audit",
    ]
    said = folder.with_suffix(".out")
    process = spawn(
        [*words, *options], log=said, environment={"PYTHONPATH": str(PROJECT)}, die_with_parent=True
    )
    try:
        status = process.wait(patience(START_S + events * MOST_S_PER_EVENT))
    finally:
        process.kill()
    return status, said.read_text(errors="replace")


@pytest.mark.long
@pytest.mark.pairs
@between(CHOSEN)
def test_each_record_arrives_once_and_in_order(pair: str, tmp_path: Path) -> None:
    go_through(tmp_path / "run", pair, "exactly_once", events=CHOSEN[pair])


@pytest.mark.long
@pytest.mark.pairs
@between(AT_LEAST_ONCE)
def test_at_least_once_none_is_lost_and_what_comes_first_comes_in_order(pair: str, tmp_path: Path) -> None:
    go_through(tmp_path / "run", pair, "at_least_once", events=FEW)


def go_through(folder: Path, pair: str, delivery: str, *, events: int) -> None:
    """Every promise of the delivery is kept, and every kind of event has come where there are enough."""
    options = ("--seed", str(SEED), "--pair", pair, "--delivery", delivery)
    status, said = run_faults(folder, *options, events=events)
    print(said)
    verdict = f"seed {SEED} between {pair} ended with status {status}; above is what it said"
    assert status == 0, verdict
    root_rights.check_fault_run(said)
    if events >= len(Kind):
        assert what_occurred(said) == what_can_occur(said)


def what_occurred(said: str) -> set[str]:
    """The kinds of events in the run's table."""
    return {kind.name for kind in Kind if re.search(rf"^  {kind.name.lower()} +[1-9]\d*$", said, re.M)}


def what_can_occur(said: str) -> set[str]:
    """All of them; without namespaces there is no file system that can be filled."""
    return {kind.name for kind in Kind} - ({"DISK_FULL"} if "links: TCP proxies" in said else set())


@pytest.mark.long
def test_without_namespaces_the_same_is_done_by_proxies(tmp_path: Path) -> None:
    status, said = run_faults(tmp_path / "run", "--seed", "3", "--proxies", events=2)
    print(said)
    assert status == 0
    assert "links: TCP proxies" in said
    assert root_rights.FALLBACK in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("sabotage", "delivery", "found"),
    [
        ("lose:audited", "exactly_once", r"lost: \w+/audited/0/\d: "),
        ("lose:audited", "at_least_once", r"lost: \w+/audited/0/\d: "),
        ("repeat", "exactly_once", "came more than once"),
        ("change", "exactly_once", "not as it was written"),
    ],
)
def test_a_worker_that_does_harm_is_found_out(
    sabotage: str, delivery: str, found: str, tmp_path: Path
) -> None:
    options = ("--seed", "1", "--delivery", delivery, "--sabotage", sabotage, "--arrive-s", "12")
    status, said = run_faults(tmp_path / "run", *options, events=1)
    print(said)
    assert status == BROKEN
    assert re.search(found, said)


@pytest.mark.long
def test_at_least_once_is_not_taken_for_exactly_once(tmp_path: Path) -> None:
    # Seed 1 begins with both ends' brokers and a worker killed.
    options = ("--seed", "1", "--delivery", "at_least_once", "--judge-as", "exactly_once")
    status, said = run_faults(tmp_path / "run", *options, events=8)
    print(said)
    assert status == BROKEN
    assert "came more than once" in said
    assert "lost: " not in said
