"""The mirror's memory, smaller than `make bench-mirror-memory`: flat while gigabytes pass, bounded when
nothing can leave. The pair's servers are frozen for seconds, and then left as they were."""

from __future__ import annotations

import os

import pytest

from tests.benchmarks.mirror.memory import COPIES, TOLERANCE, Flat, Stalled, exit_status, flat, stalled
from tests.pairs import Pair, in_pairs

MEGABYTE = 1_000_000
ALLOWED = 16 << 20

DELIVERIES = {"millrace-millrace": ("exactly_once",), "kafka-kafka": ("at_least_once",)}
"""By `make test-pairs` both in every pair."""


@pytest.mark.long
@in_pairs("millrace-millrace", "kafka-kafka")
def test_memory_stays_flat(pair: Pair) -> None:
    found = flat(
        pair.folder,
        pair.source.server,
        pair.target.server,
        total=1_200 * MEGABYTE,
        step=200 * MEGABYTE,
        delivery="exactly_once",
        say=print,
    )
    assert found.deviation <= TOLERANCE, found.means


@in_pairs(*DELIVERIES)
def test_stalled_target_does_not_fill_memory(pair: Pair) -> None:
    all_asked = os.environ.get("MILLRACE_PAIRS")
    for delivery in ("exactly_once", "at_least_once") if all_asked else DELIVERIES[pair.name]:
        found = stalled(
            pair.folder / delivery,
            pair.source.server,
            pair.target.server,
            allowed=ALLOWED,
            delivery=delivery,
            least_s=3.0,
        )
        print(delivery, found)
        assert found.in_flight <= ALLOWED
        assert found.growth <= COPIES * ALLOWED
        # Otherwise nothing was tried.
        assert found.in_flight > ALLOWED // 4


def test_the_verdict_is_the_exit_status() -> None:
    level, held = Flat([50.0, 100.0, 104.0, 98.0], warm_up_steps=1), Stalled(15 << 20, 40 << 20, ALLOWED)
    assert exit_status(level, held) == 0
    assert exit_status(Flat([100.0, 100.0, 112.0], warm_up_steps=0), held) == 1
    for wrong in (
        Stalled(ALLOWED + 1, 40 << 20, ALLOWED),
        Stalled(15 << 20, COPIES * ALLOWED + 1, ALLOWED),
        Stalled(ALLOWED // 4, 0, ALLOWED),
    ):
        assert exit_status(level, wrong) == 1
