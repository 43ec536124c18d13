"""What surrounds Spark's start: which copy of PySpark workers load, which of the JVM's lines are left out."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from millrace.audit.spark_daemon import prefer_installed
from millrace.audit.spark_session import core_count, is_local, relay


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


def test_cores_of_a_local_master_are_what_its_brackets_say():
    assert (core_count("local"), core_count("local[3]"), core_count("spark://host:7077")) == (1, 3, 16)
