"""What is asked of running mirrors: by `millrace mirror …`, by their ports, and by what they show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from tests import forked
from tests.cluster.mirror_process import MirrorProcess, until
from tests.waiting import patience

# Where programs and modules are: a copy of the product under test is found by it.
PATH = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}


def check(mirror: MirrorProcess, *words: str) -> tuple[int, str]:
    """`millrace mirror check` (or what `words` say) with the config of a mirror: exit status, and all that it
    says."""
    log = mirror.log_path.with_name("check.log")
    log.unlink(missing_ok=True)
    words = (*mirror.program, "mirror", *(words or ("check",)), "--config", str(mirror.config_path))
    status = forked.start([sys.executable, *words], log=log).wait(patience(180))
    said = log.read_text()
    assert "Traceback" not in said, said
    return status, said


def command(
    mirror: MirrorProcess, *words: str, expect: int = 0, environment: Mapping[str, str] | None = None
) -> str:
    """What `millrace mirror …` says, on standard output or as its error; asked of this worker. `environment`:
    what its secrets are taken from."""
    done = subprocess.run(
        [sys.executable, "-m", "millrace.deploy.cli", "mirror", *words, "--config", str(mirror.config_path)],
        capture_output=True,
        text=True,
        timeout=patience(90),
        check=False,
        # A terminal's settings and proxies of the machine that runs the tests mean nothing here.
        env={**PATH, "http_proxy": "http://127.0.0.1:1", **(environment or {})},
    )
    assert done.returncode == expect, (done.returncode, done.stdout, done.stderr, mirror.log[-3000:])
    assert "Traceback" not in done.stderr
    if expect:
        assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stdout + done.stderr


def call(
    mirror: MirrorProcess, method: str, path: str, body: Any = None, *, at: str = "127.0.0.1", **headers: str
) -> tuple[int, dict[str, Any], Any]:
    """A request as any HTTP client makes it: status, headers (lower case), body (JSON where it is). `at`: by
    which address of this machine."""
    data = None if body is None else json.dumps(body).encode()
    named = {"Content-Type": "application/json"} if data is not None else {}
    named |= {key.replace("_", "-"): value for key, value in headers.items()}
    request = urllib.request.Request(f"http://{at}:{mirror.port}{path}", data, named, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        answer = opener.open(request, timeout=patience())
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        text = answer.read().decode()
        found = {key.lower(): value for key, value in answer.headers.items()}
    is_json = found["content-type"].startswith("application/json")
    return int(answer.status), found, json.loads(text) if is_json else text


def partitions(*mirrors: MirrorProcess) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (each["topic"], each["partition"]): each
        for mirror in mirrors
        for each in mirror.status().get("partitions", [])
    }


def states(*mirrors: MirrorProcess) -> set[str]:
    return {each["state"] for each in partitions(*mirrors).values()}


async def runs(mirror: MirrorProcess, count: int) -> None:
    """Until this worker carries `count` partitions."""

    async def carried() -> bool:
        return len(partitions(mirror)) == count and states(mirror) <= {"running", "paused"}

    await until(carried, logs_of=[mirror])


async def answered(condition: Any) -> bool:
    """The condition, or False while a port does not answer yet."""
    try:
        return bool(await condition())
    except OSError:
        return False
