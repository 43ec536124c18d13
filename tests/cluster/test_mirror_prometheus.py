"""A real Prometheus scrapes a loaded mirror: every panel of the dashboard gets data, and alerts fire.

Two sources, one target, two workers under exactly_once, live load; one source is throttled, one partition is
stopped at a gap and one is paused, so that nothing that the dashboard shows is empty.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from tests.waiting import Deadline, patience

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
SCRAPE_INTERVAL = "1s"
UNHEALTHY = {"MirrorSourceDown", "MirrorTargetDown", "MirrorWorkerDown"}
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
        # The product's rules, impatient: what they say is promtool's test, here they meet real series.
        rules.write_text(re.sub(r"for: \d+m", "for: 0s", (DASHBOARDS / "mirror-alerts.yaml").read_text()))
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

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(patience())


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    """What a test started; stopped with it."""
    started: list[Any] = []
    yield started
    for each in reversed(started):
        each.stop()


@in_pairs("millrace-millrace", "kafka-kafka")
def test_every_panel_of_the_dashboard_gets_data_and_a_gap_raises_an_alert(
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
            post(workers[0], "/throttle", {"source": lhr, "bytes_per_second": 5_000_000})

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
            try:
                await asyncio.to_thread(look, prometheus, ewr, lhr)
            finally:
                load.cancel()
                await asyncio.wait([load])
            if not load.cancelled():
                load.result()

    asyncio.run(story())


def look(prometheus: Prometheus, ewr: str, lhr: str) -> None:
    """Polls until nothing is empty any more."""
    dashboard = json.loads((DASHBOARDS / "mirror-lag.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    missing = {
        (panel["title"], target["refId"]): filled(target["expr"])
        for panel in panels
        for target in panel["targets"]
    }
    alerts: set[str] = set()
    healthy = False
    deadline = Deadline(
        lambda: f"data for {missing}; healthy {healthy}; {alerts}", within_s=240, logs_of=[prometheus]
    )
    while not healthy or missing or "MirrorGapOpen" not in alerts or "MirrorGapMet" not in alerts:
        deadline.check()
        time.sleep(0.5)
        try:
            missing = {key: query for key, query in missing.items() if not prometheus.query(query)}
            alerts = {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]}
            # What is healthy raises nothing; a scrape that a busy machine held up passes.
            errors = [each["lastError"] for each in prometheus.ask("targets")["activeTargets"]]
            healthy = errors == ["", ""] and not alerts & UNHEALTHY
        except OSError:
            continue  # Prometheus is not up yet
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
    return build_batch([Record(b"k", b"v" * 100, timestamp_ms=now_ms) for _ in range(20)])


def post(mirror: MirrorProcess, path: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{mirror.port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=patience()) as answer:
        assert answer.status == 200
