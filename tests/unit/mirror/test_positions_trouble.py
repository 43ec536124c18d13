"""What holds the positions up, in one line: nobody may be made to abort what is about to be committed."""

from __future__ import annotations

import asyncio

import pytest

from millrace.mirror.config import parse_config
from millrace.mirror.delivery import positions_keeper
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from millrace.mirror.topics.own_topics import POSITIONS
from tests.unit.client.test_open_transactions import Brokers
from tests.waiting import until_async as until

CONFIG = parse_config(
    {
        "name": "aggregate",
        "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
        "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
    }
)
TOPIC = POSITIONS.of("aggregate")


def told(brokers: Brokers, monkeypatch: pytest.MonkeyPatch, refused: dict[str, str] | None = None) -> str:
    """What is told while a reading hangs; `refused`: what the target does not take, and why."""
    monkeypatch.setattr(positions_keeper, "TOLD_AFTER_S", 0.01)

    async def main() -> str:
        async with brokers.serve() as target:
            system = SystemRecords(target, lambda: 0, 1)
            for topic, reason in (refused or {}).items():
                system.failures.failed((topic, 0), reason, 0)
            keeper = PositionsKeeper(CONFIG, target, system)

            async def hang() -> None:
                await asyncio.Event().wait()

            monkeypatch.setattr(keeper, "_read", hang)
            reading = asyncio.create_task(keeper.read())
            await until(lambda: keeper.trouble != "")
            said = keeper.trouble
            reading.cancel()
            await asyncio.wait([reading])
            assert keeper.trouble == ""
            return said

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "whose"),
    [(14, "broker 2 did not say whose it is"), (0, "no coordinator shows whose it is")],
)
def test_no_abort_is_advised_for_what_nobody_claims(
    code: int, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers = Brokers(TOPIC)
    brokers.codes[2] = code
    assert told(brokers, monkeypatch) == (
        f"{TOPIC}-0: an open transaction from offset 1234 of producer 77 ({whose}) is not over; "
        "if it stays past its timeout, see what kafka-transactions.sh find-hanging --broker-id 1 names: "
        "abort nothing else"
    )


def test_what_a_coordinator_is_about_to_end_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(TOPIC)
    brokers.states[2] = {"worker": "PrepareCommit"}
    said = told(brokers, monkeypatch)
    assert said == (
        f"{TOPIC}-0: an open transaction from offset 1234 of worker (PrepareCommit) is not ended by its "
        "producer, nor by its timeout yet"
    )


def test_an_answer_about_nothing_does_not_end_the_telling(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(TOPIC)
    brokers.says_nothing = True
    said = told(brokers, monkeypatch)
    assert said.startswith(f"{TOPIC}-0 has not been read to its end (")
    assert f"says nothing of the producers of {TOPIC}-0" in said


def test_a_target_that_takes_no_record_of_the_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its own record behind them nobody knows that these are the newest positions."""
    said = told(Brokers(TOPIC), monkeypatch, {TOPIC: "NOT_ENOUGH_REPLICAS", "other": "another"})
    assert said == f"{TOPIC}-0 takes no record (NOT_ENOUGH_REPLICAS)"
