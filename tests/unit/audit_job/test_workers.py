"""What the workers of a cluster answer before anything is read, and where a state may lie for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.audit import job
from millrace.audit.config import parse_config
from millrace.audit.runs.state_checks import check_place
from millrace.audit.spark.masters import is_elsewhere
from millrace.audit.spark.workers import Answer, ClockOff, judge, shared_folder
from millrace.broker.errors import ConfigError

HDFS = "hdfs://name:8020/audit"


def config(state: str) -> Any:
    clusters = {"ewr": {"bootstrap": ["h:1"], "tier": "source"}}
    return parse_config({"clusters": clusters, "topics": ["flights"], "state": state})


@pytest.mark.parametrize("master", ["spark://h:7077", "yarn", "k8s://https://h:443"])
def test_a_folder_of_this_machine_is_refused_before_anything_starts(master, tmp_path: Path):
    with pytest.raises(ConfigError) as refused:
        check_place(config(str(tmp_path)), master)
    line = str(refused.value)
    assert "state: got" in line and master in line and f"file://{tmp_path}" in line and "\n" not in line
    for shared in (HDFS, f"file://{tmp_path}"):
        check_place(config(shared), master)


@pytest.mark.java
def test_a_master_that_is_none_is_told_before_its_workers_are_thought_of(tmp_path: Path):
    mistyped = config(str(tmp_path)).model_copy(update={"report": tmp_path / "report"})
    result = job.run(mistyped, "sparc://h:7077")
    assert result.exit_status == 3 and result.problem.startswith("'sparc://h:7077' is no Spark master")


def test_a_report_beside_a_driver_in_the_cluster_is_refused():
    with pytest.raises(ConfigError, match=r"report: got .*there when the driver is gone"):
        check_place(config(HDFS), "yarn", in_cluster=True)
    check_place(config(HDFS).model_copy(update={"report": HDFS}), "yarn", in_cluster=True)


@pytest.mark.parametrize("master", ["local", "local[4]", "local[*]", "local-cluster[2,1,1024]"])
def test_workers_of_this_machine_find_its_folders(master, tmp_path: Path):
    assert not is_elsewhere(master)
    check_place(config(str(tmp_path)), master)


def test_only_a_mounted_folder_may_be_another_one_elsewhere():
    assert shared_folder("file:///mnt/audit") == shared_folder("file:/mnt/audit") == "/mnt/audit"
    assert shared_folder(HDFS) is None and shared_folder("s3a://bucket/audit") is None


def test_a_worker_that_does_not_find_the_folder_is_named():
    answers = [Answer("w1", 100.0, True), Answer("w2", 100.0, False)]
    with pytest.raises(ConfigError, match=r"^state: got 'file:///mnt/a', .* on w2 it is another one"):
        judge(answers, "file:///mnt/a", 99.0, 101.0)


@pytest.mark.parametrize(
    ("at_s", "said"),
    [
        (9_000.0, "clock of Spark's worker w1 is 1,000 s behind the driver's"),
        (11_000.0, "w1 is 990 s ahead of the driver's"),
    ],
)
def test_a_clock_that_is_off_is_named_and_nothing_is_read(at_s, said):
    with pytest.raises(ClockOff) as refused:
        judge([Answer("w0", 10_005.0, True), Answer("w1", at_s, True)], HDFS, 10_000.0, 10_010.0)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert refused.value.exit_status == 3


def test_clocks_within_five_minutes_pass():
    judge([Answer("w1", 9_701.0, True), Answer("w2", 10_309.0, True)], HDFS, 10_000.0, 10_010.0)
