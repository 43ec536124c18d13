"""The seed of tests that draw their input: always the same in `make test`, of one's choosing elsewhere.

A test that draws asks `given()` and prints nothing: its failure says the seed (tests/conftest.py), and
`MILLRACE_TEST_SEED=<seed>` before pytest draws the same again. `make test-long ONLY=random` runs these tests
with many seeds; there hypothesis searches on, too, where in `make test` it looks at the same examples.
"""

from __future__ import annotations

import os

VARIABLE = "MILLRACE_TEST_SEED"
RUNS_VARIABLE = "MILLRACE_TEST_RUNS"
USUAL = 1

_asked: list[int] = []


def is_chosen() -> bool:
    """Whether somebody has named a seed: what searches may then search elsewhere than usually."""
    return VARIABLE in os.environ


def given() -> int:
    """The seed for what a test draws. Raises ValueError when the variable is no number."""
    seed = int(os.environ.get(VARIABLE, USUAL))
    _asked.append(seed)
    return seed


def taken() -> bool:
    """Whether somebody has asked since the last call."""
    was_asked = bool(_asked)
    _asked.clear()
    return was_asked


def runs(usual: int) -> int:
    """How many histories a test goes through: `usual` in `make test`. Raises ValueError as `given` does."""
    return int(os.environ.get(RUNS_VARIABLE, usual))


def examples(searching: int) -> int:
    """How many hypothesis looks at: `searching` where a seed was chosen, a third of them, always the same, in
    `make test`."""
    return searching if is_chosen() else searching // 3
