"""What every handler is given: the request's header, who sent it, and the broker's services.

`BrokerServices` is built once by `server/broker.py`; a `RequestContext` belongs to one request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from millrace.broker.config import BrokerConfig
from millrace.broker.coordination.client_quotas import ClientQuotaStore
from millrace.broker.coordination.controller_client import ControllerClient
from millrace.broker.coordination.elections import Elections
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.producer_ids import ProducerIds
from millrace.broker.coordination.reassignments import Reassignments
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.checksum import Buffer
from millrace.broker.protocol.frames import RequestHead
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.server.fetch_sessions import FetchSessionCache
from millrace.broker.server.memory_limits import AnswerBacklog
from millrace.broker.server.quotas import ClientQuotas
from millrace.broker.server.transaction_markers import MarkerWriter
from millrace.broker.server.transactional_produce import TransactionalAppends
from millrace.broker.telemetry.metrics import BrokerMetrics
from millrace.broker.transactions.coordinator import TransactionCoordinator
from millrace.broker.transactions.verification import TransactionGate


class Clock(Protocol):
    """Where the broker takes the time from."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch: for what is written down, and for what is compared with that. It may
        be set back or forward."""
        ...

    def steady_ms(self) -> int:
        """Milliseconds of a clock that nobody sets: for how long something has lasted or may last. It means
        nothing outside this process."""
        ...


class SpokenApi(NamedTuple):
    """One line of ApiVersions' answer; both ends belong to the range."""

    api_key: int
    first: int
    last: int


class SystemClock:
    """The machine's clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


@dataclass(slots=True, kw_only=True)
class BrokerServices:
    """The parts of a running broker that handlers call."""

    config: BrokerConfig
    clock: Clock
    metrics: BrokerMetrics
    metadata_cache: MetadataCache
    replica_manager: ReplicaManager
    controller: ControllerClient
    reassignments: Reassignments
    elections: Elections
    producer_ids: ProducerIds
    groups: GroupCoordinator
    transactions: TransactionCoordinator
    transaction_gate: TransactionGate
    transactional_appends: TransactionalAppends
    marker_writer: MarkerWriter
    quotas: ClientQuotas
    quota_store: ClientQuotaStore
    fetch_sessions: FetchSessionCache
    backlog: AnswerBacklog
    spoken: Sequence[SpokenApi] = ()


class Shortcut(Protocol):
    """Answers requests that are like an earlier one on their connection, without all that was found out
    then."""

    api_key: ClassVar[int]

    def fits(self, frame: memoryview) -> bool:
        """Whether the request is like that one."""
        ...

    def answer(self, frame: memoryview) -> list[Buffer] | None:
        """The answer. None for a request that is not like that one, or has to go the usual way nevertheless.
        `frame` is not kept."""
        ...


@dataclass(slots=True)
class ConnectionMemory:
    """What requests leave for those that come after them on their connection."""

    shortcut: Shortcut | None = None
    last_fetch: bytes = b""
    """The frame of a fetch: a shortcut is made if the next is like it. Empty once that has happened."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request. `client_address` is the peer's host."""

    head: RequestHead
    client_address: str
    broker: BrokerServices
    memory: ConnectionMemory
