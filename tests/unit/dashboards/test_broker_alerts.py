"""The broker's alert rules are whole: Prometheus' own tools take them, and every metric exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.dashboards.grafana import ROOT, check_alerts_are_tested, check_alerts_fire, promtool

ALERTS = ROOT / "dashboards" / "broker-alerts.yaml"
CASES = Path(__file__).with_name("broker-alerts-test.yaml")
METRIC = re.compile(r"\bmillrace_broker_\w+")


def test_prometheus_takes_the_rules() -> None:
    assert "2 rules found" in promtool("check", "rules", str(ALERTS))


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    check_alerts_fire(ALERTS, CASES, tmp_path)


def test_each_alert_is_tested() -> None:
    check_alerts_are_tested(ALERTS, CASES)


def test_every_metric_that_is_asked_for_exists() -> None:
    asked = set(METRIC.findall(ALERTS.read_text()))
    named = set(METRIC.findall((ROOT / "broker" / "server" / "gauges.py").read_text()))
    assert asked and asked <= named, asked - named
