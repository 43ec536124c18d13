"""The settings of KIP-73, which an administrator's client sets, topics accept and brokers obey: bytes a
second of a broker, and of a topic the replicas (`partition:broker`, or `*`) that the rates hold for."""

from __future__ import annotations

from typing import NamedTuple

LEADER_RATE = "leader.replication.throttled.rate"
FOLLOWER_RATE = "follower.replication.throttled.rate"
LEADER_REPLICAS = "leader.replication.throttled.replicas"
FOLLOWER_REPLICAS = "follower.replication.throttled.replicas"
EVERY_REPLICA = "*"


class ThrottleSettings(NamedTuple):
    """A broker's setting and its topics' that belong together."""

    rate: str
    replicas: str


OF_FOLLOWER = ThrottleSettings(FOLLOWER_RATE, FOLLOWER_REPLICAS)
"""What it may fetch of these replicas, which it has."""
OF_LEADER = ThrottleSettings(LEADER_RATE, LEADER_REPLICAS)
"""What it may give of these replicas, which it leads."""
