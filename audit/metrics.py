"""The audit's results in Prometheus' text format, for a node exporter's textfile folder or a push.

`metrics_text(summary)` is written to `metrics.prom` beside the report by `job`. A registry of its own:
nothing of the process leaks in, and the same summary always gives the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

VERDICTS = ("PROVEN", "COUNT_MATCH", "UNKNOWN", "DUPLICATE", "LOSS")


def metrics_text(summary: Mapping[str, Any]) -> str:
    """Gauges of one summary."""
    registry = CollectorRegistry()
    verdict = Gauge(
        "millrace_audit_verdict", "1 for the verdict of the last audit", ["verdict"], registry=registry
    )
    for name in VERDICTS:
        verdict.labels(name).set(name == summary["verdict"])
    counts = summary["counts"]
    records = Gauge(
        "millrace_audit_records", "Records by what the last audit says of them", ["kind"], registry=registry
    )
    for name, count in counts.items():
        if name != "seen":
            records.labels(name).set(count)
    seen = Gauge(
        "millrace_audit_seen_records", "Distinct records seen in a tier", ["tier"], registry=registry
    )
    for tier, count in counts["seen"].items():
        seen.labels(tier).set(count)
    windows = Gauge("millrace_audit_windows", "Windows by verdict", ["verdict"], registry=registry)
    for name, count in summary["windows"].items():
        windows.labels(name).set(count)
    untrusted = Gauge(
        "millrace_audit_untrusted", "Headers, batches and events that could not be trusted", registry=registry
    )
    untrusted.set(sum(each["count"] for each in summary["untrusted"]))
    if summary["at"] is not None:
        at = Gauge("millrace_audit_time_seconds", "When the last audit looked, Unix time", registry=registry)
        at.set(datetime.fromisoformat(summary["at"]).timestamp())
    return generate_latest(registry).decode()
