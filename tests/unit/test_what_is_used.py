"""What the product defines, the product uses: a function, class, constant or method that nothing reaches from
an entry point is dead code, or a helper of the tests in the wrong folder.

Reached is what runs on import, what is listed below as called from outside, and whatever those name in turn:
a function that is named by itself or by dead code alone is dead, too. Names of modules are followed through
imports; a method counts as named wherever an attribute of its name is read, of whatever object, so that of
two methods of one name both are reached. Names with two underscores are not looked at; fields are by
`test_fields_are_read`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("broker", "mirror", "audit", "deploy")

FOR_USERS = (
    "millrace.audit.aiokafka_producer",
    "millrace.audit.client_producer",
    "millrace.audit.consumer",
    "millrace.audit.kafka_python_producer",
    "millrace.audit.producer",
    "millrace.audit.spark.spark_source",
    "millrace.audit.stream_reporter",
    "millrace.broker.coordination.zookeeper_consumer.consumer",
)
"""Modules whose public functions, classes and methods applications call."""

REGISTERING = {"command", "callback", "field_validator", "model_validator", "overload"}
"""Decorators that give a function to Typer, pydantic or numba."""

CALLED_BACK = {
    "buffer_updated": "asyncio.BufferedProtocol",
    "connection_lost": "asyncio.BufferedProtocol",
    "connection_made": "asyncio.BufferedProtocol",
    "construct_object": "yaml.SafeLoader",
    "eof_received": "asyncio.BufferedProtocol",
    "format_commands": "typer.core.TyperGroup",
    "get_buffer": "asyncio.BufferedProtocol",
    "pause_writing": "asyncio.BufferedProtocol",
    "readable": "io.IOBase",
    "resume_writing": "asyncio.BufferedProtocol",
    "seekable": "io.IOBase",
    "redirect_request": "urllib.request.HTTPRedirectHandler",
}
"""Methods that a base class of somebody else calls."""

EXCEPTIONS = {
    "millrace.audit.config.parse_config": "a config for whoever has values and no file",
    "millrace.mirror.config.parse_config": "a config for whoever has values and no file",
    "millrace.audit.contract.event_json.FIELD_NAMES": "what EVENTS.md is held to",
    "millrace.audit.report.document.schema_text": "makes summary.schema.json, which is shipped",
    "millrace.mirror.delivery.progress.PartitionProgress.settled_position": "what its rules are about",
}
"""Reached from nowhere, and rightly there."""

ERRORS = "millrace.broker.errors"
"""Its subclasses of KafkaError are a table: each error code of the protocol."""

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class Name:
    """What a module or (`within`) a class of it defines."""

    module: str
    name: str
    within: str = ""

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.within, self.name) if part)


@dataclass(slots=True)
class Used:
    """What a piece of code names: values, and attributes with the name that they are read of ("" where they
    are read of something else)."""

    names: set[str] = field(default_factory=set)
    attributes: set[tuple[str, str]] = field(default_factory=set)


@dataclass(slots=True)
class Module:
    """`imports` are {name here: (module, name there, "" for the module itself)}, several where functions have
    imports of their own; `on_import` is what it names when it is imported."""

    imports: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    defined: dict[Name, Used] = field(default_factory=dict)
    on_import: Used = field(default_factory=Used)
    registered: list[Name] = field(default_factory=list)


class Reader:
    """Reads a module."""

    def __init__(self, dotted: str, source: str) -> None:
        self.module = Module()
        self._dotted = dotted
        for statement in _statements(ast.parse(source).body):
            self._read(statement)

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, Function):
            self._read_function(statement)
        elif isinstance(statement, ast.ClassDef):
            own = self._used_by(Name(self._dotted, statement.name))
            for part in ast.iter_child_nodes(statement):
                if isinstance(part, Function) and not part.name.startswith("__"):
                    self._read_function(part, statement.name)
                else:
                    self._collect(part, frozenset(), own)
        elif targets := _assigned(statement):
            used = Used()
            self._collect(statement, frozenset(), used)
            # Of numbers that are given out together, as the columns of a table, one is as good as all.
            used.names |= targets
            for target in targets:
                self.module.defined.setdefault(Name(self._dotted, target), used)
        else:
            self._collect(statement, frozenset(), self.module.on_import)

    def _read_function(self, function: ast.FunctionDef | ast.AsyncFunctionDef, within: str = "") -> None:
        name = Name(self._dotted, function.name, within)
        self._collect(function, frozenset(), self._used_by(name))
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if (called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)) in REGISTERING:
                self.module.registered.append(name)

    def _used_by(self, name: Name) -> Used:
        return self.module.defined.setdefault(name, Used())

    def _collect(self, node: ast.AST, hidden: frozenset[str], used: Used) -> None:
        """What a node names, but for what names of functions around it hide."""
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load) and node.id not in hidden:
                used.names.add(node.id)
            return
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id not in hidden:
                used.attributes.add((node.value.id, node.attr))
                return
            used.attributes.add(("", node.attr))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "getattr":
                wanted = node.args[1]
                used.attributes.add(("", str(wanted.value) if isinstance(wanted, ast.Constant) else ""))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                there = (origin, alias.name) if origin else (alias.name, "")
                self.module.imports.setdefault(alias.asname or alias.name, set()).add(there)
        elif isinstance(node, AnyFunction):
            inside = hidden | _locals_of(node)
            for child in ast.iter_child_nodes(node):
                is_body = child is node.body if isinstance(node, ast.Lambda) else child in node.body
                self._collect(child, inside if is_body else hidden, used)
            return
        for child in ast.iter_child_nodes(node):
            self._collect(child, hidden, used)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, with those under its conditions."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements(statement.body)
            yield from _statements(statement.orelse)
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)
            if isinstance(statement, ast.If):
                yield ast.Expr(statement.test)
        else:
            yield statement


def _assigned(statement: ast.stmt) -> set[str]:
    """The names that an assignment gives to a module."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return set()
    nodes = [node for target in targets for node in ast.walk(target)]
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _locals_of(function: AnyFunction) -> set[str]:
    """Parameters and what the body assigns; not what it imports."""
    names = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    shared: set[str] = set()
    todo: list[ast.AST] = [] if isinstance(function, ast.Lambda) else list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Global):
            shared |= set(node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                names.add(node.id)
        elif isinstance(node, (*Function, ast.ClassDef)):
            names.add(node.name)
        elif not isinstance(node, ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))
    return names - shared


class Reach:
    """What is reached of the modules, from what they name on import and from the roots that are added."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self._modules = modules
        self._defined = {name: used for module in modules.values() for name, used in module.defined.items()}
        self._reached: set[Name] = set()
        self._todo: list[Name] = []
        self._attributes: set[str] = set()
        self._having: dict[str, list[Name]] = {}
        """By attribute: methods, and what is in modules that are handed around as values."""
        self._values: set[str] = set()
        for name in self._defined:
            if name.within:
                self._having.setdefault(name.name, []).append(name)
        for dotted, module in modules.items():
            self._follow(dotted, module.on_import)
            self.add(module.registered)

    def add(self, roots: Iterable[Name]) -> None:
        self._todo.extend(roots)
        while self._todo:
            name = self._todo.pop()
            if name not in self._reached:
                self._reached.add(name)
                self._follow(name.module, self._defined[name])

    def unreached(self) -> list[str]:
        rest = self._defined.keys() - self._reached
        return sorted(str(name) for name in rest if not name.name.startswith("__"))

    def _follow(self, dotted: str, used: Used) -> None:
        for name in used.names:
            for module in self._find(dotted, name):
                self._hand_around(module)
        for base, attribute in used.attributes:
            modules = list(self._find(dotted, base)) if base else []
            for module in modules:
                for inner in self._find(module, attribute):
                    self._hand_around(inner)
            if not modules and attribute not in self._attributes:
                self._attributes.add(attribute)
                self._todo.extend(self._having.get(attribute, ()))

    def _find(self, dotted: str, name: str) -> Iterator[str]:
        """Reaches what a module has under a name; the name of what is a module itself."""
        module = self._modules.get(dotted)
        if module is None:
            return
        if (own := Name(dotted, name)) in self._defined:
            self._todo.append(own)
        for origin, there in module.imports.get(name, ()):
            if (named := f"{origin}.{there}".rstrip(".")) in self._modules:
                yield named
            else:
                yield from self._find(origin, there)

    def _hand_around(self, dotted: str) -> None:
        if dotted not in self._values:
            self._values.add(dotted)
            for each in self._modules[dotted].defined:
                if not each.within:
                    self._having.setdefault(each.name, []).append(each)
                    if each.name in self._attributes:
                        self._todo.append(each)


def modules_of_the_product() -> dict[str, Module]:
    modules = {}
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            dotted = ".".join(("millrace", *parts)).removesuffix(".__init__")
            modules[dotted] = Reader(dotted, path.read_text()).module
    return modules


def called_from_outside(modules: dict[str, Module]) -> Iterator[Name]:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for script in scripts.values():
        yield Name(*script.split(":"))
    for dotted, module in modules.items():
        for name, used in module.defined.items():
            if dotted in FOR_USERS and not name.name.startswith("_") and not name.within.startswith("_"):
                yield name
            if dotted == ERRORS and not name.within and "KafkaError" in used.names:
                yield name
            if name.name == "__all__" or (name.within and name.name in CALLED_BACK):
                yield name


def test_what_the_product_defines_the_product_uses() -> None:
    modules = modules_of_the_product()
    assert len(modules) > 400, "the product was not found"
    reach = Reach(modules)
    reach.add(called_from_outside(modules))
    unneeded = set(EXCEPTIONS) - set(reach.unreached())
    reach.add(name for module in modules.values() for name in module.defined if str(name) in EXCEPTIONS)
    assert (reach.unreached(), unneeded) == ([], set())


@pytest.mark.parametrize(
    ("added", "found"),
    [
        ("def helper(): pass", ["helper"]),
        ("def helper(): return helper()", ["helper"]),
        ("def helper(): return LIMIT\nLIMIT = 3", ["LIMIT", "helper"]),
        ("def helper(used): return used\nused = 3\nhelper(1)", ["used"]),
        ("class Thing:\n    def unused(self): pass\nThing()", ["Thing.unused"]),
        ("class Thing:\n    def read(self): pass\nThing().read()", []),
        ("FIRST, SECOND = range(2)\nprint(SECOND)", []),
        ("from product.other import helper\nhelper()", []),
        ("from product import other\nother.helper()", []),
        ("from product import other\n[module.helper for module in (other,)]", []),
    ],
)
def test_what_nothing_names_is_found(added: str, found: list[str]) -> None:
    modules = {"product.room": Reader("product.room", added).module}
    if "other" in added:
        modules["product.other"] = Reader("product.other", "def helper(): pass").module
    assert Reach(modules).unreached() == [f"product.room.{name}" for name in found]
