"""`millrace topics reassign`: what it takes on its command line and in its plans, and what it asks for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from millrace.broker.client import reassignments
from millrace.broker.client.reassignments import Moving
from millrace.broker.errors import NetworkException
from millrace.deploy.cli import USAGE_ERROR_STATUS, run
from millrace.deploy.commands import topics_reassign
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
    one: dict[str, Any] = {"topic": "t", "partition": 3, "replicas": [2, 1], "log_dirs": ["any", "any"]}
    path.write_text(json.dumps({"version": 1, "partitions": [one]}))
    assert read_plan(path) == {("t", 3): (2, 1)}
    for wrong in (
        "",
        "[]",
        json.dumps({"partitions": [{"topic": "t"}]}),
        json.dumps({"partitions": [one, one]}),
        *(
            json.dumps({"partitions": [one | changes]})
            for changes in (
                {"partition": 1 << 31},
                {"partition": -1},
                {"partition": 1.5},
                {"replicas": [1 << 31]},
                {"replicas": [-1]},
                {"replicas": "12"},
            )
        ),
        '{"partitions": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ):
        path.write_text(wrong)
        with pytest.raises(typer.BadParameter, match=r"plan\.json"):
            read_plan(path)


class Moves:
    """A cluster of four brokers whose topic "t" has one partition, and what a command asks of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: tuple[int, ...], moving: Moving | None):
        self.moving = {} if moving is None else {("t", 0): moving}
        self.asked: list[Any] = []
        self.throttle_error: Exception | None = None
        parts = {0: SimpleNamespace(replicas=replicas)}
        self.view = SimpleNamespace(
            topics={"t": SimpleNamespace(partitions=parts)},
            brokers={broker: SimpleNamespace(rack=None) for broker in (1, 2, 3, 4)},
        )
        for name in ("list_reassignments", "alter_reassignments", "set_throttle", "remove_throttle"):
            monkeypatch.setattr(reassignments, name, getattr(self, name))
        monkeypatch.setattr(
            topics_reassign, "with_cluster", lambda _b, command, _c: asyncio.run(command(self))
        )

    async def metadata(self, *_: object, **__: object) -> Any:
        return self.view

    async def list_reassignments(self, _cluster: object) -> dict[tuple[str, int], Moving]:
        return self.moving

    async def alter_reassignments(self, _cluster: object, targets: Any) -> dict[object, object]:
        self.asked.append(targets)
        return {}

    async def set_throttle(self, _cluster: object, moves: Any, rate: int) -> None:
        self.asked.append((rate, moves))
        if self.throttle_error is not None:
            raise self.throttle_error

    async def remove_throttle(self, _cluster: object, topics: Any, *, rates: bool) -> None:
        self.asked.append(("off", list(topics), rates))


UNDER_WAY = Moving(replicas=(2, 1), adding=(2,), removing=(1,))


def test_replication_factor_of_what_moves_is_that_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata shows the replicas that leave, too."""
    moves = Moves(monkeypatch, (2, 1), UNDER_WAY)
    assert run(["topics", "reassign", "t", "--brokers", "3", "--throttle", "9"]) == 0
    assert moves.asked == [(9, {("t", 0): ((1,), (3,))}), {("t", 0): (3,)}]


def test_what_is_on_its_way_is_not_moved_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moves = Moves(monkeypatch, (2, 1), UNDER_WAY)
    assert run(["topics", "reassign", "t", "--brokers", "2"]) == 0
    assert moves.asked == []
    assert "on its way there" in capsys.readouterr().out
    assert run(["topics", "reassign", "t", "--brokers", "1"]) == 0
    assert moves.asked == [{("t", 0): (1,)}], "back to where it came from is another way"


@pytest.mark.parametrize(
    ("moving", "taken_off"), [(None, ("off", ["t"], True)), (UNDER_WAY, ("off", [], False))]
)
def test_throttle_that_cannot_be_set_everywhere_is_left_nowhere(
    monkeypatch: pytest.MonkeyPatch, moving: Moving | None, taken_off: Any
) -> None:
    """But where others' moves go by it."""
    moves = Moves(monkeypatch, (2, 1) if moving else (1,), moving)
    moves.throttle_error = NetworkException("broker 2 does not answer")
    assert run(["topics", "reassign", "t", "--brokers", "3", "--throttle", "9"]) != 0
    assert moves.asked == [(9, {("t", 0): ((1,), (3,))}), taken_off]
