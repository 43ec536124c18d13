"""The dashboard and the alert rules are whole: Prometheus' own tools take them, and every metric exists.

That each panel gets data from a running mirror is tests/cluster/test_mirror_prometheus.py's part.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.dashboards.exposition import metric_names, sample_text
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

DASHBOARD = ROOT / "dashboards" / "mirror-lag.json"
ALERTS = ROOT / "dashboards" / "mirror-alerts.yaml"
CASES = Path(__file__).with_name("mirror-alerts-test.yaml")
METRIC = re.compile(r"\bmillrace_mirror_\w+")
# What Grafana fills in before it asks.
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$source": ".*"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def test_prometheus_takes_the_rules() -> None:
    assert "9 rules found" in promtool("check", "rules", str(ALERTS))


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    check_alerts_fire(ALERTS, CASES, tmp_path)


def test_each_alert_is_tested() -> None:
    check_alerts_are_tested(ALERTS, CASES)


def test_every_metric_that_is_asked_for_exists(dashboard: dict[str, Any]) -> None:
    asked = metrics_asked_for(dashboard, ALERTS, METRIC)
    assert len(asked) > 15
    assert asked <= metric_names(), asked - metric_names()


def test_the_exposition_is_as_prometheus_wants_it() -> None:
    promtool("check", "metrics", stdin=sample_text())


def test_prometheus_takes_every_query(dashboard: dict[str, Any], tmp_path: Path) -> None:
    check_queries(dashboard, VARIABLES, tmp_path)


def test_the_dashboard_is_one_that_grafana_imports(dashboard: dict[str, Any]) -> None:
    check_importable(dashboard)
    check_layout(dashboard)
