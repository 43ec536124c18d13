"""The delivery histories again, with sources of tiny batches: what is delivered has been merged.

At least once (`test_mirror_delivery`) the sources hold real batches, mostly of one record, with ends of
transactions, holes and two codecs among them, and answers are cut anywhere. The mirror's own walk merges
them, and its own `split` takes a refused batch apart. Exactly once (`test_mirror_transactions`) the batches
are offsets alone, that reach over the control records between them.

What must hold besides: a batch holds the records of its offsets, and of a refused batch nothing is given up
but the record that was refused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from millrace.broker.protocol.records import read_records
from millrace.mirror.batches.coalesce import BatchWalk, Unvouched
from millrace.mirror.batches.intake import prepare
from millrace.mirror.batches.rebatch import BatchPath, split, stamp_for_target
from millrace.mirror.delivery.progress import Span
from tests import seeds
from tests.simulation import histories
from tests.simulation import mirror_history as exactly_once
from tests.simulation import test_mirror_delivery as at_least_once
from tests.simulation.test_mirror_delivery import SOURCES
from tests.unit.mirror.fetch_answers import Raw, marker, raw_batch

HISTORY_COUNT = seeds.runs(120)
CODECS = (0, 0, 0, 3)
TARGET_LIMITS = (1 << 20, 900)


class Batch(at_least_once.Batch):
    def __init__(
        self,
        source: str,
        offsets: Sequence[int],
        span: Span,
        assignment: at_least_once.Assignment,
        data: memoryview,
    ) -> None:
        super().__init__(source, offsets, span, assignment, len(data))
        self.data = data


class Log:
    """A source's partition; each record's value is its offset."""

    def __init__(self, rng: random.Random, end: int, control: set[int]) -> None:
        self.holes: set[int] = set()
        self._batches: list[tuple[int, bytearray]] = []  # the offset after it
        codec, offset = rng.choice(CODECS), 0
        while offset < end:
            if offset in control:
                self._add(offset + 1, marker(offset, 7, abort=False))
                offset += 1
                continue
            count = rng.choice((1, 1, 1, 1, 2, 3))
            following = min([end, offset + count, *(at for at in control if at > offset)])
            kept = [at for at in range(offset, following) if at == offset or rng.random() < 0.8]
            self.holes |= set(range(offset, following)) - set(kept)
            records = [Raw(at - offset, at, b"k", b"%d" % at) for at in kept]
            last_delta = following - offset - 1
            made = raw_batch(records, base_offset=offset, codec=codec, last_offset_delta=last_delta)
            self._add(following, made)
            offset = following
            codec = rng.choice(CODECS) if rng.random() < 0.2 else codec

    def _add(self, following: int, made: bytearray) -> None:
        self._batches.append((following, made))

    def answer(self, offset: int) -> bytearray:
        return bytearray().join(made for following, made in self._batches if following > offset)


class History(at_least_once.History):
    def __init__(self, seed: int, *, harsh: bool) -> None:
        super().__init__(seed, harsh=harsh)
        layout = random.Random(seed)
        self.limit = layout.choice(TARGET_LIMITS)
        self.logs = {
            source: Log(layout, self.source_ends[source], self.control[source]) for source in SOURCES
        }
        for source in SOURCES:
            self.recorded_gaps[source] |= self.logs[source].holes
        self.merged_count = 0
        self.walk = BatchWalk()

    def fetch(self) -> None:
        source = self.random.choice(SOURCES)
        assignment = self.assignments[source]
        progress = assignment.progress
        if progress.fetch_offset >= self.source_ends[source] or progress.is_blocked:
            return
        answer = self.logs[source].answer(progress.fetch_offset)
        del answer[self.random.randint(1, len(answer)) :]
        log_end = self.source_ends[source]
        try:
            for ready in prepare(
                self.walk, memoryview(answer), (), progress.fetch_offset, self.limit, self.count, log_end
            ):
                span = progress.fetched(ready.next_offset, 1 if ready.offsets else 0, len(ready.offsets))
                if ready.batch is not None:
                    self.lane.enqueue(made(source, ready.offsets, span, assignment, ready.batch))
        except Unvouched:
            return  # asked for again, with more of what follows

    def count(self, path: BatchPath, batches: int, _records: int, _size: int) -> None:
        if path is BatchPath.COALESCE:
            self.merged_count += batches

    def refused(self, batch: at_least_once.Batch) -> None:
        assert isinstance(batch, Batch)
        halves = split(batch.data, batch.offsets)
        if not halves:
            super().refused(batch)
            return
        progress = batch.assignment.progress
        spans = progress.split(batch.span, [half.offsets[-1] + 1 for half in halves])
        instead = []
        for half, span in zip(halves, spans, strict=True):
            assert half.batch is not None
            instead.append(made(batch.source, half.offsets, span, batch.assignment, half.batch))
        self.lane.replace(batch, instead)

    def check_log(self) -> None:
        super().check_log()
        for source in SOURCES:
            given_up = self.recorded_gaps[source] - self.logs[source].holes - self.control[source]
            assert given_up <= self.poison[source], f"of {source} {given_up} were given up"


def made(
    source: str, offsets: Sequence[int], span: Span, assignment: at_least_once.Assignment, data: memoryview
) -> Batch:
    """Stamped as it is sent; with the records of its offsets."""
    data = memoryview(bytearray(data))
    stamp_for_target(data, 9, 0, 0)
    assert [int(record.value or b"") for record in read_records(data)] == list(offsets)
    return Batch(source, offsets, span, assignment, data)


@pytest.mark.parametrize("harsh", [False, True], ids=["failing_network", "kills_and_revocations"])
def test_merged_batches_lose_nothing_keep_order_and_give_up_refused_records_alone(harsh: bool) -> None:
    merged_count = given_up_count = 0
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        history = History(seed, harsh=harsh)
        try:
            history.run()
            history.check_log()
        except Exception as error:
            raise AssertionError(f"History(seed={seed}, harsh={harsh}) broke a rule: {error}") from error
        histories.went_through("deliveries of merged batches")
        merged_count += history.merged_count
        given_up_count += sum(
            len(history.poison[source] - history.logs[source].holes - history.control[source])
            for source in SOURCES
        )
    assert merged_count > 10 * HISTORY_COUNT and given_up_count > HISTORY_COUNT // 5


def test_batches_merged_over_the_ends_of_transactions_bring_each_record_once() -> None:
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        exactly_once.run(seed, merges=True)


def test_merged_batches_that_are_refused_late_neither_lose_nor_repeat_nor_stall() -> None:
    first_seed = seeds.given()
    for seed in range(first_seed, first_seed + HISTORY_COUNT):
        exactly_once.run(seed, capricious=True, merges=True)
