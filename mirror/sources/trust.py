"""What a partition believes of the answers that it is given, wherever its fetch offset is. Pure.

Held by `pipeline`. What is not believed at one offset is a `doubt`; what outlives an offset is kept here:
where the last batch ended that was taken whole, which the next one may not claim to begin before; whether the
answer showed what stands behind that one, or else a hole there may be one that the source passes over; and up
to where one claims to reach that is known to be out of its place, because the source may give that one first.
"""

from __future__ import annotations

from collections.abc import Iterator

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import CorruptMessage, KafkaError
from millrace.broker.protocol.batch import HEADER_SIZE
from millrace.mirror.batches.coalesce import (
    NO_END,
    BatchWalk,
    OutOfOrder,
    holds_whole_batch,
    refuse_hole,
    refuse_overlap,
)
from millrace.mirror.batches.intake import Count, Prepared, prepare
from millrace.mirror.sources.doubt import Doubt, Found, Question


class Trust:
    """Of one partition in one log."""

    def __init__(self) -> None:
        self.last_doubt = Doubt(0)
        """Of the offset that was asked about last; `at` gives that of any."""
        self._is_looked_at = False
        self._misplaced_up_to = -1
        self._batch_start = self._batch_end = -1
        self._shows_following = False

    def at(self, offset: int) -> Doubt:
        """Of what stands there; the same one as long as the fetch offset is the same."""
        if self.last_doubt.offset != offset:
            self.last_doubt = Doubt(offset)
        return self.last_doubt

    def forget_doubt(self, offset: int) -> None:
        """Fetching goes on there, and what stands there is as new."""
        self.last_doubt = Doubt(offset)

    def forget_order(self) -> None:
        """Fetching goes on from before, or in another log: where one stands out of its place is found out
        anew."""
        self._misplaced_up_to = self._batch_end = -1

    def believed(
        self, walk: BatchWalk, fetched: FetchedPartition, from_offset: int, max_batch_size: int, count: Count
    ) -> Iterator[Prepared]:
        """What an answer that was asked for at `from_offset` has for the target, as far as it is believed
        (see `prepare`). Raises the KafkaError of what is not, behind what is. Who stops before the end has
        taken nothing whole."""
        doubt, data = self.at(from_offset), fetched.records
        log_end = fetched.high_watermark if fetched.high_watermark >= 0 else NO_END
        passes_over, is_trusted = from_offset < self._misplaced_up_to, doubt.trusts(data)
        reached = began = from_offset
        is_unseen = False
        doubt.taken_from = self._batch_start if from_offset == self._batch_end else -1
        if from_offset == self._batch_end and not passes_over and not is_trusted:
            refuse_overlap(data, from_offset)
            is_unseen = not self._shows_following
        try:
            for ready in prepare(
                walk, data, fetched.aborted, from_offset, max_batch_size, count, log_end,
                passes_over, is_trusted,
            ):  # fmt: skip
                if reached == from_offset < ready.base_offset:
                    if doubt.is_out_of_order:
                        raise OutOfOrder(
                            "the source passes over a batch that it gave before, out of its place"
                        )
                    if is_unseen:
                        refuse_hole(data, from_offset)
                reached, began = ready.next_offset, ready.base_offset
                yield ready
        except KafkaError:
            if reached > from_offset:  # what is refused stands behind what was taken
                self._batch_start, self._batch_end, self._shows_following = began, reached, False
            raise
        if reached > from_offset:
            self._batch_start, self._batch_end = began, reached
            self._shows_following = walk.cut_off_size >= HEADER_SIZE
            return
        if not data:
            doubt.needed_size = 0
            if doubt.is_out_of_order and from_offset < log_end:
                raise OutOfOrder("the source gives nothing where a batch stood that was out of its place")
        if holds_whole_batch(data):
            # It would be asked for, and answered so, for ever.
            raise CorruptMessage(f"the source answers with records that all lie before offset {from_offset}")
        if data:
            doubt.reason = f"the source gives only a part of the batch at offset {from_offset}"

    def take_question(self, offset: int) -> Question | None:
        """What a look at the log is to find out now; `looked` follows. One look at a time."""
        question = None if self._is_looked_at else self.at(offset).question
        self._is_looked_at |= question is not None
        return question

    def looked(self, question: Question, found: Found, offset: int, steady_ms: int) -> bool:
        """What came of a look. Whether it was still waited for: what nobody waits for any more (the partition
        has moved, its lane went back) changes nothing."""
        self._is_looked_at = False
        doubt = self.at(offset)
        if doubt.question is not question:
            return False
        self._misplaced_up_to = max(self._misplaced_up_to, found.misplaced_up_to)
        doubt.answered(found, steady_ms)
        return True
