"""`millrace audit waive`, `status`, and the options of `run` and `watch`: what a person types and reads."""

from __future__ import annotations

import errno
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from millrace.audit import job, watch
from millrace.audit.keeping import state_files
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.reconciliation.settled import lines_digest
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict, WindowState, WindowVerdict
from millrace.audit.report.folder import note_failure
from millrace.audit.spark import environment
from millrace.deploy import cli, spark_submit
from millrace.deploy.commands import audit
from tests.settling import settle

START_MS, HOUR_MS = 1_356_998_400_000, 3_600_000


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """An audit that found one loss, on 2013-01-01."""
    path = tmp_path / "audit.yaml"
    clusters = {"ewr": {"bootstrap": ["127.0.0.1:1"], "tier": "source"}}
    path.write_text(yaml.safe_dump({"clusters": clusters, "topics": ["flights"], "window": "1d"}))
    state = StateFolder.open(tmp_path / "audit-state")
    rows = [
        WindowVerdict(
            topic="flights", producer="AA", stream="0" * 16, window_start_ms=START_MS, window_ms=86_400_000,
            state=WindowState.SETTLED, verdict=Verdict.LOSS, missing={("produced", "ewr"): ((1, 1),)},
        )
    ]  # fmt: skip
    table = settle(verdict_rows(rows), None, ["flights"], 1).table
    state.write_table("verdicts/run.parquet", table)
    state.commit(
        Commit(number=1, at_ms=5, verdicts=["verdicts/run.parquet"], verdicts_digest=lines_digest(table))
    )
    return path


@pytest.fixture
def millrace(config, capsys):
    """(exit status, out, err) of `millrace audit ...` with the config."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.run(["audit", *arguments, "--config", str(config)])
        return (status, *capsys.readouterr())

    return run


def test_a_waiver_is_given_and_shown(millrace):
    status, out, err = millrace("waive", "flights", "2013-01-01", "--why", "replayed by hand")
    assert status == 0, err
    assert "LOSS" in out and "@" in out
    told = json.loads(millrace("status", "--json")[1])
    assert json.loads(millrace("status", "-o", "json")[1]) == told
    assert told["topics"]["flights"]["waivers"] == 1
    assert told["waivers"][0]["why"] == "replayed by hand" and told["waivers"][0]["stands"]
    table = millrace("status")[1].splitlines()
    assert any(line.startswith("flights") for line in table) and max(map(len, table)) <= 79


def test_a_second_waiver_says_which_one_it_replaces(millrace):
    first = millrace("waive", "flights", "2013-01-01", "--why", "replayed by hand", "--who", "ann")[1]
    assert "replaces" not in first
    _, second, _ = millrace("waive", "flights", "2013-01-01", "--why", "counted again", "--who", "dana")
    assert second.splitlines()[0].endswith("LOSS, by dana: counted again")
    assert re.fullmatch(r"replaces the waiver of ann at 20\S+Z: replayed by hand", second.splitlines()[1])
    told = json.loads(millrace("status", "--json")[1])
    assert [each["who"] for each in told["waivers"]] == ["dana"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("waive", "flights", "2013-01-02", "--why", "x"), 3, "settled window"),
        (("waive", "flights", "yesterday", "--why", "x"), 3, "such as 2013"),
        (("waive", "flights", "2013-01-01"), 64, "--why"),
        (("run", "--until", "2013-01-01"), 3, "--from"),
        (
            ("run", "--from", "2013-01-02", "--until", "2013-01-01"),
            3,
            "--until: got '2013-01-01', expected a time after --from 2013-01-02",
        ),
        (("run", "--from", "yesterday"), 3, "--from: got 'yesterday', expected a time such as"),
        (
            ("run", "--from", "2013-01-02", "--until", "noon"),
            3,
            "--until: got 'noon', expected a time such as",
        ),
        (("run", "--from", "9013-01-02"), 3, "--from: got '9013-01-02', expected a time in the past"),
        (
            ("run", "--from", "20130101"),
            3,
            "--from: got '20130101', expected a time such as 2013-01-01T00:00:00Z, or milliseconds since",
        ),
        (("run", "--from", "2013"), 3, "--from: got '2013', expected a time such as"),
        (("run", "--from", "2013-01-01", "--until", "9" * 5000), 3, "which have 13 digits"),
        (("run", "--since", "9" * 5000 + "d"), 3, "--since: got '999"),
        (
            ("waive", "flights", "20130101", "--why", "x"),
            3,
            "window: got '20130101', expected a time such as",
        ),
        (("watch", "--every", "1000000000d"), 3, "--every: got '1000000000d', expected a duration such as"),
        (("watch", "--every", "soon"), 3, "duration"),
        (("waive", "--why", "x"), 64, "either a topic and a window, or --untrusted"),
        (("waive", "flights", "2013-01-01", "--untrusted", "x", "--why", "x"), 64, "either"),
        (("waive", "--untrusted", "header", "--why", "x"), 3, "the last report tells"),
    ],
)
def test_a_slip_is_one_line_and_a_status(millrace, arguments, status, message):
    found, _, err = millrace(*arguments)
    assert found == status, err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("what", [("flights", "2013-01-01"), ("--untrusted", "header")])
def test_a_waiver_that_cannot_be_written_is_one_line_and_the_status_of_what_could_not_be_done(
    config, millrace, monkeypatch, what
):
    report = config.parent / "audit-report"
    report.mkdir()
    (report / "summary.json").write_text(json.dumps({"untrusted": [{"what": "header", "count": 1}]}))

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(state_files, "_write_flushed", full)
    status, out, err = millrace("waive", *what, "--why", "a trial")
    assert (status, out, err.count("\n")) == (3, "", 1), err
    assert err.startswith(f"millrace: audit: {config.parent}/audit-state/waivers/")
    assert "No space left on device; make room and run it again" in err


def test_that_nobody_reads_what_an_audit_told_is_no_failure_of_it(millrace, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(audit.typer, "echo", gone)
    assert millrace("waive", "flights", "2013-01-01", "--why", "a trial")[0] == cli.READER_GONE_STATUS


@pytest.mark.parametrize("command", [("run",), ("watch",), ("status",), ("explain", "flights", "2013-01-01")])
def test_a_wrong_config_is_a_job_that_failed_whatever_was_asked(config, millrace, command):
    config.write_text("clusters: {ewr: {bootstrap: 'h:9092', tier: source}}\ntopics: [flights]\n")
    status, _, err = millrace(*command)
    assert status == 3 and "expected a list such as [host:9092]" in err


@pytest.mark.parametrize(
    ("words", "horizon_ms"),
    [((), 30 * 86_400_000), (("--since", "10d"), 10 * 86_400_000), (("--since", "forever"), None)],
)
def test_a_run_is_told_the_horizon_of_its_verdict(millrace, monkeypatch, words, horizon_ms):
    told = []

    def run(*_: object, **options: object) -> job.JobResult:
        told.append(options["horizon_ms"])
        return job.JobResult(3, None, "on purpose")

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    status, _, err = millrace("run", *words)
    assert (status, err, told) == (3, "millrace: on purpose\n", [horizon_ms])


def test_a_backfill_is_told_its_range_of_time(millrace, monkeypatch):
    told = []

    def run(*_: object, **options: object) -> job.JobResult:
        told.append(options["only"])
        return job.JobResult(3, None, "on purpose")

    monkeypatch.setattr(job, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    millrace("run", "--from", "2013-01-01", "--until", "2013-01-02T12:00:00Z")
    begin_ms = time.time_ns() // 1_000_000
    millrace("run", "--from", "2013-01-01")
    millrace("run")
    day, on, whole = told
    assert day == (START_MS, START_MS + 36 * HOUR_MS)
    assert on[0] == START_MS and begin_ms <= on[1] <= time.time_ns() // 1_000_000
    assert whole is None


@pytest.mark.parametrize("words", [(), ("--since", "10d"), ("--since", "forever")])
def test_a_watch_tells_each_run_the_horizon(millrace, monkeypatch, words):
    commands = []

    class Watching:
        def __init__(self, command: list[str], *_: object, **__: object) -> None:
            commands.append(command)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(watch, "Watch", Watching)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    millrace("watch", "--runs", "1", *words)
    ((*_, option, since),) = commands
    assert (option, since) == ("--since", words[-1] if words else "30d")


def test_what_could_not_be_trusted_is_waived_by_its_words_and_shown(config, millrace):
    what = "header of an unknown version, in agg, topic flights"
    report = config.parent / "audit-report"
    report.mkdir()
    told = {"untrusted": [{"what": what, "count": 100}, {"what": "malformed batch, in ewr", "count": 1}]}
    (report / "summary.json").write_text(json.dumps(told))
    status, out, err = millrace("waive", "--untrusted", "unknown version", "--why", "a trial", "--who", "ann")
    assert (status, out) == (0, f"waived: {what} (100), by ann: a trial\n"), err
    (standing,) = json.loads(millrace("status", "--json")[1])["untrusted_waivers"]
    assert (standing["untrusted"], standing["count"], standing["stands"]) == ("unknown version", 100, True)
    assert "  not trusted, unknown version: ann: a trial" in millrace("status")[1]
    told["untrusted"][0]["count"] = 101
    (report / "summary.json").write_text(json.dumps(told))
    assert "unknown version: LAPSED, more came: ann" in millrace("status")[1]


def test_the_status_says_that_the_last_run_failed(config, millrace):
    report = config.parent / "audit-report"
    note_failure(report, START_MS, "cluster agg cannot be reached")
    table = millrace("status")[1].splitlines()
    assert table[0] == "FAILED    the last run, 2013-01-01T00:00:00Z:"
    assert table[1].strip() == "cluster agg cannot be reached" and max(map(len, table)) <= 79
    told = json.loads(millrace("status", "--json")[1])["last_failure"]
    assert told == {"at": "2013-01-01T00:00:00Z", "sentence": "cluster agg cannot be reached"}


FINISHED = """
import json
import os
import sys
from millrace.audit import job
from millrace.audit.report.summary import summarise
from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.deploy import cli
from millrace.deploy.commands import audit

summary = summarise(
    verdict_rows([]), tiers=["ewr"], at_ms=0, window_ms=1, unaudited={},
    untrusted={"\u0141\u00f3d\u017a": 1}, watermarks={"flights": None},
)
config, said = sys.argv[1:]
reading, unread = os.pipe()
os.close(reading)
open_ = {"nowhere": os.open(os.devnull, 1), "full": os.open("/dev/full", 1), "unread": unread}
ends = []
for verdict in (0, 1, 2):
    def run(*given, progress, **more):
        progress("counting")
        return job.JobResult(verdict, summary, "told nobody")

    job.run, audit._choose_java = run, lambda: None
    for out, err, letters in (
        ("nowhere", "said", "utf-8"), ("full", "said", "utf-8"), ("unread", "said", "utf-8"),
        ("nowhere", "said", "latin-1"), ("nowhere", "unread", "utf-8"),
    )[verdict:]:
        open_["said"] = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        child = os.fork()
        if not child:
            os.dup2(open_[out], 1)
            os.dup2(open_[err], 2)
            sys.stdout.reconfigure(encoding=letters, errors="strict")
            cli.main(["audit", "run", "--config", config])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(open_["said"])
        ends.append((verdict, out, err, letters, status, open(said).read()))
print(json.dumps(ends))
"""


def test_a_verdict_is_the_exit_status_whether_it_can_be_printed_or_not(config, tmp_path):
    """Nobody reads it any more, the disk is full, or the terminal has not all letters. Each run is a fork of
    one process that has loaded everything and printed nothing."""
    program = [sys.executable, "-c", FINISHED, str(config), str(tmp_path / "said")]
    ended = subprocess.run(program, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    ends = json.loads(ended.stdout)
    assert len(ends) == 5 + 4 + 3
    for verdict, out, err, letters, status, said in ends:
        expected = "millrace: told nobody\n" if err == "said" else ""
        assert (status, said) == (verdict, expected), (out, err, letters)


def test_what_package_prints_can_be_typed(tmp_path, monkeypatch, capsys):
    """The archive itself is made in test_environment, and run on real clusters by the long suite."""
    made: list[tuple[Path, str | None]] = []

    def written(output: Path, python: str | None) -> list[str]:
        made.append((output, python))
        output.write_bytes(b"packed")
        return ["numpy", "pyarrow"]

    monkeypatch.setattr(environment, "write_environment", written)
    output = tmp_path / "packed.tar.gz"
    assert cli.run(["audit", "package", "-o", str(output), "--python", "/opt/python3"]) == 0
    assert made == [(output, "/opt/python3")]
    program = tmp_path / "millrace-audit.py"
    assert program.read_bytes() == Path(spark_submit.__file__).read_bytes()
    told = capsys.readouterr().out
    assert f"{output}: millrace and 2 libraries, 0 MB" in told
    yaml_line, submit, yarn = (line.strip() for line in told.splitlines() if line.startswith("  "))
    settings = yaml.safe_load(yaml_line)["spark"]
    unpacked = f"./{environment.FOLDER}/bin/python"
    assert settings["spark.archives"] == f"{output}#{environment.FOLDER}"
    assert unpacked in settings.values()
    for words in (shlex.split(submit), shlex.split(yarn)):
        assert words[words.index("--archives") + 1] == f"{output}#{environment.FOLDER}"
        assert f"spark.pyspark.python={unpacked}" in words and words[words.index("run") - 1] == str(program)
    assert "spark.yarn.maxAppAttempts=1" in shlex.split(yarn) and "cluster" in shlex.split(yarn)
