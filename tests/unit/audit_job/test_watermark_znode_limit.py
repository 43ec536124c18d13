"""A ZooKeeper that goes away while watermarks are told: the run says so and ends."""

from __future__ import annotations

import socket
import threading

import pytest
from kazoo.client import KazooClient
from kazoo.protocol.states import KeeperState

from millrace.audit.config import ZooKeeperConfig
from millrace.audit.runs.watermark_znode import publish
from millrace.broker.errors import ZooKeeperUnreachable
from tests.waiting import patience


@pytest.mark.parametrize("chroot", ["", "/data"])
def test_question_between_two_connections_is_not_waited_for_without_end(
    chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()

    def start(client: KazooClient, timeout: float) -> None:
        """It was connected, and has not found another server since."""
        client._state = KeeperState.CONNECTING
        client._connection._write_sock = ours

    monkeypatch.setattr(KazooClient, "start", start)
    monkeypatch.setattr(KazooClient, "stop", lambda client: None)
    told: list[Exception] = []

    def tell() -> None:
        config = ZooKeeperConfig(connect=f"127.0.0.1:1{chroot}", timeout="100ms")
        with pytest.raises(ZooKeeperUnreachable) as problem:
            publish(config, {"flights": 1}, 2, 3)
        told.append(problem.value)

    with ours, theirs:
        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(patience())
        assert not telling.is_alive()
    assert "no answer within 0.1 s" in str(told[0])
