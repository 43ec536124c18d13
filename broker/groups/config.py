"""What the group coordinator is told at start; the broker's settings carry it under Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.broker.config import BrokerSettings

_MS_PER_MINUTE = 60_000


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """Limits and times of group coordination.

    `initial_rebalance_delay_ms` is how long an empty group waits for more members before its first
    generation; 0 answers the first member at once.
    """

    initial_rebalance_delay_ms: int = 3_000
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = 2_147_483_647
    offset_metadata_max_size: int = 4_096
    offsets_retention_ms: int = 10_080 * _MS_PER_MINUTE
    offsets_retention_check_interval_ms: int = 600_000

    @classmethod
    def from_settings(cls, settings: BrokerSettings) -> GroupConfig:
        return cls(
            initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
            min_session_timeout_ms=settings.group_min_session_timeout_ms,
            max_session_timeout_ms=settings.group_max_session_timeout_ms,
            max_size=settings.group_max_size,
            offset_metadata_max_size=settings.offset_metadata_max_bytes,
            offsets_retention_ms=settings.offsets_retention_minutes * _MS_PER_MINUTE,
            offsets_retention_check_interval_ms=settings.offsets_retention_check_interval_ms,
        )
