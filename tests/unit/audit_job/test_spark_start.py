"""What surrounds Spark's start: which copy of PySpark workers load, which of the JVM's lines are left out."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit.spark import spark_session
from millrace.audit.spark.spark_daemon import prefer_installed
from millrace.audit.spark.spark_session import (
    core_count,
    is_elastic,
    is_local,
    relay,
    require_master,
    scratch_folder,
    session_cores,
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
    assert (core_count("local"), core_count("local[3]"), core_count("spark://host:7077")) == (1, 3, None)
    assert core_count("local[*]") == len(os.sched_getaffinity(0))


def test_without_a_master_all_cores_of_this_machine_are_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spark_session.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(spark_session, "submitted", dict)
    assert spark_session.chosen_master(None) == "local[*]"
    assert spark_session.chosen_master("local[2]") == "local[2]"


def session_of(master: str, cores: int, **settings: str) -> Any:
    """A session whose executors have so many cores; settings have _ for the dots in their names."""
    given = {f"spark.{name.replace('_', '.')}": value for name, value in settings.items()}
    conf = SimpleNamespace(get=lambda name, default=None: given.get(name, default))
    return SimpleNamespace(
        sparkContext=SimpleNamespace(master=master, defaultParallelism=cores, getConf=lambda: conf)
    )


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {}, 2),
        (96, {}, 96),
        # Four of ten executors are there.
        (8, {"executor_instances": "10", "executor_cores": "2"}, 20),
        # As many as there are tasks (`is_elastic`).
        (2, {"dynamicAllocation_enabled": "true"}, 2),
        (400, {"dynamicAllocation_enabled": "true"}, 400),
        (2, {"dynamicAllocation_enabled": "true", "dynamicAllocation_maxExecutors": str(2**31 - 1)}, 2),
        (
            2,
            {
                "dynamicAllocation_enabled": "true",
                "dynamicAllocation_maxExecutors": "50",
                "executor_cores": "4",
            },
            200,
        ),
    ],
)
def test_cores_of_a_cluster_are_those_that_its_session_has_or_was_promised(cores, settings, expected):
    assert session_cores(session_of("spark://host:7077", cores, **settings)) == expected
    assert session_cores(session_of("local[3]", cores, **settings)) == 3


def test_a_cluster_is_elastic_where_nothing_bounds_what_it_may_ask_for():
    asking = {"dynamicAllocation_enabled": "true"}

    def elastic(master: str = "yarn", **settings: str) -> bool:
        return is_elastic(session_of(master, 2, **settings))

    assert elastic(**asking) and elastic(**asking, dynamicAllocation_maxExecutors=str(2**31 - 1))
    assert not elastic(**asking, dynamicAllocation_maxExecutors="50")
    assert not elastic() and not elastic("local[2]", **asking)


@pytest.mark.parametrize(("master", "set_here"), [("local[3]", "3"), ("yarn", None)])
def test_a_cluster_is_not_told_how_many_cores_it_has(master, set_here, tmp_path, monkeypatch):
    """Spark would answer what it was told."""
    monkeypatch.setattr(spark_session, "SparkConf", Settings)
    conf = spark_session._configuration(master, tmp_path, {})
    names = ("spark.default.parallelism", "spark.sql.shuffle.partitions")
    assert {conf.get(name) for name in names} == {set_here}


def test_what_audit_yaml_sets_stands_above_what_was_submitted_and_that_above_our_own(tmp_path, monkeypatch):
    monkeypatch.setattr(spark_session, "SparkConf", Settings)
    submitted = {"spark.driver.memory": "2g", "spark.ui.enabled": "true", "spark.master": "yarn"}
    monkeypatch.setattr(spark_session, "submitted", lambda: submitted)
    given = {"spark.driver.memory": "3g", "spark.hadoop.fs.s3a.endpoint": "ours"}
    conf = spark_session._configuration("local[2]", tmp_path, given)
    assert conf["spark.driver.memory"] == "3g" and conf["spark.ui.enabled"] == "true"
    assert conf["spark.hadoop.fs.s3a.endpoint"] == "ours" and conf["spark.sql.adaptive.enabled"] == "false"
    assert conf["spark.master"] == "local[2]", "the one that the run was asked for"


class Settings(dict[str, str]):
    """SparkConf's face, without a JVM."""

    def setAll(self, pairs: Any) -> Settings:
        self.update(pairs)
        return self


def test_a_folder_whose_name_has_a_comma_is_no_list_of_folders(tmp_path: Path):
    """Spark would make the second half of the name a folder of its own, wherever it was started."""
    assert "," not in scratch_folder(tmp_path / "state, of today")
    assert Path(scratch_folder(tmp_path)).parent == tmp_path
