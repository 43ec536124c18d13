"""`millrace mirror reload`: whoever is told to read its file again, and who was not is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from millrace.deploy import cli
from tests.unit.deploy.test_mirror_view import document, silent, worker


class Answering(ThreadingHTTPServer):
    """A worker's port: what it says of the whole mirror, and how often it was told to reload."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Worker)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.mirror: dict[str, Any] = {}
        self.reloads = 0


class Worker(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self._answer(self.server.mirror)

    def do_POST(self) -> None:
        self.server.reloads += self.path == "/reload"
        self._answer({"done": "reloaded: gaps.default", "changed": ["gaps.default"]})

    def _answer(self, found: dict[str, Any]) -> None:
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def workers() -> Iterator[list[Answering]]:
    """Two that answer; the first is asked."""
    found = [Answering(), Answering()]
    serving = [threading.Thread(target=each.serve_forever, args=(0.01,)) for each in found]
    for each in serving:
        each.start()
    yield found
    for each, thread in zip(found, serving, strict=True):
        each.shutdown()
        thread.join()
        each.server_close()


def at(answering: Answering, number: int) -> dict[str, Any]:
    return worker(number) | {"url": answering.url}


def reload(first: Answering, *others: dict[str, Any], **more: Any) -> int:
    first.mirror = document(at(first, 1), *others) | {"crew_is_old": False} | more
    return cli.run(["mirror", "reload", "--url", first.url])


def test_every_worker_is_told(workers: list[Answering], capsys: pytest.CaptureFixture[str]) -> None:
    first, second = workers
    assert reload(first, at(second, 2)) == 0
    assert [each.reloads for each in workers] == [1, 1]
    said = capsys.readouterr().out.splitlines()
    assert said == [f"{each.url}: reloaded: gaps.default" for each in workers]


def test_who_does_not_answer_is_named_and_not_waited_for(
    workers: list[Answering], capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be asked for as long as a drain may take, and would not hear of it."""
    first, second = workers
    assert reload(first, silent(), at(second, 2)) == 1
    assert [each.reloads for each in workers] == [1, 1]
    assert capsys.readouterr().err == (
        "millrace: not reloaded: http://10.0.0.9:8090 does not answer: no answer within 2 s\n"
    )


def test_whoever_answers_in_anothers_place_is_told_once(
    workers: list[Answering], capsys: pytest.CaptureFixture[str]
) -> None:
    """As 127.0.0.1 does on every machine."""
    first, _ = workers
    reason = "another worker answers there: is it on another machine? set its control.advertised"
    elsewhere = {"id": "m2", "url": first.url, "status": None, "error": reason}
    unknown = {"id": "m3", "url": None, "status": None, "error": "it has not said where it answers"}
    assert reload(first, elsewhere, unknown) == 1
    assert first.reloads == 1
    said = capsys.readouterr().err
    assert f"not reloaded: {first.url} does not answer: {reason}; not reloaded: m3 does not answer" in said


def test_a_drained_worker_does_not_know_of_all(
    workers: list[Answering], capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = workers
    assert reload(first, crew_is_old=True) == 1
    assert first.reloads == 1
    assert "the worker that was asked is drained" in capsys.readouterr().err
