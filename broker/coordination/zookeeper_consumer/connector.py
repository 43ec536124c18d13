"""A consumer of the old model on the event loop: carries out Algorithm 1, commits, rewinds, shuts down.

`zookeeper_consumer.py` puts its two faces before it. Everything here runs on one event loop; streams are
taken from by any thread.

What ZooKeeper's session means here:

    session     meaning                             this consumer
    connected   watches are to be set anew          reads the registry, rebalances if its share differs
    suspended   owner znodes live until it ends     reads on; after a session timeout it stops, because by
                                                    then another may own its partitions
    lost        every owner znode is gone           stops at once, commits nothing, registers anew

Delivery is at least once. What is handed out but not committed when a partition moves (or this process
dies) is delivered again, by whoever owns it next. A partition that comes back to the same stream goes on
where that stream was, unless another consumer has committed meanwhile. Who asks for a commit then has also
what it consumed of partitions that are not its own now written, where nobody has committed since.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.coordination.session import Session, SessionError, SessionState, VersionConflict
from millrace.broker.coordination.zookeeper_consumer import rules as rules
from millrace.broker.coordination.zookeeper_consumer.fetching import RESETS, Fetching, FetchLimits
from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions, checked_name
from millrace.broker.coordination.zookeeper_consumer.registry import ConsumerRegistry, Registry
from millrace.broker.coordination.zookeeper_consumer.streams import ConsumerClosed, Reading, StreamQueue
from millrace.broker.errors import ConfigError, MillraceError
from millrace.broker.protocol.topic_partition import TopicPartition

log = logging.getLogger("millrace.consumer")


class StreamsExist(MillraceError):
    """`create_message_streams` was called before: a consumer has one set of streams."""


class NotOwned(MillraceError):
    """The partition is not one that this consumer owns now."""


class CommitFailed(MillraceError):
    """Some offsets were not written; the message names a partition and the reason."""


class ConsumerConnector:
    """See the module's text. `start`, one of the `create_…` methods, then `shutdown`."""

    def __init__(self, zookeeper: str, group: str, options: ConsumerOptions) -> None:
        self.group = checked_name("group", group)
        self.options = options
        self._zookeeper = zookeeper
        self._rng = random.Random()
        if options.consumer_id is None:
            host = re.sub(r"[^a-zA-Z0-9._-]", "_", socket.gethostname())
            self.consumer_id = rules.consumer_id(group, host, _now_ms(), uuid.uuid4())
        else:
            self.consumer_id = f"{group}_{checked_name('consumer_id', options.consumer_id)}"
        self._session = Session(
            zookeeper,
            session_timeout_ms=options.zookeeper_session_timeout_ms,
            connection_timeout_ms=options.zookeeper_connection_timeout_ms,
        )
        self._registry = ConsumerRegistry(self._session, group, self.consumer_id, self._note_change)
        self._subscription = rules.Subscription(rules.Pattern.STATIC, {})
        self._queues: dict[tuple[str | None, int], StreamQueue] = {}
        self._cluster: Cluster | None = None
        self._brokers: tuple[str, ...] = ()
        # What is owned; `_held` None: not known, `_left` the readings of partitions that were given back.
        self._held: rules.Share | None = None
        self._readings: dict[TopicPartition, Reading] = {}
        self._left: dict[TopicPartition, Reading] = {}
        self._fetching: Fetching | None = None
        self._fetching_task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        self._session_number = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._committing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._first: asyncio.Future[None] | None = None
        self._failure: MillraceError | None = None
        self._closed = False

    # --- beginning ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to ZooKeeper. Raises ZooKeeperUnreachable."""
        self._session.on_state(self._on_state)
        await self._session.start()
        self._connected.set()

    async def create_streams(
        self, subscription: rules.Subscription
    ) -> dict[tuple[str | None, int], StreamQueue]:
        """Register and wait for the first rebalance. The queues by (topic, number); topic None for a filter.

        Raises StreamsExist, RebalanceFailed, ConsumerIdTaken.
        """
        self._check_open()
        if self._first is not None:
            raise StreamsExist(f"consumer {self.consumer_id} has its streams; make another consumer for more")
        self._subscription = subscription
        loop = asyncio.get_running_loop()
        is_static = subscription.pattern is rules.Pattern.STATIC
        for name, count in subscription.streams.items():
            for number in range(count):
                self._queues[name if is_static else None, number] = StreamQueue(
                    f"{name}/{number}",
                    max_chunks=self.options.queued_max_message_chunks,
                    max_size=self.options.queued_max_bytes,
                    read_committed=self.options.read_committed,
                    on_room=partial(self._room_again, loop),
                )
        self._first = loop.create_future()
        self._changed.set()
        self._spawn(self._follow())
        if self.options.auto_commit_enable:
            self._spawn(self._commit_now_and_then())
        await asyncio.shield(self._first)
        return self._queues

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task of this consumer has failed: streams that stood still in silence would be worse."""
        if task.cancelled():
            return
        error = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, MillraceError):
            self._fail(error)
        elif error is not None:
            self._fail(MillraceError(f"a defect of the consumer: {error!r}"))

    def _fail(self, error: MillraceError) -> None:
        if self._failure is not None or self._closed:
            return
        self._failure = error
        log.error("consumer %s has failed: %s", self.consumer_id, error)
        self._halt()
        for task in self._tasks:
            task.cancel()
        for queue in self._queues.values():
            queue.fail(error)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
        # Its share is to go to others, not to lie with a consumer that reads nothing.
        self._tasks.append(asyncio.get_running_loop().create_task(self._leave_group()))

    async def _leave_group(self) -> None:
        try:
            await self._registry.release_all()
            await self._registry.unregister()
        except SessionError as error:
            # The end of the session does the same.
            log.info("consumer %s could not leave its group: %s", self.consumer_id, error)

    def _check_open(self) -> None:
        if self._closed:
            raise ConsumerClosed("the consumer was shut down")
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    # --- session ------------------------------------------------------------------------------------

    def _on_state(self, state: SessionState) -> None:
        self._registry.forget_watches()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if state is SessionState.CONNECTED:
            self._connected.set()
            self._note_change()
            return
        self._connected.clear()
        if state is SessionState.LOST:
            self._stand_down("the ZooKeeper session is lost")
        else:  # also with no share yet: a rebalance under way may still take one
            timeout_s = self._session.session_timeout_ms / 1000
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(timeout_s, self._stand_down, "ZooKeeper is out of reach")

    def _stand_down(self, reason: str) -> None:
        """Others may own the partitions by now: read and commit nothing more of them."""
        self._session_number += 1
        if self._held:
            log.warning("consumer %s stops reading its partitions: %s", self.consumer_id, reason)
        self._halt()

    def _halt(self) -> None:
        """Stop fetching and empty the streams; the positions are kept in `_left`."""
        self._held = None
        if self._fetching_task is not None:
            self._fetching_task.cancel()
            self._fetching = self._fetching_task = None
        for reading in self._readings.values():
            reading.stream.revoke([reading])
        self._left.update(self._readings)
        self._readings = {}

    def _note_change(self) -> None:
        self._changed.set()

    # --- Algorithm 1 --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Rebalance whenever the registry has changed, until cancelled or failed."""
        while True:
            await self._changed.wait()
            await self._connected.wait()
            self._changed.clear()
            try:
                await self._rebalance()
            except (SessionError, VersionConflict) as error:
                # `_held` is still true if nothing was stopped yet, and None otherwise.
                log.info("a rebalance was interrupted: %s", error)
                self._changed.set()
                await asyncio.sleep(0.1)
                continue
            if self._first is not None and not self._first.done():
                self._first.set_result(None)

    async def _rebalance(self) -> None:
        limits = rules.RebalanceLimits(self.options.rebalance_max_retries, self.options.rebalance_backoff_ms)
        exclude = self.options.exclude_internal_topics
        steps = rules.rebalance(self.consumer_id, self._held, limits, exclude_internal=exclude)
        session_number = self._session_number
        answer: Any = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                break
            if session_number != self._session_number:
                raise SessionError("the session ended within a rebalance")
            answer = await self._carry_out(step, session_number)
        if self._fetching_task is None:
            self._start_fetching()  # the brokers may have come only now

    async def _carry_out(self, step: rules.Step, session_number: int) -> Any:
        match step:
            case rules.ReadGroup():
                registry = await self._registry.read(self._subscription)
                self._know_brokers(registry)
                return registry.view
            case rules.Register():
                return await self._registry.register(self._subscription, _now_ms())
            case rules.StopStreams():
                return await self._stop_streams()
            case rules.ReleaseAll():
                return await self._registry.release_all()
            case rules.Claim(share):
                return await self._registry.claim(share)
            case rules.Pause(ms, until_free):
                topic, partition = until_free[0]
                log.info(
                    "rebalance of %s: %s-%d is still another's; trying again",
                    self.consumer_id,
                    topic,
                    partition,
                )
                now = asyncio.get_running_loop().time
                begun = now()
                # Spread, so that consumers that collided do not come back in step.
                await self._registry.until_free(until_free, ms * self._rng.uniform(0.8, 1.2))
                return (now() - begun) * 1000
            case rules.StartStreams(share):
                return await self._start_streams(share, session_number)

    async def _stop_streams(self) -> None:
        self._held = None
        readings = list(self._readings.values())
        self._halt()
        if readings and self.options.auto_commit_enable:
            failed = await self._commit([(reading, reading.stream.position(reading)) for reading in readings])
            if failed:
                log.warning("before a rebalance: %s; delivering again from the last commit", failed)

    async def _start_streams(self, share: rules.Share, session_number: int) -> None:
        async with self._committing:  # a commit between would pass for another consumer's
            stored = await self._registry.read_offsets(share)
            if session_number != self._session_number:
                raise SessionError("the session ended within a rebalance")
            for key, thread in share.items():
                stream = self._queue_of(key[0], thread.stream)
                known = self._left.pop(key, None)
                offset, version = stored[key]
                if known is None or known.stream is not stream:
                    known = Reading(key, stream)
                elif known.version == version and known.delivered >= 0:
                    self._readings[key] = known  # nobody has committed since: the stream goes on where it was
                    continue
                known.stored, known.version = offset, version
                if offset is None:
                    stream.forget(known)
                else:
                    stream.rewind(known, offset)
                self._readings[key] = known
        self._held = dict(share)
        owned = ", ".join(f"{topic}-{number}" for topic, number in sorted(share)) or "nothing"
        log.info("consumer %s owns %s", self.consumer_id, owned)
        self._start_fetching()

    def _queue_of(self, topic: str, number: int) -> StreamQueue:
        is_static = self._subscription.pattern is rules.Pattern.STATIC
        return self._queues[topic if is_static else None, number]

    # --- fetching -----------------------------------------------------------------------------------

    def _know_brokers(self, registry: Registry) -> None:
        """Follow the brokers to where they are registered now."""
        if not registry.brokers and not self._brokers:
            log.warning("no broker is registered in ZooKeeper at %s; is the path right?", self._zookeeper)
        if not registry.brokers or registry.brokers == self._brokers:
            return
        self._brokers = registry.brokers
        if self._cluster is None:
            self._cluster = Cluster(
                self._zookeeper,
                registry.brokers,
                client_id=self.options.client_id or self.group,
                request_timeout_ms=self.options.socket_timeout_ms,
            )
        else:
            self._cluster.set_bootstrap(registry.brokers)

    def _start_fetching(self) -> None:
        if self._cluster is None or not self._readings:
            return
        options = self.options
        limits = FetchLimits(
            message_max_bytes=options.fetch_message_max_bytes,
            min_bytes=options.fetch_min_bytes,
            wait_max_ms=options.fetch_wait_max_ms,
            leader_backoff_ms=options.refresh_leader_backoff_ms,
            offset_reset=options.auto_offset_reset,
            read_committed=options.read_committed,
        )
        self._fetching = Fetching(self._cluster, self._readings.values(), limits, self._record_start)
        self._fetching_task = asyncio.get_running_loop().create_task(self._fetching.run())
        self._fetching_task.add_done_callback(self._ended)

    def _wake_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.wake()

    def _room_again(self, loop: asyncio.AbstractEventLoop) -> None:
        """A stream has room; called from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nothing is fetched any more
            loop.call_soon_threadsafe(self._wake_fetching)

    # --- offsets ------------------------------------------------------------------------------------

    async def _commit_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self.options.auto_commit_interval_ms / 1000)
            if self._connected.is_set() and self._readings:
                failed = await self._commit(self._positions(None))
                if failed:
                    log.warning("automatic commit: %s", failed)

    def _positions(self, holder: object) -> list[tuple[Reading, int]]:
        return [(reading, reading.stream.position(reading, holder)) for reading in self._readings.values()]

    def _all_positions(self, holder: object) -> list[tuple[Reading, int]]:
        """Also of partitions that are not read now, as within a rebalance, where more was consumed of them
        than was written."""
        left = [(reading, reading.stream.position(reading, holder)) for reading in self._left.values()]
        ahead = [(reading, at) for reading, at in left if reading.stored is None or at > reading.stored]
        return self._positions(holder) + ahead

    async def commit_offsets(self, holder: object) -> None:
        """Write what has been consumed of every partition; messages that `holder` has in hand count.

        Raises CommitFailed, once also for what another owner has committed meanwhile and will deliver again.
        """
        self._check_open()
        failed = await self._commit(self._all_positions(holder))
        if failed:
            raise CommitFailed(f"consumer {self.consumer_id}: {failed}")

    async def _record_start(self, reading: Reading) -> None:
        async with self._committing:
            offset = reading.stream.position(reading)
            if not await self._write(reading, offset):
                log.info("offset %d of %s was not written: the partition is another's now", offset, reading)

    async def _commit(self, positions: Iterable[tuple[Reading, int]]) -> str:
        """Write these; what failed, in words, or an empty text."""
        async with self._committing:
            news = [(reading, at) for reading, at in positions if at >= 0 and at != reading.stored]
            results = await asyncio.gather(
                *(self._write(reading, at) for reading, at in news), return_exceptions=True
            )
        failed = []
        for (reading, at), result in zip(news, results, strict=True):
            if isinstance(result, SessionError | VersionConflict):
                failed.append(f"offset {at} of {reading} was not written: {result}")
            elif isinstance(result, BaseException):
                raise result
            elif not result:
                failed.append(f"offset {at} of {reading} was not written: the partition is another's now")
                if self._left.get(reading.key) is reading:
                    del self._left[reading.key]
        return failed[0] + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "") if failed else ""

    async def _write(self, reading: Reading, offset: int) -> bool:
        """False: another owns the partition and has committed."""
        version = await self._registry.write_offset(reading.key, offset, reading.version)
        if version is None:
            return False
        reading.stored, reading.version = offset, version
        return True

    async def rewind(self, topic: str, partition: int, to: int | str) -> int:
        """Go to an offset, or to "committed", "smallest" or "largest"; the offset is returned.

        Nothing is committed by it. Raises NotOwned, ConfigError for another word or a negative offset.
        """
        self._check_open()
        key = (topic, partition)
        reading = self._owned(key)
        offset: int | None
        if isinstance(to, str):
            offset = await self._named_offset(key, to)
            if offset is None:
                offset = await self._named_offset(key, self.options.auto_offset_reset)
        else:
            offset = to
        if offset is None or offset < 0:
            raise ConfigError("to", to, "an offset, 'committed', 'smallest' or 'largest'")
        if self._owned(key) is not reading:
            raise NotOwned(f"{topic}-{partition} moved to another stream meanwhile")
        reading.stream.rewind(reading, offset)
        self._wake_fetching()
        return offset

    def _owned(self, key: TopicPartition) -> Reading:
        try:
            return self._readings[key]
        except KeyError:
            raise NotOwned(f"{key[0]}-{key[1]} is not owned by consumer {self.consumer_id} now") from None

    async def _named_offset(self, key: TopicPartition, name: str) -> int | None:
        if name == "committed":
            return (await self._registry.read_offsets([key]))[key].offset
        if name in RESETS and self._cluster is not None:
            listed = await self._cluster.list_offsets({key: RESETS[name]}, self.options.read_committed)
            return listed[key].offset
        return -1

    def owned_partitions(self) -> Mapping[TopicPartition, int]:
        """The partitions that are read now, each with the number of the stream that it feeds."""
        return {key: thread.stream for key, thread in (self._held or {}).items()}

    # --- the end ------------------------------------------------------------------------------------

    async def shutdown(self, holder: object) -> None:
        """Stop, commit (with automatic commits on), give everything back, end the session. Idempotent.

        Messages that `holder` has in hand count as consumed. Does not raise for a ZooKeeper that is away:
        the session's end does what could not be done.
        """
        if self._closed:
            return
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
        is_connected = self._connected.is_set() and self._failure is None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for queue in self._queues.values():
            queue.close()
        positions = self._all_positions(holder)
        self._halt()
        if is_connected:
            await self._say_goodbye(positions)
        if self._first is not None and not self._first.done():
            self._first.set_exception(ConsumerClosed("the consumer was shut down"))
            self._first.exception()  # nobody may be waiting any more
        await self._session.stop()
        if self._cluster is not None:
            await self._cluster.close()

    async def _say_goodbye(self, positions: list[tuple[Reading, int]]) -> None:
        try:
            async with asyncio.timeout(self._session.session_timeout_ms / 1000):
                if self.options.auto_commit_enable:
                    failed = await self._commit(positions)
                    if failed:
                        log.warning("at shutdown: %s", failed)
                await self._leave_group()
        except TimeoutError:
            log.warning("consumer %s left without ZooKeeper's answer", self.consumer_id)


def _now_ms() -> int:
    return int(time.time() * 1000)
