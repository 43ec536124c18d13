"""What is known of a cluster, and how old each part of it is: the metadata that a client keeps.

Made by `cluster`, which asks and tells it what was answered. Pure: no I/O; times are seconds on a clock that
only goes forward, the caller's.

A view is laid together from answers about all topics and about some, so its parts differ in age: the brokers
are as old as the last answer, a topic as the last answer that described it, the list of all topics as the
last answer about all. An answer is as old as its question: the cluster may have changed while it was under
way. An error that shows the view to be old (`STALE_METADATA`) invalidates all of it; the view itself stays,
for the addresses to ask next.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.broker.client.metadata import ClusterMetadata, merge_topics
from millrace.broker.errors import (
    BrokerNotAvailable,
    FencedLeaderEpoch,
    InconsistentTopicId,
    KafkaStorageError,
    LeaderNotAvailable,
    NotController,
    NotLeaderOrFollower,
    ReplicaNotAvailable,
    UnknownLeaderEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)

# Error codes of answers that say: what you know of the cluster is old.
STALE_METADATA = frozenset(
    error.code
    for error in (
        UnknownTopicOrPartition,
        LeaderNotAvailable,
        NotLeaderOrFollower,
        ReplicaNotAvailable,
        BrokerNotAvailable,
        NotController,
        KafkaStorageError,
        FencedLeaderEpoch,
        UnknownLeaderEpoch,
        UnknownTopicId,
        InconsistentTopicId,
    )
)


class KnownMetadata:
    """See the module's text. `view` is None until the first answer."""

    def __init__(self) -> None:
        self.view: ClusterMetadata | None = None
        # When each part was asked for; absent: never, or invalidated.
        self._brokers_read_at: float | None = None
        self._all_read_at: float | None = None
        self._topic_read_at: dict[str, float] = {}

    def is_fresh(self, topics: Sequence[str] | None, oldest: float) -> bool:
        """Whether these topics, or the list of all (None), and the brokers were asked for after `oldest`."""

        def young(read_at: float | None) -> bool:
            return read_at is not None and read_at > oldest

        if self.view is None or not young(self._brokers_read_at):
            return False
        if topics is None:
            return young(self._all_read_at)
        # A topic with an error is asked for again each time: it may exist by now.
        return all(topic in self.view.topics and young(self._topic_read_at.get(topic)) for topic in topics)

    def take(self, news: ClusterMetadata, topics: Sequence[str] | None, read_at: float) -> ClusterMetadata:
        """Lay an answer about these topics, or all (None), asked for at `read_at`, over what was known; the
        view that comes of it."""
        view = self.view = news if self.view is None or topics is None else merge_topics(self.view, news)
        self._brokers_read_at = read_at
        if topics is None:
            self._all_read_at = read_at
            self._topic_read_at.clear()
        self._topic_read_at.update(dict.fromkeys(news.topics, read_at))
        return view

    def invalidate(self) -> None:
        """Nothing is fresh until it is read anew."""
        self._brokers_read_at = None
        self._all_read_at = None
        self._topic_read_at.clear()
