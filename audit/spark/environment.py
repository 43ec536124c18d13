"""The archive of a Python environment that executors need: `millrace audit package`.

A virtual environment that can be moved, as PySpark's documentation on Python package management recommends
(what `venv-pack` makes): millrace, the libraries that it depends on, and a `bin/python` that points at the
Python of the machines it is for. Spark unpacks it into each executor's working folder (`spark.archives`), and
`spark.pyspark.python` names the Python in it. PySpark itself is left out: a cluster has its own, and its jars
are hundreds of megabytes.

What goes in is what the installed packages say of themselves (`importlib.metadata`), so that the archive has
the very versions that were tested with the driver, and nothing that a developer has installed beside them.
The interpreter is not in it: machines need the same minor version of Python, at the path that `python` names.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from millrace.broker.errors import MillraceError

OURS = "millrace"
PARTS = ("audit", "broker", "deploy", "mirror")
FROM_SPARK = frozenset({"pyspark", "py4j"})
FOLDER = "environment"
"""The name under which executors find it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMPILED = "__pycache__"  # Python makes its own
_LEVEL = 1  # what takes long is the packing; compiled code packs to a third at any level


def write_environment(archive: Path, python: str | None = None) -> list[str]:
    """Write the archive; `python` is the interpreter's path where it is for. Returns what is in it, as
    `numpy 2.4.6`.

    Raises MillraceError where a library that is needed is not installed here.
    """
    found = dependencies()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = PurePosixPath("lib", f"python{version}", "site-packages")
    interpreter = python or os.path.realpath(sys.executable)
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = archive.with_name(f".{archive.name}.{uuid.uuid4().hex}")
    try:
        with tarfile.open(temporary, "w:gz", compresslevel=_LEVEL, dereference=True) as packed:
            home = str(PurePosixPath(interpreter).parent)
            _add_text(packed, "pyvenv.cfg", f"home = {home}\ninclude-system-site-packages = false\n")
            for name in ("python", "python3", f"python{version}"):
                _add_link(packed, f"bin/{name}", interpreter)
            for each in found:
                for name, path in _files(each):
                    packed.add(path, str(site / name))
            for name, text in own_metadata().items():
                _add_text(packed, str(site / name), text)
            for name, path in _own_files():
                packed.add(path, str(site / OURS / name))
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    return [f"{each.name} {each.version}" for each in found]


def dependencies() -> list[Distribution]:
    """Everything that millrace needs, but for what Spark brings, in order of names."""
    found: dict[str, Distribution] = {}
    waiting = [(OURS, "")]
    while waiting:
        name, wanted_by = waiting.pop()
        if name in found or name in FROM_SPARK:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            raise MillraceError(
                f"{name} is not installed here{f', and {wanted_by} needs it' if wanted_by else ''}: "
                "install millrace with pip, then make the package"
            ) from None
        waiting += [(each, name) for each in required(found[name].requires or ())]
    found.pop(OURS)
    return [found[name] for name in sorted(found)]


def required(requirements: list[str] | tuple[str, ...]) -> Iterator[str]:
    """Names of the requirements that hold here, as they are compared (PEP 503). One with a condition that is
    no extra holds where what it names is installed: pip has judged it."""
    for requirement in requirements:
        text, _, condition = requirement.partition(";")
        match = _NAME.match(text.strip())
        if match is None or "extra" in condition:
            continue
        name = re.sub(r"[-_.]+", "-", match[0]).lower()
        if not condition or _is_installed(name):
            yield name


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _files(library: Distribution) -> Iterator[tuple[str, Path]]:
    """(name below site-packages, path); without programs, which lie outside and have this machine's paths."""
    for file in library.files or ():
        path = Path(str(file.locate()))
        if not {"..", _COMPILED} & set(file.parts) and path.is_file():
            yield str(file), path


def own_metadata() -> dict[str, str]:
    """{file's name below site-packages: what the package says of itself, its version above all}; empty for a
    copy that was never installed.

    In a source tree `<name>.egg-info/PKG-INFO` is found before the installed `METADATA`; they say the same.
    """
    try:
        ours = distribution(OURS)
    except PackageNotFoundError:
        return {}
    told = ours.read_text("METADATA") or ours.read_text("PKG-INFO") or ""
    return {f"{OURS}-{ours.version}.dist-info/METADATA": told} if told else {}


def _own_files() -> Iterator[tuple[str, Path]]:
    """(name below `millrace/`, path), wherever the parts are installed, from a source tree too."""
    for part in PARTS:
        root = Path(str(importlib.import_module(f"{OURS}.{part}").__file__)).parent
        for path in sorted(root.rglob("*")):
            if path.is_file() and _COMPILED not in path.parts:
                yield f"{part}/{path.relative_to(root).as_posix()}", path


def _add_text(packed: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(text.encode()), int(time.time())
    packed.addfile(entry, io.BytesIO(text.encode()))


def _add_link(packed: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mtime = tarfile.SYMTYPE, target, int(time.time())
    packed.addfile(entry)
