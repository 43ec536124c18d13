"""Streams: the bounded queues between fetching and the threads that read messages.

Chunks (the bytes of one partition's fetch answer) are put in by the fetcher on the event loop; messages are
taken out by any thread. A batch is checked and unpacked by the thread that takes from it, so neither the
event loop nor another stream waits for a decompression. Called by `fetching.py` (put),
the connector (revoke, rewind, positions) and the faces of the streams (take).

A partition's positions (`Reading`), all guarded by its stream's lock:

    finished   <=   delivered   <=   fetch_offset        (offsets of the next message)
    committed       handed out       put into the queue
    from here       so far           so far

A message counts as finished when its stream is asked for the next one, or when the thread that took it
commits: an automatic commit can never cover a message that is still being worked on. What must stay true:
after `revoke` returns, `take` gives no message of that partition, whatever was in the queue or half unpacked.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from millrace.broker.client.committed import committed_batches
from millrace.broker.coordination.zookeeper_consumer.messages import Message, unpack
from millrace.broker.errors import KafkaError, MillraceError
from millrace.broker.protocol.batch import BatchHeader, iterate_batches, verify_crc
from millrace.broker.protocol.topic_partition import TopicPartition


class ConsumerClosed(MillraceError):
    """The consumer was shut down."""


@dataclass(eq=False, slots=True)
class Reading:
    """One owned partition. `epoch` grows whenever what is under way for it has become worthless.

    `fetch_offset` is None until it is known where to begin. `stored` and `version` are the committed offset
    as this consumer last read or wrote it, None and -1 where there was none.
    """

    key: TopicPartition
    stream: StreamQueue
    fetch_offset: int | None = None
    delivered: int = -1
    finished: int = -1
    stored: int | None = None
    version: int = -1
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.key[0]}-{self.key[1]}"


@dataclass(eq=False, slots=True)
class _Chunk:
    """Bytes of one answer, or (without bytes) a jump to `next_offset`."""

    reading: Reading
    epoch: int
    batches: Iterator[tuple[memoryview, BatchHeader, bool]]
    size: int
    next_offset: int


@dataclass(eq=False, slots=True)
class _Open:
    """The batch that messages are taken from; `messages` are in reverse order."""

    reading: Reading
    next_offset: int
    messages: list[Message] = field(default_factory=list)


class StreamQueue:
    """See the module's text. `on_room` is called, from any thread, when a full queue has room again."""

    def __init__(
        self, name: str, *, max_chunks: int, max_size: int, read_committed: bool, on_room: Callable[[], None]
    ) -> None:
        self.name = name
        self._max_chunks = max_chunks
        self._max_size = max_size
        self._read_committed = read_committed
        self._on_room = on_room
        self._lock = threading.Lock()
        self._filled = threading.Condition(self._lock)
        self._unpacking = threading.Lock()
        self._chunks: deque[_Chunk] = deque()
        self._size = 0
        self._chunk: _Chunk | None = None
        self._open: _Open | None = None
        self._in_hand: Reading | None = None
        self._holder: object = None
        self._failure: MillraceError | None = None
        self._closed = False
        self._signal: asyncio.Event | None = None

    # --- for the fetcher, on the event loop -----------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that may be fetched for this stream now; 0 when it is full."""
        with self._lock:
            return 0 if self._is_full() else self._max_size - self._size

    def fetch_position(self, reading: Reading) -> tuple[int | None, int]:
        """Where to fetch on, and the epoch that the answer belongs to."""
        with self._lock:
            return reading.fetch_offset, reading.epoch

    def _is_full(self) -> bool:
        return len(self._chunks) >= self._max_chunks or self._size >= self._max_size

    def put(
        self, reading: Reading, epoch: int, records: memoryview, aborted: Iterable[tuple[int, int]]
    ) -> bool:
        """Queue the whole batches of an answer; whether there was one. Raises CorruptMessage."""
        next_offset, size = None, 0
        for position, header in iterate_batches(records):
            next_offset, size = header.next_offset, position + header.size
        if next_offset is None:
            return False
        batches = committed_batches(records[:size], aborted if self._read_committed else ())
        self._put(_Chunk(reading, epoch, batches, size, next_offset))
        return True

    def jump(self, reading: Reading, epoch: int, offset: int) -> bool:
        """Go on at `offset` once everything queued for the partition has been taken.

        Whether it is the partition's position to commit already: not while messages from before the jump
        are queued or in hand.
        """
        with self._lock:
            if reading.epoch != epoch:
                return False
            if reading.fetch_offset is None or reading.delivered == reading.fetch_offset:
                self._close_opened(reading)
                reading.fetch_offset = reading.delivered = offset
                if self._in_hand is reading:
                    return False
                reading.finished = offset
                return True
        self._put(_Chunk(reading, epoch, iter(()), 0, offset))
        return False

    def _put(self, chunk: _Chunk) -> None:
        with self._lock:
            if chunk.reading.epoch != chunk.epoch or self._closed:
                return
            chunk.reading.fetch_offset = chunk.next_offset
            self._chunks.append(chunk)
            self._size += chunk.size
            self._wake()

    def _wake(self) -> None:
        self._filled.notify_all()
        if self._signal is not None:
            self._signal.set()

    # --- for the connector, on the event loop -----------------------------------------------------------

    def revoke(self, readings: Iterable[Reading]) -> None:
        """These partitions are no more to be read from: forget what is queued and half taken of them."""
        with self._lock:
            for reading in readings:
                self._drop(reading)
                reading.fetch_offset = reading.delivered

    def rewind(self, reading: Reading, offset: int) -> None:
        """The next message of the partition is the one at `offset`; a commit commits that."""
        with self._lock:
            self._drop(reading)
            reading.fetch_offset = reading.delivered = reading.finished = offset
            if self._in_hand is reading:
                self._in_hand = None

    def forget(self, reading: Reading) -> None:
        """Where the partition begins is not known (any more)."""
        with self._lock:
            self._drop(reading)
            reading.fetch_offset = None
            reading.delivered = reading.finished = -1
            if self._in_hand is reading:
                self._in_hand = None

    def _drop(self, reading: Reading) -> None:
        reading.epoch += 1
        kept = [chunk for chunk in self._chunks if chunk.reading is not reading]
        self._chunks = deque(kept)
        self._size = sum(chunk.size for chunk in kept)
        self._close_opened(reading)

    def _close_opened(self, reading: Reading) -> None:
        if self._chunk is not None and self._chunk.reading is reading:
            self._chunk = None
        if self._open is not None and self._open.reading is reading:
            self._open = None

    def position(self, reading: Reading, holder: object = None) -> int:
        """The offset to commit. `holder` is who asks: what it has in hand counts as finished."""
        with self._lock:
            if holder is not None and self._in_hand is not None and holder == self._holder:
                self._in_hand.finished = self._in_hand.delivered
                self._in_hand = None
            return reading.finished

    def close(self) -> None:
        """No more messages: those who wait are told."""
        with self._lock:
            self._closed = True
            self._clear()

    def fail(self, error: MillraceError) -> None:
        """No more messages: whoever takes gets the error."""
        with self._lock:
            self._failure = error
            self._clear()

    def _clear(self) -> None:
        self._chunks.clear()
        self._size = 0
        self._chunk = self._open = None
        self._wake()

    # --- for those who read -----------------------------------------------------------------------------

    def take(self, holder: object) -> Message | None:
        """The next message, None when none is there yet. `holder` names the thread or task.

        Raises ConsumerClosed, the error that ended the consumer, and for a batch that cannot be read
        CorruptMessage, InvalidRecord, RecordTooLarge: again at each call, until the partition is rewound
        past it or another fetch brings it whole.
        """
        while True:
            with self._lock:
                if self._in_hand is not None:
                    self._in_hand.finished = self._in_hand.delivered
                    self._in_hand = None
                batch = self._open
                if batch is not None:
                    if batch.messages:
                        message = batch.messages.pop()
                        self._in_hand = reading = batch.reading
                        self._holder = holder
                        # After the last one comes what follows the batch: its end may be compacted away.
                        reading.delivered = message.offset + 1 if batch.messages else batch.next_offset
                        return message
                    self._open = None
                if self._failure is not None:
                    raise self._failure.with_traceback(None)
                if self._closed:
                    raise ConsumerClosed("the consumer was shut down")
                if self._chunk is None and not self._chunks:
                    return None
            with self._unpacking:
                self._open_next()

    def _open_next(self) -> None:
        """Unpack the next batch, outside the lock."""
        with self._lock:
            if self._open is not None:
                return
            chunk = self._chunk = self._chunk or self._next_chunk()
            if chunk is None:
                return
            start = chunk.reading.delivered
        try:
            found = next(chunk.batches, None)
            messages = [] if found is None else _messages_of(chunk.reading.key, found, start)
        except KafkaError as error:
            self._refetch(chunk)
            raise type(error)(f"{chunk.reading} at or after offset {start}: {error}") from None
        with self._lock:
            if self._chunk is not chunk:
                return  # revoked or rewound meanwhile
            reading = chunk.reading
            if found is None:
                self._chunk = None
                reading.delivered = reading.finished = chunk.next_offset
            elif messages:
                self._open = _Open(reading, found[1].next_offset, messages)
            else:
                reading.delivered = reading.finished = max(reading.delivered, found[1].next_offset)

    def _next_chunk(self) -> _Chunk | None:
        if not self._chunks:
            return None
        was_full = self._is_full()
        chunk = self._chunks.popleft()
        self._size -= chunk.size
        if was_full and not self._is_full():
            self._on_room()
        return chunk

    def _refetch(self, chunk: _Chunk) -> None:
        """Fetch the partition again from what was delivered last: the bytes may arrive whole next time."""
        with self._lock:
            if self._chunk is chunk:
                self._drop(chunk.reading)
                chunk.reading.fetch_offset = chunk.reading.delivered
        self._on_room()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until there may be something to take; False when `timeout_s` is over."""
        with self._filled:
            return self._filled.wait_for(self._has_news, timeout_s)

    async def wait_async(self) -> None:
        """The same for a task of the consumer's own event loop."""
        if self._signal is None:
            self._signal = asyncio.Event()
        while True:
            with self._lock:
                if self._has_news():
                    return
                self._signal.clear()
            await self._signal.wait()

    def _has_news(self) -> bool:
        return bool(self._chunks or self._chunk or self._open or self._closed or self._failure is not None)


def _messages_of(
    key: TopicPartition, found: tuple[memoryview, BatchHeader, bool], start: int
) -> list[Message]:
    """The messages of a batch from `start` on, in reverse order; none of a control or aborted batch."""
    batch, header, is_data = found
    verify_crc(batch, 0, header)
    if not is_data:
        return []
    messages = unpack(*key, batch, header)
    if messages and messages[0].offset < start:
        messages = [message for message in messages if message.offset >= start]
    messages.reverse()
    return messages
