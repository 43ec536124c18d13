"""What a mirror must be allowed to do with the consumer groups of its config, and what of that it may not.

Called by `check`, beside `permissions`: `of_synced_groups` for `groups:` (positions read on the source and
committed on the target), `of_progress_group` for `progress_group` (committed on the source). All warnings:
records are carried all the same. What Kafka asks for: Describe on a group to see it and to read its offsets,
Read on the group and on each topic to commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence

from millrace.broker.client.authorized import cluster_operations, group_operations, topic_operations
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.groups import list_groups
from millrace.broker.protocol.operations import Operation, Operations
from millrace.mirror.checks.findings import Finding, Severity
from millrace.mirror.checks.permissions import GROUP, Missing, as_findings, missing_of
from millrace.mirror.config import MirrorConfig, SourceConfig
from millrace.mirror.offsets.group_sync import GroupPatterns

CLUSTER, CLUSTER_NAME = "Cluster", "kafka-cluster"
ASKED_AT_ONCE = 8
MAX_GROUPS_ASKED = 200

_READ_AT_SOURCE = {Operation.DESCRIBE: "its positions cannot be read, so it is not kept in step"}
_COMMIT_AT_TARGET = {
    Operation.DESCRIBE: "what it has committed there cannot be known, so it is not kept in step",
    Operation.READ: "its positions cannot be committed there",
}
_PROGRESS = {
    Operation.DESCRIBE: "whose group it is cannot be known, so progress is not committed",
    Operation.READ: "progress is not committed",
}


async def of_synced_groups(
    config: MirrorConfig,
    source: SourceConfig,
    cluster: Cluster,
    target: Cluster | None,
    target_topics: Collection[str],
) -> list[Finding]:
    """For a source with `groups:`. `target` is None when it cannot be asked now; `target_topics` are those
    topics there that the source feeds and that exist. Of very many groups the first are looked at. Raises
    what keeps a cluster, or a group's coordinator, away."""
    if source.groups is None:
        return []
    patterns = GroupPatterns(source.groups, source.progress_group)
    listed = {each.group_id: each.protocol_type for each in (await list_groups(cluster)).groups}
    seen = [name for name, kind in listed.items() if patterns.selects(name, kind)][:MAX_GROUPS_ASKED]
    unseen = [name for name in source.groups.include if name not in listed and _is_plain(name)]
    place = config.source_path(source.cluster, "groups")
    missing = missing_of_groups(_READ_AT_SOURCE, await _operations(cluster, [*seen, *unseen]))
    if not seen and any(not _is_plain(pattern) for pattern in source.groups.include):
        missing += missing_to_list(await cluster_operations(cluster))
    findings = as_findings(config, cluster.name, place, missing, Severity.WARNING)
    if target is not None:
        missing = missing_of_groups(_COMMIT_AT_TARGET, await _operations(target, [*seen, *unseen]))
        given = await topic_operations(target, sorted(target_topics)) if target_topics else {}
        without = {Operation.READ: "positions of groups cannot be committed there"}
        for topic, operations in given.items():
            missing += missing_of(without, topic, operations, without)
        findings += as_findings(config, target.name, place, missing, Severity.WARNING)
    return findings


async def of_progress_group(config: MirrorConfig, source: SourceConfig, cluster: Cluster) -> list[Finding]:
    """For a source with `progress_group`. Raises what keeps its coordinator away."""
    if source.progress_group is None:
        return []
    missing = missing_of_groups(_PROGRESS, await _operations(cluster, [source.progress_group]))
    place = config.source_path(source.cluster, "progress_group")
    return as_findings(config, cluster.name, place, missing, Severity.WARNING)


def missing_of_groups(
    without: Mapping[Operation, str], given: Mapping[str, Operations | None]
) -> list[Missing]:
    """What of the operations in `without` is not given on each group. None: the cluster does not say."""
    return [
        Missing(operation, GROUP, name, reason)
        for name, operations in given.items()
        if operations is not None
        for operation, reason in without.items()
        if operation not in operations
    ]


def missing_to_list(given: Operations | None) -> list[Missing]:
    """No group was seen that a pattern means: a cluster lists only those that may be described, and all of
    them to whoever may describe the cluster."""
    if given is None or Operation.DESCRIBE in given:
        return []
    reason = "of the groups that are meant none is seen: they are listed with this, or with Describe on each"
    return [Missing(Operation.DESCRIBE, CLUSTER, CLUSTER_NAME, reason)]


async def _operations(cluster: Cluster, groups: Sequence[str]) -> dict[str, Operations | None]:
    limit = asyncio.Semaphore(ASKED_AT_ONCE)

    async def of(name: str) -> Operations | None:
        async with limit:
            return await group_operations(cluster, name)

    names: Iterable[str] = dict.fromkeys(groups)
    return dict(zip(names, await asyncio.gather(*(of(name) for name in names)), strict=True))


def _is_plain(pattern: str) -> bool:
    return all(character.isalnum() or character in "_-" for character in pattern)
