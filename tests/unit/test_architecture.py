"""ARCHITECTURE.md is held to the code: each file it names exists, each function is defined where it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
HOP = re.compile(r"`([a-z_/]+\.py):([A-Za-z_]+)`")
FILE = re.compile(r"`((?:broker|mirror|audit|deploy|tests)/[a-z_/]+\.py)`")


def names_defined_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_journeys_name_functions_that_exist() -> None:
    hops = HOP.findall(TEXT)
    assert len(hops) > 20, "the journeys are gone"
    wrong = [f"{file}:{name}" for file, name in hops if name not in names_defined_in(ROOT / file)]
    assert not wrong


def test_files_named_exist() -> None:
    missing = [name for name in FILE.findall(TEXT) if not (ROOT / name).is_file()]
    assert not missing
