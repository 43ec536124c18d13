"""The list of differences is what the tests use, no more and no less, and users read the same list."""

from __future__ import annotations

import ast
from pathlib import Path

from millrace.broker.config import SETTING_FIELDS
from tests.kafka_fixture import SAME_SETTINGS
from tests.wire.differences import DIFFERENCES, table

FOLDER = Path(__file__).parent
ARCHITECTURE = FOLDER.parents[1] / "ARCHITECTURE.md"
BAD_INPUT = FOLDER.parent / "cluster" / "test_bad_input_like_kafka.py"


def used_ids() -> set[str]:
    """The first argument of every `….outcome(…)` and `Apart(…)` of the tests that ask both servers."""
    found: set[str] = set()
    for path in (*FOLDER.glob("test_*.py"), BAD_INPUT):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if (isinstance(called, ast.Attribute) and called.attr == "outcome") or (
                isinstance(called, ast.Name) and called.id == "Apart"
            ):
                (first, *_) = node.args
                assert isinstance(first, ast.Constant), f"{path.name}:{node.lineno}: the id is not a literal"
                found.add(str(first.value))
    return found


def test_every_difference_is_asserted_and_every_asserted_one_is_listed():
    assert used_ids() == set(DIFFERENCES)


def test_architecture_has_the_same_table():
    assert table() in ARCHITECTURE.read_text(), (
        "ARCHITECTURE.md lacks the table of tests/wire/differences.py: python -m tests.wire.differences"
    )


def test_both_servers_get_the_same_settings():
    assert set(SAME_SETTINGS) <= set(SETTING_FIELDS)
