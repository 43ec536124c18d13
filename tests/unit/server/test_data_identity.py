"""Whose data a folder holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.broker.errors import ConfigError
from millrace.broker.server.data_identity import FILE_NAME, check_identity


def test_new_folder_is_marked_and_recognised(tmp_path: Path) -> None:
    check_identity([tmp_path], 3, "abc")
    check_identity([tmp_path], 3, "abc")
    assert (tmp_path / FILE_NAME).read_text() == "version=0\nbroker.id=3\ncluster.id=abc\n"


@pytest.mark.parametrize(("broker_id", "cluster_id"), [(4, "abc"), (3, "other")])
def test_folder_of_another_is_refused(tmp_path: Path, broker_id: int, cluster_id: str) -> None:
    check_identity([tmp_path], 3, "abc")
    with pytest.raises(ConfigError, match=r"meta\.properties"):
        check_identity([tmp_path], broker_id, cluster_id)


def test_folder_written_by_apache_kafka_is_taken(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("#\n#Mon Jan 01 00:00:00\nbroker.id=3\nversion=0\ncluster.id=abc\n")
    check_identity([tmp_path], 3, "abc")
