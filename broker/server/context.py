"""What every handler is given: the request's header, who sent it, and the broker's services.

`BrokerServices` is built once by `server/broker.py`; a `RequestContext` belongs to one request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from millrace.broker.config import BrokerConfig
from millrace.broker.coordination.controller_client import ControllerClient
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.producer_ids import ProducerIds
from millrace.broker.groups.coordinator import GroupCoordinator
from millrace.broker.protocol.frames import RequestHead
from millrace.broker.replication.replica_manager import ReplicaManager
from millrace.broker.telemetry.metrics import BrokerMetrics


class Clock(Protocol):
    """Where the broker takes the time from."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
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


@dataclass(slots=True, kw_only=True)
class BrokerServices:
    """The parts of a running broker that handlers call."""

    config: BrokerConfig
    clock: Clock
    metrics: BrokerMetrics
    metadata_cache: MetadataCache
    replica_manager: ReplicaManager
    controller: ControllerClient
    producer_ids: ProducerIds
    groups: GroupCoordinator
    spoken: Sequence[SpokenApi] = ()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request. `client_address` is the peer's host."""

    head: RequestHead
    client_address: str
    broker: BrokerServices
