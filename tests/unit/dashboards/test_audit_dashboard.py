"""The audit's dashboard, alert rules and metrics are whole: Prometheus' own tools take them, and every metric
that is asked for exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from millrace.audit.reconciliation.verdict_rows import verdict_rows
from millrace.audit.reconciliation.verdicts import DIFFERS, Verdict
from millrace.audit.report.metrics import failed_text, metrics_text
from millrace.audit.report.summary import summarise
from tests.browser.report_data import HOUR_MS, START_MS, TIERS, TOPICS, rich, row
from tests.unit.dashboards.grafana import (
    ROOT,
    check_alerts_are_tested,
    check_alerts_fire,
    check_importable,
    check_layout,
    check_queries,
    metrics_asked_for,
    promtool,
)

DASHBOARD = ROOT / "dashboards" / "audit.json"
ALERTS = ROOT / "dashboards" / "audit-alerts.yml"
CASES = Path(__file__).with_name("audit-alerts-test.yaml")
METRIC = re.compile(r"\bmillrace_audit_\w+")
SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$topic": ".*"}


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return rich(3)[0]


@pytest.fixture(scope="module")
def text(summary: dict[str, Any]) -> str:
    return metrics_text(summary)


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def values(text: str, name: str, **labels: str) -> dict[str, float]:
    """{labels as they stand: value} of the samples of a metric that have these labels."""
    return {
        written: float(value)
        for metric, written, value in SAMPLE.findall(text)
        if metric == name and all(f'{label}="{want}"' in written for label, want in labels.items())
    }


def test_prometheus_takes_metrics_of_a_good_and_of_a_failed_run(text: str) -> None:
    promtool("check", "metrics", stdin=text)
    promtool("check", "metrics", stdin=failed_text(text, 1_000))
    promtool("check", "metrics", stdin=failed_text("", 1_000))


def test_metrics_say_what_the_summary_says(text: str, summary: dict[str, Any]) -> None:
    counts = summary["counts"]
    assert sum(values(text, "millrace_audit_missing_records").values()) == counts["missing"] == 28
    assert sum(values(text, "millrace_audit_duplicate_records").values()) == counts["duplicates"]
    lost = values(text, "millrace_audit_missing_records", topic="orders", upstream="ewr", tier="agg")
    assert list(lost.values()) == [15]
    assert 0 in values(text, "millrace_audit_missing_records", topic="flights").values()
    for kind in ("in_flight", "unreported", "explained", "unknown"):
        assert sum(values(text, "millrace_audit_records", kind=kind).values()) == counts[kind] > 0
    for verdict in ("PROVEN", "COUNT_MATCH", "UNKNOWN", "DUPLICATE", "LOSS", "OPEN"):
        told = values(text, "millrace_audit_windows", verdict=verdict)
        assert len(told) == len(TOPICS)
        assert sum(told.values()) == summary["windows"][verdict] > 0
    agg = values(text, "millrace_audit_tier_windows", topic="orders", tier="agg", verdict="LOSS")
    # Three with missing records, one with other content; what jfk never had is jfk's.
    assert list(agg.values()) == [4]
    assert list(
        values(text, "millrace_audit_tier_windows", topic="orders", tier="jfk", verdict="LOSS").values()
    ) == [1]
    assert sum(values(text, "millrace_audit_untrusted").values()) == 19


def test_what_a_person_has_waived_is_apart_so_that_a_new_finding_beside_it_shows() -> None:
    """The status is 0 then; an alert that went on would not be raised anew by the next loss."""
    lost = {"verdict": Verdict.LOSS, "missing": {("ewr", "agg"): ((1, 2),)}}
    twice = {"verdict": Verdict.DUPLICATE, "duplicates": {"agg": ((1, 1),)}, "extra_copies": {"agg": 1}}
    other = {
        "verdict": Verdict.LOSS,
        "content_checked": DIFFERS,
        "reasons": ("content differs between ewr and agg",),
    }
    seen: dict[str, Any] = {"consumed": {"ewr": 5, "agg": 5}, "seen": {"ewr": 5, "agg": 5}}
    rows = [row("a@ewr", hour, count=5, **{**seen, **each}) for hour, each in enumerate((lost, twice, other))]
    again = [row("b@ewr", 5, count=5, **seen, **lost)]
    waived = {(each.topic, each.window_start_ms) for each in rows}

    def figures(*more: Any) -> list[float]:
        summary = summarise(
            verdict_rows([*rows, *more]), tiers=TIERS, at_ms=START_MS, window_ms=HOUR_MS, unaudited={},
            untrusted={"x": 3, "y": 1}, accepted={"x"}, waived=waived, in_doubt=False,
        )  # fmt: skip
        text = metrics_text(summary)
        told = [
            values(text, "millrace_audit_last_run_status"),
            values(text, "millrace_audit_missing_records"),
            values(text, "millrace_audit_waived_records", kind="missing"),
            values(text, "millrace_audit_duplicate_records"),
            values(text, "millrace_audit_waived_records", kind="duplicates"),
            values(text, "millrace_audit_content_windows", content="differs"),
            values(text, "millrace_audit_content_windows", content="waived"),
            values(text, "millrace_audit_untrusted"),
            values(text, "millrace_audit_waived_untrusted"),
            values(text, "millrace_audit_windows", verdict="LOSS"),
            values(text, "millrace_audit_waived_windows", verdict="LOSS"),
            values(text, "millrace_audit_waived_windows", verdict="DUPLICATE"),
        ]
        return [sum(each.values()) for each in told]

    assert figures() == [0, 0, 2, 0, 1, 0, 1, 1, 3, 2, 2, 1]
    assert figures(*again) == [1, 2, 2, 0, 1, 0, 1, 1, 3, 3, 2, 1]


def test_metrics_tell_the_watermark_and_how_far_it_is_behind(text: str) -> None:
    known = values(text, "millrace_audit_watermark_known")
    assert sorted(known.values()) == [0, 1, 1]
    behind = values(text, "millrace_audit_watermark_lag_seconds", topic="orders")
    assert list(behind.values()) == [(337 - 60) * 3600]
    assert not values(text, "millrace_audit_watermark_lag_seconds", topic=TOPICS[2])


def test_a_failed_run_shows_and_keeps_the_last_good_figures(text: str) -> None:
    after = failed_text(text, 5_000)
    assert list(values(after, "millrace_audit_last_run_status").values()) == [3]
    assert list(values(after, "millrace_audit_last_run_timestamp_seconds").values()) == [5]
    assert list(values(text, "millrace_audit_last_run_status").values()) == [1]
    for name in ("millrace_audit_missing_records", "millrace_audit_last_success_timestamp_seconds"):
        assert values(after, name) == values(text, name) != {}
    assert failed_text(after, 5_000) == after


def test_no_name_that_a_producer_chose_becomes_a_label(text: str) -> None:
    assert "ledger" not in text and "script" not in text


def test_prometheus_takes_the_rules() -> None:
    assert "8 rules found" in promtool("check", "rules", str(ALERTS))


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    check_alerts_fire(ALERTS, CASES, tmp_path)


def test_each_alert_is_tested() -> None:
    check_alerts_are_tested(ALERTS, CASES)


def test_every_metric_that_is_asked_for_exists(dashboard: dict[str, Any], text: str) -> None:
    known = {name for name, _, _ in SAMPLE.findall(text)}
    asked = metrics_asked_for(dashboard, ALERTS, METRIC)
    assert len(asked) > 15
    assert asked <= known, asked - known


def test_prometheus_takes_every_query(dashboard: dict[str, Any], tmp_path: Path) -> None:
    check_queries(dashboard, VARIABLES, tmp_path)


def test_the_dashboard_is_one_that_grafana_imports(dashboard: dict[str, Any]) -> None:
    assert dashboard["uid"] == "millrace-audit"
    check_importable(dashboard)
    check_layout(dashboard)
