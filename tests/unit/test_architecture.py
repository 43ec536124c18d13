"""ARCHITECTURE.md is held to the code: each file it names exists, each function is defined where it says and
used by the product, and an arrow is a call."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
HOP = re.compile(r"`([a-z_/]+\.py):([A-Za-z_]+)`")
CALL = re.compile(HOP.pattern + rf"(?=\s*→\s*{HOP.pattern})")
FILE = re.compile(r"`((?:broker|mirror|audit|deploy|tests)/[a-z_/]+\.py)`")


KINDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def definitions_in(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, KINDS)]


def called_in(tree: ast.AST) -> set[str]:
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    attributes = {function.attr for function in called if isinstance(function, ast.Attribute)}
    return attributes | {function.id for function in called if isinstance(function, ast.Name)}


def test_journeys_name_functions_that_exist() -> None:
    hops = HOP.findall(TEXT)
    assert len(hops) > 20, "the journeys are gone"
    wrong = [
        f"{file}:{name}"
        for file, name in hops
        if name not in {each.name for each in definitions_in(ROOT / file)}
    ]
    assert not wrong


def test_journeys_arrows_are_calls() -> None:
    calls = CALL.findall(TEXT)
    assert len(calls) > 5, "the arrows are gone"
    wrong = [
        f"{file}:{name} → {callee}"
        for file, name, _, callee in calls
        if not any(callee in called_in(each) for each in definitions_in(ROOT / file) if each.name == name)
    ]
    assert not wrong


def test_an_arrow_of_the_journeys_stands_between_two_functions() -> None:
    """Any other is checked by nobody."""
    steps = [line for line in TEXT.splitlines() if re.match(r"\d+\. ", line) and HOP.search(line)]
    assert len(steps) > 10, "the journeys are gone"
    assert [line for line in steps if line.count("→") != len(CALL.findall(line))] == []


def test_files_named_exist() -> None:
    missing = [name for name in FILE.findall(TEXT) if not (ROOT / name).is_file()]
    assert not missing
