"""What a loss of power leaves: some of the pages that were never flushed, and not those before them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from millrace.broker.protocol.control_records import build_marker
from millrace.broker.storage import producer_snapshot
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from tests.stored_batches import batches_of

from .compaction import COMPACT, OpenLog
from .conftest import append, make_batch

SIZE = len(make_batch())


@pytest.mark.parametrize("policy", [COMPACT, frozenset({"delete"})], ids=["compacted", "deleted"])
def test_the_lost_end_of_a_segment_is_no_hole_of_a_compaction(tmp_path: Path, policy: frozenset[str]) -> None:
    """The segment behind it was written back before it. Its records would stay out of reach, and the replica
    would be taken for whole."""
    config = LogConfig(segment_bytes=4 * SIZE, cleanup_policy=policy)
    log = Log.open(tmp_path / "t-0", config, recovery_point=None, now_ms=0)
    for _ in range(12):
        append(log)
    os.truncate(log.directory / f"{4:020d}.log", SIZE)
    again = Log.open(tmp_path / "t-0", config, recovery_point=0, now_ms=0)
    assert again.end_offset == 5
    assert len(list(batches_of(again))) == 5


def test_age_of_a_segment_whose_last_entries_were_lost_is_read_from_it(open_log: OpenLog) -> None:
    """They are synced with what comes next; by the last one retention keeps the segment or removes it."""
    settings = {"segment_bytes": 8 * SIZE, "index_interval_bytes": 1}
    log = open_log(**settings)
    for number in range(8):
        append(log, timestamp_ms=9000 if number == 6 else 1000 + number)
    log.flush(0)
    append(log, timestamp_ms=1020)  # in a new segment
    path = log.directory / f"{0:020d}.timeindex"
    assert log.segments[0].time_index.last() == (9000, 6)
    os.truncate(path, path.stat().st_size - 12)
    again = open_log(recovery_point=8, **settings)
    assert again.segments[0].max_timestamp == 9000


def test_an_aborted_transaction_that_outlived_its_records_hides_no_others(open_log: OpenLog) -> None:
    """The next transaction of its producer stands where it stood, and is committed."""
    log = open_log()
    append(log, 5)
    log.flush(0)
    producer_snapshot.write(log.directory, log.producers)
    flushed = log.segments[0].path.stat().st_size
    transaction = {"producer_id": 7, "base_sequence": 0, "transactional": True}
    append(log, producer_epoch=0, **transaction)
    log.append(build_marker(7, 0, 0, False, 0), leader_epoch=0, now_ms=0, origin="internal")
    assert log.aborted_transactions(0, 1 << 60) == ((7, 5),)
    os.truncate(log.segments[0].path, flushed)
    again = open_log(recovery_point=5)
    append(again, producer_epoch=1, **transaction)
    again.append(build_marker(7, 1, 0, True, 0), leader_epoch=0, now_ms=0, origin="internal")
    assert again.aborted_transactions(0, 1 << 60) == ()
