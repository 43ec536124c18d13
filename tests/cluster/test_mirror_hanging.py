"""Positions that cannot be read to their end: a transaction on their topic that nobody ends is named."""

from __future__ import annotations

import asyncio

import pytest
from confluent_kafka import Producer

from millrace.broker.client.open_transactions import open_transactions
from millrace.mirror.config import parse_config
from millrace.mirror.delivery import positions_keeper
from millrace.mirror.delivery.positions_keeper import PositionsKeeper
from millrace.mirror.delivery.system_records import SystemRecords
from tests.cluster.mirror_process import until
from tests.pairs import Pair, in_pairs


@in_pairs("kafka-millrace", "millrace-kafka")
def test_the_transaction_that_holds_up_the_positions_is_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(positions_keeper, "TOLD_AFTER_S", 0.2)
    mirror = pair.unique("hanging")
    config = parse_config(
        {
            "name": mirror,
            "target": {"cluster": pair.target.name, "bootstrap": [pair.target.bootstrap]},
            "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:1"], "topics": {"include": ["flights"]}}],
        }
    )

    async def story() -> None:
        writer = Producer({"bootstrap.servers": pair.target.bootstrap, "transactional.id": f"{mirror}.id"})
        async with pair.target.cluster() as target:
            keeper = PositionsKeeper(config, target, SystemRecords(target, lambda: 1, 1))
            await keeper.make_topics()
            topic = keeper.positions.topic
            await asyncio.to_thread(writer.init_transactions, 120)
            writer.begin_transaction()
            writer.produce(topic, b"x", b"no position", partition=0)
            await asyncio.to_thread(writer.flush, 120)
            (found,) = await open_transactions(target, topic, 0)
            assert (found.transactional_id, found.start_offset) == (f"{mirror}.id", 0)
            reading = asyncio.create_task(keeper.read())

            async def told() -> str:
                return keeper.trouble

            said = await until(told, lambda: "nothing was told")
            assert said.startswith(f"{topic}-0: an open transaction from offset 0 of {mirror}.id (Ongoing)")
            assert not reading.done()
            await asyncio.to_thread(writer.abort_transaction, 120)
            await reading
            assert keeper.trouble == ""
            assert await open_transactions(target, topic, 0) == []

    asyncio.run(story())
    assert "the positions are still being read" in capsys.readouterr().out
