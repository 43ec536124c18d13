"""The topics that coordinators keep their state in: how they are made, and who leads them.

Called by FindCoordinator, which makes them when they are first needed, and by whatever looks for the
coordinator of a transactional id. The settings are those that Apache Kafka enforces: compacted, never
compressed where a coordinator writes, and of transactions never a leader that may lack a decision.

Unlike there, a number of replicas that is only a default gives way to the number of brokers: a cluster of one
broker works without a setting, one of three keeps its groups and transactions when it loses any. What someone
has set is taken as it is, and refused while there are too few brokers.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.config import BrokerSettings
from millrace.broker.coordination.controller_client import NewTopic
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from millrace.broker.replication.partition import NO_LEADER


def offsets_topic(settings: BrokerSettings, broker_count: int) -> NewTopic:
    """`broker_count` is how many brokers new replicas can be placed on."""
    wanted = settings.offsets_topic_replication_factor
    factor = _at_most(wanted, broker_count, settings, "offsets_topic_replication_factor")
    return NewTopic(
        OFFSETS_TOPIC,
        settings.offsets_topic_num_partitions,
        factor,
        config={
            "cleanup.policy": "compact",
            "compression.type": "producer",
            "segment.bytes": str(settings.offsets_topic_segment_bytes),
        },
        shortage=_shortage(OFFSETS_TOPIC, "offsets.topic.replication.factor", wanted, factor),
    )


def transactions_topic(settings: BrokerSettings, broker_count: int) -> NewTopic:
    """`broker_count` is how many brokers new replicas can be placed on."""
    wanted = settings.transaction_state_log_replication_factor
    wanted_in_sync = settings.transaction_state_log_min_isr
    factor = _at_most(wanted, broker_count, settings, "transaction_state_log_replication_factor")
    # One replica may be away: with all of two in sync, either broker's end would stop all transactions.
    min_in_sync = _at_most(wanted_in_sync, factor - 1, settings, "transaction_state_log_min_isr")
    raise_in_sync = f"millrace topics configure {TRANSACTIONS_TOPIC} min.insync.replicas={wanted_in_sync}"
    return NewTopic(
        TRANSACTIONS_TOPIC,
        settings.transaction_state_log_num_partitions,
        factor,
        config={
            "cleanup.policy": "compact",
            "compression.type": "uncompressed",
            "min.insync.replicas": str(min_in_sync),
            "segment.bytes": str(settings.transaction_state_log_segment_bytes),
            "unclean.leader.election.enable": "false",
        },
        shortage=_shortage(
            TRANSACTIONS_TOPIC,
            "transaction.state.log.replication.factor",
            wanted,
            factor,
            then=f" --wait; {raise_in_sync}" if min_in_sync < wanted_in_sync else "",
        ),
    )


def _at_most(wanted: int, most: int, settings: BrokerSettings, field: str) -> int:
    """A default gives way, what was asked for by name does not."""
    return wanted if field in settings.given else max(1, min(wanted, most))


def _shortage(topic: str, setting: str, wanted: int, factor: int, then: str = "") -> dict[str, Any]:
    if factor >= wanted:
        return {}
    return {
        "replicas": factor,
        "setting": f"{setting}={wanted}",
        "remedy": f"with {wanted} brokers: millrace topics reassign {topic} --brokers ID,ID,…"
        f" --replication-factor {wanted}{then}",
    }


def transaction_coordinator(cache: MetadataCache, transactional_id: str) -> int:
    """The broker that coordinates a transactional id; NO_LEADER while there is none."""
    info = cache.topic(TRANSACTIONS_TOPIC)
    if info is None or not info.partitions:
        return NO_LEADER
    partition = info.partitions.get(coordinator_partition(transactional_id, len(info.partitions)))
    return NO_LEADER if partition is None or partition.leader not in cache.brokers else partition.leader


def partition_leader(cache: MetadataCache, topic: str, partition: int) -> int | None:
    """Who leads a partition now; NO_LEADER while nobody does, None when there is no such partition."""
    info = cache.partition(topic, partition)
    if info is None:
        return None
    return info.leader if info.leader in cache.brokers else NO_LEADER
