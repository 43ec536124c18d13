"""What the transaction coordinator is told at start; the broker's settings carry it under Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.broker.config import BrokerSettings


@dataclass(frozen=True, slots=True)
class TransactionConfig:
    """Limits and times. `abort_check_interval_ms` is how late a timeout may be noticed;
    `write_timeout_ms` how long a request waits for its record to be on all in-sync replicas."""

    max_timeout_ms: int = 900_000
    id_expiration_ms: int = 604_800_000
    abort_check_interval_ms: int = 10_000
    expiry_check_interval_ms: int = 3_600_000
    write_timeout_ms: int = 5_000

    @classmethod
    def from_settings(cls, settings: BrokerSettings) -> TransactionConfig:
        return cls(
            max_timeout_ms=settings.transaction_max_timeout_ms,
            id_expiration_ms=settings.transactional_id_expiration_ms,
            abort_check_interval_ms=settings.transaction_abort_timed_out_transaction_cleanup_interval_ms,
            expiry_check_interval_ms=settings.transaction_remove_expired_transaction_cleanup_interval_ms,
        )
