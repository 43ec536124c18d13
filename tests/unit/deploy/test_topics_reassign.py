"""`millrace topics reassign`: what it takes on its command line and in its plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from millrace.deploy.cli import USAGE_ERROR_STATUS, run
from millrace.deploy.commands.topics_reassign import read_plan


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["t"], "say where to"),
        (["--brokers", "1,2"], "name the topics"),
        (["t", "--brokers", "1,1"], "different broker ids"),
        (["t", "--brokers", "one"], "different broker ids"),
        (["t", "--brokers", "1", "--cancel"], "--brokers and --cancel do not go together"),
        (["t", "--plan", "p.json"], "--plan names the topics itself"),
        (["--plan", "missing.json"], "No such file"),
        (["t", "--list", "-r", "2"], "--replication-factor goes with --brokers"),
    ],
)
def test_contradictions_are_refused_before_anything_is_asked(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["topics", "reassign", *words]) == USAGE_ERROR_STATUS
    assert said in " ".join(capsys.readouterr().err.split())


def test_plan_of_kafkas_tool_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    one = {"topic": "t", "partition": 3, "replicas": [2, 1], "log_dirs": ["any", "any"]}
    path.write_text(json.dumps({"version": 1, "partitions": [one]}))
    assert read_plan(path) == {("t", 3): (2, 1)}
    for wrong in (
        "",
        "[]",
        json.dumps({"partitions": [{"topic": "t"}]}),
        json.dumps({"partitions": [one, one]}),
    ):
        path.write_text(wrong)
        with pytest.raises(typer.BadParameter, match=r"plan\.json"):
            read_plan(path)
