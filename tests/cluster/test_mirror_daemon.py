"""The mirror as a process: its seam, its port, its check."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import FatalError, PortTaken
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.mirror.checks.check import Severity, check
from millrace.mirror.config import MirrorConfig, parse_config
from millrace.mirror.daemon import Mirror, run
from tests.cluster.mirror_process import end_offset, send, until
from tests.ports import free_port
from tests.servers import BrokerProcess
from tests.waiting import patience

BrokerFactory = Callable[..., BrokerProcess]


def config(target: str, source: str, **more: object) -> MirrorConfig:
    settings: dict[str, object] = {
        "name": "aggregate",
        "target": {"cluster": "agg", "bootstrap": [target]},
        "sources": [{"cluster": "ewr", "bootstrap": [source], "topics": {"include": ["flights"]}}],
        "control": {"listen": "127.0.0.1:0"},
        "discovery_interval_ms": 500,
    }
    return parse_config({**settings, **more})


@pytest.mark.java
def test_hook_between_fetch_and_produce_drops_and_repeats(broker_factory: BrokerFactory) -> None:
    ewr, agg = broker_factory(), broker_factory()

    def sabotage(source: str, topic: str, partition: int, batch: memoryview) -> list[bytes | memoryview]:
        assert (source, topic, partition) == ("ewr", "flights", 0)
        value = read_records(batch)[0].value
        if value == b"lost":
            return []
        return [bytes(batch), bytes(batch)] if value == b"twice" else [batch]

    async def story() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
            await create_topic(source, "flights", 1, 1, {"retention.ms": "-1"})
            for value in (b"first", b"lost", b"twice", b"last"):
                await send(source, "flights", 0, build_batch([Record(None, value, timestamp_ms=1)]))
            mirror = Mirror(config(agg.bootstrap, ewr.bootstrap), between=sabotage)
            running = asyncio.create_task(mirror.run())

            async def all_there() -> bool:
                assert not running.done()
                return await end_offset(target, "flights", 0) >= 4

            await until(all_there, lambda: str(mirror.worker and mirror.worker.status()))
            mirror.request_stop()
            assert await running == 0
            values = [record.value async for record in read_topic_to_end(target, "flights")]
            assert values == [b"first", b"twice", b"twice", b"last"]

    asyncio.run(story())


@pytest.mark.java
def test_check_names_what_is_wrong_and_what_is_well(broker_factory: BrokerFactory) -> None:
    ewr, agg = broker_factory(), broker_factory()

    async def story() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source:
            await create_topic(source, "flights", 1, 1)
        well = await check(config(agg.bootstrap, ewr.bootstrap))
        assert {finding.severity for finding in well} == {Severity.OK}
        away = await check(config(agg.bootstrap, f"127.0.0.1:{free_port()}"))
        assert (away[0].severity, away[0].where) == (Severity.ERROR, "ewr")
        # The same cluster under another name of the same host.
        round_trip = await check(config(ewr.bootstrap.replace("127.0.0.1", "localhost"), ewr.bootstrap))
        messages = [finding.message for finding in round_trip if finding.severity is Severity.ERROR]
        assert any("same cluster" in message for message in messages)
        assert any("carried into the cluster that they come from" in message for message in messages)

    asyncio.run(story())


@pytest.mark.java
def test_mirror_into_its_own_source_ends_with_one_line(
    broker_factory: BrokerFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    ewr = broker_factory()

    async def prepare() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source:
            await create_topic(source, "flights", 1, 1)

    asyncio.run(prepare())
    assert run(config(ewr.bootstrap.replace("127.0.0.1", "localhost"), ewr.bootstrap)) == 2
    said = capfd.readouterr().err
    assert "is the same cluster as agg" in said
    assert "(and 1 more: see `millrace mirror check`)" in said
    assert "Traceback" not in said


def test_taken_control_port_is_one_line_and_its_own_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        nowhere = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        assert run(config(*nowhere, control={"listen": listen})) == PortTaken.exit_status
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert listen in lines[0]


def test_missing_config_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "mirror.yaml") == 2
    assert "No such file" in capfd.readouterr().err


@pytest.mark.java
def test_positions_topic_that_expires_is_refused_before_anything_is_carried(
    broker_factory: BrokerFactory,
) -> None:
    ewr, agg = broker_factory(), broker_factory()

    async def story() -> None:
        async with Cluster("ewr", [ewr.bootstrap]) as source, Cluster("agg", [agg.bootstrap]) as target:
            await create_topic(source, "flights", 1, 1, {"retention.ms": "-1"})
            await send(source, "flights", 0, build_batch([Record(None, b"first", timestamp_ms=1)]))
            await create_topic(target, "millrace.positions.aggregate", 1, 1, {"cleanup.policy": "delete"})
            mirror = Mirror(config(agg.bootstrap, ewr.bootstrap))
            with pytest.raises(FatalError, match=r"cleanup\.policy=delete.*set it to compact"):
                await asyncio.wait_for(mirror.run(), patience(120))
            assert await end_offset(target, "flights", 0) == 0

    asyncio.run(story())
