"""Three real brokers and a real ZooKeeper through rounds of random faults: what was promised is kept.

The run is a process of its own, because it moves into network namespaces (see `faults/network.py`); as root
it must find them (others fall back to proxies, and have no disk to fill). Seed and rounds can be given:
`make faults ROUNDS=100 SEED=7`. When a promise is broken, everything that was said is the failure's text: the
seed, what happened when, the records with their places, and the brokers' logs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from millrace.deploy.processes import spawn
from tests import root_rights
from tests.waiting import DeadlinePassed, patience

pytestmark = [pytest.mark.java, pytest.mark.long]

ROUNDS = int(os.environ.get("MILLRACE_FAULT_ROUNDS", "20"))
SEED = int(os.environ.get("MILLRACE_FAULT_SEED", "5"))
START_S = 120
MOST_S_PER_ROUND = 240
"""A broken round may wait for each of its deadlines before it is called broken."""

LATE = 3

PROJECT = Path(__file__).resolve().parents[2]


def run_faults(folder: Path, *options: str, rounds: int) -> tuple[int, str]:
    """Exit status, and all that it said."""
    words = [sys.executable, "-m", "tests.cluster.faults", "--folder", str(folder), "--rounds", str(rounds)]
    said = folder.with_suffix(".out")
    process = spawn(
        [*words, *options], log=said, environment={"PYTHONPATH": str(PROJECT)}, die_with_parent=True
    )
    try:
        status = process.wait(patience(START_S + rounds * MOST_S_PER_ROUND))
    finally:
        process.kill()
    return status, said.read_text(errors="replace")


def test_every_promise_is_kept_through_random_faults(tmp_path: Path) -> None:
    status, said = run_faults(tmp_path / "run", "--seed", str(SEED), rounds=ROUNDS)
    print(said)
    verdict = f"seed {SEED} ended with status {status}; above is what it said"
    if status == LATE:
        raise DeadlinePassed(verdict)
    assert status == 0, verdict
    root_rights.check_fault_run(said)


def test_without_namespaces_the_same_is_done_by_proxies(tmp_path: Path) -> None:
    status, said = run_faults(tmp_path / "run", "--seed", "12", "--proxies", rounds=1)
    print(said)
    assert status == 0
    assert "cuts by TCP proxies" in said
    assert root_rights.FALLBACK in said
