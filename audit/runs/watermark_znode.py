"""Watermarks in ZooKeeper: `<path>/<topic>/watermark`, for downstream jobs that watch instead of polling.

The value is JSON: {"version": 1, "watermark": ISO time or null, "watermark_ms", "at", "run"}. It is written
by compare-and-set on the znode's version and only when it changes, so that a watch fires for news alone. What
a later run told is never overwritten by an earlier one: of two jobs at once the newer run's word stays. Later
is what has the higher number, or the same (two runs at once), and the later time: by the number alone a new
state would be silent for as many runs as the old one had, by the time alone a host whose clock is behind
would be.

The only module of the audit that imports kazoo. Called by `job`; a ZooKeeper that is away fails no audit: the
old watermark stays, which claims less.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import BadVersionError, KazooException, NodeExistsError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from millrace.audit.config import ZooKeeperConfig
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.broker.errors import ZooKeeperUnreachable
from millrace.broker.times import time_ms

_MOST_TRIES = 10


def publish(config: ZooKeeperConfig, watermarks: Mapping[str, int | None], at_ms: int, run: int) -> list[str]:
    """Tell each topic's watermark; returns the topics whose znode a later run had written. Raises
    ZooKeeperUnreachable."""
    overtaken = []
    with _client(config) as client:
        for topic, watermark_ms in sorted(watermarks.items()):
            body = {
                "version": 1,
                "watermark": iso_time(watermark_ms),
                "watermark_ms": watermark_ms,
                "at": iso_time(at_ms),
                "run": run,
            }
            if not _put(client, f"{config.path}/{topic}/watermark", body, config.timeout_ms / 1000):
                overtaken.append(topic)
    return overtaken


def _put(client: KazooClient, path: str, body: Mapping[str, Any], limit_s: float) -> bool:
    """Each question with a limit: one that is asked between two connections would wait for the next one."""
    content = json.dumps(body).encode()
    for _ in range(_MOST_TRIES):
        try:
            held, stat = client.get_async(path).get(timeout=limit_s)
        except NoNodeError:
            with contextlib.suppress(NodeExistsError):
                client.create_async(path, content, makepath=True).get(timeout=limit_s)
                return True
            continue
        known = _body(held)
        if known.get("watermark_ms") == body["watermark_ms"] and "watermark_ms" in known:
            return True
        if _is_later(known, body):
            return False
        with contextlib.suppress(BadVersionError):
            client.set_async(path, content, version=stat.version).get(timeout=limit_s)
            return True
    return False


def _is_later(known: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    try:
        return bool(known["run"] >= body["run"] and time_ms(known["at"]) > time_ms(body["at"]))
    except (KeyError, TypeError, ValueError):  # a stranger's
        return False


def _body(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


@contextlib.contextmanager
def _client(config: ZooKeeperConfig) -> Iterator[KazooClient]:
    hosts, slash, chroot = config.connect.partition("/")
    quiet = logging.getLogger("millrace.audit.zookeeper")
    quiet.setLevel(logging.CRITICAL)  # what goes wrong is told in one line by the caller
    client = KazooClient(hosts, timeout=config.timeout_ms / 1000, logger=quiet)
    try:
        client.start(timeout=config.timeout_ms / 1000)
        if slash:
            client.ensure_path_async(f"/{chroot}").get(timeout=config.timeout_ms / 1000)
            client.chroot = f"/{chroot}"
        yield client
    except (KazooException, KazooTimeoutError, OSError) as problem:
        silence = f"no answer within {config.timeout_ms / 1000:g} s"
        name = silence if isinstance(problem, KazooTimeoutError) else type(problem).__name__
        told = " ".join(str(problem).split()) or name
        raise ZooKeeperUnreachable(f"ZooKeeper at {config.connect}: {told}") from problem
    finally:
        with contextlib.suppress(Exception):
            client.stop()
            client.close()
