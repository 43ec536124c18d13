"""What the worker that leads the group remembers from one rebalance to the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace.mirror.assignor import Assignor, read_claims
from millrace.mirror.sharing.assignment import Claim, decode_share, encode_claim
from millrace.mirror.sharing.rates import level_of
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.worker import MOST_SHARED_OUT_AT_ONCE, Worker

EWR = [SourcePartition("ewr", "flights", number) for number in range(4)]
FRA = SourcePartition("fra", "flights", 0)


def share_out(
    assignor: Assignor,
    claims: dict[str, Claim],
    partitions: Collection[SourcePartition],
    unseen: Collection[str] = (),
) -> dict[str, set[SourcePartition]]:
    members = {member: encode_claim(claim) for member, claim in claims.items()}
    shares = assignor.share_out(
        members, read_claims(members), set(partitions), sources={"ewr", "fra"}, unseen=unseen, unfenced={7: 2}
    )
    assert all(decode_share(share).slots[7] == 2 for share in shares.values()), "what is not fenced is in use"
    return {member: set(decode_share(share).partitions) for member, share in shares.items()}


def test_source_that_was_never_seen_keeps_its_partitions_where_they_are() -> None:
    claims = {"a": Claim(frozenset({FRA}), 1)}
    assert share_out(Assignor(), claims, EWR, unseen={"fra"}) == {"a": {FRA, *EWR}}
    assert share_out(Assignor(), claims, EWR) == {"a": set(EWR)}, "seen, and without the topic"


def test_level_that_was_claimed_once_still_counts_when_its_new_owner_has_not_measured_it() -> None:
    busy, one, other = EWR[:3]
    measured = {busy: level_of(20e6), one: level_of(10e6), other: level_of(10e6)}
    assignor = Assignor()
    share_out(assignor, {"a": Claim(frozenset(measured), 1, levels=measured)}, measured)
    unmeasured = {"a": Claim(frozenset({busy, one}), 2), "b": Claim(frozenset({other}), 2)}
    assert share_out(assignor, unmeasured, measured)["a"] == {busy}
    assert share_out(Assignor(), unmeasured, measured)["a"] == {busy, one}, "a new leader knows of none"


def test_other_partitions_are_news_once() -> None:
    assignor = Assignor()
    share_out(assignor, {"a": Claim()}, EWR[:2])
    assert not assignor.is_news(EWR[:2])
    assert assignor.is_news(EWR)
    assert not assignor.is_news(EWR)


def test_configs_that_differ_are_told_of_once() -> None:
    assignor = Assignor()
    claims = {"a": Claim(sources=frozenset({"ewr", "fra"})), "b": Claim(sources=frozenset({"ewr"}))}
    with capture_logs() as lines:
        share_out(assignor, claims, EWR)
        share_out(assignor, claims, EWR)
    told = [line for line in lines if line["log_level"] == "warning"]
    assert [(line["worker"], line["carries_none_of"]) for line in told] == [("b", "fra")]


def test_claim_that_cannot_be_read_claims_nothing() -> None:
    with capture_logs() as lines:
        assert read_claims({"a": b"?"}) == {"a": Claim()}
    assert lines[0]["member"] == "a"


@pytest.mark.parametrize("more", [0, 1])
def test_very_many_partitions_are_shared_out_beside_the_event_loop(more: int) -> None:
    """Heartbeats go on: a leader that lost its seat over it would do the same as the next one."""
    many = {SourcePartition("ewr", "t", number) for number in range(MOST_SHARED_OUT_AT_ONCE + more)}
    threads = []

    def noted(*_: object, **__: object) -> dict[str, bytes]:
        threads.append(threading.current_thread())
        return {}

    async def none_departed(_: object) -> dict[int, int]:
        return {}

    worker: Any = SimpleNamespace(
        readers={},
        discovery=SimpleNamespace(partitions=lambda _: many, unseen=lambda _: set()),
        _assignor=SimpleNamespace(share_out=noted),
        _slots={},
        _fence=none_departed,
    )
    assert asyncio.run(Worker._share_out(worker, {})) == {}
    assert (threads == [threading.main_thread()]) is not bool(more)


def test_whose_seat_is_gone_is_fenced_before_anybody_is_given_its_work() -> None:
    """Its open transaction may hold records that whoever has the partition next would carry, too."""
    steps = []

    async def story() -> None:
        fenced = asyncio.Event()

        async def fence(departed: Any) -> dict[int, int]:
            steps.append(dict(departed))
            await fenced.wait()
            return {3: 1}

        def share_out(*_: object, unfenced: dict[int, int], **__: object) -> dict[str, bytes]:
            steps.append(unfenced)
            return {}

        worker: Any = SimpleNamespace(
            readers={},
            discovery=SimpleNamespace(partitions=lambda _: set(EWR), unseen=lambda _: set()),
            _assignor=SimpleNamespace(share_out=share_out),
            _slots={3: 2},
            _fence=fence,
        )
        sharing = asyncio.ensure_future(Worker._share_out(worker, {"a": encode_claim(Claim(slot=0))}))
        for _ in range(10):
            await asyncio.sleep(0)
        assert steps == [{3: 2}], "the others wait"
        fenced.set()
        await sharing

    asyncio.run(story())
    assert steps == [{3: 2}, {3: 1}]
