"""Where an audit's state may lie: which file systems can commit in one step, and what their errors become."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from millrace.audit.config import parse_config
from millrace.audit.keeping.hadoop_files import FileSystemAway, Rule, commit_rule, os_error, refusal
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.spark.spark_failures import one_line
from millrace.broker.errors import ConfigError, DiskFull, MillraceError

WHERE = "hdfs://nn:8020/audit/state"
CONFIG = {"clusters": {"one": {"bootstrap": ["127.0.0.1:9092"], "tier": "source"}}, "topics": ["flights"]}


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs", "ofs", "abfss"])
def test_where_a_rename_refuses_a_name_that_exists_it_commits(scheme):
    assert commit_rule(scheme, False) is Rule.RENAME


def test_a_store_commits_by_conditional_create_or_not_at_all():
    assert commit_rule("s3a", True) is Rule.CONDITIONAL
    assert commit_rule("oss", True) is Rule.CONDITIONAL
    for scheme in ("s3a", "s3n", "oss", "viewfs", "ftp"):
        assert commit_rule(scheme, False) is None
    assert commit_rule("gs", False) is Rule.GENERATION
    assert commit_rule("file", False) is Rule.LINK
    told = refusal("s3a://bucket/state", "s3a")
    assert "3.4.2" in told and "two jobs could both commit" in told and "\n" not in told
    assert "ftp:// is not known" in refusal("ftp://host/state", "ftp")


def test_what_java_says_is_one_line_that_tells_what_to_do():
    stack = "Permission denied: user=ann\n\tat org.apache.hadoop.Check(Check.java:1)\n"
    denied = os_error(WHERE, "AccessControlException", stack)
    assert str(denied) == f"{WHERE}: Permission denied: user=ann (AccessControlException)"
    assert isinstance(denied, MillraceError) and isinstance(denied, OSError)
    safe = os_error(WHERE, "SafeModeException", "Cannot create file. Name node is in safe mode.\nIt was")
    away = os_error(WHERE, "ConnectException", "Connection refused")
    assert isinstance(safe, FileSystemAway) and "takes no writes now" in str(safe)
    assert isinstance(away, FileSystemAway) and f"{WHERE} cannot be reached" in str(away)
    assert isinstance(os_error(WHERE, "FileNotFoundException", ""), FileNotFoundError)
    full = os_error(WHERE, "NSQuotaExceededException", "The NameSpace quota of directory /a is exceeded")
    assert isinstance(full, DiskFull) and "make room" in str(full)


@pytest.mark.parametrize(
    ("java", "words"),
    [
        (
            "java.net.ConnectException: Call From a/127.0.1.1 to nn:8020 failed on connection exception: x",
            "Hadoop server at nn:8020;",
        ),
        ("DestHost:destPort nn:8020 , LocalHost:localPort a/127.0.1.1:0. Failed on local", "at nn:8020;"),
        ("SafeModeException: Cannot create file/a. Name node is in safe mode.\nIt was", "(Cannot create"),
        ("AccessControlException: Permission denied: user=ann\n\tat org", "Permission denied: user=ann"),
        ("IOException: File /a could only be written to 0 of the 1 minReplication nodes.", "0 of the 1"),
    ],
)
def test_what_spark_says_of_the_states_file_system_is_one_line(java, words):
    told = one_line(
        f"An error occurred while calling o1.parquet.\n: {java}\n\tat org.apache.Some(Some.java:1)"
    )
    assert told is not None and words in told and "\n" not in told and "\tat" not in told


def test_state_and_report_may_lie_at_uris():
    config = parse_config({**CONFIG, "report": "hdfs://nn/report/", "state": "hdfs://nn/state"})
    assert (config.report, config.state) == ("hdfs://nn/report", "hdfs://nn/state")
    for name in ("report", "state"):
        with pytest.raises(ConfigError, match=rf"{name}: got 'hdfs://', expected a path or a URI"):
            parse_config({**CONFIG, name: "hdfs://"})


def test_looking_makes_nothing(tmp_path: Path):
    assert StateFolder.look(tmp_path / "state").latest() == Commit()
    assert not (tmp_path / "state").exists()


def test_files_that_were_to_get_a_name_are_swept_after_a_day(tmp_path: Path):
    state = StateFolder.open(tmp_path)
    left = [
        tmp_path / "commits" / f".00000002.json.{'0a' * 16}",
        tmp_path / "waivers" / f".flights-1.1.json.{'0a' * 16}",
        tmp_path / "waivers" / f".{'0c' * 8}.1.untrusted.{'0a' * 16}",
        tmp_path / ".probe-1",
    ]
    others = [tmp_path / "commits" / ".00000001.json.crc", tmp_path / ".keep"]
    for path in (*left, *others):
        path.touch()
        os.utime(path, (1, 1))
    young = tmp_path / "commits" / f".00000003.json.{'0b' * 16}"
    young.touch()
    state.sweep(Commit(), time.time())
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in (*others, young))
