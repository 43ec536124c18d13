"""The audited producer: confluent-kafka's Producer that says what it published.

For applications: change one import. Calls, callbacks and settings stay confluent-kafka's; `acks=all` and
idempotence are the defaults. Every record gets the `_mr` header; counts of every topic and window go to the
events topic through the same connection. What is this module's own is configured by keys `millrace.*`:

    millrace.producer            name in headers and reports (default application@host)
    millrace.application         default: the script's name
    millrace.datacenter          default ""
    millrace.window.ms           60000 (100 to 7 days)
    millrace.report.interval.ms  10000
    millrace.lease.ms            silence after which it counts as dead (3 intervals, at least 60000)
    millrace.audit.topic         millrace.audit (`audit_topic` of audit.yaml must say the same)
    millrace.journal             a file's path: unreported counts survive kill -9 (default none)
    millrace.identity            full | compact (the producer's name is in the events only)
    millrace.content.digest      false | true: reports tell the content of records too (`content_digest`)

and `partitioner`, `encoder`, `key.serializer`, `value.serializer` (`preparation`). `send` is synchronous, as
in Kafka 0.7, whose settings are taken with `producer.type` (`producer_config`).

Differences from confluent-kafka: `produce_batch` takes headers and timestamps too; topic names that no broker
takes are refused at once; without a `timestamp` the creation time is set here; `close` takes a timeout; `len`
and `flush` do not count reports; after a fork the child's producer refuses to work.
Records of a transaction count when it is committed, and its reports go through a connection of their own.

Threads: `produce`, `poll` and `flush` may be called from any. One thread of this module publishes the
reports; it serves no delivery callbacks, those run where the application calls `poll` or `flush`, but for
those of a producer that was dropped without `close`.

The per-record path allocates the header, one bound method and the numbers, nothing else: every attribute
access there is counted (tests/benchmarks/audit/bench_producer.py). What the records of a millisecond have in
common is looked up once for all of them (`session`, a stream's moment).
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from millrace.audit.clients import producer_life
from millrace.audit.clients.delivery_reports import (
    DIGEST_SHIFT,
    DeliveryCallback,
    DeliveryReports,
    Destination,
    first_given,
)
from millrace.audit.clients.event_publisher import EventPublisher
from millrace.audit.clients.interruption import is_refusal, refuse_inside
from millrace.audit.clients.open_streams import OpenStreams
from millrace.audit.clients.preparation import (
    Preparation,
    check_messages,
    digest_of,
    error_of,
    without_identity,
)
from millrace.audit.clients.producer_config import ProducerConfig, read_config
from millrace.audit.clients.producer_life import ReportingThread, drain, seconds_left
from millrace.audit.clients.recovery import open_journal
from millrace.audit.clients.sending import ProducerData, Standing, queue_all, send_all
from millrace.audit.clients.session import StreamSession, WindowCounts
from millrace.audit.clients.told_stream import ProducerIdentity
from millrace.audit.clients.transaction_counts import Outcome
from millrace.audit.clients.transactions import Transactions
from millrace.audit.contract.events import CLOSED
from millrace.audit.contract.header import HEADER_KEY, encode_producer_name, identity_packer, identity_suffix

BATCH_RUN = 256
PURGE_TIMEOUT_S, TOPIC_TIMEOUT_S = 1.0, 5.0

# What confluent-kafka raises before it takes a record, and others perhaps after (`is_refusal`).
_NOT_TAKEN = (BufferError, KafkaException, NotImplementedError, OverflowError, TypeError, ValueError)

_LOCKED = frozenset({"_tell_the_end", "report"})
"""Methods that hold a lock of the producer's (`interruption`)."""

_bind = MethodType
_produce, _poll = Producer.produce, Producer.poll
_time_ns = time.time_ns


class AuditedProducer(Producer):
    """confluent-kafka's Producer, audited. Raises ConfigError for a wrong `millrace.*` setting."""

    # Looked at for every record: where the base is made in C, a slot costs a quarter of another attribute.
    __slots__ = ("__dict__", "__weakref__", "_content", "_default_callback", "_does_more", "_journal",
                 "_pack_identity", "_refusal", "_streams")  # fmt: skip

    def __init__(self, *configs: Mapping[str, Any], **settings: Any):
        merged: dict[str, Any] = {}
        for config in configs:
            merged.update(config)
        extras = {name: settings.pop(name) for name in ("logger",) if name in settings}
        merged.update(settings)
        self._refusal: str | None = _UNFINISHED
        self._has_aborted, self._ended_whole = True, None  # type: bool, bool | None
        self._closing = threading.RLock()
        self._config: ProducerConfig = read_config(merged)
        self._default_callback: DeliveryCallback | None = self._config.on_delivery
        super().__init__(self._config.client, **extras)
        self._journal = open_journal(self._config.journal, _now_ms())
        self._identity = ProducerIdentity(
            session=secrets.token_hex(8),
            producer=self._config.producer,
            host=self._config.host,
            application=self._config.application,
            datacenter=self._config.datacenter,
        )
        name = encode_producer_name(self._config.producer)
        self._header_name = name if self._config.name_in_header else b""
        self._pack_identity = identity_packer(self._header_name)
        self._content = self._config.content
        self._preparation = Preparation(self._config.preparation) if self._config.preparation else None
        self._open_streams = OpenStreams(self._identity, self._config, self._journal)
        self._streams = self._open_streams.by_topic  # looked at for every record
        self._report_lock = threading.Lock()
        self._transactions = Transactions(self._config.transactional, self._journal)
        self._transaction_lock = self._transactions.lock
        self._does_more = bool(self._transaction_lock or self._preparation or self._content)
        self._delivery_reports = DeliveryReports(
            self._journal, sent_once=self._config.sent_once, only_errors=self._config.only_errors
        )
        self._publisher = EventPublisher(
            self._config.events_topic,
            self._config.client,
            self._journal,
            transactional=self._config.transactional,
            extras=extras,
        )
        self._reporting = ReportingThread(self, self._config.report_interval_ms / 1000)
        self._refusal = None
        producer_life.begin(self, self._reporting)
        if self._publisher.owes:
            self._reporting.wake.set()

    def __del__(self) -> None:
        """One that is dropped without `close` is closed by its reporting thread, callbacks and all."""
        if hasattr(self, "_refusal") and not self._is_over():
            self._reporting.close_dropped(self)

    @property
    def refusal(self) -> str | None:
        """Why this producer works no more; None while it does."""
        return self._refusal

    def produce(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int = -1,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
        timestamp: int = 0,
        headers: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
    ) -> None:
        """Send a record as confluent-kafka's `produce` does; `timestamp` is its creation time (now).

        Raises what confluent-kafka raises; after a BufferError the record's number goes to the next record.
        """
        does_more = self._does_more
        if does_more:
            lock = self._transaction_lock
            if lock is not None and not lock._is_owned():  # type: ignore[attr-defined]
                with lock:  # which a signal's handler that raises cannot leave locked
                    AuditedProducer.produce(
                        self, topic, value, key, partition, callback, on_delivery, timestamp, headers
                    )
                return
            if self._preparation is not None:
                self._check_usable()
                value, key, partition = self._preparation.prepare(self, topic, value, key, partition, headers)
        if callback is None:  # one that is false, as an empty list with `__call__`, is one
            callback = self._default_callback if on_delivery is None else on_delivery
        sequence = 0
        if not timestamp:
            try:
                stream = self._streams[topic]
                since_ns, until_ns, numbers, created_ms, window, suffix = stream.moment
                if since_ns <= _time_ns() < until_ns:
                    sequence = next(numbers, 0)
            except KeyError:
                pass  # the topic's first record
        if not sequence:
            stream, window, sequence, created_ms, suffix = self._number(topic, timestamp)
        try:
            pack = self._pack_identity
            identity = pack(stream.prefix, sequence, suffix)
            destination = window.destination or self._new_destination(stream, window)
            told, function = destination.last
            number = sequence
            if does_more and self._content:
                headers = None if headers is None else without_identity(headers)  # it may be read only once
                number |= digest_of(sequence, key, value, headers) << DIGEST_SHIFT
            _produce(
                self,
                topic,
                value,
                key,
                partition,
                _bind(function, number) if callback is told else destination.bind(number, callback),
                None,
                created_ms,
                [(HEADER_KEY, identity)]
                if headers is None
                else [*without_identity(headers), (HEADER_KEY, identity)],
            )
        except BaseException as error:
            # A signal's handler may raise after the client took the record: its number is not free.
            if isinstance(error, _NOT_TAKEN) and is_refusal(error):
                stream.give_back(window, sequence)
            else:
                self._delivery_reports.in_doubt(stream, window, sequence)
            raise

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = -1,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> int:
        """Send many; returns how many were taken, and marks the others with `_error`.

        A message may have `value`, `key`, `partition`, `callback`, `timestamp`, `headers`. Raises TypeError.
        """
        check_messages(messages, encoded=self._preparation is None)
        callback = first_given(callback, on_delivery, self._default_callback)
        in_runs = not self._does_more
        accepted = 0
        for start in range(0, len(messages), BATCH_RUN):
            part = messages[start : start + BATCH_RUN]
            stream = self._streams.get(topic)
            run = None
            if in_runs and stream is not None and not any(message.get("timestamp") for message in part):
                created_ms = _now_ms()
                if created_ms >= (stream.promise_ms or 0):
                    run = stream.assign_run(created_ms, len(part))
            if run is None or stream is None:
                accepted += sum(
                    self._produce_message(topic, message, partition, callback) for message in part
                )
            else:
                accepted += self._produce_run(stream, run, created_ms, part, partition, callback)
        return accepted

    def send(
        self,
        data: str | ProducerData | Iterable[ProducerData],
        values: Any = None,
        key: Any = None,
        *,
        timeout: float = -1,
    ) -> list[Standing]:
        """Send one or many and wait until the cluster has them: where each of them stands, in order.

        `send(topic, value, key)`, `send(topic, [value, ...], key)`, or ProducerData, one or many. Raises
        NotDelivered when any was not acknowledged (in `timeout` seconds; by default the client's own timeouts
        decide), and what `produce` raises. With `producer.type` async it only queues, and returns no places.
        """
        if isinstance(data, str):
            items: Iterable[ProducerData] = (ProducerData(data, values, key),)
        else:
            items = (data,) if isinstance(data, ProducerData) else data
        if self._config.send_waits:
            return send_all(self, items, timeout)
        queue_all(self, items)
        return []

    def poll(self, timeout: float = -1) -> int:
        """Serve delivery callbacks; what they told is in the journal before this returns."""
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        journal = self._journal
        if journal is None:
            return _poll(self, timeout)
        served = 1  # what one of several callbacks raises ends the poll
        try:
            served = _poll(self, timeout)
            return served
        finally:
            if served:
                journal.settle()

    def flush(self, timeout: float = -1) -> int:
        """Wait until all is delivered; returns how many records are still in the queue."""
        self._check_usable("flush")
        try:
            left = int(super().flush(timeout))
        finally:
            if self._journal is not None:
                self._journal.settle()
        return max(left - self._publisher.in_flight, 0)

    def __len__(self) -> int:
        """Records that wait for delivery or whose callbacks were not served; reports do not count."""
        return max(super().__len__() - self._publisher.in_flight, 0)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Give up records; they are ambiguous, or failed where nothing is ever sent twice (`retries` 0)."""
        self._check_usable()
        super().purge(in_queue, in_flight, blocking)

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._check_usable()
        return super().list_topics(timeout=timeout) if topic is None else super().list_topics(topic, timeout)

    def cluster_id(self, timeout: float = -1) -> str:
        self._check_usable()
        return str(super().cluster_id(timeout))

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """For the application's connection, and for what the reports need of the cluster."""
        self._check_usable()
        super().set_sasl_credentials(username, password)
        self._config.client.update({"sasl.username": username, "sasl.password": password})
        self._publisher.set_credentials(username, password)

    def init_transactions(self, timeout: float = -1) -> None:
        self._check_usable()
        super().init_transactions(timeout)

    def begin_transaction(self) -> None:
        """Records from here on count when the transaction is committed."""
        self._check_usable("begin_transaction")
        self._transactions.begin(super().begin_transaction)

    def send_offsets_to_transaction(self, positions: Any, group_metadata: Any, timeout: float = -1) -> None:
        self._check_usable()
        super().send_offsets_to_transaction(positions, group_metadata, timeout)

    def commit_transaction(self, timeout: float = -1) -> None:
        """Commit; the transaction's records are acknowledged then.

        An error that can be retried, or that asks for an abort, leaves them pending until the next call; a
        fatal one leaves them ambiguous.
        """
        self._check_usable("commit_transaction")
        self._transactions.finish(super().commit_transaction, timeout, Outcome.COMMITTED)

    def abort_transaction(self, timeout: float = -1) -> None:
        """Abort; the transaction's records are failed then, for no reader of committed data will see them."""
        self._check_usable("abort_transaction")
        self._transactions.finish(super().abort_transaction, timeout, Outcome.ABORTED)

    def close(self, timeout: float = -1) -> bool:
        """Deliver what is queued, report the final counts and that the streams are closed. Safe to repeat.

        An open transaction is aborted. Without a timeout (seconds) it ends when all is delivered or given up
        by its own timeout; with one, what is left is purged. Returns whether all was delivered, reports too,
        and the same when it is repeated; a journal keeps what was not. One that was interrupted (Ctrl-C) is
        gone on with when it is repeated, or at the process's end. While another thread closes it, this
        waits for that. Raises a callback's first error at its end, and RuntimeError at once in a signal's
        handler that would wait for what it interrupted.
        """
        if self._is_over() or (self._refusal is not None and self._closing._is_owned()):  # type: ignore[attr-defined]
            return bool(self._ended_whole)
        refuse_inside(self, "close", _LOCKED)
        deadline = math.inf if timeout < 0 else time.monotonic() + timeout
        if not self._closing.acquire(timeout=seconds_left(deadline)):
            return False
        try:
            return bool(self._ended_whole) if self._is_over() else self._close(deadline)
        finally:
            self._closing.release()

    def _is_over(self) -> bool:
        """Whether there is nothing to close; a `close` that was interrupted has left something."""
        return self._refusal is not None and (self._refusal != _CLOSED or self._ended_whole is not None)

    def _close(self, deadline: float) -> bool:
        """As `close`, by the one thread that does."""
        raised: list[Exception] = []
        if self._refusal is None:
            abort, patience_s = super().abort_transaction, seconds_left(deadline, share=3)
            self._has_aborted = self._transactions.abort_open(abort, patience_s, raised)
            drain(self, seconds_left(deadline, share=2), raised)
            self._refusal = _CLOSED  # from here on nothing is taken
        streams = self._open_streams.end(_CLOSED)
        self._transactions.end(self._transactions.open, Outcome.UNKNOWN)
        delivered = self._tell_the_end(streams, deadline, raised)
        if self._journal is not None:
            self._journal.close()
        if self._publisher.own_connection is not None:
            self._publisher.own_connection.close()
        # The client's own `close` aborts what is open, and waits for that without an end.
        self._ended_whole = bool(super().close()) and delivered if self._has_aborted else False
        producer_life.end(self, self._reporting)
        if raised:
            raise raised[0]
        return self._ended_whole

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self) -> None:
        """Publish now what changed since the last report, rather than at the next interval."""
        if self._refusal is not None:
            return
        refuse_inside(self, "report", _LOCKED)
        with self._report_lock:
            if self._refusal is not None:
                return
            if self._preparation is not None:
                self._preparation.refresh(self)
            if not self._publisher.prepare_topic(TOPIC_TIMEOUT_S):
                return
            self._publisher.publish_owed(self)
            for stream in self._publisher.take_undelivered():
                if stream.state == CLOSED:
                    self._open_streams.tell_again(stream)
            for stream, events, is_last in self._open_streams.reports(_now_ms):
                deadline = time.monotonic() + TOPIC_TIMEOUT_S if is_last else None
                self._publisher.publish(self, stream, events, deadline)
            self._publisher.serve()

    def forked(self) -> list[Producer]:
        """In a forked child: refuse to work; returns the clients whose threads the child does not have.

        Locks are made anew, because a thread that held one does not exist here either.
        """
        self._refusal = _FORKED
        self._open_streams.forked(_FORKED)
        self._transaction_lock = self._transactions.forked()
        if self._journal is not None:
            self._journal.abandon()
        own = self._publisher.own_connection
        return [self] if own is None else [self, own]

    def _number(self, topic: str, timestamp: int) -> tuple[StreamSession, WindowCounts, int, int, bytes]:
        """(stream, window, sequence, creation time, end of the header) of a record that is in no moment."""
        number = self._open_streams.number
        stream, window, sequence, created_ms = number(topic, timestamp, _now_ms, self._open_stream)
        try:
            if stream.run_end > stream.reserved:
                self._reserve(stream, window, stream.run_end)
            suffix = self._new_suffix(created_ms)
            if not timestamp:
                stream.keep_moment(window, created_ms, suffix)
            return stream, window, sequence, created_ms, suffix
        except BaseException:
            self._delivery_reports.in_doubt(stream, window, sequence)
            raise

    def _open_stream(self, topic: str, clocked: bool) -> StreamSession:
        self._check_usable()
        stream = self._open_streams.open(topic, clocked=clocked)
        self._reporting.wake.set()
        return stream

    def _check_usable(self, call: str = "") -> None:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        if call:
            refuse_inside(self, call, _LOCKED)

    def _reserve(self, stream: StreamSession, window: WindowCounts, sequence: int) -> None:
        if self._journal is not None:
            self._journal.reserve(stream, window, sequence)

    def _new_suffix(self, created_ms: int) -> bytes:
        return identity_suffix(created_ms, self._header_name)

    def _new_destination(self, stream: StreamSession, window: WindowCounts) -> Destination:
        destination = self._delivery_reports.destination(stream, window, self._transactions.open)
        # Outside of a transaction a transactional client refuses the record: nothing to keep.
        if self._transaction_lock is None or self._transactions.open is not None:
            window.destination = destination
        return destination

    def _produce_message(
        self, topic: str, message: dict[str, Any], partition: int, callback: DeliveryCallback | None
    ) -> bool:
        """One message of a batch; whether it was taken."""
        own = message.get("partition")
        try:
            self.produce(
                topic,
                message.get("value"),
                message.get("key"),
                partition if own is None else own,
                first_given(message.get("callback"), callback),
                timestamp=message.get("timestamp") or 0,
                headers=message.get("headers"),
            )
        except (BufferError, KafkaException) as error:
            message["_error"] = error_of(error)
            return False
        return True

    def _produce_run(
        self,
        stream: StreamSession,
        run: tuple[WindowCounts, int],
        created_ms: int,
        messages: list[dict[str, Any]],
        partition: int,
        callback: DeliveryCallback | None,
    ) -> int:
        """Messages of a batch under numbers in a row; one that is refused leaves its number to the next."""
        window, first = run
        sequence, last = first, first + len(messages) - 1
        try:
            if last > stream.reserved:
                self._reserve(stream, window, last)
            suffix, pack = self._new_suffix(created_ms), self._pack_identity
            destination = window.destination or self._new_destination(stream, window)
            for message in messages:
                identity = (HEADER_KEY, pack(stream.prefix, sequence, suffix))
                own, headers = message.get("partition"), message.get("headers")
                try:
                    _produce(
                        self,
                        stream.topic,
                        message.get("value"),
                        message.get("key"),
                        partition if own is None else own,
                        destination.bind(sequence, first_given(message.get("callback"), callback)),
                        None,
                        created_ms,
                        [identity] if headers is None else [*without_identity(headers), identity],
                    )
                    sequence += 1
                except (BufferError, KafkaException) as error:
                    if not is_refusal(error):
                        raise
                    message["_error"] = error_of(error)
        except BaseException as error:
            if sequence <= last and not (isinstance(error, _NOT_TAKEN) and is_refusal(error)):
                self._delivery_reports.in_doubt(stream, window, sequence)
                sequence += 1
            raise
        finally:
            if sequence <= last:
                stream.give_back(window, sequence, last)
        return sequence - first

    def _tell_the_end(self, streams: list[StreamSession], deadline: float, raised: list[Exception]) -> bool:
        """The last records and reports; whether all of them were delivered. A purge of the application's that
        came just before may take the reports with it; those go out again."""
        given_up = False
        closing = list(streams)
        while True:
            if not self._report_lock.acquire(timeout=seconds_left(deadline)):
                self._flush_all(deadline, raised)
                return False
            try:
                earlier = self._publisher.take_undelivered()
                streams += [each for each in earlier if each.state == CLOSED and each not in streams]
                closing += [each for each in streams if each not in closing]
                self._report_closed(streams, deadline)
            finally:
                self._report_lock.release()
            delivered = self._flush_all(deadline, raised)
            undelivered = self._publisher.take_undelivered()
            streams = [each for each, error in undelivered.items() if error and error.code() in _PURGED]
            given_up |= len(streams) < len(undelivered) or any(each.untold for each in closing)
            if not streams or not delivered:
                return delivered and not undelivered and not given_up and not self._publisher.owes

    def _report_closed(self, streams: list[StreamSession], deadline: float) -> None:
        patience_s = seconds_left(deadline, share=2, unlimited=TOPIC_TIMEOUT_S)
        self._publisher.prepare_topic(min(max(patience_s, 0.1), TOPIC_TIMEOUT_S))
        self._publisher.publish_owed(self)
        for stream in streams:
            self._publisher.publish_end(self, stream, _now_ms(), deadline)

    def _flush_all(self, deadline: float, raised: list[Exception]) -> bool:
        """The last records and reports; what is left at the deadline is purged."""
        own = self._publisher.own_connection
        clients: list[Any] = [super()] if own is None else [super(), own]
        delivered = True
        for client in clients:
            if drain(client, seconds_left(deadline), raised) != 0:
                delivered = False
                client.purge()
                drain(client, PURGE_TIMEOUT_S, raised)
        return delivered


_PURGED = {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
_CLOSED = "this producer is closed"
_FORKED = "a forked process must open its own producer: the parent's streams are not its own"
_UNFINISHED = "this producer was never opened"


def _now_ms() -> int:
    return _time_ns() // 1_000_000
