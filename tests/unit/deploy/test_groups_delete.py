"""`millrace groups delete --offsets`: it deletes what was named, all of it, and nothing else."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.client import group_offsets
from millrace.broker.client import groups as client_groups
from millrace.broker.errors import GroupSubscribedToTopic
from millrace.deploy.cli import run
from millrace.deploy.commands import groups


class Group:
    """A group with offsets in partitions 0 to 2 of `orders`, one of which a member reads, and in `bills`."""

    def __init__(self, is_read: bool = False) -> None:
        self.is_read = is_read
        self.committed = {("bills", 0), ("orders", 0), ("orders", 1), ("orders", 2)}

    async def fetch(self, cluster: Any, name: str) -> dict[tuple[str, int], int]:
        return dict.fromkeys(self.committed, 5)

    async def describe(self, cluster: Any, name: str) -> Any:
        return SimpleNamespace(exists=name == "billing")

    async def delete(self, cluster: Any, name: str, keys: Iterable[tuple[str, int]]) -> dict[Any, Any]:
        outcome = {
            key: GroupSubscribedToTopic("it is read") if self.is_read and key[0] == "bills" else None
            for key in keys
        }
        self.committed -= {key for key, error in outcome.items() if error is None}
        return outcome


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    stage = Group()
    monkeypatch.setattr(group_offsets, "fetch_offsets", stage.fetch)
    monkeypatch.setattr(client_groups, "describe_group", stage.describe)
    monkeypatch.setattr(client_groups, "delete_offsets", stage.delete)
    monkeypatch.setattr(groups, "with_cluster", lambda _, command, __: asyncio.run(command(None)))
    return stage


def delete(*words: str, name: str = "billing", asks: bool = False) -> int:
    topics = [word for each in words for word in ("--topic", each)]
    return run(["groups", "delete", name, "--offsets", *topics, *(() if asks else ("--yes",))])


def test_only_what_was_named_is_deleted(
    group: Group, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert delete("orders:0,2", "bills", asks=True) == 0
    out = capsys.readouterr().out
    assert out.startswith("Delete the offsets in orders:0,2, bills of billing? [y/N]: ")
    assert out.endswith("deleted 3 offsets of group billing\n")
    assert group.committed == {("orders", 1)}


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["orders:9"], "orders:9"),
        (["orders:0,9,7"], "orders:7,9"),
        (["orders:0", "typo"], "typo"),
        (["orders:3", "orders:0", "typo:1"], "orders:3, typo:1"),
    ],
)
def test_what_has_no_offsets_is_named_and_then_none_is_deleted(
    words: list[str], missing: str, group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    assert delete(*words) == 1
    found = capsys.readouterr()
    assert (found.out, found.err) == (
        "",
        f"millrace: group billing has no offsets in {missing}; none of it was deleted\n",
    )
    assert len(group.committed) == 4


def test_group_that_is_not_there_is_called_so(group: Group, capsys: pytest.CaptureFixture[str]) -> None:
    group.committed.clear()
    assert delete("orders", name="biling") == 1
    assert "there is no group biling" in capsys.readouterr().err


def test_what_a_member_reads_stays_and_the_rest_is_told(
    group: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    group.is_read = True
    assert delete("orders:0", "bills") == 1
    found = capsys.readouterr()
    assert found.out == "deleted 1 offset of group billing\n"
    assert "members of group billing read bills now: stop them first" in found.err
    assert group.committed == {("bills", 0), ("orders", 1), ("orders", 2)}
