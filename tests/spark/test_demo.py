"""The demo as a user starts it: what it prints, writes, returns and leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.waiting import patience

pytestmark = pytest.mark.java

DEMO = [sys.executable, "-m", "millrace.deploy.cli", "demo"]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str
    report: Path

    @property
    def summary(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.report / "summary.json").read_text())
        return content

    @property
    def injected(self) -> dict[str, list[dict[str, Any]]]:
        content: dict[str, list[dict[str, Any]]] = json.loads((self.report / "injected.json").read_text())
        return content


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Path]:
    """Where the demo puts its folder; nothing may run or lie there afterwards."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    yield folder
    assert processes_in(folder) == []
    assert list(folder.glob("millrace-demo-*")) == []


@pytest.fixture
def demo(workspace: Path, tmp_path: Path) -> Callable[..., Outcome]:
    def run(*arguments: str) -> Outcome:
        report = tmp_path / "report"
        answer = subprocess.run(
            [*DEMO, "--report", str(report), *arguments],
            capture_output=True,
            text=True,
            timeout=patience(TIMEOUT_S),
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(workspace)},
        )
        assert "Traceback" not in answer.stderr, answer.stderr
        return Outcome(answer.returncode, answer.stdout, answer.stderr, report)

    return run


@pytest.fixture
def small_csv(tmp_path: Path) -> str:
    """1,200 events of six producers in three datacenters."""
    path = tmp_path / "orders.csv"
    lines = ["site,shop,order"]
    lines += [f"{'ABC'[n % 3]},{'xy'[n // 3 % 2]}@{'ABC'[n % 3]},{n}" for n in range(1200)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that were started from this folder's demo."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found


def records(findings: list[dict[str, Any]]) -> set[tuple[str, str, str, int]]:
    return {
        (finding["topic"], finding["producer"], finding["stream"], sequence)
        for finding in findings
        for first, last in finding["sequences"]
        for sequence in range(first, last + 1)
    }


@pytest.mark.long
def test_all_flights_of_a_year_are_proven(demo: Callable[..., Outcome]) -> None:
    outcome = demo()
    assert outcome.status == 0, outcome.out + outcome.err
    summary = outcome.summary
    assert summary["verdict"] == "PROVEN"
    counts = summary["counts"]
    assert counts["acknowledged"] == 336_776
    assert counts["seen"] == {"ewr": 120_835, "jfk": 111_279, "lga": 104_662, "agg": 336_776}
    assert {counts[name] for name in ("missing", "duplicates", "unreported", "unknown", "explained")} == {0}
    assert summary["losses"] == summary["duplicates"] == []
    assert len(summary["producers"]) == 35
    assert sum(producer["published"] for producer in summary["producers"]) == 336_776
    rows = pq.read_table(outcome.report / "reconciliation.parquet")
    assert sum(rows["published"].to_pylist()) == 336_776
    assert "<html" in (outcome.report / "index.html").read_text()
    assert "latency from send to readable in the aggregate: mean" in outcome.out
    assert "PROVEN" in outcome.out


def test_lost_and_repeated_records_are_named_one_by_one_and_a_kept_sandbox_serves(
    demo: Callable[..., Outcome], small_csv: str, workspace: Path
) -> None:
    outcome = demo(
        *("--input", small_csv, "--datacenter-column", "site", "--producer-column", "shop"),
        *("--lose", "7", "--duplicate", "3", "--seed", "42", "--seconds", "2", "--keep"),
    )
    check_that_it_serves_and_goes_down(outcome, workspace)
    assert outcome.status == 1, outcome.out + outcome.err
    assert "audit named all 7 losses and 3 duplicates, and nothing else" in outcome.out
    summary, injected = outcome.summary, outcome.injected
    assert (summary["verdict"], summary["counts"]["acknowledged"]) == ("LOSS", 1200)
    assert (summary["counts"]["missing"], summary["counts"]["duplicates"]) == (7, 3)
    assert (len(injected["lost"]), len(injected["duplicated"])) == (7, 3)
    for kind, named in (("lost", summary["losses"]), ("duplicated", summary["duplicates"])):
        assert records(named) == {
            (deed["topic"], deed["producer"], deed["stream"], deed["sequence"]) for deed in injected[kind]
        }
    for loss in summary["losses"]:
        assert loss["topic"] == "orders"
        assert loss["lost_between"] == [loss["producer"][-1].lower(), "agg"]


@pytest.mark.long
def test_killed_mirror_and_broker_lose_nothing(demo: Callable[..., Outcome]) -> None:
    outcome = demo("--kill")
    assert outcome.status in (0, 1), outcome.out + outcome.err
    assert "SIGKILL to mirror-aggregate-1 and broker-agg" in outcome.out
    counts = outcome.summary["counts"]
    assert (counts["acknowledged"], counts["seen"]["agg"], counts["missing"]) == (336_776, 336_776, 0)
    assert outcome.summary["verdict"] == ("DUPLICATE" if outcome.status else "PROVEN")
    assert (counts["duplicates"] > 0) == (outcome.status == 1)


def test_column_that_is_not_there_is_one_line_and_starts_nothing(
    demo: Callable[..., Outcome], small_csv: str
) -> None:
    outcome = demo("--input", small_csv, "--datacenter-column", "site", "--producer-column", "nosuch")
    assert outcome.status == 3
    assert outcome.err.count("\n") == 1
    assert "no column 'nosuch': name one with --producer-column (it has site, shop, order)" in outcome.err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_stops_all_that_it_started(
    number: signal.Signals, workspace: Path, tmp_path: Path, small_csv: str
) -> None:
    command = [
        *DEMO,
        *("--input", small_csv, "--datacenter-column", "site", "--producer-column", "shop"),
        *("--seconds", "60", "--report", str(tmp_path / "report")),
    ]
    environment = {**os.environ, "TMPDIR": str(workspace)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        guard = threading.Timer(TIMEOUT_S, child.kill)
        guard.start()
        for line in child.stdout:
            if b"published" in line:
                break
        assert len(processes_in(workspace)) >= 8
        child.send_signal(number)
        child.stdout.read()
        error = child.stderr.read().decode()
        guard.cancel()
    assert child.returncode == 130
    assert error == "millrace: interrupted; everything that the demo started is stopped\n"


def check_that_it_serves_and_goes_down(outcome: Outcome, workspace: Path) -> None:
    """What `--keep` left running serves, and its file is all that ends it."""
    file = next(workspace.glob("millrace-demo-*/sandbox.yaml"))
    local = [sys.executable, "-m", "millrace.deploy.cli", "local"]
    status = [*local, "status", "--file", str(file), "-o", "json"]
    try:
        assert f"millrace local down --delete --file {file}" in outcome.out, outcome.err
        rows = json.loads(subprocess.run(status, capture_output=True, text=True, check=True).stdout)
        assert {row["state"] for row in rows} == {"serving"}
        assert all(row["address"] in outcome.out for row in rows)
    finally:
        subprocess.run([*local, "down", "--delete", "--file", str(file)], check=True, capture_output=True)
