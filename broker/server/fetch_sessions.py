"""Incremental fetches (KIP-227): the broker remembers what a reader asks for, and both send only changes.

A full fetch with epoch 0 opens a session, if the cache has a slot for it; the answer names it. From then on
the reader sends what it wants otherwise (new offsets, more partitions, forgotten ones) under the next epoch,
and the answer holds only partitions with data, an error, or a changed high watermark or start. Partitions
that had data go to the end of the order, so that a busy one does not starve the rest. Topics are named or
identified, as the request that opened the session did.

Who gets a slot is decided as in Apache Kafka: a session unused for two minutes makes room for anyone; one
that is older than two minutes makes room for a new one that is worth as much (followers before consumers,
then more partitions before fewer); a follower may also push out any consumer. Who gets none is answered in
full each time, under session id 0. Beyond that a session holds at most `MOST_IN_SESSION` partitions and the
cache `MOST_PARTITIONS`: a slot is bounded by count, a request's size is the peer's to choose.

Called by `handlers/fetch.py`, on the event loop. Pure: the steady clock's time is passed in, ids come from
a given generator.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from millrace.broker.errors import FetchSessionIdNotFound, FetchSessionTopicIdError, InvalidFetchSessionEpoch
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionData, PartitionFetch, Topic
from millrace.broker.protocol.session_epochs import FINAL_EPOCH, FULL, LARGEST_ID, NO_SESSION, next_epoch

EVICTION_MS = 120_000
"""How long a session is safe after its last use, and from sessions of more worth after its creation."""

MOST_PARTITIONS = 200_000
"""In all sessions together; each takes a few hundred bytes."""

MOST_IN_SESSION = 10_000
"""In one: what to tell its reader is found in one go, which takes 1 to 4 ms for a thousand."""

FAILED_SEARCH_MS = 100
"""A full cache is not searched again for a while when it had nothing to give up for as much."""

Key = tuple[Topic, int]
Worth = tuple[bool, int]
NO_PARTITIONS: tuple[PartitionData, ...] = ()


class _Cached:
    """One partition of a session: how it was last asked for, what the reader was last told of it."""

    __slots__ = ("asked", "high_watermark", "log_start_offset")

    def __init__(self, asked: PartitionFetch, high_watermark: int = -1, log_start_offset: int = -1) -> None:
        self.asked = asked
        self.high_watermark = high_watermark
        self.log_start_offset = log_start_offset

    def take(self, given: PartitionData) -> bool:
        """Whether the reader must be told; what it is told is remembered."""
        told = (
            len(given.records) > 0
            or given.error_code != 0
            or given.high_watermark != self.high_watermark
            or given.log_start_offset != self.log_start_offset
            or given.preferred_read_replica >= 0
            or given.diverging is not None
        )
        # After an error the partition is sent again as soon as it is well.
        self.high_watermark = -1 if given.error_code else given.high_watermark
        self.log_start_offset = given.log_start_offset
        return told


class FetchSession:
    """One reader's view. Made and kept by the cache."""

    __slots__ = ("created_ms", "epoch", "id", "partitions", "privileged", "used_ms", "uses_ids")

    def __init__(self, session_id: int, privileged: bool, uses_ids: bool, steady_ms: int) -> None:
        self.id = session_id
        self.privileged = privileged
        self.uses_ids = uses_ids
        self.created_ms = self.used_ms = steady_ms
        self.epoch = next_epoch(FULL)
        self.partitions: dict[Key, _Cached] = {}

    @property
    def worth(self) -> Worth:
        return self.privileged, len(self.partitions)


class SessionFetch:
    """One request seen through the cache: what is to be read, and how the answer is cut down."""

    __slots__ = ("_cache", "_request", "_session", "_uses_ids", "partitions")

    def __init__(
        self,
        cache: FetchSessionCache,
        request: FetchRequest,
        uses_ids: bool,
        session: FetchSession | None,
    ) -> None:
        self._cache = cache
        self._request = request
        self._uses_ids = uses_ids
        self._session = session
        self.partitions: Sequence[PartitionFetch] = (
            request.partitions
            if session is None
            else [cached.asked for cached in session.partitions.values()]
        )
        """What is to be read, in the order of reading."""

    def finish(
        self, given: Sequence[PartitionData], steady_ms: int
    ) -> tuple[int, int, Sequence[PartitionData]]:
        """(error code, session id, partitions) of the answer, where `given` is what was read."""
        session = self._session
        if session is None:
            if self._request.session_epoch == FINAL_EPOCH:
                return 0, NO_SESSION, given
            return 0, self._cache.open(self._request, self._uses_ids, given, steady_ms), given
        if not self._is_current(session):
            return InvalidFetchSessionEpoch.code, session.id, NO_PARTITIONS
        told = []
        for part in given:
            key = (part.topic, part.partition)
            cached = session.partitions.get(key)
            if cached is not None and cached.take(part):
                told.append(part)
                if len(part.records):
                    del session.partitions[key]
                    session.partitions[key] = cached
        return 0, session.id, told

    def finish_empty(self) -> tuple[int, int, Sequence[PartitionData]]:
        """The same for an answer that carries nothing because of a quota: nothing is taken as told."""
        session = self._session
        if session is None:
            return 0, NO_SESSION, NO_PARTITIONS
        error_code = 0 if self._is_current(session) else InvalidFetchSessionEpoch.code
        return error_code, session.id, NO_PARTITIONS

    def _is_current(self, session: FetchSession) -> bool:
        """False when another request of the session came meanwhile, as after a client's timeout."""
        return session.epoch == next_epoch(self._request.session_epoch)


class FetchSessionCache:
    """All sessions of a broker. `slots` is `max.incremental.fetch.session.cache.slots`."""

    def __init__(self, slots: int, ids: random.Random | None = None) -> None:
        self._slots = slots
        self._ids = ids or random.Random()
        # In the order of their last use.
        self._sessions: dict[int, FetchSession] = {}
        self._failed_search: tuple[int, Worth] = (-FAILED_SEARCH_MS, (False, -1))
        self.partition_count = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def resolve(
        self, request: FetchRequest, uses_ids: bool, steady_ms: int
    ) -> SessionFetch | tuple[int, int]:
        """What a request asks for. (error code, session id to answer with) where it cannot be told.

        A full request ends the session that it names.
        """
        if request.session_epoch in (FULL, FINAL_EPOCH):
            self._remove(request.session_id)
            return SessionFetch(self, request, uses_ids, None)
        session = self._sessions.get(request.session_id)
        if session is None:
            return FetchSessionIdNotFound.code, NO_SESSION
        if session.epoch != request.session_epoch:
            return InvalidFetchSessionEpoch.code, NO_SESSION
        if session.uses_ids != uses_ids:
            return FetchSessionTopicIdError.code, NO_SESSION
        if len(request.partitions) > MOST_IN_SESSION:
            return self._refuse_as_unknown(session)
        self._update(session, request)
        if not session.partitions:
            self._remove(session.id)
            return SessionFetch(self, request._replace(session_epoch=FINAL_EPOCH), uses_ids, None)
        if len(session.partitions) > MOST_IN_SESSION or self.partition_count > MOST_PARTITIONS:
            return self._refuse_as_unknown(session)
        self._use(session, steady_ms)
        return SessionFetch(self, request, uses_ids, session)

    def is_of_one(self, session_id: int, epoch: int, key: Key) -> bool:
        """Whether this partition is all that the session holds, and its next request has this epoch."""
        session = self._sessions.get(session_id)
        return (
            session is not None
            and session.epoch == epoch
            and len(session.partitions) == 1
            and key in session.partitions
        )

    def go_on(
        self,
        session_id: int,
        asked: PartitionFetch,
        high_watermark: int,
        log_start_offset: int,
        steady_ms: int,
    ) -> None:
        """What `resolve` and `finish` do with a request for nothing but the partition that is all the session
        holds (`is_of_one`), and that is given records."""
        session = self._sessions[session_id]
        cached = session.partitions[asked.topic, asked.partition]
        cached.asked = asked
        cached.high_watermark, cached.log_start_offset = high_watermark, log_start_offset
        self._use(session, steady_ms)

    def _use(self, session: FetchSession, steady_ms: int) -> None:
        session.epoch = next_epoch(session.epoch)
        session.used_ms = steady_ms
        del self._sessions[session.id]
        self._sessions[session.id] = session

    def _refuse_as_unknown(self, session: FetchSession) -> tuple[int, int]:
        """The reader asks in full then, and is told that there is no session to be had."""
        self._remove(session.id)
        return FetchSessionIdNotFound.code, NO_SESSION

    def _update(self, session: FetchSession, request: FetchRequest) -> None:
        before = len(session.partitions)
        for asked in request.partitions:
            key = (asked.topic, asked.partition)
            cached = session.partitions.get(key)
            if cached is None:
                session.partitions[key] = _Cached(asked)
            else:
                cached.asked = asked
        for forgotten in request.forgotten:
            session.partitions.pop(forgotten, None)
        self.partition_count += len(session.partitions) - before

    def open(
        self, request: FetchRequest, uses_ids: bool, given: Iterable[PartitionData], steady_ms: int
    ) -> int:
        """A new session for the reader of a full answer; its id, or 0 where there is no room."""
        privileged = request.replica_id >= 0
        count = len(request.partitions)
        if count > MOST_IN_SESSION or not self._has_room_for(count, steady_ms):
            return NO_SESSION
        asked = {(part.topic, part.partition): part for part in request.partitions}
        if len(self._sessions) >= self._slots and not self._evict((privileged, len(asked)), steady_ms):
            return NO_SESSION
        session = FetchSession(self._new_id(), privileged, uses_ids, steady_ms)
        for part in given:
            key = (part.topic, part.partition)
            if key in asked:
                session.partitions[key] = cached = _Cached(asked[key])
                cached.take(part)
        self._sessions[session.id] = session
        self.partition_count += len(session.partitions)
        return session.id

    def _has_room_for(self, count: int, steady_ms: int) -> bool:
        """Of partitions; who has not used a session for long makes room."""
        while self.partition_count + count > MOST_PARTITIONS:
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or steady_ms - oldest.used_ms <= EVICTION_MS:
                return False
            self._give_up(oldest)
        return True

    def _new_id(self) -> int:
        while True:
            session_id = self._ids.randint(1, LARGEST_ID)
            if session_id not in self._sessions:
                return session_id

    def _evict(self, worth: Worth, steady_ms: int) -> bool:
        """Make room for a session of this worth, if one must give way to it."""
        oldest = next(iter(self._sessions.values()), None)
        if oldest is None:
            return False
        if steady_ms - oldest.used_ms > EVICTION_MS:
            return self._give_up(oldest)
        failed_ms, failed_worth = self._failed_search
        if steady_ms - failed_ms < FAILED_SEARCH_MS and worth <= failed_worth:
            return False
        privileged = worth[0]
        candidates = [
            session
            for session in self._sessions.values()
            if steady_ms - session.created_ms > EVICTION_MS or (privileged and not session.privileged)
        ]
        least = min(candidates, key=lambda session: (session.worth, session.id), default=None)
        if least is not None and worth > least.worth:  # of equals, the one that is there stays
            return self._give_up(least)
        self._failed_search = (steady_ms, worth)
        return False

    def _give_up(self, session: FetchSession) -> bool:
        self._remove(session.id)
        self.evictions += 1
        return True

    def _remove(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.partition_count -= len(session.partitions)
