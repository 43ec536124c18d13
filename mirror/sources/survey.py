"""A look at a source's log beside the fetching: where damage ends, and whether a batch stands in its place.

Called by `source` with what `doubt` wants to know. No header is believed for itself. A batch's offset has no
checksum, but a source finds batches by its index and by its files' names, which were there before any damage:

    a batch alone    is asked for by the last offset that it claims, together with what follows it, and so is
                     what it claims to be followed by; one that claims to begin before what was asked for, or
                     within what was taken, by where it begins and ends there, too, whoever follows it;
                     behind a hole also what stands before it, for of one
                     that claims to lie farther back a source shows nothing else: it passes over it
    damage           ends where the source gives another batch that can be believed: looked for farther and
                     farther ahead, then by halves, so that damage farther on is left to its own gap

Only what a source gives speaks for a batch or against it, and what speaks against one is asked for twice. No
error is a word of either kind (a leader has moved, a remote store is away), nor is nothing where there should
be something: then the look tells nothing, and there will be another one. Damage is said by CORRUPT_MESSAGE;
and of its own disk a source also says it by KAFKA_STORAGE_ERROR, and by giving nothing where it does not find
its batches, as behind a wrong length. Of a remote store (KIP-405) the same says that it is away.

Uncommitted batches are neighbours like any: looks read them too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import UUID

import structlog

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import EARLIEST, LATEST, local_start
from millrace.broker.client.raw_fetch import FetchedPartition, FetchPosition, fetch
from millrace.broker.errors import (
    CorruptMessage,
    KafkaStorageError,
    LeaderNotAvailable,
    OffsetOutOfRange,
    RequestTimedOut,
    error_for_code,
)
from millrace.mirror.batches.placement import (
    Beginning,
    Suspect,
    beginning_at,
    holds,
    reaches_before,
    reaching,
    right_behind,
)
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.sources.doubt import Found, Question
from millrace.mirror.sources.fetch_sizes import MORE_SIZE, MOST_OF_A_LOOK, larger_look
from millrace.mirror.topics.routes import SourcePartition

log = structlog.get_logger("millrace.mirror.sources.survey")

# Looks of one source at a time: each may hold MOST_OF_A_LOOK bytes, and one that is slow stops no other.
LOOKS_AT_ONCE = 2
# Kafka gives nothing out of tiered storage to those that do not wait (before KIP-1018).
WAIT_MS = 500


class _UnreadableNeighbour(CorruptMessage):
    """What lies beside a suspect is not given, though it is within the log."""


class Surveyor:
    """Looks at the logs of one source cluster."""

    def __init__(self, cluster: Cluster, spend: Callable[[int], None]) -> None:
        """`spend` is told how many bytes each answer had."""
        self._cluster = cluster
        self._spend = spend
        self._turns = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def look(self, partition: SourcePartition, topic_id: UUID, question: Question) -> Found:
        """Raises nothing of what makes a source unreachable: that is a look which tells nothing."""
        try:
            async with self._turns:
                return await _Look(self._cluster, self._spend, partition, topic_id, question).answer()
        except CLUSTER_FAILURES as error:
            log.warning("asking again", of=str(partition), error=str(error))
            is_unreadable = isinstance(error, _UnreadableNeighbour)
            return Found(why_not=str(error), is_neighbour_unreadable=is_unreadable)


class _Look:
    def __init__(
        self,
        cluster: Cluster,
        spend: Callable[[int], None],
        partition: SourcePartition,
        topic_id: UUID,
        question: Question,
    ) -> None:
        self._cluster = cluster
        self._spend = spend
        self._partition = partition
        self._key = (partition.topic, partition.partition)
        self._topic_id = topic_id
        self._question = question
        self._given_size = 0  # of the answer that told last
        self._misplaced_up_to = -1
        self._local_start = -1  # -1: not asked for

    async def answer(self) -> Found:
        offset, suspect = self._question.offset, self._question.suspect
        if suspect is not None:
            if not await self._is_contradicted(suspect, offset):
                if 0 < offset < suspect.base_offset and await self._is_behind_another(offset):
                    return Found(suspect.base_offset)
                return Found(is_in_order=True, mark=suspect.mark)
            if not await self._is_given(suspect):  # compaction has put another one in its place, say
                return Found(why_not="the source gives another batch there now")
        size = max(MORE_SIZE, self._question.needed_size)
        found = await self._readable_at(offset, size)
        if found is not None and found.is_vouched_for and not _is_of(suspect, found):
            return self._told(found)
        if suspect is None and found is not None:
            suspect = found.batch
        end = await self._end_of_damage(suspect)
        if end is None:
            return Found(why_not="the source gives nothing behind it that can be believed")
        if suspect is None:
            # It can give others: what it could not give is damage if it still cannot.
            found = await self._readable_at(offset, size)
            if found is not None and found.is_vouched_for:
                return self._told(found)
        elif suspect.base_offset <= end < suspect.next_offset:
            # There it looks as if it stood in its place.
            self._misplaced_up_to = max(self._misplaced_up_to, suspect.next_offset)
        return Found(end, misplaced_up_to=self._misplaced_up_to)

    def _told(self, found: Beginning) -> Found:
        """Of a batch at the offset in question that can be believed."""
        question, misplaced_up_to = self._question, self._misplaced_up_to
        if question.is_last:
            return Found(found.next_offset, misplaced_up_to=misplaced_up_to)
        # A batch whose offset was wrong is passed over by the source itself, once it is asked for.
        if (found.is_behind or question.is_out_of_order) and found.base_offset > question.offset:
            return Found(found.base_offset, misplaced_up_to=misplaced_up_to)
        return Found(
            is_in_order=True,
            mark=found.batch.mark if found.batch is not None else b"",
            needed_size=self._given_size if misplaced_up_to > question.offset else 0,
            misplaced_up_to=misplaced_up_to,
        )

    # --- damage ----------------------------------------------------------------------------------

    async def _end_of_damage(self, suspect: Suspect | None) -> int | None:
        """Where the first batch behind damage begins that can be believed, or from where on it is given; or
        the log's end. None when nothing can be read at all. A suspect that comes again is no other batch."""
        log_end = await self._log_end()
        bad, step = self._question.offset, 1
        while True:
            if bad >= log_end:
                return None
            good = min(log_end, bad + step)
            end = await self._good_from(good, suspect)
            if end is not None:
                break
            bad, step = good, 2 * step
        while bad + 1 < good:
            middle = (bad + good) // 2
            nearer = await self._good_from(middle, suspect)
            if nearer is None:
                bad = middle
            else:
                good, end = middle, nearer
        if bad > self._question.offset and await self._good_from(bad, suspect) is not None:
            # So may be others that were passed over on the way.
            raise CorruptMessage(f"offset {bad} can be read again")
        return end

    async def _good_from(self, offset: int, suspect: Suspect | None) -> int | None:
        found = await self._readable_at(offset, MORE_SIZE)
        if found is None or not found.is_vouched_for or _is_of(suspect, found):
            return None
        return found.base_offset if found.base_offset > self._question.offset else offset

    async def _readable_at(self, offset: int, size: int) -> Beginning | None:
        """The batch that holds `offset`, or the next one, or an empty one at the log's end; None when the
        source cannot give it as it was written. Raises what is no word of that."""
        answer = await self._fetch(offset, size)
        if not len(answer.records):
            if not answer.error_code and offset >= await self._log_end():
                return Beginning(offset, offset, True, False)
            await self._raise_unless_damaged(offset, answer)
            return None
        found = beginning_at(answer.records, offset, answer.high_watermark)
        log_end, is_all = answer.high_watermark, False
        while (found is None or not found.is_vouched_for) and not is_all:
            # More of the log may tell more, and it may have grown since its end was asked for.
            larger = await self._fetch(offset, larger_look(len(answer.records)))
            _raise_refusal(larger)
            is_all = len(larger.records) <= len(answer.records) or len(larger.records) >= MOST_OF_A_LOOK
            if len(larger.records) > len(answer.records):
                answer = larger
            log_end = max(answer.high_watermark, await self._log_end())
            found = beginning_at(answer.records, offset, log_end)
        self._given_size = len(answer.records)
        if found is None or found.batch is None:
            return Beginning(offset, offset, True, False) if offset >= log_end else None
        position = found.batch.position
        if not found.is_vouched_for or self._reaches_into_what_was_taken(found):
            is_vouched_for = not await self._is_contradicted(found.batch, offset)
            found = found._replace(is_vouched_for=is_vouched_for)
        if found.is_behind:
            claimed = reaches_before(answer.records, position)
            # Behind today's end the index leads past it, or it is found out anew.
            self._misplaced_up_to = max(self._misplaced_up_to, min(claimed, log_end))
        return found

    def _reaches_into_what_was_taken(self, found: Beginning) -> bool:
        """Whether it claims to begin before another is known to end: then no neighbour speaks for it."""
        return self._question.taken_from >= 0 and found.base_offset < self._question.offset

    # --- a batch alone ---------------------------------------------------------------------------

    async def _is_contradicted(self, suspect: Suspect, offset: int) -> bool:
        """Asked twice, as the wire may have been at fault; where the two differ, neither counts."""
        if not await self._has_another(suspect, offset):
            return False
        if not await self._has_another(suspect, offset):
            raise _two_words(suspect.next_offset - 1)
        return True

    async def _is_behind_another(self, offset: int) -> bool:
        """Whether right behind the batch that ends at `offset`, where a hole begins, stands one that claims
        to lie before that; asked twice, too. Where the source does not show it nobody can tell: from one file
        into the next no answer goes on, and healthy logs have holes there."""
        if not await self._has_one_too_low(offset):
            return False
        if not await self._has_one_too_low(offset):
            raise _two_words(offset - 1)
        return True

    async def _has_one_too_low(self, offset: int) -> bool:
        # Asked for by its last offset, Apache Kafka (4.1) passes over the batch before it as well.
        before = self._question.taken_from if self._question.taken_from >= 0 else offset - 1
        answer = await self._fetch(before, MORE_SIZE)
        # What was taken may be many batches that became one.
        while MORE_SIZE <= (given := len(answer.records)) < MOST_OF_A_LOOK:
            if right_behind(answer.records, offset - 1) is not None:
                break
            answer = await self._fetch(before, larger_look(given))
            if len(answer.records) <= given:
                break
        if answer.error_code == OffsetOutOfRange.code and before < await self._offset_of(EARLIEST):
            return False  # what was taken has expired
        if not len(answer.records):
            await self._raise_unless_damaged(before, answer)
            # Damaged since it was taken: that must not hold up what follows for ever.
            if not self._question.may_pass_over:
                raise _UnreadableNeighbour(f"the source gives nothing at offset {before}, which it has given")
        following = right_behind(answer.records, offset - 1)
        return following is not None and following.next_offset <= offset

    async def _is_given(self, suspect: Suspect) -> bool:
        answer = await self._fetch(self._question.offset, _size_for(suspect))
        _raise_refusal(answer)
        return holds(answer.records, suspect.mark)

    async def _has_another(self, suspect: Suspect, offset: int) -> bool:
        """Whether the source gives another batch where a suspect, given at `offset`, claims to lie. That it
        comes alone says nothing: so do, in healthy logs, the last one of a file, from which no answer goes
        on, and each where the source's limit for an answer is smaller than two batches."""
        base_offset, end = suspect.base_offset, suspect.next_offset
        if base_offset < offset and await self._has_another_where_it_begins(suspect):
            return True
        # One that claims to begin before what was asked for is known by the offset before that, too.
        for within in (offset - 1, end - 1) if base_offset < offset else (end - 1,):
            answer = await self._fetch(within, _size_for(suspect))
            _raise_refusal(answer)
            log_end = answer.high_watermark
            found = beginning_at(answer.records, within, log_end)
            if not _is_of(suspect, found):  # the log may have grown since its end was read
                log_end = max(log_end, end, await self._log_end())
                found = beginning_at(answer.records, within, log_end)
            if not _is_of(suspect, found):
                if reaching(answer.records, within) is None:
                    raise _nothing_at(within, log_end)
                return True  # another one, or itself where its neighbours speak against it
        if found is not None and found.is_vouched_for:
            return False
        following = await self._next_from(end, log_end)
        return following is not None and following.base_offset < end

    async def _has_another_where_it_begins(self, suspect: Suspect) -> bool:
        """The same of a suspect that claims to begin before the offset at which it was given: there one may
        stand that ends before that offset. Not looked at is what lies before the offset in question: it may
        have expired."""
        within = max(suspect.base_offset, self._question.offset)
        answer = await self._fetch(within, _size_for(suspect))
        if not len(answer.records):
            await self._raise_unless_damaged(within, answer)
            if not self._question.may_pass_over:
                raise _UnreadableNeighbour(f"the source gives nothing at offset {within}")
            return False
        log_end = max(answer.high_watermark, suspect.next_offset, await self._log_end())
        return not _is_of(suspect, beginning_at(answer.records, within, log_end))

    async def _next_from(self, offset: int, log_end: int) -> Suspect | None:
        """What the source gives where a suspect claims to end; None where that is the log's end, or where
        compaction has left nothing before it."""
        at, is_unreadable = offset, False
        while at < log_end:
            answer = await self._given_behind(at)
            following = reaching(answer.records, at)
            if following is not None and at > offset and len((await self._given_behind(offset)).records):
                raise CorruptMessage(f"offset {offset} can be read again")
            if following is not None:
                return following
            # Damage there, or a hole, must not hold up the batch before it for ever.
            if not self._question.may_pass_over:
                raise _UnreadableNeighbour(f"the source gives nothing behind offset {offset - 1}")
            is_unreadable |= bool(answer.error_code)
            at = 2 * at - offset + 1
        if is_unreadable:
            raise _UnreadableNeighbour(f"the source gives nothing from offset {offset} up to {log_end}")
        return None

    async def _given_behind(self, offset: int) -> FetchedPartition:
        """What the source has there; nothing where it cannot give it. Raises what is no word of that."""
        answer = await self._fetch(offset, 1)
        if not len(answer.records):
            await self._raise_unless_damaged(offset, answer)
        return answer

    # --- what is asked ---------------------------------------------------------------------------

    async def _raise_unless_damaged(self, offset: int, answer: FetchedPartition) -> None:
        """Of an answer without batches. Raises the error that is no word of the log, and RequestTimedOut for
        nothing at all: so Apache Kafka ends a fetch that has waited long enough for its remote store."""
        code = answer.error_code
        if code == CorruptMessage.code:
            return
        if code not in (0, KafkaStorageError.code):
            raise error_for_code(code)
        if self._local_start < 0:
            self._local_start = await local_start(self._cluster, self._key)
        if offset < self._local_start:
            _raise_refusal(answer)
            raise RequestTimedOut(f"the source gives nothing of its remote store, at offset {offset}")

    async def _log_end(self) -> int:
        return await self._offset_of(LATEST)

    async def _offset_of(self, end: int) -> int:
        found = await self._cluster.list_offsets({self._key: end})
        return found[self._key].offset

    async def _fetch(self, offset: int, size: int) -> FetchedPartition:
        """About `size` bytes of what the source has from `offset` on, and at least one batch."""
        view = await self._cluster.metadata([self._key[0]])
        leader = view.leader(*self._key)
        if leader is None:
            raise LeaderNotAvailable(f"{self._partition} has no leader now")
        (answer,) = await fetch(
            self._cluster,
            leader,
            {self._key: FetchPosition(offset, topic_id=self._topic_id)},
            max_wait_ms=WAIT_MS,
            max_bytes=size,
            partition_max_bytes=size,
            read_committed=False,
            purpose="survey",
        )
        self._spend(len(answer.records))
        return answer


def _size_for(suspect: Suspect) -> int:
    """Of an answer that may hold what follows it, although it begins before it as the last one did."""
    return larger_look(suspect.position + suspect.size)


def _is_of(suspect: Suspect | None, found: Beginning | None) -> bool:
    batch = found.batch if found is not None else None
    return suspect is not None and batch is not None and batch.mark == suspect.mark


def _nothing_at(offset: int, log_end: int) -> CorruptMessage:
    return CorruptMessage(f"the source gives nothing at offset {offset}, and the log ends at {log_end}")


def _two_words(offset: int) -> CorruptMessage:
    return CorruptMessage(f"the source does not say the same twice of offset {offset}")


def _raise_refusal(answer: FetchedPartition) -> None:
    if answer.error_code:
        raise error_for_code(answer.error_code)
