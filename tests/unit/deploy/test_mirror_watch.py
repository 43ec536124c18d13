"""`millrace mirror status --watch`: look after look, whether the worker answers or not, until it is ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from millrace.deploy import cli
from millrace.deploy.commands import mirror_control
from tests.terminal import Terminal
from tests.unit.deploy.test_mirror_view import LONG, document, partition, worker

WATCH = ["mirror", "status", "--watch", "--interval", "0.2", "--url"]


class Worker(BaseHTTPRequestHandler):
    """Answers as a worker does; every second look fails."""

    fails = True
    looks = 0
    shown = document(worker(partitions=[partition("ewr", "flights", 0, "stopped")]))

    def do_GET(self) -> None:
        Worker.looks += 1
        is_well = Worker.looks % 2 == 1 or not Worker.fails
        body = json.dumps(Worker.shown if is_well else {"error": "not yet"}).encode()
        self.send_response(200 if is_well and self.path == "/mirror" else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    Worker.looks = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Worker) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


class Pauses:
    """Takes the place of `time.sleep` between two looks: after so many a person presses Ctrl-C."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.lengths: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.lengths.append(seconds)
        if len(self.lengths) == self.looks:
            raise KeyboardInterrupt

    def strftime(self, _form: str) -> str:
        return "12:34:56"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses(3)
    monkeypatch.setattr(mirror_control, "time", pauses)
    return pauses


def watched(*words: str) -> int:
    try:
        return cli.run(["mirror", "status", "--watch", *words])
    except KeyboardInterrupt:
        return 130


def test_json_is_a_line_for_each_look(url: str, pauses: Pauses, capsys: pytest.CaptureFixture[str]) -> None:
    assert watched("--url", url, "--json", "--interval", "0.5") != 0
    said = capsys.readouterr()
    looks = [json.loads(line) for line in said.out.splitlines()]
    assert [sorted(look)[0] for look in looks] == ["mirror", "error", "mirror"]
    assert looks[0]["topics"][0]["state"] == "stopped"
    assert "not yet" in looks[1]["error"]
    assert pauses.lengths == [0.5] * 3
    assert "Traceback" not in said.err


def test_table_goes_on_when_a_worker_does_not_answer(
    url: str, pauses: Pauses, capsys: pytest.CaptureFixture[str]
) -> None:
    watched("--url", url)
    said = capsys.readouterr().out
    before, _, after = said.partition("not yet")
    assert all("1 stopped" in look and "flights" in look for look in (before, after)), said
    assert (Worker.looks, pauses.lengths) == (3, [mirror_control.WATCH_INTERVAL_S] * 3)


def test_on_a_terminal_each_look_covers_the_one_before(
    url: str, pauses: Pauses, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("LINES", "5")
    monkeypatch.setenv("COLUMNS", "60")
    watched("--url", url)
    first, *rest = capsys.readouterr().out.split("\x1b[H")[1:]
    assert len(rest) == 2
    assert first.endswith("12:34:56\x1b[K\n\x1b[J")
    assert first.count("\n") == 4 and "lines more" in first, "no more than the terminal has"


@pytest.mark.parametrize("well", [3, 40])
def test_a_screen_shows_what_is_stopped_and_what_to_do_whatever_else_there_is(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, well: int
) -> None:
    partitions = [partition("ewr", f"topic-{number}", 0, lag=number) for number in range(well)]
    stopped = partition("ewr", LONG, 7, "stopped", 7_300)
    monkeypatch.setattr(Worker, "shown", document(worker(partitions=[*partitions, stopped])))
    monkeypatch.setattr(Worker, "fails", False)
    with Terminal([*WATCH, url], tmp_path / "log") as seen:
        found = seen.look(lambda lines: Worker.looks >= 3)
        assert seen.interrupt() == 130
    assert seen.screen.scrolled == []
    assert "1 stopped · 1 worker" in found[0]
    worst = found[3]  # the first of the table; a row that is full to the last column
    assert len(worst) == 80 and worst.startswith("ewr ") and worst.endswith(" stopped")
    text = "".join(found)
    for words in ("the target says: message too large", f"  millrace mirror skip ewr/{LONG}:7"):
        assert words in text, found
    shown = sum(line.endswith(" running") for line in found)
    assert [line for line in found if " more" in line] == (
        [] if shown == well else [f"… {well - shown} topics more"]
    )
    assert shown >= 3 and len(found) <= 23


def test_a_worker_that_is_away_is_told_within_the_screen(tmp_path: Path) -> None:
    with Terminal([*WATCH, "http://127.0.0.1:1"], tmp_path / "log", columns=60) as seen:
        seen.look(lambda lines: "another one with --url" in " ".join(lines))
        assert seen.interrupt() == 130
    assert seen.screen.wrapped == 0
