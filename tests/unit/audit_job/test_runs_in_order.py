"""Runs in order of set and first member, however wide their numbers are."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.audit.scanning.united_sets import in_order
from tests import seeds

SETS, MEMBERS = 1 << 31, 1 << 32


@pytest.mark.parametrize("most_sets", [1, 22, 1 << 20, SETS])
@pytest.mark.parametrize("longest", [1, 3, 1000, MEMBERS])
def test_runs_of_any_numbers_come_in_order_and_none_is_another(most_sets: int, longest: int) -> None:
    rng = np.random.default_rng(seeds.given())
    runs = np.empty((5000, 3), np.int64)
    runs[:, 0] = rng.integers(0, most_sets, len(runs))
    runs[:, 1] = rng.integers(0, MEMBERS, len(runs))
    runs[:, 2] = np.minimum(runs[:, 1] + rng.integers(0, longest, len(runs)), MEMBERS - 1)
    runs[0], runs[1] = (most_sets - 1, MEMBERS - 1, MEMBERS - 1), (0, 0, longest - 1)
    before = runs.copy()
    ordered = in_order(runs)
    assert (runs == before).all(), "a copy"
    known = sorted(before.tolist())
    assert sorted(ordered.tolist()) == known
    assert [each[:2] for each in ordered.tolist()] == [each[:2] for each in known]


def test_no_run_is_in_order() -> None:
    assert in_order(np.empty((0, 3), np.int64)).shape == (0, 3)
