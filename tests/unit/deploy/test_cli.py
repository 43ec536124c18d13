"""The command line: quick to start, one line for what is wrong, statuses that scripts can rely on."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from millrace.deploy import cli
from millrace.deploy.commands.output import Format, print_rows
from tests.ports import free_port

GROUPS = ["broker", "topics", "groups", "log", "mirror", "audit", "zookeeper", "local"]


@pytest.fixture(autouse=True)
def nothing_replaces_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`zookeeper run` becomes the server: were a check missing, the tests themselves would."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"a server would have been started: {arguments}")

    monkeypatch.setattr("os.execv", refuse)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def test_start_up_imports_nothing_heavy() -> None:
    code = (
        "import sys, millrace.deploy.cli\n"
        "heavy = {'numba', 'numpy', 'pyspark', 'pyarrow', 'pydantic', 'kio', 'yaml', 'uvloop', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


@pytest.mark.parametrize("group", [[], *([name] for name in GROUPS), ["demo"]])
def test_help_of_every_group_is_there(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *group, "--help")
    assert (status, err) == (0, "")
    assert "Usage" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "No such command 'nosuch'"),
        (["topics", "nosuch"], "No such command 'nosuch'"),
        (["zookeeper", "run", "--port", "70000"], "--port"),
        (["zookeeper", "run", "--bogus"], "--bogus"),
        (["topics", "create", "t", "--set", "retention.ms"], "--set 'retention.ms': expected key=value"),
        (["topics", "list", "--bootstrap", "localhost"], "--bootstrap 'localhost': expected host:port"),
        (["topics", "list", "--bootstrap", ","], "--bootstrap is empty"),
        (["topics", "configure", "t"], "nothing to change"),
        (["topics", "configure", "t", "retention.ms"], "setting 'retention.ms': expected key=value"),
        (["topics", "configure", "t", "a=1", "--delete", "a"], "a is both set and deleted"),
        (["topics", "configure", "t", "--delete", "a=1"], "--delete 'a=1': expected the name"),
        (["groups", "list", "--state", "Stabel"], "--state 'Stabel': expected one of Stable, Empty, Prep"),
        (["groups", "list", "--state", "Empty", "--state", "x"], "NotReady, Dead (see"),
        (["groups", "reset", "g"], "expected one of --to-earliest"),
        (["groups", "reset", "g", "--to-latest", "--shift-by", "-1"], "expected one of --to-earliest"),
        (["groups", "reset", "g", "--to-timestamp", "noon"], "--to-timestamp 'noon': expected a time"),
        (["groups", "reset", "g", "--to-timestamp", "²"], "--to-timestamp '²': expected a time"),
        (["groups", "reset", "g", "--to-timestamp", "1969-12-31T23:59:59.999"], "a time before 1970"),
        (["groups", "reset", "g", "--to-timestamp", "1795500000"], "it is 1970-01-21T18:45:00Z"),
        (["groups", "reset", "g", "--to-timestamp", "9" * 5000], "…': expected a time such as"),
        (["groups", "reset", "g", "--to-latest", "--topic", "t:x"], "--topic 't:x': expected a topic"),
        (["groups", "reset", "g", "--to-latest", "--topic", "t:²"], "--topic 't:²': expected a topic"),
        (
            ["groups", "reset", "g", "--to-latest", "--topic", "t:2147483648"],
            "expected a topic, or partitions",
        ),
        (["groups", "reset", "g", "--to-latest", "--topic", "t:" + "9" * 5000], "…': expected a topic"),
        (["groups", "reset", "g", "--to-offset", "-1"], "--to-offset"),
        (["topics", "reassign", "t", "--brokers", "1", "--throttle", str(1 << 63)], "--throttle: got"),
        (["topics", "reassign", "t", "--brokers", "1", "-r", "32768"], "expected at most 32767"),
        (["mirror", "throttle", "ewr", "9" * 320], "expected bytes per second"),
        (["groups", "delete", "g", "--yes", "--offsets", "--topic", ":1"], "--topic ':1': expected a topic"),
        (
            ["groups", "delete", "g", "--yes", "--offsets", "t"],
            "--offsets and --topic TOPIC together",
        ),
        (["groups", "delete", "g", "--yes", "--topic", "t"], "--offsets and --topic TOPIC together"),
        (["demo", "--lose", "-1"], "--lose"),
        (["demo", "--producer-column", "x"], "--producer-column needs --input"),
        (["audit", "explain", "flights"], "window"),
        (["mirror", "run"], "--config"),
    ],
)
def test_wrong_command_line_is_one_line_and_status_64(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == cli.USAGE_ERROR_STATUS
    assert out == ""
    assert words in err
    assert err.startswith("millrace: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("topics list -o yaml", "--output: got 'yaml', expected one of table, json"),
        ("topics create t -p 0", "--partitions: got '0', expected 1 or more"),
        ("topics create t -r x", "--replicas: got 'x', expected a whole number"),
        ("topics create t -p 99999999999", "--partitions: got '99999999999', expected at most 2147483647"),
        ("topics create t -r 32768", "--replicas: got '32768', expected at most 32767"),
        ("topics configure t -p 2147483648", "--partitions: got '2147483648', expected at most 2147483647"),
        ("zookeeper run --port 70000", "--port: got '70000', expected at most 65535"),
        ("mirror status --interval soon", "--interval: got 'soon', expected a number"),
        ("log dump nowhere.log", "FILE: nowhere.log is not there"),
        ("topics create", "Missing argument 'name'"),
    ],
)
def test_refused_value_is_told_with_its_option_and_what_is_expected(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *arguments.split())
    command = "millrace " + " ".join(arguments.split()[:2])
    assert (status, err) == (64, f"millrace: {words} (see: {command} --help)\n")


def every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, (*path, name))


@pytest.mark.parametrize("path", list(every_command(typer.main.get_command(cli.app))), ids=" ".join)
def test_help_fills_the_lines_of_a_narrow_terminal_and_cuts_no_name(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, *path, "--help")
    assert status == 0
    assert "<bool>" not in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    described = lines[: next(number for number, line in enumerate(lines) if line.endswith(":"))]
    for line, following in pairwise(described[1:]):
        if line and following:
            assert len(f"{line} {following.split()[0]}") > 78, f"{line!r} has room for more"
    names = [option for line in lines for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", line)]
    assert names and not any("…" in name for name in re.findall(r"--\S+", out))


def test_help_shows_defaults_that_only_words_can_tell(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "audit", "run", "--help")[1]
    assert "[default: now]" in out
    assert "[default: what spark-submit was told, or local[*]]" in " ".join(out.split())


def test_help_of_a_group_shows_the_first_sentence_of_each_command_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = " ".join(run(capsys, "audit", "--help")[1].split())
    assert "waive Go on without the proof of a window: the watermark may pass it, and it no longer" in said
    assert "..." not in said.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["broker", "run", "--config", "none.yaml"], 2, "none.yaml"),
        (
            ["broker", "run", "--id", "1", "--listen", "x", "--zookeeper", "z:1", "--data", "d"],
            2,
            "listen: got 'x'",
        ),
        (["broker", "run", "--set", "nosuch.key=1", "--id", "1"], 2, "nosuch.key"),
        (["mirror", "run", "--config", "none.yaml"], 2, "none.yaml"),
        (["mirror", "check", "--config", "none.yaml"], 2, "none.yaml"),
        (["audit", "run", "--config", "none.yaml"], 3, "none.yaml"),
        *(
            (["audit", *words], 3, "audit.yaml: got 'No such file")
            for words in (
                ["run"],
                ["watch"],
                ["status"],
                ["explain", "t", "0"],
                ["waive", "t", "0", "--why", "w"],
            )
        ),
        (["local", "up", "--file", "none.yaml"], 2, "none.yaml"),
        (["demo", "--input", "none.csv"], 3, "none.csv"),
        (["demo", "--report", "/dev/null/report"], 3, "/dev/null/report"),
        (["local", "up", "--data", "/dev/null/data"], 12, "/dev/null/data"),
    ],
)
def test_expected_failure_is_one_line_with_its_own_status(
    arguments: list[str],
    status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found, _, err = run(capsys, *arguments)
    assert (found, words in err, err.count("\n")) == (status, True, 1), err


@pytest.mark.parametrize("command", ["check", "run"])
def test_every_mistake_of_a_mirrors_file_has_its_line(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mirror.yaml"
    path.write_text("name: m\ntarget: {cluster: agg, bootstrap: []}\nsources: []\nlanes: four\n")
    status, _, err = run(capsys, "mirror", command, "--config", str(path))
    assert (status, [line.split(": ")[1:3] for line in err.splitlines()]) == (
        2,
        [
            ["mirror.yaml:2", "target.bootstrap"],
            ["mirror.yaml:3", "sources"],
            ["mirror.yaml:4", "lanes"],
        ],
    )


@pytest.mark.parametrize(
    ("arguments", "typed", "status", "words"),
    [
        (["topics", "delete", "t"], "", 64, "--yes does it without asking"),
        (["groups", "delete", "g"], "", 64, "--yes does it without asking"),
        (["topics", "delete", "t"], "n\n", 130, ""),
        (["topics", "delete", "t", "--bootstrap", "here"], "y\n", 64, "'here': expected host:port"),
    ],
)
def test_question_that_nobody_answers_names_the_option_and_a_piped_answer_counts(
    arguments: list[str],
    typed: str,
    status: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    found, _, err = run(capsys, *arguments)
    assert (found, words in err) == (status, True), err


@pytest.mark.parametrize(
    "arguments",
    [
        ["topics", "create", "t", "--replication-factor", "1", "--config", "retention.ms=-1"],
        ["groups", "reset", "g", "--to-datetime", "2026-11-21T08:00:00.000"],
    ],
)
def test_options_may_have_the_names_of_kafkas_own_tools(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *arguments, "--bootstrap-server", "here")
    assert (status, "'here': expected host:port" in err) == (64, True), err


@pytest.mark.parametrize(
    "words",
    [
        "topics list",
        "topics create t",
        "topics describe t",
        "topics configure t retention.ms=1",
        "topics delete t --yes",
        "topics reassign t --brokers 1",
        "groups list",
        "groups describe g",
        "groups reset g --to-earliest --execute",
        "groups delete g --yes",
        "groups delete g --yes --offsets --topic t",
    ],
)
def test_address_that_refuses_connections_ends_a_command_at_once_and_is_named(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(self: object, failure_count: int, random_unit: float) -> float:
        raise AssertionError("it would be tried again")

    monkeypatch.setattr("millrace.broker.client.retry.BackOff.delay_ms", wait)
    address = f"127.0.0.1:{free_port()}"
    status, out, err = run(capsys, *words.split(), "--bootstrap", address)
    assert (status, out) == (20, "")
    assert err == (f"millrace: cluster {address}: no server answers; tried {address}: Connection refused\n")


def test_zookeeper_on_a_taken_port_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        status, _, err = run(capsys, "zookeeper", "run", "--port", str(port), "--data", str(tmp_path))
    assert status == 10
    assert f"{port} is taken" in err
    assert err.count("\n") == 1


def test_no_java_says_what_to_install(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("millrace.deploy.java.find_java.__defaults__", (None, tmp_path))
    status, _, err = run(capsys, "zookeeper", "run", "--data", str(tmp_path / "data"))
    assert status == 13
    assert "apt-get install default-jre-headless" in err


def test_defect_shows_its_traceback_and_is_not_taken_for_a_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("millrace.deploy.local.sandbox.Sandbox.from_file", broken)
    status, _, err = run(capsys, "local", "status")
    assert status == cli.DEFECT_STATUS
    assert "Traceback" in err
    assert "a defect" in err


def unread(code: str, *arguments: str) -> tuple[int, str]:
    """(status, standard error) of a program whose output nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = [sys.executable, "-c", code, *arguments]
    try:
        ended = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, env=buffered, text=True)
    finally:
        os.close(writing)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(("status", "told"), [(0, 141), (2, 2)])
def test_output_that_nobody_reads_is_no_finding_and_hides_none(status: int, told: int) -> None:
    """Status 1 is a loss to some commands, and 0 says that all is well; Python's own would be 120."""
    program = "import sys; from millrace.deploy import cli\n"
    assert unread(f"{program}cli.main(['--help'])") == (cli.READER_GONE_STATUS, "")
    command = "cli.app = lambda **given: print('a line') or int(sys.argv[1])\n"
    assert unread(f"{program}{command}cli.main([])", str(status)) == (told, "")


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--version")
    assert status == 0
    assert out.startswith("millrace 0.")


def test_rows_for_programs_are_json_and_for_pipes_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "isr": [1, 2], "extra": None}, {"name": "long", "isr": [], "extra": 3}]
    print_rows(rows, ["name", "isr", "extra"], Format.JSON)
    assert json.loads(capsys.readouterr().out) == rows
    print_rows(rows, ["name", "isr", "extra"])
    assert capsys.readouterr().out.splitlines() == ["NAME  ISR  EXTRA", "a     1,2  -", "long  -    3"]
