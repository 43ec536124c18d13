"""The APIs of this broker: which handler module answers what. ApiVersions tells clients exactly this."""

from __future__ import annotations

from types import ModuleType

from millrace.broker.server.context import SpokenApi
from millrace.broker.server.dispatch import Handler, handler_of
from millrace.broker.server.handlers import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    alter_client_quotas,
    alter_configs,
    alter_partition_reassignments,
    api_versions,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_client_quotas,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_producers,
    describe_topic_partitions,
    describe_transactions,
    elect_leaders,
    end_txn,
    fetch,
    find_coordinator,
    heartbeat,
    incremental_alter_configs,
    init_producer_id,
    join_group,
    leave_group,
    list_groups,
    list_offsets,
    list_partition_reassignments,
    list_transactions,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sync_group,
    txn_offset_commit,
    write_txn_markers,
)

MODULES: tuple[ModuleType, ...] = (
    describe_client_quotas,
    alter_client_quotas,
    produce,
    fetch,
    list_offsets,
    metadata,
    offset_commit,
    offset_fetch,
    find_coordinator,
    join_group,
    heartbeat,
    leave_group,
    sync_group,
    describe_groups,
    list_groups,
    api_versions,
    create_topics,
    delete_topics,
    delete_records,
    init_producer_id,
    offset_for_leader_epoch,
    add_partitions_to_txn,
    add_offsets_to_txn,
    end_txn,
    write_txn_markers,
    txn_offset_commit,
    describe_configs,
    alter_configs,
    describe_log_dirs,
    create_partitions,
    delete_groups,
    elect_leaders,
    incremental_alter_configs,
    alter_partition_reassignments,
    list_partition_reassignments,
    offset_delete,
    describe_cluster,
    describe_producers,
    describe_transactions,
    list_transactions,
    describe_topic_partitions,
)


def handlers() -> list[Handler]:
    """Every handler, for the dispatcher."""
    return [handler_of(module) for module in MODULES]


def spoken_apis() -> tuple[SpokenApi, ...]:
    """What is advertised. A module may advertise more than it answers (see produce.py)."""
    return tuple(
        SpokenApi(
            int(module.API), getattr(module, "ADVERTISED_FROM", module.VERSIONS.start), module.VERSIONS[-1]
        )
        for module in MODULES
    )
