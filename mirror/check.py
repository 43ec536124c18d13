"""`millrace mirror check`: a config against the live clusters, before anything is carried.

`check` asks and returns findings; `run` is what the command line calls: it prints them and gives the exit
status (0: nothing worse than a warning). Nothing is created or written.

Looked at: every cluster answers; every source selects at least one topic; no two source topics meet in one
target topic by accident of naming; no route leads back to its own topic, also by way of other mirrors whose
positions topics are seen on these clusters; the target's limits take the source's batches.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from millrace.broker.client.admin import describe_configs
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.client.read_to_end import read_topic_to_end
from millrace.broker.errors import FatalError, KafkaError
from millrace.mirror.checkpoints import Positions
from millrace.mirror.config import MirrorConfig, SourceConfig, load_config
from millrace.mirror.routes import POSITIONS_TOPIC_PREFIX, Route, TopicSelector, find_loops
from millrace.mirror.system_records import CLUSTER_FAILURES
from millrace.mirror.topics import DEFAULT_MAX_BATCH_SIZE

TIMEOUT_MS = 5_000


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for a person: what, where, and what to do."""

    severity: Severity
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity.value:<8} {self.where}: {self.message}"


async def check(config: MirrorConfig) -> list[Finding]:
    """Every finding, errors first. Raises nothing that a cluster does."""
    findings: list[Finding] = []
    clusters = {
        each.cluster: Cluster(each.cluster, each.bootstrap, request_timeout_ms=TIMEOUT_MS)
        for each in (config.target, *config.sources)
    }
    try:
        views: dict[str, ClusterMetadata] = {}
        for name, outcome in zip(
            clusters,
            await asyncio.gather(*(_look(cluster) for cluster in clusters.values())),
            strict=True,
        ):
            if isinstance(outcome, ClusterMetadata):
                views[name] = outcome
                count = len(outcome.brokers)
                findings.append(Finding(Severity.OK, name, f"answers, with {count} broker(s)"))
            else:
                findings.append(Finding(Severity.ERROR, name, str(outcome)))
        findings += _same_cluster(views)
        for source in config.sources:
            if source.cluster in views:
                findings += _selection(config, source, views[source.cluster])
        findings += await _loops(config, clusters, views)
        if config.target.cluster in views:
            findings += await _limits(config, clusters, views)
    finally:
        for cluster in clusters.values():
            await cluster.close()
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def run(config: MirrorConfig | Path | str) -> int:
    """Prints the findings; 0 when the mirror may run, 1 when it should not."""
    try:
        settings = config if isinstance(config, MirrorConfig) else load_config(config)
    except FatalError as error:
        sys.stderr.write(f"millrace mirror check: {error}\n")
        return error.exit_status
    findings = asyncio.run(check(settings))
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    return int(any(finding.severity is Severity.ERROR for finding in findings))


async def _look(cluster: Cluster) -> ClusterMetadata | Exception:
    try:
        return await cluster.metadata(max_age_ms=0)
    except CLUSTER_FAILURES as error:
        return error


def _same_cluster(views: Mapping[str, ClusterMetadata]) -> list[Finding]:
    """Two names for one cluster: as source and target that is a loop of its own."""
    names: dict[str, str] = {}
    findings: list[Finding] = []
    for name, view in views.items():
        if view.cluster_id is None:
            continue
        first = names.setdefault(view.cluster_id, name)
        if first != name:
            message = f"is the same cluster as {first} (id {view.cluster_id}); list each cluster once"
            findings.append(Finding(Severity.ERROR, name, message))
    return findings


def _selection(config: MirrorConfig, source: SourceConfig, view: ClusterMetadata) -> list[Finding]:
    names = _selected(source, view)
    if not names:
        return [Finding(Severity.WARNING, source.cluster, "no topic matches topics.include yet")]
    findings = [Finding(Severity.OK, source.cluster, f"selects {len(names)} topic(s): {_some(names)}")]
    meeting: dict[str, list[str]] = {}
    for name in names:
        meeting.setdefault(config.naming_rule.target_topic(source.cluster, name), []).append(name)
    for target, topics in sorted(meeting.items()):
        if len(topics) > 1:
            message = f"topics {_some(topics)} would all become {target}; give them different names"
            findings.append(Finding(Severity.ERROR, source.cluster, message))
    return findings


def _selected(source: SourceConfig, view: ClusterMetadata) -> list[str]:
    selector = TopicSelector(source.topics.include, source.topics.exclude)
    return [
        name for name, topic in sorted(view.topics.items()) if not topic.internal and selector.selects(name)
    ]


async def _loops(
    config: MirrorConfig, clusters: Mapping[str, Cluster], views: Mapping[str, ClusterMetadata]
) -> list[Finding]:
    target = views.get(config.target.cluster)
    routes: set[Route] = set()
    for source in config.sources:
        view = views.get(source.cluster)
        if view is None or target is None or not (view.cluster_id and target.cluster_id):
            continue
        for topic in _selected(source, view):
            name = config.naming_rule.target_topic(source.cluster, topic)
            routes.add(Route(view.cluster_id, topic, target.cluster_id, name))
    for cluster_name, view in views.items():
        routes |= await _routes_seen_on(clusters[cluster_name], view)
    names = {view.cluster_id or "": name for name, view in views.items()}
    findings: list[Finding] = []
    for loop in find_loops(routes):
        way = " -> ".join(f"{names.get(cluster, cluster)}/{topic}" for cluster, topic in [*loop, loop[0]])
        findings.append(
            Finding(Severity.ERROR, config.name, f"records would go round: {way}; exclude the topic")
        )
    return findings


async def _routes_seen_on(cluster: Cluster, view: ClusterMetadata) -> set[Route]:
    """The routes of every mirror that writes to a cluster, from the positions it keeps there. Their target
    names are taken to be the source's: the naming of others is not known."""
    routes: set[Route] = set()
    for topic in view.topics:
        if not topic.startswith(POSITIONS_TOPIC_PREFIX) or not view.cluster_id:
            continue
        positions = Positions()
        try:
            async for record in read_topic_to_end(cluster, topic):
                positions.apply(record.key, record.value)
        except CLUSTER_FAILURES:
            continue  # the cluster answered before; what it keeps of others only adds to the picture
        for partition, position in positions.known.items():
            routes.add(Route(position.cluster_id, partition.topic, view.cluster_id, partition.topic))
    return routes


async def _limits(
    config: MirrorConfig, clusters: Mapping[str, Cluster], views: Mapping[str, ClusterMetadata]
) -> list[Finding]:
    findings: list[Finding] = []
    target = clusters[config.target.cluster]
    for source in config.sources:
        view = views.get(source.cluster)
        for topic in _selected(source, view) if view is not None else ():
            name = config.naming_rule.target_topic(source.cluster, topic)
            if name not in views[config.target.cluster].topics:
                continue  # it will be created with the source's limits
            try:
                there = await describe_configs(target, name)
                here = await describe_configs(clusters[source.cluster], topic)
            except KafkaError as error:
                findings.append(Finding(Severity.WARNING, f"{target.name}/{name}", f"not described: {error}"))
                continue
            findings += _compare(f"{target.name}/{name}", here, there)
    return findings


def _compare(
    where: str, source: Mapping[str, str | None], target: Mapping[str, str | None]
) -> Iterable[Finding]:
    limit = int(target.get("max.message.bytes") or DEFAULT_MAX_BATCH_SIZE)
    largest = int(source.get("max.message.bytes") or DEFAULT_MAX_BATCH_SIZE)
    if limit < largest:
        message = f"max.message.bytes {limit} is below the source's {largest}: larger batches are split"
        yield Finding(Severity.WARNING, where, message)
    codec = target.get("compression.type") or "producer"
    if codec != "producer":
        message = f"compression.type {codec} makes the target compress every batch again; producer does not"
        yield Finding(Severity.WARNING, where, message)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
