"""What the product keeps, the product reads: a field of a class, or an attribute that its methods set, whose
name no code reads is a leftover, or a figure for tests alone.

Read is an attribute of that name wherever it stands, of whatever object (as in `test_what_is_used`), and what
a pattern takes apart: by the name of a field, or by its place in a class. What adds to an attribute does not
read it. Settings have a test of their own (`test_settings_are_read`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from tests.unit.test_what_is_used import PARTS, ROOT

TAKEN_WHOLE = {
    "broker.config.BrokerSettings": "settings, see `test_settings_are_read`",
    "broker.storage.cleaner.CleanResult": "logged",
    "broker.telemetry.metrics.BrokerMetrics": "its counters are read by the names in a table",
    "mirror.batches.coalesce.Step": "unpacked by `intake.prepare`",
    "mirror.delivery.delivery.TransactionCounts": "in the status",
    "audit.report.drawing.Layer": "in a template",
    "audit.report.drawing.Picture": "in a template",
    "audit.report.summary.Cost": "in summary.json",
    "audit.scanning.cells.Cell": "a row of the cells' table",
}
"""Classes whose fields leave the product together, or are read in another way, and how."""

MODEL = "BaseModel"
"""Of pydantic: what derives from it is checked and written as a whole."""


class Field(NamedTuple):
    """What a class keeps, by the dotted name of the class."""

    within: str
    name: str


@dataclass(slots=True)
class Fields:
    """What modules keep, what they read, and how their classes are made."""

    kept: set[Field] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    ordered: dict[str, list[str]] = field(default_factory=dict)
    """By the name of a class: its annotated fields, as a pattern takes them by place."""
    bases: dict[str, set[str]] = field(default_factory=dict)
    """By the name of a class: the names of those that it derives from."""
    taken_by_place: list[tuple[str, int]] = field(default_factory=list)
    """Names of classes in patterns, and how many fields a pattern takes."""

    def add(self, dotted: str, source: str) -> None:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Load):
                    self.read.add(node.attr)
            elif isinstance(node, ast.MatchClass):
                self.read |= set(node.kwd_attrs)
                self.taken_by_place.append((_last_name(node.cls), len(node.patterns)))
            elif isinstance(node, ast.ClassDef):
                self._add_class(f"{dotted}.{node.name}", node)

    def _add_class(self, dotted: str, made: ast.ClassDef) -> None:
        annotated = list(_annotated(made.body))
        self.ordered[made.name] = annotated
        self.bases.setdefault(made.name, set()).update(map(_last_name, made.bases))
        self.kept |= {Field(dotted, name) for name in [*annotated, *_set_by_methods(made)]}

    def unread(self) -> set[Field]:
        by_place = {
            (name, taken)
            for name, count in self.taken_by_place
            for taken in self.ordered.get(name, ())[:count]
        }
        return {
            each
            for each in self.kept
            if each.name not in self.read
            and (each.within.rpartition(".")[2], each.name) not in by_place
            and not self._is_model(each.within)
        }

    def _is_model(self, dotted: str) -> bool:
        todo, seen = [dotted.rpartition(".")[2]], set[str]()
        while todo:
            name = todo.pop()
            if name == MODEL:
                return True
            if name not in seen:
                seen.add(name)
                todo.extend(self.bases.get(name, ()))
        return False


def _last_name(node: ast.expr) -> str:
    """`b` of `a.b[T]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _annotated(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if not isinstance(statement, ast.AnnAssign) or _last_name(statement.annotation) == "ClassVar":
            continue
        if isinstance(statement.target, ast.Name):
            yield statement.target.id


def _set_by_methods(made: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(made):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def test_what_the_product_keeps_the_product_reads() -> None:
    fields = Fields()
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            fields.add(".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text())
    assert len(fields.kept) > 3_000, "the product was not found"
    unread = fields.unread()
    left = sorted(f"{each.within}.{each.name}" for each in unread if each.within not in TAKEN_WHOLE)
    assert (left, TAKEN_WHOLE.keys() - {each.within for each in unread}) == ([], set())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class Thing:\n    size: int\n", ["size"]),
        ("class Thing:\n    size: int\nprint(Thing(1).size)", []),
        ("class Thing:\n    def __init__(self):\n        self.count = 0\n        self.count += 1", ["count"]),
        ("class Thing:\n    def more(self):\n        self.count = self.count + 1", []),
        ("class Thing:\n    a: int\n    b: int\nmatch made:\n    case Thing(first): print(first)", ["b"]),
        ("class Thing:\n    a: int\nmatch made:\n    case Thing(a=first): print(first)", []),
        ("class Thing:\n    a: int\nclass B:\n    a: int\nmatch made:\n    case Thing(x): print(x)", ["a"]),
        ("class Thing(NamedTuple):\n    a: int\n", ["a"]),
        ("class Part(BaseModel):\n    a: int\nclass Whole(Part):\n    b: int\n", []),
    ],
)
def test_what_nobody_reads_is_found(source: str, found: list[str]) -> None:
    fields = Fields()
    fields.add("room", source)
    assert sorted(each.name for each in fields.unread()) == found
