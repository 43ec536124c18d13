"""A batch whose base offset was damaged on the disk: no checksum is over it, and no reader may take it for a
hole, or for the log's end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.batch import iterate_batches
from millrace.broker.storage.disk_errors import WouldBlock
from millrace.broker.storage.log import Log

from .conftest import append, make_batch

OpenLog = Callable[..., Log]
COUNT = 6


def filled(log: Log) -> Log:
    """A batch of one record at each offset."""
    for _ in range(COUNT):
        append(log)
    return log


def misplaced(log: Log, offset: int, *, bit: int) -> Log:
    """`log` with this bit of the base offset flipped in the batch at `offset`."""
    for path in sorted(log.directory.glob("*.log")):
        data = bytearray(path.read_bytes())
        for position, header in iterate_batches(bytes(data)):
            if header.base_offset == offset:
                data[position + 7 - bit // 8] ^= 1 << bit % 8
                path.write_bytes(data)
                return log
    raise LookupError(offset)


def found(log: Log, offset: int, **options: bool) -> list[int] | None:
    """Offsets that an answer from `offset` on holds; None: an error."""
    try:
        read = log.read(offset, 1 << 20, end_offset=COUNT, **options)
    except CorruptMessage:
        return None
    return [header.base_offset for _, header in iterate_batches(read.data)]


@pytest.mark.parametrize("bit", [4, 28, 60])
def test_batch_that_claims_to_lie_behind_the_log_is_an_error_and_hides_no_other(
    open_log: OpenLog, bit: int
) -> None:
    log = filled(open_log())
    misplaced(log, 2, bit=bit)
    for _ in range(2):  # with what the first reader has left behind, too
        assert found(log, 0) == [0, 1]
        assert found(log, 2) is None
        assert [found(log, offset) for offset in (3, 4, 5)] == [[3, 4, 5], [4, 5], [5]]
    assert found(log, COUNT) == []


def test_what_lies_alone_in_its_segment_is_an_error_and_hides_no_other(open_log: OpenLog) -> None:
    log = filled(open_log(segment_bytes=len(make_batch())))
    misplaced(log, 2, bit=4)
    assert [found(log, offset) for offset in range(COUNT)] == [[0], [1], None, [3], [4], [5]]


def test_offset_that_may_be_in_the_damaged_batch_is_never_taken_for_a_hole(open_log: OpenLog) -> None:
    """Two side by side, and the last of the log."""
    log = filled(open_log())
    for offset in (2, 3, 5):
        misplaced(log, offset, bit=28)
    assert [found(log, offset) for offset in range(COUNT)] == [[0, 1], [1], None, None, [4], None]


def test_search_behind_a_damaged_batch_does_not_wait_for_the_disk(open_log: OpenLog) -> None:
    log = filled(open_log())
    misplaced(log, 2, bit=28)
    with pytest.raises(WouldBlock):
        found(log, 3, may_block=False)


def test_batch_behind_what_may_be_shown_is_no_damage(open_log: OpenLog) -> None:
    log = filled(open_log())
    assert bytes(log.read(3, 1 << 20, end_offset=3).data) == b""
    assert bytes(log.read(COUNT, 1 << 20).data) == b""
    # Nor is one behind a hole: what follows it is not committed yet. (A damage that looks like one.)
    misplaced(log, 2, bit=0)
    assert bytes(log.read(2, 1 << 20, end_offset=3).data) == b""
