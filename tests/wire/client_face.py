"""What a foreign client looks like to a test: records in, records out, groups, transactions, refusals.

The faces are filled by `client_confluent.py`, `client_kafka_python.py` and `client_aiokafka.py`, three
independent implementations of the protocol; `foreign_clients.py` lists them. An adapter only translates
names: it adds no retries, and it waits for nothing but the client's own answers. Every adapter works
against any Kafka-protocol address.

A refusal is named as the protocol names it, whoever reports it, so that one expectation holds for all
clients; what a client refuses on its own keeps the client's name.
"""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kio.schema.errors import ErrorCode

from tests.waiting import patience, until

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PATIENCE_S = 90.0
LARGEST_REQUEST = 8 << 20
HEARTBEAT_INTERVAL_MS = 300
SESSION_TIMEOUT_MS = 6_000
POLL_S = 0.02
FETCH_WAIT_MS = 50
"""Readers that look once and go: nobody waits half a second for an answer without records."""


@dataclass(frozen=True)
class Sent:
    """A record as it is handed to a client."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 1_357_034_400_000
    partition: int = 0


@dataclass(frozen=True)
class Received:
    """A record as a client hands it out."""

    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int
    partition: int
    offset: int

    def as_sent(self) -> Sent:
        return Sent(self.value, self.key, self.headers, self.timestamp_ms, self.partition)


class Refused(Exception):
    """The broker, or the client on its own, refused something; `reason` is the error's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def error_name(code: int) -> str:
    """The protocol's name of an error code: 10 is MESSAGE_TOO_LARGE."""
    return str(ErrorCode(code).name).upper()


def refused(error: Any) -> Refused:
    """What kafka-python or aiokafka raised, under the protocol's name where it has one."""
    code = getattr(error, "errno", None)
    return Refused(error_name(code) if isinstance(code, int) and code > 0 else type(error).__name__)


def handed_out(record: Any) -> Received:
    """A record as kafka-python and aiokafka hand it out."""
    return Received(
        record.value, record.key, tuple(record.headers), record.timestamp, record.partition, record.offset
    )


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    until(condition, what, within_s=timeout_s)


class GroupMember:
    """A group member in a thread of its own; the test reads its attributes.

    A subclass fills `_run`: subscribe, then until `_leaving` is set keep `assigned` true, append to
    `records`, and commit what was appended. `revoked` lists what was taken away, rebalance by rebalance,
    where the library says so. `failure` holds the traceback of what ended the member, `refusal` the error's
    name.
    """

    def __init__(self, bootstrap: str, group: str, topic: str, **options: Any) -> None:
        self.bootstrap = bootstrap
        self.group = group
        self.topic = topic
        self.options = options
        self.assigned: frozenset[int] = frozenset()
        self.records: list[Received] = []
        self.revoked: list[frozenset[int]] = []
        self.failure: str | None = None
        self.refusal: str | None = None
        self.silent = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Commit, leave the group, and end the thread."""
        self._leaving.set()
        self._thread.join(patience(PATIENCE_S))
        assert not self._thread.is_alive(), f"a member of {self.group} does not come to its end"
        assert self.failure is None, self.failure

    def fall_silent(self) -> None:
        """Ask for nothing more until it leaves; only some libraries' members can (`max.poll.interval.ms`)."""
        self.silent = True

    def abandon(self) -> None:
        """End the thread of a member that its test did not let leave, whatever became of it."""
        self._leaving.set()
        self._thread.join(patience(5.0))

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:
            self.refusal = error.reason if isinstance(error, Refused) else refused(error).reason
            self.failure = traceback.format_exc()

    def _run(self) -> None:
        raise NotImplementedError


MEMBERS: list[GroupMember] = []
"""Every member that was started; a fixture of `conftest.py` ends those that a failed test left running."""


class TransactionalProducer(ABC):
    """A producer with a transactional id. Every method raises Refused.

    The constructor has already taken the id over (InitProducerId): a producer that had it before is fenced,
    and what that one left open is aborted.
    """

    def __init__(self, bootstrap: str, transactional_id: str, timeout_ms: int = 60_000) -> None:
        raise NotImplementedError

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send(self, topic: str, records: Sequence[Sent]) -> list[int]:
        """Send and wait for every acknowledgement; the offsets."""

    @abstractmethod
    def send_offsets(self, group: str, offsets: Mapping[tuple[str, int], int]) -> None:
        """Make committed offsets of a group, (topic, partition) → offset, part of the transaction."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """End without a word about an open transaction, where the client can."""


class ForeignAdmin(ABC):
    """The administration of one client library. Every method raises Refused."""

    @abstractmethod
    def create_topic(
        self, name: str, partitions: int = 1, replicas: int = 1, configs: Mapping[str, str] | None = None
    ) -> None: ...

    @abstractmethod
    def add_partitions(self, topic: str, total: int) -> None:
        """Partitions up to this number."""

    @abstractmethod
    def alter_topic(self, topic: str, name: str, value: str) -> None:
        """Set one setting."""

    @abstractmethod
    def delete_topic(self, topic: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class ForeignClient(ABC):
    """One client library."""

    name: str
    sends_null_headers = False
    sends_null_records = False
    """Whether a record without both key and value may be sent; any client must be able to read one."""
    member_type: type[GroupMember]
    transactional_type: type[TransactionalProducer]
    admin_type: type[ForeignAdmin] | None = None
    """None where tests use the library's own admin client, as they do confluent-kafka's."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @abstractmethod
    def produce(
        self,
        topic: str,
        records: Sequence[Sent],
        codec: str = "none",
        *,
        acks: int = -1,
        idempotent: bool = False,
        largest_request: int = LARGEST_REQUEST,
        retries: int | None = None,
    ) -> list[int]:
        """Send all records, wait for every acknowledgement; the offsets. Raises Refused.

        With `retries=0` the first refusal of the broker is the last word, also where it might pass.
        """

    @abstractmethod
    def consume(self, topic: str, partitions: Sequence[int], count: int, start: int = 0) -> list[Received]:
        """Read `count` records from offset `start` of each partition on, then stop. Raises Refused."""

    @abstractmethod
    def drain(self, topic: str, partition: int = 0, *, committed: bool = False) -> list[Received]:
        """Every record up to the end; with `committed` only committed ones, up to the last stable offset."""

    @abstractmethod
    def first_read(self, topic: str, start: int, reset: str) -> Received:
        """The record that a consumer is given first which seeks `start` with this auto.offset.reset."""

    @abstractmethod
    def offset_for_time(self, topic: str, partition: int, timestamp_ms: int) -> int | None:
        """Offset of the first record at or after the time, None when there is none."""

    @abstractmethod
    def bounds(self, topic: str, partition: int, *, committed: bool = False) -> tuple[int, int]:
        """First offset, and the next one to be written; with `committed` the last stable offset instead."""

    @abstractmethod
    def committed(self, group: str, topic: str, partition: int) -> int | None:
        """The group's committed offset."""

    @abstractmethod
    def commit(self, group: str, topic: str, partition: int, offset: int, metadata: str = "") -> None:
        """Commit for a group without members. Raises Refused."""

    def member(self, group: str, topic: str, **options: Any) -> GroupMember:
        started = self.member_type(self.bootstrap, group, topic, **options)
        MEMBERS.append(started)
        return started

    def transactional(self, transactional_id: str, timeout_ms: int = 60_000) -> TransactionalProducer:
        return self.transactional_type(self.bootstrap, transactional_id, timeout_ms)
