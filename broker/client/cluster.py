"""A named cluster: its servers, what is known of them, and one connection to each for each purpose.

`Cluster` finds a way in (a random bootstrap server first, then the others, then a growing pause), keeps the
metadata (`known_metadata.py`) and follows it: a broker that comes back at another address is reconnected
there, and an answer that shows the metadata to be old (`NOT_LEADER_OR_FOLLOWER` and its like) makes the next
look fetch it anew.
`raw_fetch`, `raw_produce`, `admin`, `group_member`, the mirror and the audit all talk through it.

A purpose is a name for traffic that must not wait behind other traffic: a server answers the requests of
one connection in order, so a long poll on "fetch" would hold up a commit sent on the same socket.

The connections are its `connection_pool`'s. A server that refuses the login or a certificate is not asked
again at once (`gates.py`): the error names what to change. `trouble` is what a status shows.

Nothing is connected before it is needed. Requests are not repeated here unless the method says so;
`retrying` is the loop for those that may be.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from kio.static.protocol import RequestPayload

from millrace.broker.client.connection import MAX_RESPONSE_SIZE, Connection, Encoder, request_schema
from millrace.broker.client.connection_pool import CONNECT_TIMEOUT_MS, ConnectionPool
from millrace.broker.client.frame_memory import FrameMemory
from millrace.broker.client.known_metadata import STALE_METADATA, KnownMetadata
from millrace.broker.client.lane import Lane
from millrace.broker.client.metadata import ClusterMetadata, metadata_request, read_metadata
from millrace.broker.client.offsets import EARLIEST, LATEST, ListedOffset, list_offsets
from millrace.broker.client.retry import REQUEST_BACK_OFF, share_ms
from millrace.broker.client.security import Security
from millrace.broker.errors import (
    AccessRefused,
    ClusterUnreachable,
    KafkaError,
    MillraceError,
    NetworkException,
    ProtocolError,
    RequestTimedOut,
    UnsupportedVersion,
    error_for_code,
)
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.topic_partition import TopicPartition

__all__ = ["EARLIEST", "LATEST", "Cluster"]

T = TypeVar("T")

METADATA_MAX_AGE_MS = 300_000
TELLING_TRY_MS = 100
"""A shorter try, as the last one before a deadline may be, has found out less than those before it."""
_METADATA_VERSIONS = (9, 12)
_FIND_COORDINATOR_VERSION = 3
_COORDINATOR_KINDS = {"group": 0, "transaction": 1}

_CONNECTION_ERRORS = (NetworkException, RequestTimedOut, ProtocolError)


class Cluster:
    """See the module's text. An async context manager; `close()` ends every connection."""

    def __init__(
        self,
        name: str,
        bootstrap: Sequence[str],
        *,
        client_id: str = "millrace",
        request_timeout_ms: int = 30_000,
        awaits_start: bool = True,
        security: Security | None = None,
        max_response_size: int = MAX_RESPONSE_SIZE,
        frame_memory: FrameMemory | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`name` is what errors call the cluster, `bootstrap` a list of `host:port`; without `security`
        connections are plain TCP and nobody logs in; large answers are received into `frame_memory`. Without
        `awaits_start` a cluster that was never reached is not waited for: that every bootstrap server turns
        the connection down is the answer, as a person wants it. Raises ValueError for an unreadable address.
        """
        if not bootstrap:
            raise ValueError(f"cluster {name}: no bootstrap servers, expected a list of host:port")
        self.name = name
        self.client_id = client_id
        self.request_timeout_ms = request_timeout_ms
        self._awaits_start = awaits_start
        self.set_bootstrap(bootstrap)
        self._refused: AccessRefused | None = None
        self._unreached: ClusterUnreachable | None = None
        self._rng = rng or random.Random()
        self._pool = ConnectionPool(
            name,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            security=security,
            max_response_size=max_response_size,
            frame_memory=frame_memory,
            rng=self._rng,
            on_failed=self.invalidate,
        )
        self._coordinators: dict[tuple[str, str], int] = {}
        self._known = KnownMetadata()
        self._refreshing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; requests under way fail with NetworkException."""
        await self._pool.close()

    def take_security(self, security: Security | None) -> None:
        """Lets itself in by other means from now on. Every connection is opened anew, so requests under way
        fail with NetworkException; servers that refused are asked again at once."""
        self._refused = None
        self._pool.take_security(security)

    def close_purpose(self, purpose: str, node_id: int | None = None) -> None:
        """Close the connections of one purpose (to one broker), for a user of the cluster that ends before it
        does."""
        self._pool.close_purpose(purpose, node_id)

    def __str__(self) -> str:
        return f"cluster {self.name}"

    @property
    def trouble(self) -> str | None:
        """Why connections to the cluster failed last, in one line; None while they do not."""
        return self._reasons(self._pool.gates.failures) or None

    @property
    def is_throttled(self) -> bool:
        """Whether a server wants nothing more from one of the connections now (a quota, KIP-219)."""
        return self._pool.is_throttled

    @property
    def throttled_ms(self) -> int:
        """Asked for by servers over whose quotas this client was, in all."""
        return self._pool.throttled_ms

    # --- metadata -----------------------------------------------------------------------------------

    async def metadata(
        self, topics: Sequence[str] | None = None, *, max_age_ms: float = METADATA_MAX_AGE_MS
    ) -> ClusterMetadata:
        """The cluster with these topics, or with all of them (None); from memory when young enough.

        Topics that do not exist are absent from `.topics` and have their code in `.topic_errors`; asking
        never creates one. Keeps trying for `request_timeout_ms`, waiting for others who ask included, then
        raises ClusterUnreachable.
        """
        self._pool.check_open()
        oldest = self._now() - max_age_ms / 1000
        if not self._known.is_fresh(topics, oldest):
            refused_before, unreached_before = self._refused, self._unreached
            deadline = self._now() + self.request_timeout_ms / 1000
            async with self._refreshing:
                # Whoever held the lock may have read what is wanted here since this was asked.
                if not self._known.is_fresh(topics, oldest):
                    if self._refused is not None and self._refused is not refused_before:
                        raise self._refused
                    if (
                        self._unreached is not None
                        and self._unreached is not unreached_before
                        and self._now() >= deadline
                    ):
                        raise ClusterUnreachable(self.name, self._without_name(self._unreached))
                    await self._refresh(topics, deadline)
        view = self._known.view
        if view is None:
            raise AssertionError("a refresh leaves a view behind")
        return view if topics is None else view.narrowed(topics)

    def invalidate(self) -> None:
        """Make the next look at the metadata ask the cluster."""
        self._known.invalidate()

    def set_bootstrap(self, bootstrap: Sequence[str]) -> None:
        """Other servers to find a way in by, for a caller that learns where they are from elsewhere. Raises
        ValueError for an unreadable address."""
        try:
            self._bootstrap = [Address.parse(each) for each in bootstrap]
        except ValueError as error:
            given = ", ".join(bootstrap)
            raise ValueError(f"cluster {self.name}: bootstrap servers {given!r}, expected {error}") from None

    def observe(self, error_code: int) -> None:
        """Note an error code from an answer: some of them tell that the metadata is old."""
        if error_code in STALE_METADATA:
            self.invalidate()

    async def _refresh(self, topics: Sequence[str] | None, deadline: float) -> None:
        """Read the metadata from whichever server answers first. Holds `_refreshing`."""

        read_at = self._now()
        try:
            news = await self._read_view(topics, deadline)
        except AccessRefused as error:
            self._refused = error
            raise
        except ClusterUnreachable as error:
            self._unreached = error
            raise
        self._pool.retire_moved(self._known.take(news, topics, read_at))

    # --- connections --------------------------------------------------------------------------------

    async def connection(self, node_id: int | None = None, purpose: str = "control") -> Connection:
        """An open connection to a broker, or to any (None).

        Raises NetworkException, RequestTimedOut or ProtocolError when this broker cannot be reached (the
        next call looks the cluster up again), ClusterUnreachable when none can.
        """
        if node_id is None:
            return await self._any_connection(purpose)
        lane = self._pool.lane(node_id, purpose)
        if not lane.waiting_count and lane.connection is not None and lane.connection.is_open:
            return lane.connection
        failed_before = lane.failed_turns
        lane.waiting_count += 1
        try:
            async with lane.turn:
                if lane.connection is not None and lane.connection.is_open:
                    return lane.connection
                if lane.error is not None and lane.failed_turns != failed_before:
                    raise lane.error
                try:
                    return await self._reach(node_id, lane)
                except MillraceError as error:
                    lane.failed_turns += 1
                    lane.error = error
                    raise
        finally:
            lane.waiting_count -= 1

    async def _reach(self, node_id: int, lane: Lane) -> Connection:
        """Open the lane's connection where the metadata says that the broker is now."""
        view = await self.metadata([])
        if node_id not in view.brokers:
            view = await self.metadata([], max_age_ms=0)
        if node_id not in view.brokers:
            self.invalidate()
            known = sorted(view.brokers)
            raise NetworkException(f"{self}: broker {node_id} is not among its brokers {known}")
        pause_s = lane.not_before - self._now()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        return await self._pool.open_lane(lane, view.brokers[node_id].address)

    async def _any_connection(self, purpose: str) -> Connection:
        """To the first that can be reached, within the time that a request has in all."""
        deadline = self._now() + self.request_timeout_ms / 1000
        view = await self.metadata([])
        failed: list[MillraceError] = []
        order = self._pool.in_random_order(view.brokers, purpose)
        for place, node_id in enumerate(order):
            try_ms = self._try_ms(deadline, len(order) - place)
            try:
                async with asyncio.timeout(try_ms / 1000):
                    return await self.connection(node_id, purpose)
            except (*_CONNECTION_ERRORS, AccessRefused) as error:
                failed.append(error)
            except TimeoutError:
                address = view.brokers[node_id].address
                late = RequestTimedOut(f"{self} at {address}: no connection within {try_ms:.0f} ms")
                failed.append(self._pool.gates.refusal_at(address) or late)
        self.invalidate()
        if failed and all(isinstance(error, AccessRefused) for error in failed):
            raise AccessRefused(self.name, self._reasons(failed))
        raise ClusterUnreachable(self.name, f"no broker it names can be reached: {self._reasons(failed)}")

    def _reasons(self, errors: Iterable[MillraceError]) -> str:
        return "; ".join(dict.fromkeys(self._without_name(error) for error in errors))

    def _without_name(self, error: MillraceError) -> str:
        return str(error).removeprefix(f"{self}: ").removeprefix(f"{self} at ")

    # --- the way in ---------------------------------------------------------------------------------

    async def _read_view(self, topics: Sequence[str] | None, deadline: float) -> ClusterMetadata:
        """Ask the known brokers in random order, then the bootstrap servers in random order, last those that
        want nothing more now; then pause and begin again, until the deadline (or not, see `awaits_start`).
        Each gets its share of the time that is left."""
        reasons: dict[Address, str] = {}
        for pass_count in itertools.count(1):
            refusals: list[AccessRefused] = []
            ways = self._ways_in()
            for place, (address, lane) in enumerate(ways):
                try_ms = self._try_ms(deadline, len(ways) - place)
                if not try_ms:
                    break
                try:
                    return await self._ask_metadata_at(address, lane, topics, try_ms)
                except AccessRefused as error:
                    refusals.append(error)
                    reasons[address] = self._without_name(error).removeprefix(f"{address}: ")
                except (*_CONNECTION_ERRORS, UnsupportedVersion) as error:
                    if address not in reasons or try_ms >= TELLING_TRY_MS:
                        reasons[address] = str(error).removeprefix(f"{self} at {address}: ")
            if len(refusals) == len(ways):
                raise AccessRefused(self.name, self._reasons(refusals))
            is_turned_down = all(self._pool.gates.turns_down(address) for address, _ in ways)
            if is_turned_down and self._known.view is None and not self._awaits_start:
                break
            pause_s = REQUEST_BACK_OFF.delay_ms(pass_count, self._rng.random()) / 1000
            if self._pool.is_closed or self._now() + pause_s >= deadline:
                break
            await asyncio.sleep(pause_s)
        tried = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        raise ClusterUnreachable(self.name, f"no server answers; tried {tried or 'none in time'}")

    def _ways_in(self) -> list[tuple[Address, Lane | None]]:
        """Where to ask, in order: brokers by their lanes, bootstrap servers by passing connections; then what
        refused when it was last tried, then what wants nothing more now."""
        view = self._known.view
        brokers = view.brokers if view else {}
        ways: list[tuple[Address, Lane | None]] = [
            (brokers[node_id].address, self._pool.lane(node_id, "control"))
            for node_id in self._pool.in_random_order(brokers, "control")
        ]
        known = {address for address, _ in ways}
        others = [address for address in self._bootstrap if address not in known]
        ways += [(address, None) for address in self._rng.sample(others, len(others))]

        def place(way: tuple[Address, Lane | None]) -> tuple[bool, bool]:
            address, lane = way
            return lane is not None and lane.is_throttled, self._pool.gates.refusal_at(address) is not None

        return sorted(ways, key=place)

    async def _ask_metadata_at(
        self, address: Address, lane: Lane | None, topics: Sequence[str] | None, try_ms: float
    ) -> ClusterMetadata:
        if lane is None:
            deadline = self._now() + try_ms / 1000
            connection = await self._pool.open(address, deadline, try_ms)
            try:
                return await self._ask_metadata(connection, topics, self._left_ms(deadline))
            finally:
                connection.close()
        try:
            # Who gives up here leaves to the others what is under way on the lane: the connection that opens,
            # and the requests that would fail with one that got no answer within its timeout.
            async with asyncio.timeout(try_ms / 1000):
                return await self._ask_metadata(
                    await self._pool.open_lane(lane, address), topics, self.request_timeout_ms
                )
        except TimeoutError:
            what = f"no answer within {try_ms:.0f} ms"
            if lane.connection is not None and lane.is_throttled:
                what = lane.connection.unsent(try_ms)
            late = RequestTimedOut(f"{self} at {address}: {what}")
            raise self._pool.gates.refusal_at(address) or late from None

    async def _ask_metadata(
        self, connection: Connection, topics: Sequence[str] | None, timeout_ms: float
    ) -> ClusterMetadata:
        version = self.highest_version(connection, Api.METADATA, _METADATA_VERSIONS)
        request = metadata_request(version, topics)
        answer = await connection.call(request, min(timeout_ms, CONNECT_TIMEOUT_MS))
        view = read_metadata(answer)
        if not view.brokers:
            raise NetworkException(f"{connection}: it knows no brokers yet")
        return view

    def _try_ms(self, deadline: float, tries_left: int) -> float:
        return share_ms(self._left_ms(deadline), tries_left, self.request_timeout_ms)

    def _left_ms(self, deadline: float) -> float:
        return max(0.0, (deadline - self._now()) * 1000)

    # --- requests -----------------------------------------------------------------------------------

    async def request(
        self,
        entity: RequestPayload,
        *,
        node_id: int | None = None,
        purpose: str = "control",
        timeout_ms: float | None = None,
    ) -> Any:
        """Send one kio request to a broker, or to any (None), once; the kio answer is returned.

        The entity's version must be one the broker offers (`api_version` picks one), otherwise
        UnsupportedVersion is raised and nothing is sent. Error codes within the answer are the caller's.
        """
        connection = await self.connection(node_id, purpose)
        try:
            return await connection.call(
                entity, self.request_timeout_ms if timeout_ms is None else timeout_ms
            )
        except _CONNECTION_ERRORS:
            self.invalidate()
            raise

    async def exchange(
        self, connection: Connection, encode: Encoder, timeout_ms: float | None = None
    ) -> memoryview:
        """Send a request laid out by the caller on a connection of this cluster; the raw answer."""
        try:
            return await connection.exchange(
                encode, self.request_timeout_ms if timeout_ms is None else timeout_ms
            )
        except _CONNECTION_ERRORS:
            self.invalidate()
            raise

    async def api_version(self, api: Api, at_least: int, at_most: int, node_id: int | None = None) -> int:
        """The highest version that both sides know; UnsupportedVersion where the ranges do not meet."""
        return self.highest_version(await self.connection(node_id), api, (at_least, at_most))

    async def retrying(
        self,
        attempt: Callable[[], Awaitable[T]],
        *,
        timeout_ms: float | None = None,
        final: tuple[type[KafkaError], ...] = (),
    ) -> T:
        """Repeat `attempt` while it raises a retriable KafkaError (except those in `final`), with a growing
        pause, until `timeout_ms` (by default the request timeout) is over; then the last error is raised."""
        timeout_ms = self.request_timeout_ms if timeout_ms is None else timeout_ms
        deadline = self._now() + timeout_ms / 1000
        for failure_count in itertools.count(1):
            try:
                return await attempt()
            except KafkaError as error:
                pause_s = REQUEST_BACK_OFF.delay_ms(failure_count, self._rng.random()) / 1000
                hopeless = not error.retriable or isinstance(error, final) or self._pool.is_closed
                if hopeless or self._now() + pause_s >= deadline:
                    raise
                self.observe(error.code)
            await asyncio.sleep(pause_s)
        raise AssertionError("the loop above has no other end")

    async def coordinator(self, key: str, kind: Literal["group", "transaction"] = "group") -> int:
        """The node that coordinates a group or a transactional id; remembered until forgotten.

        Raises a KafkaError (COORDINATOR_NOT_AVAILABLE is retriable) when there is none.
        """
        remembered = self._coordinators.get((kind, key))
        if remembered is not None:
            return remembered
        schema = request_schema(Api.FIND_COORDINATOR, _FIND_COORDINATOR_VERSION)
        answer = await self.request(schema.FindCoordinatorRequest(key=key, key_type=_COORDINATOR_KINDS[kind]))
        if answer.error_code:
            raise error_for_code(
                int(answer.error_code),
                f"{self}: no coordinator of {kind} {key}: {answer.error_message or ''}",
            )
        self._coordinators[kind, key] = int(answer.node_id)
        return int(answer.node_id)

    def forget_coordinator(self, key: str, kind: Literal["group", "transaction"] = "group") -> None:
        """Look for the coordinator again at the next need."""
        self._coordinators.pop((kind, key), None)

    async def list_offsets(
        self, timestamps: Mapping[TopicPartition, int], read_committed: bool = False
    ) -> dict[TopicPartition, ListedOffset]:
        """Offsets by time, or the ends: see `offsets.list_offsets`."""
        return await list_offsets(self, timestamps, read_committed)

    # --- small things -------------------------------------------------------------------------------

    def highest_version(self, connection: Connection, api: Api, spoken: tuple[int, int]) -> int:
        """The highest version within `spoken` that the connection's server offers, or UnsupportedVersion."""
        version = connection.versions.highest(api, *spoken)
        if version is None:
            offered = connection.versions.ranges.get(api)
            raise UnsupportedVersion(
                f"{connection}: {api.name} is spoken here in versions {spoken[0]}-{spoken[1]}, "
                f"there in {'none' if offered is None else f'{offered[0]}-{offered[1]}'}"
            )
        return version

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
