"""The APIs of this broker: which handler module answers what. ApiVersions tells clients exactly this."""

from __future__ import annotations

from types import ModuleType

from millrace.broker.server.context import SpokenApi
from millrace.broker.server.dispatch import Handler, handler_of
from millrace.broker.server.handlers import (
    alter_configs,
    api_versions,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    fetch,
    find_coordinator,
    heartbeat,
    incremental_alter_configs,
    init_producer_id,
    join_group,
    leave_group,
    list_groups,
    list_offsets,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sync_group,
)

MODULES: tuple[ModuleType, ...] = (
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
    describe_configs,
    alter_configs,
    describe_log_dirs,
    create_partitions,
    delete_groups,
    incremental_alter_configs,
    offset_delete,
    describe_cluster,
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
