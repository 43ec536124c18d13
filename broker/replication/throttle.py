"""How fast a follower may fetch the partitions that are being moved, or a leader give them. Pure: times in,
times out.

A bucket of one second's bytes that may be overdrawn by one answer: then the partitions rest until it is paid
back, so that the rate holds on the average, as with Apache Kafka's throttles (KIP-73). A replica that is in
sync is not held back: what it takes empties the bucket and leaves no debt, or one that falls out of sync
after hours above the rate would be held back for hours.

A leader gives by turns. An answer may owe many seconds, and whoever got it rests as long as the leader does
when it has a rate of its own: it would ask again at the very moment when the leader may give again, each
time before those who poll for it.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from millrace.broker.protocol.topic_partition import TopicPartition


class ReplicationThrottle:
    """See the module. Times are in seconds of one steady clock."""

    def __init__(self) -> None:
        self._rate: int | None = None
        self._partitions: frozenset[TopicPartition] | None = None
        self._free_from = 0.0
        """The bucket is empty until here; a bucket that was left alone fills up for one second."""

    def set(self, bytes_per_second: int | None, partitions: Collection[TopicPartition] | None = None) -> bool:
        """A rate for these partitions together (None: for all); no rate takes the throttle away. True when
        it was another one before."""
        rate = None if bytes_per_second is None else max(bytes_per_second, 1)
        chosen = None if partitions is None else frozenset(partitions)
        if (rate, chosen) == (self._rate, self._partitions):
            return False
        if rate != self._rate:
            self._free_from = 0.0
        self._rate, self._partitions = rate, chosen
        return True

    def applies_to(self, key: TopicPartition) -> bool:
        return self._rate is not None and (self._partitions is None or key in self._partitions)

    def resumes_at(self, key: TopicPartition, now: float) -> float:
        """When the partition may be fetched again; not later than `now` means at once."""
        if not self.applies_to(key):
            return now
        # One second's worth may be taken at once by those who have been quiet.
        self._free_from = max(self._free_from, now - 1.0)
        return self._free_from

    def consume(self, key: TopicPartition, size: int, now: float, *, in_sync: bool) -> None:
        """So many bytes of the partition have gone to a replica."""
        if self._rate is None or not self.applies_to(key):
            return
        free_from = max(self._free_from, now - 1.0)
        owed = free_from + size / self._rate
        self._free_from = min(owed, max(free_from, now)) if in_sync else owed


WAITING_SECONDS = 5.0
"""Who was refused and has not asked again for so long does not wait any more: it died, or needs nothing. A
follower asks every `replica.fetch.wait.max.ms`, half a second as a rule."""


class LeaderThrottle(ReplicationThrottle):
    """What a leader gives to followers that catch up: of those who wait, the one that was given something
    longest ago is next."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[int, float] = {}
        """Followers that were refused, and when they asked last."""
        self._given: dict[int, float] = {}
        """When it was a follower's turn last."""

    def gives(self, key: TopicPartition, follower_id: int, now: float) -> bool:
        """Whether the follower gets what it asks for now. It must be there to be given: a turn is taken by
        the answer True, whatever becomes of it."""
        if not self.applies_to(key):
            return True
        self._waiting = {
            other: asked for other, asked in self._waiting.items() if asked > now - WAITING_SECONDS
        }
        mine = self._given.get(follower_id, -inf)
        if self.resumes_at(key, now) > now or any(
            self._given.get(other, -inf) < mine for other in self._waiting if other != follower_id
        ):
            self._waiting[follower_id] = now
            return False
        self._waiting.pop(follower_id, None)
        self._given[follower_id] = now
        return True
