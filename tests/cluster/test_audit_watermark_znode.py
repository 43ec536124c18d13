"""Watermarks told in a real ZooKeeper: news only, compare-and-set, never an older run's word over a newer."""

from __future__ import annotations

import json
import threading

import pytest
from kazoo.client import KazooClient

from millrace.audit.config import ZooKeeperConfig
from millrace.audit.runs.watermark_znode import publish
from millrace.broker.errors import ZooKeeperUnreachable
from tests.ports import free_port
from tests.waiting import patience

pytestmark = pytest.mark.java
DAY_MS = 86_400_000


@pytest.fixture
def place(zookeeper):
    """(the config, a client below its chroot)"""
    chroot = zookeeper.chroot()
    config = ZooKeeperConfig(connect=chroot, timeout="20s")
    hosts, _, path = chroot.partition("/")
    client = KazooClient(hosts, timeout=20)
    client.start(timeout=patience())
    client.ensure_path(f"/{path}")
    client.chroot = f"/{path}"
    yield config, client
    client.stop()
    client.close()


def held(client, topic="flights"):
    content, stat = client.get(f"/millrace/audit/{topic}/watermark")
    return json.loads(content), stat.version


def test_a_watermark_is_told_and_only_news_writes_it_again(place):
    config, client = place
    assert publish(config, {"flights": DAY_MS, "hotels": None}, 5, 1) == []
    assert held(client)[0] == {
        "version": 1, "watermark": "1970-01-02T00:00:00Z", "watermark_ms": DAY_MS,
        "at": "1970-01-01T00:00:00.005Z", "run": 1,
    }  # fmt: skip
    assert held(client, "hotels")[0]["watermark"] is None
    publish(config, {"flights": DAY_MS, "hotels": None}, 6, 2)
    assert held(client)[1] == 0, "no watch fires for what is not new"
    publish(config, {"flights": 2 * DAY_MS}, 7, 3)
    assert held(client)[0]["watermark_ms"] == 2 * DAY_MS and held(client)[1] == 1


def test_it_may_go_back_by_a_later_run_but_never_by_an_earlier_one(place):
    config, client = place
    publish(config, {"flights": 3 * DAY_MS}, 5, 5)
    assert publish(config, {"flights": DAY_MS}, 4, 4) == ["flights"]
    assert held(client)[0]["run"] == 5
    assert publish(config, {"flights": DAY_MS}, 7, 6) == []
    assert held(client)[0]["watermark_ms"] == DAY_MS


def test_of_several_runs_at_once_the_newest_has_the_last_word(place):
    config, client = place
    threads = [
        threading.Thread(target=publish, args=(config, {"flights": run * DAY_MS}, run, run))
        for run in (3, 1, 4, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience())
    assert held(client)[0]["run"] == 4


def test_what_a_stranger_wrote_there_is_replaced(place):
    config, client = place
    client.create("/millrace/audit/flights/watermark", b"\xff", makepath=True)
    assert publish(config, {"flights": DAY_MS}, 5, 1) == []
    assert held(client)[0]["run"] == 1


def test_a_zookeeper_that_is_away_is_one_line():
    config = ZooKeeperConfig(connect=f"127.0.0.1:{free_port()}", timeout="1s")
    with pytest.raises(ZooKeeperUnreachable) as caught:
        publish(config, {"flights": 1}, 1, 1)
    assert "127.0.0.1" in str(caught.value) and "\n" not in str(caught.value)
