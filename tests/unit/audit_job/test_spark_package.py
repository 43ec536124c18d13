"""The package that travels to executors: what is in it, and how it unpacks itself there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from millrace.audit.spark.spark_package import build_package
from tests.waiting import patience


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_package(tmp_path_factory.mktemp("package"))


def imported_from(
    archive: Path, home: Path, temporary: Path, module: str = "millrace.audit.contract.header"
) -> Path:
    """Where a Python that has the zip on its path finds the module."""
    code = f"import {module}; print({module}.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(archive), "HOME": str(home), "TMPDIR": str(temporary)},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=True,
    )
    return Path(done.stdout.strip())


def test_everything_that_executors_may_import_is_in_it_and_nothing_of_brokers(archive, tmp_path):
    names = set(zipfile.ZipFile(archive).namelist())
    needed = {
        "audit/spark/task_reader.py",
        "audit/reconciliation/verdict_rows.py",
        "broker/errors.py",
        "broker/client/cluster.py",
    }
    assert {f"payload/{name}" for name in needed} <= names
    assert not [
        name for name in names if name.startswith(("payload/broker/server", "payload/broker/storage"))
    ]
    assert build_package(tmp_path).name == archive.name


def test_executors_know_the_drivers_version(archive):
    (found,) = distributions(name="millrace", path=[str(archive)])
    assert found.version == version("millrace")


def test_it_unpacks_once_a_user_and_version_and_the_copy_is_used(archive, tmp_path):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir(), temporary.mkdir()
    found = imported_from(archive, home, temporary, "millrace.broker.client.security")
    label = archive.stem.partition("-")[2]
    assert found == home / f".cache/millrace-{os.getuid()}/{label}/broker/client/security.py"
    found.write_text(found.read_text() + "\n# kept\n")
    assert imported_from(archive, home, temporary, "millrace.broker.client.security") == found
    assert found.read_text().endswith("# kept\n")
    assert [path.name for path in found.parents[3].iterdir()] == [label]  # no half unpacked folder is left


def test_a_folder_that_others_may_write_is_not_imported_from(archive, tmp_path):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    for parent in (home / ".cache", temporary):
        planted = parent / f"millrace-{os.getuid()}"
        planted.mkdir(parents=True)
        planted.chmod(0o777)
    found = imported_from(archive, home, temporary)
    assert found.is_relative_to(temporary)
    assert not found.is_relative_to(temporary / f"millrace-{os.getuid()}")
    assert found.parents[3].stat().st_mode & 0o077 == 0
