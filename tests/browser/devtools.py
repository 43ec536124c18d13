"""A headless Chromium driven over its DevTools pipe: what tests need of a page, without a further library.

Frames are JSON objects ended by a zero byte, written to the browser's file descriptor 3 and read from 4
(`--remote-debugging-pipe`).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import Deadline, patience, until

TIMEOUT_S = 60.0
# Puts the pipes where the browser looks for them: away first, so that neither overwrites the other.
BEGIN = """
import fcntl, os, sys
reading, writing = (fcntl.fcntl(int(word), fcntl.F_DUPFD, 10) for word in sys.argv[1:3])
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def binary() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    raise AssertionError("Chromium is needed: apt-get install chromium")


class Page:
    """One tab. `messages` collects what the page logged and what the browser refused or could not load."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = Deadline(lambda: f"{method} is answered; {self.messages}", within_s=TIMEOUT_S)
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def show(self, url: str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What an expression comes to in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """Polls until the expression is true."""
        return until(
            lambda: self.value(expression), lambda: f"{expression}; {self.messages}", within_s=TIMEOUT_S
        )

    def screenshot(self, path: Path) -> Path:
        """The whole page, however long."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def _next(self, deadline: Deadline) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], deadline.left_s)
            data = os.read(self._from, 1 << 16) if ready else b""
            if not data:
                raise AssertionError("the browser is gone") if ready else deadline.passed()
            self._buffer += data
        frame, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(frame))

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Log.entryAdded":
            self.messages.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    @property
    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        return self.__dict__.setdefault("_requests", [])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with a profile of its own; it ends with the block."""
    to_browser, to_us = os.pipe(), os.pipe()
    words = [
        binary(),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    command = [sys.executable, "-c", BEGIN, str(to_browser[0]), str(to_us[1]), *words]
    process = subprocess.Popen(
        command,
        pass_fds=(to_browser[0], to_us[1]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(to_us[1])
    try:
        yield Page(to_browser[1], to_us[0])
    finally:
        process.terminate()
        process.wait(patience())
        os.close(to_browser[1])
        os.close(to_us[0])
