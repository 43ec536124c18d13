"""The settings of KIP-73, which an administrator's client sets, topics accept and followers obey: bytes a
second of a broker, and of a topic the replicas (`partition:broker`, or `*`) that the rates hold for."""

LEADER_RATE = "leader.replication.throttled.rate"
FOLLOWER_RATE = "follower.replication.throttled.rate"
LEADER_REPLICAS = "leader.replication.throttled.replicas"
FOLLOWER_REPLICAS = "follower.replication.throttled.replicas"
EVERY_REPLICA = "*"
