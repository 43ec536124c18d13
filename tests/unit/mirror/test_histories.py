"""What a leader's epochs say of positions, at a source whose fetches do not say it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.broker.client.raw_fetch import FetchPosition
from millrace.broker.errors import UnsupportedVersion
from millrace.mirror.sources import histories as histories_module
from millrace.mirror.sources.histories import Compared, Histories

KEY = ("t", 0)
AT = FetchPosition(90, last_fetched_epoch=5)


def compared(
    monkeypatch: pytest.MonkeyPatch,
    ends: dict[int, tuple[int, int]] | None,
    now: int = 7,
    at: FetchPosition = AT,
) -> Compared:
    """`ends`: what the leader answers for an epoch; None: it cannot be asked."""

    async def epoch_ends(_cluster: object, asked: dict[Any, int]) -> Any:
        if ends is None:
            raise UnsupportedVersion("OffsetForLeaderEpoch")
        return {key: ends[epoch] for key, epoch in asked.items()}

    monkeypatch.setattr(histories_module, "epoch_ends", epoch_ends)
    cluster: Any = None
    return asyncio.run(Histories(cluster).compare({KEY: at}, {KEY: now}))


@pytest.mark.parametrize(
    ("ends", "now", "parted"),
    [
        ({5: (5, 100)}, 7, None),
        ({5: (5, 80)}, 7, (5, 80)),
        ({5: (4, 100)}, 7, (4, 100)),
        # Within the leader's own epoch no log becomes shorter: the fetch will say what it is.
        ({5: (5, 80)}, 5, None),
    ],
)
def test_position_parts_where_the_leader_left_its_epoch_before(
    monkeypatch: pytest.MonkeyPatch,
    ends: dict[int, tuple[int, int]],
    now: int,
    parted: tuple[int, int] | None,
) -> None:
    found = compared(monkeypatch, ends, now)
    if parted is None:
        assert found == Compared({KEY: AT._replace(current_leader_epoch=now)}, {})
    else:
        assert found == Compared({}, {KEY: parted})


def test_epoch_that_only_a_leader_with_epochs_does_not_know_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert compared(monkeypatch, {5: (-1, -1), 7: (7, 10)}) == Compared({}, {KEY: None})
    assert compared(monkeypatch, {5: (-1, -1), 7: (-1, -1)}).parted == {}, "it keeps none"


def test_what_cannot_be_asked_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, None).ours == {KEY: AT._replace(current_leader_epoch=7)}
    fresh = FetchPosition(0)
    assert compared(monkeypatch, None, at=fresh).ours == {KEY: fresh._replace(current_leader_epoch=7)}
