"""What surrounds Spark's start: which copy of PySpark workers load, which of the JVM's lines are left out."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.audit.spark.spark_daemon import prefer_installed
from millrace.audit.spark.spark_session import (
    core_count,
    is_local,
    relay,
    require_master,
    scratch_folder,
)
from millrace.broker.errors import MillraceError


def test_zipped_copies_come_last_and_the_order_stays():
    path = ["", "/spark/pyspark.zip", "/spark/py4j-src.zip", "/venv/site-packages", "/stdlib"]
    assert prefer_installed(path) == [
        "",
        "/venv/site-packages",
        "/stdlib",
        "/spark/pyspark.zip",
        "/spark/py4j-src.zip",
    ]


def test_only_the_known_start_line_is_left_out(monkeypatch: pytest.MonkeyPatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=shown, flush=lambda: None))
    said = [
        b"WARNING: Using incubator modules: jdk.incubator.vector\n",
        b"Error: Could not find or load main class\n",
        b"WARNING: something else\n",
    ]
    relay(said)
    assert shown.getvalue() == b"".join(said[1:])


@pytest.mark.parametrize(
    ("master", "local"), [("local", True), ("local[2]", True), ("local-cluster[2,1,1024]", False)]
)
def test_only_the_drivers_own_jvm_is_local(master: str, local: bool):
    assert is_local(master) is local


@pytest.mark.parametrize(
    "master",
    ["local", "local[*]", "local[2, 3]", "local-cluster[2,1,1024]", "yarn", "k8s://https://host:443"],
)
def test_every_kind_of_master_is_let_through(master: str):
    require_master(master)


@pytest.mark.parametrize(
    "master", ["foo", "local[", "spark//host:7077", "spark://host", "mesos://host:1", ""]
)
def test_what_is_no_master_is_one_line_before_any_java_starts(master: str):
    with pytest.raises(MillraceError, match="is no Spark master; give local") as caught:
        require_master(master)
    assert "\n" not in str(caught.value)


def test_cores_of_a_local_master_are_what_its_brackets_say():
    assert (core_count("local"), core_count("local[3]"), core_count("spark://host:7077")) == (1, 3, 16)


def test_a_folder_whose_name_has_a_comma_is_no_list_of_folders(tmp_path: Path):
    """Spark would make the second half of the name a folder of its own, wherever it was started."""
    assert "," not in scratch_folder(tmp_path / "state, of today")
    assert Path(scratch_folder(tmp_path)).parent == tmp_path
