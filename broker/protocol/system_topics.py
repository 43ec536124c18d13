"""Topics that programs keep for themselves, by name: Kafka's, and those through which mirror and audit speak
to each other without knowing each other. Pure.

The records' formats are those of EVENTS.md (events, gaps among them), of `mirror_positions.py` and of the
mirror's `route_records.py`; `tests/unit/test_mirror_to_audit.py` holds the audit to what one writes.
"""

from __future__ import annotations

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
INTERNAL_TOPICS = frozenset({OFFSETS_TOPIC, TRANSACTIONS_TOPIC})

AUDIT_TOPIC = "millrace.audit"
"""Events of producers, consumers and mirrors; one partition."""
AUDIT_RETENTION_MS = 90 * 24 * 3_600_000
AUDIT_TOPIC_SETTINGS = {"cleanup.policy": "compact,delete", "retention.ms": str(AUDIT_RETENTION_MS)}
"""Whoever makes the topic: the newest word of each key is kept, for a season."""

POSITIONS_TOPIC_PREFIX = "millrace.positions."
ROUTES_TOPIC_PREFIX = "millrace.routes."
"""Each with the mirror's name behind it."""
