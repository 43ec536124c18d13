"""The audited consumer: confluent-kafka's Consumer that says what its application got.

For applications: change one import. Calls, callbacks and settings stay confluent-kafka's. Every record that
`poll` or `consume` returns is counted by the stream and number in its `_mr` header; cumulative tier events
(`consumer_counts`) go to the events topic of the same cluster, so that the consumer group is a tier of the
audit (`group:<group.id>`), with its committed offsets as what it has passed. What is this module's own is
configured by keys `millrace.*`:

    millrace.window.ms           60000; as the audit's
    millrace.report.interval.ms  5000
    millrace.report.timeout.ms   30000; how long a report may take, and a synchronous commit wait for it
    millrace.audit.topic         millrace.audit
    millrace.content.digest      false | true: tell the content of records too

**Report, then commit.** An offset is committed only after the report that covers the records below it was
acknowledged; otherwise a consumer that died in between would have records that it got look lost. So automatic
storing of offsets is done here, after each report, and librdkafka commits what was stored; `commit` reports
first; `store_offsets` waits for the next report. An asynchronous commit goes out behind the next report and
its outcome goes to `on_commit`; a synchronous one whose report cannot be delivered raises KafkaException with
_TIMED_OUT. Two ways round it are the application's own care: offsets that a transactional producer commits,
and records filtered below this class; call `report()` before.

With an offset goes the leader epoch of the record before it, as with confluent-kafka's own commits, and, as
the commit's metadata, how much the session has told by then (`commit_mark`), so that a last report which got
lost shows; metadata of the application's own stays as it is.

Every consumer of the group must be audited: what another one gets and commits looks lost. Delivery stays at
least once: what was not committed when a consumer died is given again, to whoever takes
over. Both got it, both say so, and the audit calls it a repeat of the group.

Threads: as confluent-kafka's consumer, one that polls. A thread of this module publishes the reports and
never calls the consumer, because its calls wait for one another; what a report allows to be stored and
committed is done by the application's thread in its next call, and `poll` looks up for it while it waits.
"""

from __future__ import annotations

import atexit
import logging
import math
import operator
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from millrace.audit.clients.client_errors import kafka_error
from millrace.audit.clients.consumer_config import ConsumerConfig, read_consumer_config
from millrace.audit.clients.consumer_counts import SessionCounts, merge_commits
from millrace.audit.clients.events_topic import TopicState, connection_settings, ensure_events_topic
from millrace.audit.clients.interruption import refuse_inside
from millrace.audit.clients.known_commits import KnownCommits
from millrace.audit.contract.event_values import TierEvent
from millrace.audit.contract.group_counts import commit_mark

_log = logging.getLogger("millrace.audit.consumer")

TOPIC_TIMEOUT_S = 5.0
EXIT_TIMEOUT_S = 5.0
MAX_TOPIC_ATTEMPTS = 3
LOOK_UP_S = 0.2
MAX_WAIT_S = 3600.0

_LOCKED = frozenset(
    {
        "_apply_reported",
        "_count",
        "_has_waiting",
        "_let_go",
        "_patience_s",
        "_publish_report",
        "_remember_commit",
        "_remember_store",
        "untrusted",
    }
)
"""Methods that hold a lock of the consumer's (`interruption`)."""

_headers_of = operator.methodcaller("headers")
"""And not the method itself: with a key that is no UTF-8 confluent-kafka answers a list that is not whole,
beside an error. The interpreter's own call takes it (and dies of it), this one raises SystemError."""

_Offsets = dict[tuple[str, int], tuple[int, int | None]]
"""{(topic, partition): (next offset, leader epoch of the record before it, None where it is not told)}"""

_Waiting = tuple[_Offsets, list[list[TopicPartition]], list[list[TopicPartition]], str]
"""Positions to store, the application's own stores, its commits: what waits for a report, then a thread; and
the report's mark, which is committed with them."""


class AuditedConsumer(Consumer):
    """confluent-kafka's Consumer, audited. Raises ConfigError for a wrong `millrace.*` setting."""

    def __init__(self, *configs: Mapping[str, Any], **settings: Any):
        merged: dict[str, Any] = {}
        for config in configs:
            merged.update(config)
        extras = {name: settings.pop(name) for name in ("logger",) if name in settings}
        merged.update(settings)
        self._config: ConsumerConfig = read_consumer_config(merged)
        self._known = KnownCommits(self._config.client.get("on_commit"))
        super().__init__({**self._config.client, "on_commit": self._known}, **extras)
        self._events = self._connect_events()
        self._untrusted: dict[str, int] = {}
        self._counts = self._new_session()
        self._retired: list[SessionCounts] = []
        self._positions: _Offsets = {}
        self._stored: _Offsets = {}
        # Behind the records that a `consume` has by now and has not handed out yet.
        self._fetched: _Offsets = {}
        self._stores: list[list[TopicPartition]] = []
        self._commits: list[list[TopicPartition]] = []
        self._reported: list[_Waiting] = []
        self._under_way: list[_Waiting] = []
        self._mark = ""
        self._lock = threading.Lock()
        self._report_lock = threading.RLock()
        self._topic_ready = False
        self._topic_attempts = 0
        self._publishing = False
        self._cluster_id = ""
        self._ended = False
        self._wake = threading.Event()
        _living.add(self)
        threading.Thread(
            target=_report_regularly,
            args=(weakref.ref(self), self._wake, self._config.report_interval_ms / 1000),
            name="millrace-audit-reports",
            daemon=True,
        ).start()

    def poll(self, timeout: float | None = None) -> Any:
        """As confluent-kafka's `poll`; the record is counted as one that the application got."""
        deadline = math.inf if timeout is None or timeout < 0 else time.monotonic() + timeout
        while True:
            message = super().poll(self._patience_s(deadline))
            if message is not None:
                self._count((message,))
                return message
            if time.monotonic() >= deadline:
                return None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Any]:
        """As confluent-kafka's `consume`; the records are counted as those that the application got."""
        deadline = math.inf if timeout < 0 else time.monotonic() + timeout
        messages: list[Any] = []
        self._fetched = {}
        while True:
            some = super().consume(num_messages - len(messages), self._patience_s(deadline))
            ends = len(messages) + len(some) >= num_messages or time.monotonic() >= deadline
            if ends and not messages:
                self._count(some)
                return some
            messages += some
            self._fetched.update(_places_behind(some))
            if ends:  # not before: what a further call raises keeps all of them from the application
                self._count(messages, self._fetched)
                return messages

    def commit(  # type: ignore[override]
        self,
        message: Any = None,
        offsets: list[TopicPartition] | None = None,
        asynchronous: bool = True,
    ) -> list[TopicPartition] | None:
        """As confluent-kafka's `commit`, behind a report of everything the application has got by now."""
        refuse_inside(self, "commit", _LOCKED)
        if message is not None and offsets is not None:
            raise ValueError("message and offsets are mutually exclusive")
        if message is not None:
            offsets = [_behind(message)]
        if asynchronous:
            self._remember_commit(offsets)
            self._wake.set()
            return None
        if not self._report_now():
            raise KafkaException(
                KafkaError(
                    KafkaError._TIMED_OUT,
                    f"not committed: the audit's report was not acknowledged in "
                    f"{self._config.report_timeout_ms} ms",
                )
            )
        # Without offsets the client commits what was stored just now, where that is beyond what is committed.
        marked = {} if offsets is None else {"offsets": [_marked(each, self._mark) for each in offsets]}
        committed: list[TopicPartition] = super().commit(**marked, asynchronous=False)
        self._known.note(committed)
        return committed

    def store_offsets(self, message: Any = None, offsets: list[TopicPartition] | None = None) -> None:
        """As confluent-kafka's `store_offsets`, but stored after the next report."""
        refuse_inside(self, "store_offsets", _LOCKED)
        if (message is None) == (offsets is None):
            raise ValueError("store_offsets takes a message or offsets")
        self._remember_store([_behind(message)] if message is not None else list(offsets or ()))

    def subscribe(
        self,
        topics: list[str],
        on_assign: Callable[..., None] | None = None,
        on_revoke: Callable[..., None] | None = None,
        on_lost: Callable[..., None] | None = None,
    ) -> None:
        """As confluent-kafka's `subscribe`; before partitions go, what came from them is reported."""
        callbacks: dict[str, Any] = {"on_revoke": self._before(on_revoke)}
        if on_assign is not None:
            callbacks["on_assign"] = on_assign
        if on_lost is not None:
            callbacks["on_lost"] = self._before(on_lost)
        super().subscribe(topics, **callbacks)

    def assign(self, partitions: list[TopicPartition]) -> None:
        """As confluent-kafka's `assign`, behind a report."""
        self._let_go(None)
        super().assign(partitions)

    def unassign(self) -> None:
        """As confluent-kafka's `unassign`, behind a report."""
        self._let_go(None)
        super().unassign()

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """As confluent-kafka's `incremental_unassign`, behind a report."""
        self._let_go(partitions)
        super().incremental_unassign(partitions)

    def unsubscribe(self) -> None:
        """As confluent-kafka's `unsubscribe`, behind a report."""
        self._let_go(None)
        super().unsubscribe()

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """For the application's connection and that of the reports."""
        super().set_sasl_credentials(username, password)
        self._config.client.update({"sasl.username": username, "sasl.password": password})
        self._events.set_sasl_credentials(username, password)

    def report(self, timeout: float | None = None) -> bool:
        """Publish now what was counted since the last report; then store and commit what waited for it.

        Returns whether the report was acknowledged within `timeout` seconds (`millrace.report.timeout.ms`).
        Nothing new is true at once. For the thread that polls. Raises RuntimeError in a signal's handler that
        would wait for what it interrupted, as do `commit`, `store_offsets` and `close`.
        """
        refuse_inside(self, "report", _LOCKED)
        return self._report_now(timeout)

    def untrusted(self) -> dict[str, int]:
        """{reason: records} that the application got and no audit can speak of."""
        refuse_inside(self, "untrusted", _LOCKED)
        with self._lock:
            return dict(self._untrusted)

    def close(self) -> None:
        """Report, commit what is stored, leave the group. Safe to repeat."""
        if self._ended:
            return
        refuse_inside(self, "close", _LOCKED)
        if not self._report_now():
            _log.warning("the last report was not acknowledged: its records are not committed either")
        self._ended = True
        self._wake.set()
        try:
            super().close()
        finally:
            self._events.purge()
            self._events.close()
            _living.discard(self)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _connect_events(self) -> Producer:
        return Producer(
            {
                "linger.ms": 0,
                **connection_settings(self._config.client),
                "acks": "all",
                "enable.idempotence": True,
                "message.timeout.ms": self._config.report_timeout_ms,
            }
        )

    def _new_session(self) -> SessionCounts:
        return SessionCounts(
            self._config.group,
            secrets.token_hex(8),
            window_ms=self._config.window_ms,
            content=self._config.content,
            now_ms=_now_ms(),
            untrusted=self._untrusted,
        )

    def _count(self, messages: Iterable[Any], places: _Offsets | None = None) -> None:
        """`places`: where the application stands behind them, if that is not behind each of them."""
        now_ms = _now_ms()
        with self._lock:
            take, positions = self._counts.take, self._positions
            began = self._counts.first_offsets
            for message in messages:
                if message.error() is None:
                    topic, offset = message.topic(), message.offset()
                    place = (topic, message.partition())
                    try:
                        take(topic, message.key(), message.value(), _headers_of(message), now_ms)
                    except (SystemError, UnicodeDecodeError):
                        self._counts.take_unreadable()
                    if places is None:
                        positions[place] = (offset + 1, message.leader_epoch())
                    if place not in began:
                        self._counts.begin(*place, offset)
            positions.update(places or {})

    def _before(self, callback: Callable[..., None] | None) -> Callable[..., None]:
        def going(consumer: Any, partitions: list[TopicPartition]) -> None:
            self._let_go(partitions)
            if callback is not None:
                try:
                    callback(consumer, partitions)
                finally:
                    if self._has_waiting(partitions):
                        self._let_go(partitions)  # what the callback stored and committed, too

        return going

    def _patience_s(self, deadline: float) -> float:
        """How long to wait for records now: not long while a report under way may bring something to do."""
        self._apply_reported()
        with self._lock:
            under_way = self._publishing or self._reported or self._stores or self._commits
            waits = under_way or not all(session.is_told for session in (*self._retired, self._counts))
        rest_s = deadline - time.monotonic()
        return max(min(rest_s, LOOK_UP_S if waits else MAX_WAIT_S), 0.0)

    def _report_now(self, timeout: float | None = None) -> bool:
        told = self._publish_report(timeout)
        self._apply_reported()
        return told

    def _remember_commit(self, offsets: list[TopicPartition] | None) -> None:
        with self._lock:
            self._commits = _merged([*self._commits, self._resting_places() if offsets is None else offsets])

    def _resting_places(self) -> list[TopicPartition]:
        """What a commit without offsets means now: behind what was got, or stored, and not yet committed."""
        waiting = [each for waits in (*self._reported, *self._under_way) for each in waits[2]]
        places = _places(self._positions if self._config.stores_offsets else self._stored)
        return self._known.beyond(places, merge_commits(waiting + self._commits))

    def _remember_store(self, offsets: list[TopicPartition]) -> None:
        with self._lock:
            self._stores = _merged([*self._stores, offsets])
            for each in offsets:
                self._stored[each.topic, each.partition] = (each.offset, each.leader_epoch)

    def _let_go(self, partitions: Iterable[TopicPartition] | None) -> None:
        """Report and store before partitions (None: all) go to somebody else; then forget where they were.

        And what still waits for a report: sent later, it would set back whoever has gone on from there.
        """
        if not self._report_now():
            _log.warning("partitions go before a report was acknowledged: their last records will come again")
        gone = None if partitions is None else {(each.topic, each.partition) for each in partitions}
        with self._lock:
            waiting = [*self._reported, *self._under_way]
            for places in (self._positions, self._stored, self._fetched, *(each[0] for each in waiting)):
                for place in list(places) if gone is None else gone:
                    places.pop(place, None)
            for lists in (self._stores, self._commits, *(part for each in waiting for part in each[1:3])):
                for offsets in lists:
                    kept = [each for each in offsets if (each.topic, each.partition) not in (gone or ())]
                    offsets[:] = [] if gone is None else kept
                lists[:] = filter(None, lists)
        self._known.forget(gone)

    def _has_waiting(self, partitions: Iterable[TopicPartition]) -> bool:
        gone = {(each.topic, each.partition) for each in partitions}
        with self._lock:
            waiting = [each for offsets in (*self._stores, *self._commits) for each in offsets]
        return any((each.topic, each.partition) in gone for each in waiting)

    def _publish_report(self, timeout: float | None = None) -> bool:
        """Publish; what may be stored and committed then waits for the application's thread."""
        timeout_s = self._config.report_timeout_ms / 1000 if timeout is None else timeout
        deadline = time.monotonic() + timeout_s
        if not self._report_lock.acquire(timeout=timeout_s):
            return False
        self._publishing = True
        try:
            return self._report(deadline)
        finally:
            self._publishing = False
            self._report_lock.release()

    def _report(self, deadline: float) -> bool:
        with self._lock:
            has_news = not all(session.is_told for session in (*self._retired, self._counts))
        if has_news and not self._prepare_topic(deadline):
            return False
        with self._lock:
            positions = dict(self._positions) if self._config.stores_offsets else {}
            stores, self._stores = self._stores, []
            commits, self._commits = self._commits, []
            sessions = [*self._retired, self._counts]
            events = [(session, event) for session in sessions for event in session.report(_now_ms())]
            mark = commit_mark(self._counts.session, self._counts.told_count)
            self._under_way = [(positions, stores, commits, mark)]
        told = False
        try:
            told = self._publish(events, deadline)
        finally:
            with self._lock:
                covered, self._under_way = self._under_way, []
                if told:
                    self._reported += covered
                else:
                    self._stores = _merged(stores + self._stores)
                    self._commits = _merged(commits + self._commits)
        if not told:
            return False
        with self._lock:
            self._mark = mark
            self._retired = [session for session in self._retired if not session.is_told]
            if self._counts.is_worn(_now_ms()):
                self._retired.append(self._counts)
                self._counts = self._new_session()
                self._counts.cluster_id = self._cluster_id
            return True

    def _publish(self, events: list[tuple[SessionCounts, TierEvent]], deadline: float) -> bool:
        """Whether all of them were acknowledged; the others are said again next time."""
        if not events:
            return True
        missing = dict(enumerate(events))

        def told(number: int) -> Callable[[Any, Any], None]:
            def on_delivery(error: KafkaError | None, message: Any) -> None:
                if error is None:
                    missing.pop(number, None)

            return on_delivery

        try:
            for number, (session, event) in enumerate(events):
                key, value = session.encoded(event)
                if not self._produce(key, value, told(number), deadline):
                    break
            self._events.flush(max(deadline - time.monotonic(), 0.0))
        except KafkaException as error:
            # Without an `error_cb` the client raises a fatal error from here, once, and works no more.
            if kafka_error(error) is None:
                raise  # a signal's handler has
            _log.warning("reports go through another connection now: %s", error)
            self._events = self._connect_events()
        finally:
            with self._lock:
                for session, event in list(missing.values()):
                    session.report_again(event)
        return not missing

    def _produce(
        self, key: bytes, value: bytes, on_delivery: Callable[[Any, Any], None], deadline: float
    ) -> bool:
        """Whether to go on: False where no event is taken now."""
        while True:
            try:
                self._events.produce(self._config.events_topic, value, key, 0, on_delivery)
                return True
            except BufferError:
                if time.monotonic() >= deadline:
                    return False
                self._events.poll(0.1)
            except KafkaException as error:
                _log.warning("a report of %d bytes was not taken: %s", len(value), error)
                # One that is too large keeps the offsets that wait for it back, and no other report.
                refusal = kafka_error(error)
                return refusal is not None and refusal.code() == KafkaError.MSG_SIZE_TOO_LARGE

    def _prepare_topic(self, deadline: float) -> bool:
        """Whether events can be sent; a cluster that answers but creates nothing must do so unasked."""
        if not self._topic_ready:
            timeout_s = min(max(deadline - time.monotonic(), 0.1), TOPIC_TIMEOUT_S)
            state = ensure_events_topic(self._config.client, self._config.events_topic, timeout_s)
            self._topic_attempts += state is TopicState.UNANSWERED
            ready = state is TopicState.READY or self._topic_attempts >= MAX_TOPIC_ATTEMPTS
            self._topic_ready = ready and self._learn_cluster(timeout_s)
        return self._topic_ready

    def _learn_cluster(self, timeout_s: float) -> bool:
        try:
            described = self._events.list_topics(self._config.events_topic, timeout=timeout_s)
        except KafkaException:
            return False
        with self._lock:
            self._cluster_id = self._counts.cluster_id = described.cluster_id or ""
        return True

    def _apply_reported(self) -> None:
        """Store and commit what reports cover; in the application's thread."""
        with self._lock:
            reported, self._reported = self._reported, []
        for positions, stores, commits, mark in reported:
            self._store(positions, stores, mark)
            self._commit_behind(commits, mark)

    def _store(self, positions: _Offsets, stores: list[list[TopicPartition]], mark: str) -> None:
        """librdkafka's automatic commits take it from there."""
        for each in merge_commits([_places(positions), *stores]):
            try:
                super().store_offsets(offsets=[_marked(each, mark)])
            except (KafkaException, RuntimeError):
                continue  # not ours any more: whoever has it now gets the records again

    def _commit_behind(self, commits: list[list[TopicPartition]], mark: str) -> None:
        offsets = [_marked(each, mark) for each in merge_commits(commits)]
        try:
            if commits:  # of nothing too: the client tells `on_commit`
                super().commit(offsets=offsets, asynchronous=True)
        except (KafkaException, RuntimeError) as error:
            _log.info("nothing was committed: %s", error)


def _place(topic: str, partition: int, offset: int, epoch: int | None, metadata: str = "") -> TopicPartition:
    """With the leader epoch, where it is known (KIP-320): whoever goes on from the commit is told of a log
    that was shortened since."""
    if epoch is None or epoch < 0:
        return TopicPartition(topic, partition, offset, metadata)
    return TopicPartition(topic, partition, offset, metadata, epoch)


def _places_behind(messages: Iterable[Any]) -> _Offsets:
    return {
        (message.topic(), message.partition()): (message.offset() + 1, message.leader_epoch())
        for message in messages
        if message.error() is None
    }


def _places(offsets: _Offsets) -> list[TopicPartition]:
    return [_place(*place, *where) for place, where in offsets.items()]


def _merged(lists: list[list[TopicPartition]]) -> list[list[TopicPartition]]:
    """What waits, as one list: it does not grow with the calls."""
    return [merge_commits(lists)] if lists else []


def _behind(message: Any) -> TopicPartition:
    """Where a consumer stands that got the record. Raises KafkaException for a message that is none, such as
    the end of a partition, behind which stands a record that nobody has got."""
    if message.error() is not None:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, "the message is an error and no record"))
    return _place(message.topic(), message.partition(), message.offset() + 1, message.leader_epoch())


def _marked(place: TopicPartition, mark: str) -> TopicPartition:
    """The same with the mark of the report that covers it, unless the application has metadata of its own."""
    if place.metadata or not mark:
        return place
    return _place(place.topic, place.partition, place.offset, place.leader_epoch, mark)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _report_regularly(
    reference: weakref.ref[AuditedConsumer], wake: threading.Event, interval_s: float
) -> None:
    """The reporting thread: at every interval, and at once when a commit waits for a report."""
    while True:
        wake.wait(interval_s)
        wake.clear()
        consumer = reference()
        if consumer is None or consumer._ended:
            return
        try:
            consumer._publish_report()
        except Exception:
            _log.exception("the audit's report failed; the next one will hold what this one did not say")
        del consumer


_living: weakref.WeakSet[AuditedConsumer] = weakref.WeakSet()


def _report_at_exit() -> None:
    """An application that ends without closing has still got what it got; nothing is committed for it."""
    for consumer in list(_living):
        try:
            consumer._publish_report(EXIT_TIMEOUT_S)
        except Exception:
            _log.exception("the audit's last report failed")  # the others have theirs all the same


atexit.register(_report_at_exit)
