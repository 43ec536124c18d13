"""What every dashboard and its rules must be, by Grafana's schema and by Prometheus' own tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.waiting import patience

ROOT = Path(__file__).parents[3]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def promtool(*words: str, cwd: Path | None = None, stdin: str | None = None) -> str:
    binary = shutil.which("promtool")
    assert binary, "promtool is needed: apt-get install prometheus"
    done = subprocess.run(
        [binary, *words],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics_asked_for(dashboard: dict[str, Any], alerts: Path, metric: re.Pattern[str]) -> set[str]:
    """By panels, variables and rules."""
    variables = [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    return set(metric.findall(" ".join([*queries(dashboard), *variables, alerts.read_text()])))


def check_queries(dashboard: dict[str, Any], variables: Mapping[str, str], folder: Path) -> None:
    """As recording rules: promtool has no other way to check an expression. `variables` are what Grafana
    fills in before it asks."""
    rules = []
    for number, query in enumerate(queries(dashboard)):
        for name, value in variables.items():
            query = query.replace(name, value)
        assert "$" not in query
        rules.append({"record": f"query_{number}", "expr": query})
    path = folder / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))


def check_importable(dashboard: dict[str, Any]) -> None:
    """What Grafana's dashboard schema asks for, and that it fits any installation."""
    assert dashboard["id"] is None and dashboard["uid"] and dashboard["title"]
    assert dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    templates = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert templates["datasource"]["type"] == "datasource"
    assert templates["datasource"]["query"] == "prometheus"
    for panel in panels(dashboard):
        assert panel["type"] in ("timeseries", "stat")
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(templates), used
        assert panel["fieldConfig"]["defaults"]["unit"]


def check_layout(dashboard: dict[str, Any]) -> None:
    """No two panels overlap, and none leaves the grid."""
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, (panel["title"], taken[x, y])
                taken[x, y] = panel["title"]


def check_alerts_fire(alerts: Path, cases_file: Path, folder: Path) -> None:
    """Each case of the rules comes out as it says. The cases name the rules' file beside them: both are
    copied to the folder."""
    for path in (alerts, cases_file):
        shutil.copy(path, folder)
    promtool("test", "rules", cases_file.name, cwd=folder)


def check_alerts_are_tested(alerts: Path, cases_file: Path) -> None:
    """Each rule has a case in which it fires and one in which it is silent, and words for people."""
    rules = [rule for group in yaml.safe_load(alerts.read_text())["groups"] for rule in group["rules"]]
    tests = yaml.safe_load(cases_file.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    names = {rule["alert"] for rule in rules}
    assert fires == names
    assert silent == names
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
