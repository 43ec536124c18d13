"""The metadata cache as the pure controller sees it. Values only; for the controller and its clients."""

from __future__ import annotations

from millrace.broker.coordination.controller import ClusterPicture, ElectionRequest
from millrace.broker.coordination.metadata_cache import MetadataCache, TopicInfo
from millrace.broker.storage.log_config import UNREADABLE

UNCLEAN_SETTING = "unclean.leader.election.enable"


def picture_of(cache: MetadataCache, *, unclean_by_default: bool = False) -> ClusterPicture:
    """Everything that the controller looks at, as this broker knows it now. Nothing of a topic is copied: the
    cache puts another in its place when something changes."""
    return ClusterPicture(
        live_brokers=frozenset(cache.brokers),
        topics={name: info.partitions for name, info in cache.topics.items()},
        deleting=cache.deleting,
        leaving=frozenset(broker for broker, known in cache.brokers.items() if known.leaving),
        offline={broker: partitions for broker, partitions in cache.offline.items() if partitions},
        unclean_topics=frozenset(
            name for name, info in cache.topics.items() if allows_unclean(info, unclean_by_default)
        ),
        requests={
            kind: ElectionRequest(election.partitions, election.version)
            for kind, election in cache.elections.items()
        },
        topic_versions={name: info.version for name, info in cache.topics.items()},
    )


def allows_unclean(info: TopicInfo, by_default: bool) -> bool:
    """Whether a replica outside the in-sync set may lead the topic when there is no other."""
    setting = info.config.get(UNCLEAN_SETTING)
    if setting is None:
        return by_default and UNREADABLE not in info.config
    return setting.lower() == "true"
