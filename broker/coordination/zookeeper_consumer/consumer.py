"""`ZookeeperConsumer`: the high-level consumer of Kafka 0.7 and 0.8, for groups that live in ZooKeeper.

    with ZookeeperConsumer("zk:2181/dc1", "billing", auto_offset_reset="smallest") as consumer:
        streams = consumer.create_message_streams({"orders": 2})
        for message in streams["orders"][0]:
            ...

Consumers of a group share the partitions of their topics by Algorithm 1 of the Kafka paper, through the
znodes that Kafka 0.8's own tools and consumers use. Each partition feeds one stream of one consumer; each
stream is an iterator for one thread. Brokers are found through ZooKeeper too.

Delivery is at least once. A message counts as consumed when its stream is asked for the next one, or when
the thread that took it calls `commit_offsets` or `shutdown`. Automatic commits and rebalances commit only
what was consumed, so a message that a thread was working on when the process died is delivered again. After
a rebalance a message may be delivered by its new owner while the old one still works on it.

Every setting of `ConsumerOptions` is a keyword argument. `AsyncZookeeperConsumer` is the same for asyncio:
its streams are asynchronous iterators, and a task stands where here a thread does.

A signal's handler may call `shutdown`. Where it interrupts a stream or another call of the consumer, in the
same thread, that may hold a lock which the event loop waits for: nothing is waited for then. A thread of its
own ends the consumer, and what was interrupted goes on and returns when that is done.

What must stay true: nothing here holds a rule; the connector runs on one event loop (the blocking face has
a thread for it), and a stream's queue is the only thing that user threads touch directly.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from millrace.broker.coordination.zookeeper_consumer.connector import (
    ConsumerConnector,
)
from millrace.broker.coordination.zookeeper_consumer.messages import Message
from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions
from millrace.broker.coordination.zookeeper_consumer.rules import (
    filter_subscription,
    static_subscription,
)
from millrace.broker.coordination.zookeeper_consumer.streams import ConsumerClosed, StreamQueue
from millrace.broker.errors import MillraceError
from millrace.broker.protocol.records import warm_kernels
from millrace.broker.protocol.topic_partition import TopicPartition

T = TypeVar("T")


class ConsumerTimeout(MillraceError):
    """No message came for `consumer_timeout_ms`; the stream can be read on."""


class MessageStream:
    """An endless iterator of messages, for one thread. It ends when the consumer is shut down.

    Raises ConsumerTimeout (with `consumer_timeout_ms` set), and what ended the consumer: RebalanceFailed,
    ConsumerIdTaken, … A batch that cannot be read (CorruptMessage, InvalidRecord, RecordTooLarge) is raised
    again and again; `ZookeeperConsumer.rewind` goes past it.
    """

    def __init__(self, queue: StreamQueue, timeout_ms: int | None, wait_for_end: Callable[[], None]) -> None:
        self._queue = queue
        self._take = queue.take
        self._wait_for_end = wait_for_end
        self._timeout_s = None if timeout_ms is None else timeout_ms / 1000
        self._timeout_ms = timeout_ms

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Message:
        holder = threading.get_ident()
        try:
            while (message := self._take(holder)) is None:
                if not self._queue.wait(self._timeout_s):
                    raise ConsumerTimeout(f"stream {self._queue.name}: no message for {self._timeout_ms} ms")
        except ConsumerClosed:
            self._wait_for_end()
            raise StopIteration from None
        return message


class AsyncMessageStream:
    """`MessageStream` for a task of the consumer's event loop; batches are unpacked on that loop."""

    def __init__(self, queue: StreamQueue, timeout_ms: int | None) -> None:
        self._queue = queue
        self._timeout_ms = timeout_ms

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        holder = asyncio.current_task()
        timeout_s = None if self._timeout_ms is None else self._timeout_ms / 1000
        try:
            while (message := self._queue.take(holder)) is None:
                async with asyncio.timeout(timeout_s):
                    await self._queue.wait_async()
        except ConsumerClosed:
            raise StopAsyncIteration from None
        except TimeoutError:
            raise ConsumerTimeout(
                f"stream {self._queue.name}: no message for {self._timeout_ms} ms"
            ) from None
        return message


class AsyncZookeeperConsumer:
    """The consumer for asyncio. An asynchronous context manager: entering connects, leaving shuts down."""

    def __init__(self, zookeeper: str, group: str, **options: Any) -> None:
        """`zookeeper` is a connect string with the cluster's chroot. Raises ConfigError, TypeError."""
        self._connector = ConsumerConnector(zookeeper, group, ConsumerOptions(**options))
        self._timeout_ms = self._connector.options.consumer_timeout_ms

    @property
    def consumer_id(self) -> str:
        """`group_host-timestamp-uuid`, the name of the registration."""
        return self._connector.consumer_id

    async def start(self) -> Self:
        """Connect. Raises ZooKeeperUnreachable."""
        await asyncio.gather(self._connector.start(), asyncio.to_thread(warm_kernels))
        return self

    async def create_message_streams(self, streams: Mapping[str, int]) -> dict[str, list[AsyncMessageStream]]:
        """See `ZookeeperConsumer.create_message_streams`."""
        queues = await self._connector.create_streams(static_subscription(streams))
        return {
            topic: [AsyncMessageStream(queues[topic, number], self._timeout_ms) for number in range(count)]
            for topic, count in streams.items()
        }

    async def create_message_streams_by_filter(
        self, *, include: str | None = None, exclude: str | None = None, streams: int = 1
    ) -> list[AsyncMessageStream]:
        """See `ZookeeperConsumer.create_message_streams_by_filter`."""
        queues = await self._connector.create_streams(filter_subscription(include, exclude, streams))
        return [AsyncMessageStream(queues[None, number], self._timeout_ms) for number in range(streams)]

    async def commit_offsets(self) -> None:
        """See `ZookeeperConsumer.commit_offsets`; the calling task stands for the thread."""
        await self._connector.commit_offsets(asyncio.current_task())

    async def rewind(self, topic: str, partition: int, to: int | str = "committed") -> int:
        """See `ZookeeperConsumer.rewind`."""
        return await self._connector.rewind(topic, partition, to)

    def owned_partitions(self) -> dict[TopicPartition, int]:
        """The partitions read now, each with the number of the stream that it feeds."""
        return dict(self._connector.owned_partitions())

    async def shutdown(self) -> None:
        """See `ZookeeperConsumer.shutdown`."""
        await self._connector.shutdown(asyncio.current_task())

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connector.shutdown(asyncio.current_task() if error is None else None)


class ZookeeperConsumer:
    """The consumer with blocking streams; see the module's text. Making one connects to ZooKeeper.

    Its methods may be called from any thread. As a context manager it is shut down at the end; an error
    that ends the block leaves the message it happened with uncommitted.
    """

    def __init__(self, zookeeper: str, group: str, **options: Any) -> None:
        """`zookeeper` is a connect string with the cluster's chroot: `a:2181,b:2181/dc1`; `options` are those
        of `ConsumerOptions`. Raises ConfigError, TypeError (unknown option), ZooKeeperUnreachable."""
        self._connector = ConsumerConnector(zookeeper, group, ConsumerOptions(**options))
        self._timeout_ms = self._connector.options.consumer_timeout_ms
        self._loop = asyncio.new_event_loop()
        self._ending = threading.Lock()
        self._ended = False
        self._ender: threading.Thread | None = None
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"consumer {self._connector.consumer_id}", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._connector.start())
        except BaseException:
            self._stop_loop()
            raise
        warm_kernels()

    @property
    def consumer_id(self) -> str:
        """`group_host-timestamp-uuid`, the name of the registration."""
        return self._connector.consumer_id

    def create_message_streams(self, streams: Mapping[str, int]) -> dict[str, list[MessageStream]]:
        """So many streams for each topic; returns when this consumer has its first share of partitions.

        A topic may come into being later. Once per consumer. Raises ConfigError, StreamsExist,
        RebalanceFailed, ConsumerIdTaken.
        """
        queues = self._run(self._connector.create_streams(static_subscription(streams)))
        return {
            topic: [self._stream(queues[topic, number]) for number in range(count)]
            for topic, count in streams.items()
        }

    def create_message_streams_by_filter(
        self, *, include: str | None = None, exclude: str | None = None, streams: int = 1
    ) -> list[MessageStream]:
        """Streams of all topics whose whole name matches `include`, or does not match `exclude`, also of
        those that are created later. Internal topics are left out unless `exclude_internal_topics=False`.

        Regexes are cleaned as Kafka does: a comma means "or", blanks vanish. Once per consumer. Raises as
        `create_message_streams`.
        """
        queues = self._run(self._connector.create_streams(filter_subscription(include, exclude, streams)))
        return [self._stream(queues[None, number]) for number in range(streams)]

    def commit_offsets(self) -> None:
        """Write to ZooKeeper what every stream has consumed; what the calling thread has in hand counts.

        Raises ConsumerClosed, and CommitFailed where something was not written: also where a partition is
        another's now, who delivers it again.
        """
        self._run(self._connector.commit_offsets(threading.get_ident()))

    def rewind(self, topic: str, partition: int, to: int | str = "committed") -> int:
        """Read an owned partition on from an offset, or from "committed", "smallest" or "largest".

        Back or forth; what is queued of the partition is dropped, and the offset returned is the next to
        be delivered. ZooKeeper learns of it by the next commit. Raises NotOwned, ConfigError, ConsumerClosed.
        """
        return self._run(self._connector.rewind(topic, partition, to))

    def owned_partitions(self) -> dict[TopicPartition, int]:
        """The partitions read now, each with the number of the stream that it feeds."""
        return dict(self._connector.owned_partitions())

    def shutdown(self) -> None:
        """Commit (with automatic commits on), give the partitions back, leave the group. Streams end.

        What the calling thread has in hand counts as consumed. May be called again, from any thread, and by
        a signal's handler: where that interrupts a stream, or another call of this consumer, it returns at
        once, nothing in hand is committed, and the stream or the call ends when the consumer has ended.
        """
        if not _is_interrupting():
            self._shut_down(threading.get_ident())
        elif not self._ended and self._ender is None:
            self._ender = threading.Thread(
                target=self._shut_down, args=(None,), name=f"end of consumer {self.consumer_id}"
            )
            self._ender.start()

    def _wait_for_end(self) -> None:
        """Where a thread of its own ends the consumer: a program that ended now would cut that short."""
        ender = self._ender
        if ender is not None and ender is not threading.current_thread():
            ender.join()

    def _stream(self, queue: StreamQueue) -> MessageStream:
        return MessageStream(queue, self._timeout_ms, self._wait_for_end)

    def _shut_down(self, holder: int | None) -> None:
        with self._ending:
            if self._ended:
                return
            self._ended = True
            try:
                self._run(self._connector.shutdown(holder), at_the_end=True)
            finally:
                self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut_down(threading.get_ident() if error is None else None)

    def _run(self, work: Coroutine[Any, Any, T], *, at_the_end: bool = False) -> T:
        """Run on the consumer's event loop and wait."""
        if self._ended and not at_the_end:
            work.close()
            raise ConsumerClosed("the consumer was shut down")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ConsumerClosed("the consumer was shut down") from None
        finally:
            self._wait_for_end()

    def _stop_loop(self) -> None:
        # Calls of other threads that still wait for ZooKeeper get ConsumerClosed.
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_LOCKING = frozenset(
    call.__code__ for call in (MessageStream.__next__, ZookeeperConsumer._run, ZookeeperConsumer._shut_down)
)


def _is_interrupting() -> bool:
    """Whether the calling thread is within one of these: no such call comes back here, so what asks is a
    signal's handler, or a finalizer. The stack tells; nothing is kept for it while messages are taken."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _LOCKING:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
