"""What a mirror must be allowed to do on each of its clusters, and what of that it may not.

Called by `check`. `topic_needs` says what is needed (pure), the rest asks the clusters: by authorized
operations where they tell them, by the refusal of a question that changes nothing where they do not. Every
missing permission is one part of one finding per cluster and operation, in the words of `kafka-acls`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millrace.broker.client.admin import create_topic
from millrace.broker.client.authorized import group_operations, topic_operations
from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import (
    ClusterAuthorizationFailed,
    InvalidReplicationFactor,
    KafkaError,
    PolicyViolation,
    TopicAlreadyExists,
    TopicAuthorizationFailed,
)
from millrace.broker.protocol.operations import Operation, Operations
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.broker.wording import some
from millrace.mirror.checks.findings import Finding, Selected, Severity
from millrace.mirror.config import MirrorConfig

TOPIC, GROUP = "Topic", "Group"

SOURCE_OPERATIONS = (Operation.READ, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
TARGET_OPERATIONS = (Operation.WRITE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
OWN_OPERATIONS = (Operation.READ, Operation.WRITE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)


@dataclass(frozen=True, slots=True, order=True)
class Missing:
    """One permission that is not there. Without it: `without` (for people)."""

    operation: Operation
    resource: str
    name: str
    without: str


def missing_of(
    needed: Iterable[Operation], name: str, given: Operations | None, without: Mapping[Operation, str]
) -> list[Missing]:
    """What of `needed` is not given on a topic. None: the cluster does not say, so nothing is missing."""
    if given is None:
        return []
    return [
        Missing(operation, TOPIC, name, without.get(operation, "the mirror cannot work"))
        for operation in needed
        if operation not in given
    ]


def as_findings(
    config: MirrorConfig, cluster: str, place: str, missing: Iterable[Missing], severity: Severity
) -> list[Finding]:
    """One finding for each operation and kind of resource."""
    grouped: dict[tuple[str, Operation, str], list[str]] = {}
    for each in missing:
        names = grouped.setdefault((each.resource, each.operation, each.without), [])
        if each.name not in names:
            names.append(each.name)
    return [
        Finding(
            severity,
            cluster,
            f"not permitted: {operation} on {resource} {some(names)} ({without}); grant it to the principal "
            "that the mirror uses there",
            config.place(place),
        )
        for (resource, operation, without), names in sorted(grouped.items())
    ]


async def of_source(
    config: MirrorConfig, cluster: Cluster, topics: Sequence[str], named: Sequence[str]
) -> list[Finding]:
    """`topics` are those that were found; `named` are include patterns that are plain names and found
    nothing: they may exist, unseen."""
    without = {
        Operation.READ: "its records cannot be fetched",
        Operation.DESCRIBE: "the topic cannot be seen",
        Operation.DESCRIBE_CONFIGS: "the target's topic cannot be made like it or kept in step",
    }
    missing: list[Missing] = []
    found = await topic_operations(cluster, [*topics, *named]) if topics or named else {}
    for topic, given in found.items():
        missing += missing_of(SOURCE_OPERATIONS, topic, given, without)
    place = config.source_path(cluster.name, "topics.include")
    return as_findings(config, cluster.name, place, missing, Severity.ERROR)


async def of_target(
    config: MirrorConfig,
    cluster: Cluster,
    selected: Sequence[Selected],
    existing: Mapping[str, int],
    own: Mapping[str, str],
) -> tuple[list[Finding], bool]:
    """The findings, and whether existing topics may be widened. `existing`: target topics with their
    partition counts; `own`: the mirror's own topics, with what each is for."""
    targets = {each.target: max(each.feed.target_partitions.stop, 1) for each in selected}
    asked = [name for name in (*targets, *own) if name in existing]
    given = await topic_operations(cluster, asked) if asked else {}
    errors: list[Missing] = []
    later: list[Missing] = []
    may_widen = True
    for name in asked:
        operations = given.get(name)
        if name in own:
            without = dict.fromkeys(Operation, own[name])
            needed = TARGET_OPERATIONS if name == AUDIT_TOPIC else OWN_OPERATIONS
            errors += missing_of(needed, name, operations, without)
            continue
        without = {
            Operation.WRITE: "records cannot be carried there",
            Operation.DESCRIBE: "the topic cannot be seen",
            Operation.DESCRIBE_CONFIGS: "its limits cannot be known",
            Operation.ALTER: "partitions that its sources get later would not be carried",
            Operation.ALTER_CONFIGS: "its settings would not follow the source's; "
            "`config_sync: {enabled: false}` does without",
        }
        errors += missing_of(TARGET_OPERATIONS, name, operations, without)
        wanted_later = [Operation.ALTER]
        if config.config_sync.enabled:
            wanted_later.append(Operation.ALTER_CONFIGS)
        if operations is not None and Operation.ALTER not in operations:
            may_widen = may_widen and existing[name] >= targets[name]
        later += missing_of(wanted_later, name, operations, without)
    findings = as_findings(config, cluster.name, "target", errors, Severity.ERROR)
    findings += as_findings(config, cluster.name, "target", later, Severity.WARNING)
    to_create = {name: count for name, count in targets.items() if name not in existing}
    to_create |= {name: 1 for name in own if name not in existing}
    findings += await _creations(config, cluster, to_create, own)
    return findings, may_widen


async def _creations(
    config: MirrorConfig, cluster: Cluster, topics: Mapping[str, int], own: Mapping[str, str]
) -> list[Finding]:
    """What the target would say to the creation of topics; it is asked without creating any."""
    refused: list[Missing] = []
    findings: list[Finding] = []
    for name, count in sorted(topics.items()):
        without = own.get(name, "the topic cannot be created")
        try:
            await create_topic(cluster, name, count, config.target.replication_factor, validate_only=True)
        except TopicAlreadyExists:
            # Made since the cluster was looked at, or there and not to be seen.
            given = (await topic_operations(cluster, [name])).get(name)
            refused += missing_of([Operation.DESCRIBE], name, given, {Operation.DESCRIBE: without})
        except (TopicAuthorizationFailed, ClusterAuthorizationFailed):
            refused.append(Missing(Operation.CREATE, TOPIC, name, without))
        except PolicyViolation as error:
            findings.append(_uncreatable(config, cluster, name, f"by its policy: {error}"))
        except InvalidReplicationFactor as error:
            # Brokers that are away count as missing here: a mirror waits for them.
            findings.append(_uncreatable(config, cluster, name, str(error), is_passing=True))
        except KafkaError as error:
            if not error.retriable:
                findings.append(_uncreatable(config, cluster, name, str(error)))
    return findings + as_findings(config, cluster.name, "target", refused, Severity.ERROR)


def _uncreatable(
    config: MirrorConfig, cluster: Cluster, name: str, reason: str, *, is_passing: bool = False
) -> Finding:
    message = f"the target refuses to create it: {reason}"
    where = f"{cluster.name}/{name}"
    return Finding(Severity.ERROR, where, message, config.place("target"), is_passing)


async def of_group(config: MirrorConfig, cluster: Cluster) -> list[Finding]:
    """The group in which the workers share the partitions. Raises what keeps its coordinator away."""
    given = await group_operations(cluster, config.group_id)
    if given is None or Operation.READ in given:
        return []
    without = "workers cannot share the partitions"
    missing = [Missing(Operation.READ, GROUP, config.group_id, without)]
    return as_findings(config, cluster.name, "name", missing, Severity.ERROR)
