"""A real Prometheus scrapes a loaded mirror: every panel of the dashboard gets data, and alerts fire and fall
silent again.

Two sources, one target, two workers under exactly_once, live load; one source is throttled below its load,
one partition is stopped at a gap and one is paused, so that nothing that the dashboard shows is empty.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import yaml

from millrace.broker.client.admin import create_topic
from millrace.broker.client.cluster import Cluster
from millrace.broker.protocol.records import Record, build_batch
from millrace.deploy.processes import spawn
from tests.cluster.mirror_process import MirrorProcess, end_offset, send, until
from tests.pairs import End, Pair, in_pairs
from tests.ports import free_port
from tests.record_deletion import delete_records
from tests.waiting import Deadline, patience, until_async

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
SCRAPE_INTERVAL = "1s"
UNHEALTHY = {"MirrorSourceDown", "MirrorTargetDown", "MirrorWorkerDown"}
FOR_A_CAUSE = {"MirrorLagGrowing", "MirrorStalled", "MirrorGapOpen"}
# What makes the product's rules impatient, each part of them once at least: how long a state lasts, over what
# it is looked at, how far behind is behind.
IMPATIENT = {
    r"for: \d+m": "for: 0s",
    r"\[10m\]": "[5s]",
    r"\[5m\]": "[5s]",
    r"\(millrace_mirror_lag_seconds\) > 60": "(millrace_mirror_lag_seconds) > 2",
    r"\(delta\((.*)\)\) > 30": r"(delta(\1)) > 1",
}
SLOW_BYTES_PER_S = 50_000
Firing: TypeAlias = tuple[str, str, str]
"""An alert's name, source and topic; "" for a label that it does not have."""
VARIABLES = {"$__rate_interval": "15s", "$job": ".*", "$source": ".*"}


class Prometheus:
    """A Prometheus server that scrapes these ports and evaluates the alert rules; `query` is its HTTP API."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        binary = shutil.which("prometheus")
        assert binary, "Prometheus is needed: apt-get install prometheus"
        self.port = free_port()
        self.log_path = folder / "prometheus.log"
        config = folder / "prometheus.yaml"
        rules = folder / "mirror-alerts.yaml"
        # What they say is promtool's test, here they meet real series.
        rules.write_text(impatient((DASHBOARDS / "mirror-alerts.yaml").read_text()))
        config.write_text(
            yaml.safe_dump(
                {
                    "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL},
                    "rule_files": [rules.name],
                    "scrape_configs": [
                        {
                            "job_name": "mirror-aggregate",
                            "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
                        }
                    ],
                }
            )
        )
        words = [binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        words.append(f"--web.listen-address=127.0.0.1:{self.port}")
        self.process = spawn(words, log=self.log_path, die_with_parent=True)

    def ask(self, path: str, **parameters: str) -> Any:
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}{query}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=patience()) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that an expression gives now, without those that are no number."""
        samples = self.ask("query", query=expression)["result"]
        return [each for each in samples if each["value"][1] not in ("NaN", "+Inf", "-Inf")]

    def firing(self) -> set[Firing]:
        """What fires now."""
        labels = [each["labels"] for each in self.ask("alerts")["alerts"] if each["state"] == "firing"]
        return {(each["alertname"], each.get("source", ""), each.get("topic", "")) for each in labels}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(patience())


def impatient(rules: str) -> str:
    for patient, replacement in IMPATIENT.items():
        rules, count = re.subn(patient, replacement, rules)
        assert count, f"no rule says {patient} any more"
    return rules


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    """What a test started; stopped with it."""
    started: list[Any] = []
    yield started
    for each in reversed(started):
        each.stop()


@in_pairs("millrace-millrace", "kafka-kafka")
def test_every_panel_of_the_dashboard_gets_data_and_alerts_fire_until_their_cause_is_gone(
    pair: Pair, second_source: End, tmp_path: Path, processes: list[Any]
) -> None:
    ewr, lhr = pair.source.name, second_source.name
    flights, expiring, resting = (pair.unique(stem) for stem in ("flights", "expiring", "resting"))
    settings = {
        "name": pair.unique("mirror"),
        "delivery": "exactly_once",
        "naming": "{cluster}.{topic}",
    }

    async def story() -> None:
        async with (
            pair.source.cluster() as first,
            second_source.cluster() as second,
            pair.target.cluster() as target,
        ):
            for cluster in (first, second):
                await create_topic(cluster, flights, 2, 1)
            for topic in (expiring, resting):
                await create_topic(first, topic, 1, 1)
                await send(first, topic, 0, batch())
            workers = [
                pair.mirror([flights, expiring, resting], also=[second_source], **settings) for _ in range(2)
            ]

            def logs() -> str:
                return "\n".join(worker.log[-3000:] for worker in workers)

            async def begun() -> bool:
                ends = [await end_offset(target, f"{ewr}.{topic}", 0) for topic in (expiring, resting)]
                try:
                    return min(ends) > 0 and all(worker.get("/readyz")[0] == 200 for worker in workers)
                except OSError:
                    return False  # a port that is not open yet

            await until(begun, logs)
            post(workers[0], "/pause", {"source": ewr, "topic": expiring})
            post(workers[0], "/pause", {"source": ewr, "topic": resting})
            post(workers[0], "/throttle", {"source": lhr, "bytes_per_second": SLOW_BYTES_PER_S})

            async def rests() -> bool:
                states = [
                    each["state"] for worker in workers for each in worker.status().get("partitions", ())
                ]
                return states.count("paused") == 2

            await until(rests, logs)
            for _ in range(5):
                await send(first, expiring, 0, batch())
            await delete_records(first, {(expiring, 0): 70})
            post(workers[1], "/resume", {"source": ewr, "topic": expiring})
            prometheus = Prometheus(tmp_path, [worker.port for worker in workers])
            processes.append(prometheus)
            load = asyncio.create_task(loading(flights, resting, first, second))
            expected = {
                ("MirrorLagGrowing", lhr, flights),
                ("MirrorStalled", ewr, expiring),
                ("MirrorGapOpen", ewr, ""),
                ("MirrorGapMet", ewr, ""),
            }
            # What an operator has paused is no surprise.
            never = ("MirrorStalled", ewr, resting)
            try:
                await asyncio.to_thread(look, prometheus, ewr, lhr, expected, never)
                gap = {"partition": 0, "from": 20, "class": "expired"}
                post(workers[0], "/throttle", {"source": lhr, "bytes_per_second": None})
                post(workers[0], "/resume", {"source": ewr, "topic": resting})
                post(workers[1], "/skip", {"source": ewr, "topic": expiring, **gap})

                async def is_silent() -> bool:
                    firing = await asyncio.to_thread(prometheus.firing)
                    (worst,) = prometheus.query("max(millrace_mirror_lag_seconds)")
                    has_caught_up = float(worst["value"][1]) < 2
                    return has_caught_up and not {name for name, *_ in firing} & FOR_A_CAUSE

                await until(is_silent, lambda: str(prometheus.firing()))
            finally:
                load.cancel()
                await asyncio.wait([load])
            if not load.cancelled():
                load.result()

    asyncio.run(story())


@pytest.mark.long
@in_pairs("millrace-millrace", "kafka-kafka", mortal=True)
def test_a_target_that_stands_still_raises_the_alarm_also_where_nothing_is_to_be_carried(
    pair: Pair, tmp_path: Path, processes: list[Any]
) -> None:
    topic = pair.unique("flights")
    alarms = {("MirrorTargetDown", "", ""), ("MirrorNotReady", "", "")}

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, topic, 1, 1)
            await send(source, topic, 0, batch())
            mirror = pair.mirror([topic], group={"session_timeout_ms": 3_000, "rebalance_timeout_ms": 10_000})

            async def carried() -> bool:
                return await end_offset(target, topic, 0) > 0 and mirror.get("/readyz") == (200, "ready\n")

            await until(carried, logs_of=[mirror])
        prometheus = Prometheus(tmp_path, [mirror.port])
        processes.append(prometheus)

        async def fire(wanted: set[Firing]) -> bool:
            try:
                return (await asyncio.to_thread(prometheus.firing)) & alarms == wanted
            except OSError:
                return False  # it is not up yet

        async def is_seen() -> bool:
            return bool(prometheus.query("millrace_mirror_target_up == 1"))

        await until_async(is_seen, retry=(OSError,), every_s=0.1, logs_of=[prometheus])
        os.kill(pair.target.pid, signal.SIGSTOP)
        try:
            await until(lambda: fire(alarms), logs_of=[mirror])
            status, told = mirror.get("/readyz")
            assert status == 503 and f"target {pair.target.name} does not answer" in told, told
        finally:
            os.kill(pair.target.pid, signal.SIGCONT)
        await until(lambda: fire(set()), logs_of=[mirror])
        assert mirror.get("/readyz")[0] == 200

    asyncio.run(story())


def look(prometheus: Prometheus, ewr: str, lhr: str, expected: set[Firing], never: Firing) -> None:
    """Polls until nothing is empty any more and all of the expected alerts fire."""
    dashboard = json.loads((DASHBOARDS / "mirror-lag.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    missing = {
        (panel["title"], target["refId"]): filled(target["expr"])
        for panel in panels
        for target in panel["targets"]
    }
    firing: set[Firing] = set()
    healthy = False
    deadline = Deadline(
        lambda: f"data for {missing}; healthy {healthy}; {firing}", within_s=240, logs_of=[prometheus]
    )
    # All at once: before there is a second sample of a counter, whatever has a lag seems to stand still.
    while not healthy or missing or not expected <= firing:
        deadline.check()
        time.sleep(0.5)
        try:
            missing = {key: query for key, query in missing.items() if not prometheus.query(query)}
            firing = prometheus.firing()
            # What is healthy raises nothing; a scrape that a busy machine held up passes.
            errors = [each["lastError"] for each in prometheus.ask("targets")["activeTargets"]]
            healthy = errors == ["", ""] and not {name for name, *_ in firing} & UNHEALTHY
        except OSError:
            continue  # Prometheus is not up yet
        assert never not in firing
    for name in ("job", "source"):
        (variable,) = [each for each in dashboard["templating"]["list"] if each["name"] == name]
        metric, label = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variable["definition"]).groups()
        values = {each["metric"][label] for each in prometheus.query(metric)}
        assert values == ({"mirror-aggregate"} if name == "job" else {ewr, lhr})
    # Names that Prometheus knows only because the mirror said so, with their types.
    assert prometheus.ask("metadata", metric="millrace_mirror_records_total")
    assert prometheus.query(f'sum(millrace_mirror_open_gaps{{source="{ewr}"}})')[0]["value"][1] == "1"


def filled(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


async def loading(flights: str, resting: str, *clusters: Cluster) -> None:
    """Records to every source until it is cancelled."""
    turn = 0
    while True:
        turn += 1
        for cluster in clusters:
            await send(cluster, flights, turn % 2, batch())
        if turn % 10 == 0:
            await send(clusters[0], resting, 0, batch())
        await asyncio.sleep(0.05)


def batch() -> bytearray:
    now_ms = int(time.time() * 1000)
    return build_batch([Record(b"k", b"v" * 1_000, timestamp_ms=now_ms) for _ in range(20)])


def post(mirror: MirrorProcess, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{mirror.port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=patience()) as answer:
        assert answer.status == 200
