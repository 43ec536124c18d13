"""Reading a tiered topic (KIP-405), whose remote store may be away: that is no hole, and no shorter log."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.audit.scanning import range_reader
from millrace.audit.spark.read_options import CELLS, RECORDS, ReadOptions
from millrace.audit.spark.task_plan import OffsetRange
from millrace.audit.spark.task_reader import read_task
from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.client.offsets import EARLIEST, EARLIEST_LOCAL, LATEST
from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import ClusterUnreachable, OffsetOutOfRange, UnsupportedVersion

END = 4
RANGE = OffsetRange("ewr", "ewr", "flights", "flights", 0, 0, END)
SILENT, OUT_OF_RANGE = 0, OffsetOutOfRange.code  # how Apache Kafka puts it


class Tiered:
    """A cluster of one partition, a record a batch: its log is [start, end), and what lies before `local` is
    in its remote store alone, which is `away` for so many fetches."""

    def __init__(self, build, away: int = 0, says: int = SILENT, local: int = 2) -> None:
        self.build, self.away, self.says, self.local = build, away, says, local
        self.start, self.end = 0, END
        self.holes: set[int] = set()
        self.is_old = False
        self.asked: list[int] = []

    async def __aenter__(self) -> Tiered:
        return self

    async def close(self) -> None:
        pass

    async def metadata(self, topics: Any, **_: Any) -> Any:
        topic = SimpleNamespace(topic_id=NO_TOPIC_ID, partitions={0: SimpleNamespace(leader=1)})
        return SimpleNamespace(topics={"flights": topic})

    async def list_offsets(self, wanted: dict[Any, int], read_committed: bool = False) -> Any:
        if self.is_old and EARLIEST_LOCAL in wanted.values():
            raise UnsupportedVersion("ListOffsets 8")
        bounds = {EARLIEST: self.start, EARLIEST_LOCAL: self.local, LATEST: self.end}
        return {key: SimpleNamespace(offset=bounds[at]) for key, at in wanted.items()}

    async def fetch(self, cluster: Any, leader: int, positions: Any, **_: Any) -> list[FetchedPartition]:
        ((_, position),) = positions.items()
        offset = position.offset
        self.asked.append(offset)
        code, records = 0, b""
        if not self.start <= offset <= self.end:
            code = OUT_OF_RANGE
        elif offset < self.local and self.away:
            self.away -= 1
            code = self.says
        else:
            records = b"".join(
                self.build.batch(each, [self.build.stamped(0, 1, each + 1)])
                for each in range(offset, self.end)
                if each not in self.holes
            )
        end = -1 if code else self.end
        return [
            FetchedPartition(
                topic="flights", partition=0, error_code=code, high_watermark=end, last_stable_offset=end,
                log_start_offset=-1 if code else self.start, aborted=(), diverging=None,
                records=memoryview(records),
            )
        ]  # fmt: skip


@pytest.fixture
def read(monkeypatch):
    """Read the range as a task does in either mode: (offsets of its rows, what is noted as unread)."""
    steps = itertools.count()
    monkeypatch.setattr(range_reader, "time", SimpleNamespace(monotonic=lambda: float(next(steps))))
    monkeypatch.setattr(range_reader, "RETRY_WAIT_S", 0)

    def read(tiered: Tiered, mode: str, fail_on_loss: bool = True) -> Any:
        monkeypatch.setattr(range_reader, "connect", lambda *_: tiered)
        monkeypatch.setattr(range_reader, "fetch", tiered.fetch)
        options = ReadOptions({"ewr": ["h:1"]}, mode=mode, fail_on_loss=fail_on_loss)
        rows = [row for batch in read_task((RANGE,), options) for row in batch.to_pylist()]
        if mode == RECORDS:
            return [row["offset"] for row in rows]
        noted = [row for row in rows if (row["note"] or "").startswith("unread")]
        return [(row["note"], row["first_offset"], row["last_offset"]) for row in noted]

    return read


@pytest.mark.parametrize("says", [SILENT, OUT_OF_RANGE])
def test_what_a_remote_store_gives_late_is_read(build, read, says):
    assert read(Tiered(build, 5, says), RECORDS) == [0, 1, 2, 3]
    assert read(Tiered(build, 5, says), CELLS) == []


@pytest.mark.parametrize("mode", [RECORDS, CELLS])
@pytest.mark.parametrize("says", [SILENT, OUT_OF_RANGE])
def test_remote_store_that_stays_away_ends_the_read_and_nothing_is_noted_as_gone(build, read, says, mode):
    why = r"flights-0 gave nothing at offset 0, .* \(its remote store gives nothing\); check its tiered stor"
    with pytest.raises(ClusterUnreachable, match=f"^cluster ewr: {why}"):
        read(Tiered(build, 1_000_000, says), mode)


@pytest.mark.parametrize("is_old", [False, True])
def test_hole_in_what_the_leader_has_itself_is_one(build, read, is_old):
    """One that is too old for remote stores has all of it itself."""
    tiered = Tiered(build)
    tiered.holes, tiered.is_old = {2, 3}, is_old
    assert read(tiered, RECORDS) == [0, 1]
    assert read(tiered, CELLS) == [("unread: compacted", 2, 3)]
    tiered.holes = {0, 1, 2, 3}
    if is_old:
        assert read(tiered, CELLS) == [("unread: compacted", 0, 3)]


def test_only_what_the_log_does_not_hold_is_gone(build, read):
    taken = Tiered(build)
    taken.start = 3
    assert read(taken, CELLS) == [("unread: expired", 0, 2)]
    assert read(taken, RECORDS, fail_on_loss=False) == [3]
    shorter = Tiered(build, says=OUT_OF_RANGE, local=0)
    shorter.start = shorter.end = -1
    assert read(shorter, CELLS) == [("unread: truncated", 0, 3)]


def test_leader_that_does_not_find_what_its_own_disk_has_is_told_as_that(build, read):
    odd = Tiered(build)
    whole = odd.fetch

    async def fetch(*asked: Any, **settings: Any) -> list[FetchedPartition]:
        (given,) = await whole(*asked, **settings)
        return [replace(given, error_code=OUT_OF_RANGE, log_start_offset=-1, records=memoryview(b""))]

    odd.local, odd.fetch = 0, fetch  # type: ignore[method-assign]
    with pytest.raises(ClusterUnreachable, match=r"\(out of range, says its leader, .*\); check the part"):
        read(odd, CELLS)
