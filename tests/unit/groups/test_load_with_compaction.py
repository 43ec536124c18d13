"""What a coordinator reads when it takes over a partition goes by what is to be known, not by its history."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.groups.offsets_replay import OffsetsReplay
from millrace.broker.groups.record_layout import encode_offset_key, encode_offset_value
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.broker.storage.log import Log
from tests.stored_batches import batches_of
from tests.unit.storage.compaction import clean, compacted_config

KEYS = 300
PER_BATCH = 50
SEGMENT_BYTES = 64_000


def load_after(folder: Path, rounds: int) -> tuple[int, dict[tuple[str, str, int], int]]:
    """Records read, and what is known then: each of `KEYS` offsets was committed in every round, the log
    cleaned as it grew."""
    config = compacted_config(segment_bytes=SEGMENT_BYTES)
    log = Log.open(folder, config, recovery_point=None, now_ms=0)
    for number in range(rounds):
        for first in range(0, KEYS, PER_BATCH):
            records = [
                Record(
                    encode_offset_key(f"g{n}", "t", n),
                    encode_offset_value(CommittedOffset(number, -1, "", 7)),
                    (),
                    number,
                )
                for n in range(first, first + PER_BATCH)
            ]
            log.append(build_batch(records), leader_epoch=1, now_ms=number)
        if number % 20 == 19:
            clean(log, number)
    replay, read = OffsetsReplay(), 0
    for batch in batches_of(log):
        replay.take(batch)
        read += len(read_records(batch))
    assert replay.end_offset == log.end_offset == rounds * KEYS
    log.close()
    known = {
        (group, *partition): committed.offset
        for group, store in replay.memory().offsets.items()
        for partition, committed in store.items()
    }
    return read, known


@pytest.mark.parametrize("rounds", [20, 200])
def test_a_load_reads_what_is_known_and_the_segment_that_is_written(tmp_path, rounds):
    """Red without compaction: 60,000 records are read after 200 rounds then."""
    read, known = load_after(tmp_path / "offsets-0", rounds)
    assert known == {(f"g{n}", "t", n): rounds - 1 for n in range(KEYS)}
    record_size = len(build_batch([Record(encode_offset_key("g300", "t", 300), bytes(30), (), 1)])) - 61
    assert KEYS <= read <= KEYS + SEGMENT_BYTES / record_size * 2
