"""One partition as Metadata and DescribeTopicPartitions show it: values for `answers.build_entity`.

Called by these two handlers. Metadata version 0 has no list of offline replicas; there, replicas and in-sync
members that are not alive are left out and the partition says REPLICA_NOT_AVAILABLE, as in Apache Kafka.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.partition_info import PartitionInfo
from millrace.broker.errors import LeaderNotAvailable, ReplicaNotAvailable
from millrace.broker.server.answers import NO_ERROR


def partition_view(
    cache: MetadataCache, topic: str, number: int, partition: PartitionInfo, *, hide_offline: bool = False
) -> dict[str, Any]:
    """Leader, replicas, in-sync set and offline replicas; `hide_offline` is for Metadata version 0."""
    isr = () if partition.state is None else partition.state.isr
    offline = tuple(broker for broker in partition.replicas if not cache.is_alive(broker, topic, number))
    led = partition.leader in cache.brokers
    error = NO_ERROR if led else LeaderNotAvailable.code
    replicas = partition.replicas
    if hide_offline and offline:
        replicas = tuple(broker for broker in replicas if broker not in offline)
        isr = tuple(broker for broker in isr if broker not in offline)
        error = error or ReplicaNotAvailable.code
    return {
        "error_code": error,
        "partition_index": number,
        "leader_id": partition.leader if led else -1,
        "leader_epoch": partition.leader_epoch,
        "replica_nodes": replicas,
        "isr_nodes": isr,
        "offline_replicas": offline,
    }
