"""The audit's results in Prometheus' text format, for a node exporter's textfile folder or a push.

`metrics_text(summary)` is written to `metrics.prom` beside the report by `job`; `failed_text` is what a run
that failed makes of the file, so that a failure shows and the last good figures stay. A registry of its own:
nothing of the process leaks in, and the same summary always gives the same text. Labels are names of
topics, tiers and verdicts, never names that a producer chose. dashboards/audit.json shows them,
dashboards/audit-alerts.yml warns by them: so what a standing waiver covers has gauges of its own, or its
alert would hide a new finding beside it. Of findings that are not named (`losses_more` and its like) nobody
knows which are waived: they count as not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from millrace.audit.reconciliation.verdicts import OPEN, VERDICTS

WINDOW_STATES = (*VERDICTS, OPEN)
KINDS = ("acknowledged", "missing", "duplicates", "unreported", "unknown", "explained", "in_flight")
JOB_FAILED = 3
_STATUS = "millrace_audit_last_run_status"
_RUN_TIME = "millrace_audit_last_run_timestamp_seconds"
_STATUS_HELP = "Exit status of the last run: 0 proven, 1 loss or duplicate, 2 unknown, 3 the run failed"
_RUN_TIME_HELP = "When the last run looked at the clusters or failed, Unix time"

_COSTS = {
    "records": ("millrace_audit_run_records", "Records that the last audit read, of all clusters"),
    "bytes": ("millrace_audit_run_bytes", "Bytes that the last audit read, as they lie in the logs"),
    "seconds": ("millrace_audit_run_seconds", "How long the last audit took, up to its report"),
    "state_bytes": ("millrace_audit_state_bytes", "Size of the audit's state"),
    "state_files": ("millrace_audit_state_files", "Files of the audit's state"),
}


class _Gauges:
    """Gauges by name, made when they are first set."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._held: dict[str, Gauge] = {}

    def set(self, name: str, help_text: str, value: float, **labels: str) -> None:
        gauge = self._held.get(name)
        if gauge is None:
            gauge = self._held[name] = Gauge(name, help_text, list(labels), registry=self.registry)
        (gauge.labels(**labels) if labels else gauge).set(value)


def metrics_text(summary: Mapping[str, Any]) -> str:
    """Gauges of one summary."""
    gauges = _Gauges()
    at_s = _unix_s(summary["at"])
    _run(gauges, summary["exit_status"], at_s)
    if at_s is not None:
        gauges.set(
            "millrace_audit_last_success_timestamp_seconds", "When the last run that ended looked", at_s
        )
    for name in VERDICTS:
        gauges.set(
            "millrace_audit_verdict",
            "1 for the verdict of the last audit",
            name == summary["verdict"],
            verdict=name,
        )
    waived = _waived(summary)
    for topic in summary["topics"]:
        _topic(gauges, topic, waived)
    _hops(gauges, summary)
    _watermarks(gauges, summary["watermarks"], at_s)
    for each in summary["latency"]:
        for statistic, key in (("p50", "p50_ms"), ("p99", "p99_ms"), ("max", "max_ms")):
            gauges.set(
                "millrace_audit_latency_seconds",
                "Time from tier to tier, estimated from the first and last append of each window",
                each[key] / 1000,
                topic=each["topic"],
                upstream=each["between"][0],
                tier=each["between"][1],
                statistic=statistic,
            )
    late = Counter((each["topic"], each["kind"]) for each in summary["late"])
    for each in summary.get("late_more", ()):
        late[each["topic"], each["kind"]] += each["windows"]
    for (topic, kind), number in sorted(late.items()):
        gauges.set(
            "millrace_audit_late_windows",
            "Windows whose records or whose report came after the grace",
            number,
            topic=topic,
            kind=kind,
        )
    content = dict(summary["content"])
    content["waived"] = sum(1 for each in summary["differing"] if each.get("waived"))
    content["differs"] -= content["waived"]
    for name, number in content.items():
        gauges.set(
            "millrace_audit_content_windows",
            "Windows by what became of the comparison of contents",
            number,
            content=name,
        )
    gauges.set(
        "millrace_audit_untrusted",
        "Headers, batches and events that could not be trusted, and not waived",
        sum(each["count"] for each in summary["untrusted"] if not each.get("waived")),
    )
    gauges.set(
        "millrace_audit_waived_untrusted",
        "Headers, batches and events that could not be trusted, which a person has waived",
        sum(each["count"] for each in summary["untrusted"] if each.get("waived")),
    )
    for tier, number in summary["unaudited"].items():
        gauges.set("millrace_audit_unaudited_records", "Records without an identity", number, tier=tier)
    for name, (metric, help_text) in _COSTS.items():
        if name in summary.get("run", {}):
            gauges.set(metric, help_text, summary["run"][name])
    gauges.set("millrace_audit_waivers", "Windows that a person has waived", len(summary["waivers"]))
    revised = len(summary["revisions"]) + summary.get("revisions_more", 0)
    gauges.set("millrace_audit_revisions", "Verdicts that late data changed", revised)
    return generate_latest(gauges.registry).decode()


def _run(gauges: _Gauges, status: int, at_s: float | None) -> None:
    gauges.set(_STATUS, _STATUS_HELP, status)
    if at_s is not None:
        gauges.set(_RUN_TIME, _RUN_TIME_HELP, at_s)


def _waived(summary: Mapping[str, Any]) -> Counter[tuple[str, str, str]]:
    """{(kind, topic, tier): records} of findings that a standing waiver covers."""
    found: Counter[tuple[str, str, str]] = Counter()
    for each in summary["losses"]:
        if each.get("waived"):
            found["missing", each["topic"], each["lost_between"][1]] += each["count"]
    for each in summary["duplicates"]:
        if each.get("waived"):
            found["duplicates", each["topic"], each["tier"]] += each["count"]
    return found


def _topic(gauges: _Gauges, topic: Mapping[str, Any], waived: Mapping[tuple[str, str, str], int]) -> None:
    name = topic["topic"]
    for kind in KINDS:
        gauges.set(
            "millrace_audit_records",
            "Records by what the audit says of them",
            topic[kind],
            topic=name,
            kind=kind,
        )
    for state in WINDOW_STATES:
        gauges.set(
            "millrace_audit_windows",
            "Windows of producers by verdict; OPEN: not settled yet",
            topic["windows"].get(state, 0),
            topic=name,
            verdict=state,
        )
    for verdict in VERDICTS:
        gauges.set(
            "millrace_audit_waived_windows",
            "Windows of producers that a person has waived, by verdict",
            topic.get("waived", {}).get(verdict, 0),
            topic=name,
            verdict=verdict,
        )
    for tier in topic["tiers"]:
        labels = {"topic": name, "tier": tier["tier"]}
        gauges.set("millrace_audit_seen_records", "Distinct records seen in a tier", tier["seen"], **labels)
        gauges.set(
            "millrace_audit_duplicate_records",
            "Extra copies that a tier was the first to have, and not waived",
            tier["duplicates"] - waived.get(("duplicates", name, tier["tier"]), 0),
            **labels,
        )
        for kind in ("missing", "duplicates"):
            gauges.set(
                "millrace_audit_waived_records",
                "Records that were lost before a tier, or extra copies in it, which a person has waived",
                waived.get((kind, name, tier["tier"]), 0),
                **labels,
                kind=kind,
            )
        for state in WINDOW_STATES:
            gauges.set(
                "millrace_audit_tier_windows",
                "Windows of producers by what they look like in a tier",
                tier["windows"].get(state, 0),
                **labels,
                verdict=state,
            )


def _hops(gauges: _Gauges, summary: Mapping[str, Any]) -> None:
    """Every hop that can be, at 0 where nothing is missing, so that an alert sees the step from 0."""
    upstreams = {tier["name"]: tier["upstream"] for tier in summary["tiers"]}
    missing: Counter[tuple[str, str, str]] = Counter()
    for topic in summary["topics"]:
        for tier in topic["tiers"]:
            for upstream in upstreams.get(tier["tier"], ()):
                missing[topic["topic"], upstream, tier["tier"]] += 0
    for loss in (*summary["losses"], *summary.get("losses_more", ())):
        missing[loss["topic"], *loss["lost_between"]] += 0 if loss.get("waived") else loss["count"]
    for (topic_name, upstream, tier_name), number in sorted(missing.items()):
        gauges.set(
            "millrace_audit_missing_records",
            "Acknowledged records that were lost between two tiers, and not waived",
            number,
            topic=topic_name,
            upstream=upstream,
            tier=tier_name,
        )


def _watermarks(gauges: _Gauges, watermarks: Mapping[str, str | None], at_s: float | None) -> None:
    for topic, until in sorted(watermarks.items()):
        until_s = _unix_s(until)
        gauges.set(
            "millrace_audit_watermark_known",
            "1 when a prefix of the topic's windows is proven or waived",
            until_s is not None,
            topic=topic,
        )
        if until_s is None:
            continue
        gauges.set(
            "millrace_audit_watermark_timestamp_seconds",
            "Everything of the topic created before is proven or waived, Unix time",
            until_s,
            topic=topic,
        )
        if at_s is not None:
            gauges.set(
                "millrace_audit_watermark_lag_seconds",
                "How far the watermark was behind when the audit looked",
                max(0.0, at_s - until_s),
                topic=topic,
            )


def failed_text(before: str, at_ms: int) -> str:
    """The file after a run that failed: its status and time are new, all figures are of the last good run."""
    gauges = _Gauges()
    _run(gauges, JOB_FAILED, at_ms / 1000)
    kept = "".join(_without((_STATUS, _RUN_TIME), before.splitlines(keepends=True)))
    return generate_latest(gauges.registry).decode() + kept


def _without(names: Iterable[str], lines: Iterable[str]) -> Iterable[str]:
    for line in lines:
        words = line.split()
        name = (
            words[2] if line.startswith("#") and len(words) > 2 else line.partition(" ")[0].partition("{")[0]
        )
        if name not in names:
            yield line


def _unix_s(iso: str | None) -> float | None:
    return None if iso is None else datetime.fromisoformat(iso).timestamp()
