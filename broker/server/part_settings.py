"""What some parts of a broker are given of its settings, in their own words. Called by `broker.py`."""

from __future__ import annotations

from millrace.broker.config import BrokerSettings
from millrace.broker.coordination.controller_runner import ControllerSettings
from millrace.broker.replication.replica_fetcher import FetchLimits
from millrace.broker.storage.cleaner import CleanerConfig


def fetch_limits(settings: BrokerSettings) -> FetchLimits:
    return FetchLimits(
        partition_max_bytes=settings.replica_fetch_max_bytes,
        response_max_bytes=settings.replica_fetch_response_max_bytes,
        min_bytes=settings.replica_fetch_min_bytes,
        max_wait_ms=settings.replica_fetch_wait_max_ms,
    )


def controller_settings(settings: BrokerSettings) -> ControllerSettings:
    return ControllerSettings(
        unclean_leader_election=settings.unclean_leader_election_enable,
        auto_leader_rebalance=settings.auto_leader_rebalance_enable,
        imbalance_check_interval_ms=settings.leader_imbalance_check_interval_seconds * 1000,
        imbalance_per_broker_percent=settings.leader_imbalance_per_broker_percentage,
    )


def cleaner_config(settings: BrokerSettings) -> CleanerConfig:
    return CleanerConfig(
        enabled=settings.log_cleaner_enable,
        map_size=settings.log_cleaner_dedupe_buffer_size,
        max_bytes_per_second=settings.log_cleaner_io_max_bytes_per_second,
    )
