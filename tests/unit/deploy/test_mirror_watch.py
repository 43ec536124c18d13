"""`millrace mirror status --watch`: look after look, whether the worker answers or not, until it is ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from millrace.deploy import cli
from millrace.deploy.commands import mirror_control
from tests.unit.deploy.test_mirror_view import document, partition, worker


class Worker(BaseHTTPRequestHandler):
    """Answers as a worker does; every second look fails."""

    looks = 0

    def do_GET(self) -> None:
        Worker.looks += 1
        is_well = Worker.looks % 2 == 1
        found = document(worker(partitions=[partition("ewr", "flights", 0, "stopped")]))
        body = json.dumps(found if is_well else {"error": "not yet"}).encode()
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
    assert first.endswith("12:34:56\x1b[K\x1b[J")
    assert first.count("\n") == 3 and "lines more" in first, "no more than the terminal has"
