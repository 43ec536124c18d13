"""The settings of a consumer of the old model, under Kafka 0.8's names. Pure; checked when made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millrace.broker.coordination.zookeeper_consumer.fetching import RESETS
from millrace.broker.errors import ConfigError

_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]+")


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """Settings under Kafka 0.8's names, dots as underscores, with its defaults where it has one.

    Times in ms, sizes in bytes. `consumer_timeout_ms` None waits for ever. A stream queues at most
    `queued_max_message_chunks` answers of partitions and `queued_max_bytes`, beside one answer of each
    leader that is under way. `read_committed` hides aborted transactions and what open ones hold back.
    """

    consumer_id: str | None = None
    client_id: str | None = None
    zookeeper_session_timeout_ms: int = 6_000
    zookeeper_connection_timeout_ms: int = 6_000
    auto_commit_enable: bool = True
    auto_commit_interval_ms: int = 60_000
    auto_offset_reset: str = "largest"
    consumer_timeout_ms: int | None = None
    rebalance_max_retries: int = 4
    rebalance_backoff_ms: int = 2_000
    queued_max_message_chunks: int = 10
    queued_max_bytes: int = 16 << 20
    fetch_message_max_bytes: int = 1 << 20
    fetch_min_bytes: int = 1
    fetch_wait_max_ms: int = 100
    refresh_leader_backoff_ms: int = 200
    socket_timeout_ms: int = 30_000
    exclude_internal_topics: bool = True
    read_committed: bool = True

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "a number of at least 1")
        if self.auto_offset_reset not in RESETS:
            raise ConfigError("auto_offset_reset", self.auto_offset_reset, " or ".join(sorted(RESETS)))
        patience_ms = self.rebalance_max_retries * self.rebalance_backoff_ms
        if patience_ms <= self.zookeeper_session_timeout_ms:
            raise ConfigError(
                "rebalance_max_retries * rebalance_backoff_ms",
                patience_ms,
                f"more than zookeeper_session_timeout_ms ({self.zookeeper_session_timeout_ms}): a killed "
                "consumer's partitions stay its own for that long",
            )


_POSITIVE = (
    "zookeeper_session_timeout_ms",
    "zookeeper_connection_timeout_ms",
    "auto_commit_interval_ms",
    "consumer_timeout_ms",
    "rebalance_max_retries",
    "rebalance_backoff_ms",
    "queued_max_message_chunks",
    "queued_max_bytes",
    "fetch_message_max_bytes",
    "fetch_min_bytes",
    "fetch_wait_max_ms",
    "refresh_leader_backoff_ms",
    "socket_timeout_ms",
)


def checked_name(what: str, name: str) -> str:
    """A group or consumer name as Kafka allows it: it becomes a part of a znode's path."""
    if not _LEGAL_NAME.fullmatch(name) or name in (".", ".."):
        raise ConfigError(what, name, "letters, digits, '.', '_' and '-'")
    return name
