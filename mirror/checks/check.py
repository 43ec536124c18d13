"""`millrace mirror check`: a config against the live clusters, before anything is carried.

`check` asks and returns findings; `run` is what the command line calls: it prints them and gives the exit
status (0: nothing worse than a warning; 2: the mirror would not work; 20: only that a cluster is away).
`refuse_wrong_start` is the same at the start of a mirror, whose errors are therefore the same sentences.
Nothing is created or written (a cluster may make its internal topics when it is asked for a coordinator, as
at any client's first question).

Looked at: every cluster answers; every source selects at least one topic that can be carried, and tells a
topic from another of its name; no two topics of a source meet in one target topic; every rename names a
selected topic; sources that share a topic share its partitions; the target has or gets the partitions; no
route leads back to a cluster that its records come from, also by way of other mirrors; limits and settings of
the target's topics, of those, too, that the mirror will make; permissions on both ends; transactions, when
they are asked for; and what round trip and buffers allow. A cluster that does not answer, or not to one
question, hides no finding about the others.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from millrace.broker.client.admin import ConfigValue, describe_broker_configs, describe_topics_configs
from millrace.broker.client.cluster import Cluster
from millrace.broker.client.metadata import ClusterMetadata
from millrace.broker.errors import (
    AccessRefused,
    ClusterUnreachable,
    FatalError,
    KafkaError,
)
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.broker.wording import count_of, some
from millrace.mirror.checks import findings as rules
from millrace.mirror.checks import group_permissions, permissions
from millrace.mirror.checks.findings import Finding, Link, Selected, Severity, sorted_findings
from millrace.mirror.checks.transactions import of_transactions
from millrace.mirror.config import ClusterConfig, MirrorConfig, SourceConfig, load_config
from millrace.mirror.delivery.system_records import CLUSTER_FAILURES
from millrace.mirror.sources.epochs import untold
from millrace.mirror.sources.fetch_loop import way_number
from millrace.mirror.sources.progress_group import whose
from millrace.mirror.topics.own_topics import OFFSET_MAP, POSITIONS, ROUTES, STARTS, WISHES
from millrace.mirror.topics.proposals import DEAD_AFTER_MS
from millrace.mirror.topics.route_guard import copy_sentence, loop_sentence, routes_seen_on, told_routes
from millrace.mirror.topics.routes import (
    Answer,
    KnownRoutes,
    Route,
    TopicSelector,
    decide,
    find_loop,
    find_origins,
)

log = structlog.get_logger("millrace.mirror.checks.check")

__all__ = ["Finding", "Severity", "check", "refuse_wrong_start", "run"]

TIMEOUT_MS = 5_000
ROUND_TRIP_SAMPLES = 5
SEND_BUFFER = "socket.send.buffer.bytes"
# A broker's setting -> the topic's that it is the default of.
TOPIC_DEFAULTS = {
    "message.max.bytes": "max.message.bytes",
    "compression.type": "compression.type",
    "log.message.timestamp.type": "message.timestamp.type",
}
TCP_BUFFER_LIMITS = Path("/proc/sys/net/ipv4/tcp_rmem")


class StartRefused(FatalError):
    """The config cannot work on these clusters: at the start of a mirror, or as `check` found."""

    exit_status = 2


@dataclass
class _Picture:
    """What the clusters said, by their names in the config."""

    clusters: dict[str, Cluster]
    views: dict[str, ClusterMetadata] = field(default_factory=dict)
    selected: list[Selected] = field(default_factory=list)

    def of(self, source: str) -> list[Selected]:
        return [each for each in self.selected if each.source == source]


async def check(config: MirrorConfig, *, awaits_start: bool = True) -> list[Finding]:
    """Every finding, errors first. Raises nothing that a cluster does. `awaits_start`: a cluster that is away
    is given a moment to come."""
    ends = (config.target, *config.sources)
    picture = _Picture({each.cluster: _client(each, awaits_start) for each in ends})
    try:
        findings = await _reach(config, picture)
        ids = {name: view.cluster_id for name, view in picture.views.items()}
        findings += rules.second_names(config, ids)
        for number, source in enumerate(config.sources):
            if source.cluster in picture.views:
                findings += _select(config, number, picture)
        findings += rules.name_clashes(config, picture.selected)
        findings += rules.shared_partitions(config, picture.selected)
        findings += rules.idle_renames(config, picture.selected, picture.views)
        parts: list[tuple[str, Awaitable[list[Finding]]]] = [("", _loops(config, picture))]
        for source in config.sources:
            if source.cluster in picture.views:
                parts.append((source.cluster, _permissions_of_source(config, source.cluster, picture)))
                parts.append((source.cluster, _link(config, source, picture)))
                parts.append((source.cluster, _progress_group(config, source, picture)))
                parts.append((source.cluster, _synced_groups(config, source, picture)))
        target = config.target.cluster
        if target in picture.views:
            parts.append((target, _target(config, picture)))
            parts.append((target, _settings(config, picture)))
            parts.append((target, permissions.of_group(config, picture.clusters[target])))
            if config.delivery == "exactly_once":
                parts.append(
                    (target, of_transactions(config, picture.clusters[target], picture.views[target]))
                )
        for (name, _), outcome in zip(
            parts, await asyncio.gather(*(part for _, part in parts), return_exceptions=True), strict=True
        ):
            if isinstance(outcome, CLUSTER_FAILURES):
                message = f"could not be looked at in full: {outcome}"
                findings.append(Finding(Severity.WARNING, name or config.name, message, is_passing=True))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                findings += outcome
    finally:
        for cluster in picture.clusters.values():
            await cluster.close()
    return sorted_findings(findings)


def run(config: MirrorConfig | Path | str) -> int:
    """Prints the findings; the exit status is in the module's text."""
    try:
        settings = config if isinstance(config, MirrorConfig) else load_config(config)
    except FatalError as error:
        sys.stderr.writelines(f"millrace mirror check: {line}\n" for line in error.lines())
        return error.exit_status
    findings = asyncio.run(check(settings, awaits_start=False))
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if not errors:
        return 0
    away = all(finding.is_passing for finding in errors)
    return ClusterUnreachable.exit_status if away else StartRefused.exit_status


async def refuse_wrong_start(config: MirrorConfig) -> None:
    """Raises StartRefused for what would keep the mirror from working; logs warnings. A cluster that is away
    is no reason to end: the mirror waits for it."""
    try:
        findings = await check(config)
    except Exception:
        # It serves people: a mirror that can work must not end because a look at it failed.
        log.exception("the check at start failed; going on without it")
        return
    errors = [
        finding.sentence
        for finding in findings
        if finding.severity is Severity.ERROR and not finding.is_passing
    ]
    for finding in findings:
        if finding.severity is Severity.WARNING and not finding.is_passing:
            log.warning("check", finding=finding.sentence)
    if errors:
        for sentence in errors[1:]:
            log.error("check", finding=sentence)
        more = f" (and {len(errors) - 1} more: see `millrace mirror check`)" if len(errors) > 1 else ""
        raise StartRefused(errors[0] + more)


def _client(each: ClusterConfig, awaits_start: bool) -> Cluster:
    return Cluster(
        each.cluster,
        each.bootstrap,
        request_timeout_ms=TIMEOUT_MS,
        awaits_start=awaits_start,
        security=each.security,
    )


# --- clusters ------------------------------------------------------------------------------------


async def _reach(config: MirrorConfig, picture: _Picture) -> list[Finding]:
    async def look(cluster: Cluster) -> ClusterMetadata | Exception:
        try:
            return await cluster.metadata(max_age_ms=0)
        except CLUSTER_FAILURES as error:
            return error

    findings: list[Finding] = []
    names = list(picture.clusters)
    outcomes = await asyncio.gather(*(look(picture.clusters[name]) for name in names))
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, ClusterMetadata):
            picture.views[name] = outcome
            findings.append(
                Finding(Severity.OK, name, f"answers, with {count_of(len(outcome.brokers), 'broker')}")
            )
        else:
            message = str(outcome).removeprefix(f"cluster {name}: ")
            is_passing = isinstance(outcome, ClusterUnreachable)
            key = "security" if isinstance(outcome, AccessRefused) else "bootstrap"
            place = config.place(rules.path_of(config, name, key))
            findings.append(Finding(Severity.ERROR, name, message, place, is_passing))
    for each in (config.target, *config.sources):
        sasl = each.security.sasl
        if sasl is not None and not each.security.uses_tls and sasl.mechanism in ("PLAIN", "OAUTHBEARER"):
            secret = "password" if sasl.mechanism == "PLAIN" else "token"
            message = f"the {secret} goes over the network for all to read; use SASL_SSL where you can"
            place = config.place(rules.path_of(config, each.cluster, "security"))
            findings.append(Finding(Severity.WARNING, each.cluster, message, place))
    return findings


# --- topics --------------------------------------------------------------------------------------


def _select(config: MirrorConfig, number: int, picture: _Picture) -> list[Finding]:
    source = config.sources[number]
    selector = TopicSelector(source.topics.include, source.topics.exclude)
    naming = config.naming_rule
    found = [
        Selected(
            source.cluster,
            name,
            max(topic.partitions, default=-1) + 1,
            naming.target_topic(source.cluster, name),
            naming.partition_offset(source.cluster, name),
        )
        for name, topic in sorted(picture.views[source.cluster].topics.items())
        if not topic.internal and selector.selects(name)
    ]
    picture.selected += found
    topics = picture.views[source.cluster].topics
    internal = selector.left_out({name: topic.internal for name, topic in topics.items()})
    left_out = rules.left_out(config, source.cluster, internal)
    if not found:
        place = config.place(f"sources[{number}].topics.include")
        message = "no topic that can be carried matches topics.include yet"
        return [Finding(Severity.WARNING, source.cluster, message, place), *left_out]
    message = f"selects {count_of(len(found), 'topic')}: {some(map(str, found))}"
    findings = [Finding(Severity.OK, source.cluster, message), *left_out]
    if (reason := untold(topics[each.topic] for each in found)) is not None:
        place = config.place(f"sources[{number}].bootstrap")
        findings.append(Finding(Severity.WARNING, source.cluster, reason, place))
    return findings


async def _loops(config: MirrorConfig, picture: _Picture) -> list[Finding]:
    target = picture.views.get(config.target.cluster)
    if target is None or not target.cluster_id:
        return []
    names = {view.cluster_id: name for name, view in picture.views.items() if view.cluster_id}
    told = await told_routes(picture.clusters[config.target.cluster], config.name, target.cluster_id)
    findings: list[Finding] = []
    for source in config.sources:
        view = picture.views.get(source.cluster)
        if view is None or not view.cluster_id:
            continue
        seen = await routes_seen_on(picture.clusters[source.cluster], view)
        others = KnownRoutes(route for routes in seen.values() for route in routes.values())
        place = config.place(config.source_path(source.cluster, "topics.include"))
        siblings = {
            other.cluster_id: name
            for name, other in picture.views.items()
            if other.cluster_id and name not in (source.cluster, config.target.cluster)
        }
        for each in picture.of(source.cluster):
            before = told.get((source.cluster, each.topic))
            if before is not None and before.target_topic != each.target:
                before = None  # it went elsewhere; this is a new route
            since_ms = before.since_ms if before is not None else time.time_ns() // 1_000_000
            route = Route(view.cluster_id, each.topic, target.cluster_id, each.target, config.name, since_ms)
            answer, loop = decide(route, before, others)
            if loop is not None:
                message, severity = loop_sentence(loop, names), Severity.ERROR
                if find_loop(route, others.firm) is None:
                    message += (
                        ". It is only proposed: of those that begin at the same time one goes on, and one "
                        f"that died on the way is passed over after {DEAD_AFTER_MS // 1000} s"
                    )
                    severity = Severity.WARNING
                elif answer is not Answer.GIVE_WAY:
                    message += ". That mirror began later and gives way"
                    severity = Severity.WARNING
                elif before is not None and not before.is_proposed:
                    # Not refused at the start: only a mirror that runs takes back what it has told.
                    message += ". This mirror began later and gives way"
                    severity = Severity.WARNING
                findings.append(Finding(severity, source.cluster, message, place))
            original = config.naming_rule.original(source.cluster, each.topic, config.target.cluster)
            if original in target.topics and before is None and not others.into(view.cluster_id, each.topic):
                message = copy_sentence(source.cluster, each.topic, config.target.cluster, str(original))
                findings.append(Finding(Severity.WARNING, source.cluster, message, place))
            for cluster_id in find_origins(view.cluster_id, each.topic, others):
                if cluster_id in siblings:
                    message = (
                        f"records of {siblings[cluster_id]} reach {config.target.cluster}/{each.target} on "
                        f"two ways, directly and through {source.cluster}/{each.topic}: each is there twice; "
                        "exclude the topic from one of them"
                    )
                    findings.append(Finding(Severity.WARNING, source.cluster, message, place))
    return findings


async def _settings(config: MirrorConfig, picture: _Picture) -> list[Finding]:
    """Of topics that are there, and of those that the mirror will make, as far as the target tells what it
    gives to a topic that sets nothing."""
    target = picture.clusters[config.target.cluster]
    existing = picture.views[config.target.cluster].topics
    here: dict[Selected, dict[str, ConfigValue]] = {}
    for source in config.sources:
        mine = picture.of(source.cluster)
        if not mine:
            continue
        told = await describe_topics_configs(picture.clusters[source.cluster], [each.topic for each in mine])
        for each in mine:
            found = told.get(each.topic)
            if isinstance(found, dict):
                here[each] = found
    there = await describe_topics_configs(target, sorted({each.target for each in here} & existing.keys()))
    defaults = await _topic_defaults(target, picture.views[config.target.cluster])
    first: dict[str, Selected] = {}
    findings: list[Finding] = []
    for each, ours in here.items():
        decides = here[first.setdefault(each.target, each)]
        theirs = there.get(each.target)
        if each.target in existing and not isinstance(theirs, dict):
            continue
        present = theirs if isinstance(theirs, dict) else None
        expected = rules.settings_in_step(config, each.target, decides, present, defaults)
        findings += rules.settings(config, each, ours, expected)
    return rules.together(findings)


async def _topic_defaults(cluster: Cluster, view: ClusterMetadata) -> dict[str, ConfigValue]:
    """What a cluster gives to a topic that sets nothing; empty where it does not tell."""
    try:
        found = await describe_broker_configs(cluster, min(view.brokers), list(TOPIC_DEFAULTS))
    except CLUSTER_FAILURES as error:
        log.debug("the target does not tell its defaults", target=cluster.name, error=str(error))
        return {}
    return {
        TOPIC_DEFAULTS[name]: ConfigValue(value, is_set=False)
        for name, value in found.items()
        if name in TOPIC_DEFAULTS and value is not None
    }


# --- permissions, links --------------------------------------------------------------------------


async def _permissions_of_source(config: MirrorConfig, name: str, picture: _Picture) -> list[Finding]:
    found = [each.topic for each in picture.of(name)]
    source = config.source(name)
    patterns = source.topics.include if source is not None else ()
    named = [pattern for pattern in patterns if pattern not in found and _is_plain(pattern)]
    return await permissions.of_source(config, picture.clusters[name], found, named)


async def _progress_group(config: MirrorConfig, source: SourceConfig, picture: _Picture) -> list[Finding]:
    """A warning only: what is not the mirror's is not committed in, and records are carried all the same."""
    if source.progress_group is None:
        return []
    cluster = picture.clusters[source.cluster]
    if missing := await group_permissions.of_progress_group(config, source, cluster):
        return missing
    reason = await whose(cluster, source.progress_group, config.name)
    if reason is None:
        return []
    place = config.place(config.source_path(source.cluster, "progress_group"))
    return [Finding(Severity.WARNING, source.cluster, f"progress is not committed: {reason}", place)]


async def _synced_groups(config: MirrorConfig, source: SourceConfig, picture: _Picture) -> list[Finding]:
    view = picture.views.get(config.target.cluster)
    target = None if view is None else picture.clusters[config.target.cluster]
    there = {} if view is None else view.topics
    fed = {each.target for each in picture.of(source.cluster) if each.target in there}
    return await group_permissions.of_synced_groups(
        config, source, picture.clusters[source.cluster], target, fed
    )


def _is_plain(pattern: str) -> bool:
    return all(character.isalnum() or character in "_-" for character in pattern)


async def _target(config: MirrorConfig, picture: _Picture) -> list[Finding]:
    """Topics on the target: permissions, creation, width."""
    cluster = picture.clusters[config.target.cluster]
    existing = {
        name: len(topic.partitions) for name, topic in picture.views[config.target.cluster].topics.items()
    }
    own = {
        POSITIONS.of(config.name): "positions cannot be kept",
        STARTS.of(config.name): "a lost position cannot be told from none",
        ROUTES.of(config.name): "loops with other mirrors cannot be seen",
        OFFSET_MAP.of(config.name): "offsets cannot be translated",
        WISHES.of(config.name): "pauses and throttles cannot be kept",
        AUDIT_TOPIC: "gaps cannot be recorded",
    }
    findings, may_widen = await permissions.of_target(config, cluster, picture.selected, existing, own)
    return findings + rules.widths(config, picture.selected, existing, may_widen)


async def _link(config: MirrorConfig, source: SourceConfig, picture: _Picture) -> list[Finding]:
    name = source.cluster
    cluster, view = picture.clusters[name], picture.views[name]
    samples: list[float] = []
    for _ in range(ROUND_TRIP_SAMPLES):
        began = time.perf_counter()
        await cluster.metadata([], max_age_ms=0)
        samples.append(time.perf_counter() - began)
    # A link that carries less than there is to carry is behind, and asked for the larger of both.
    asked = max(("max_bytes", "behind_max_bytes"), key=lambda name: getattr(config.fetch, name))
    buffers = {f"fetch.{asked}": config.fetch.most_bytes, "in_flight_bytes": config.in_flight_bytes}
    received = _receive_buffer_limit()
    if received is not None:
        buffers["net.ipv4.tcp_rmem"] = received
    try:
        found = await describe_broker_configs(cluster, min(view.brokers), [SEND_BUFFER])
        size = int(found.get(SEND_BUFFER) or -1)
        if size > 0:
            buffers[f"{SEND_BUFFER} of {name}"] = size
    except (KafkaError, ValueError):
        log.debug("the source does not tell its send buffer", source=name)
    ways = {
        (partition.leader, way_number(each.topic, number, source.connections))
        for each in picture.of(name)
        for number, partition in view.topics[each.topic].partitions.items()
        if partition.leader >= 0
    }
    connections = max(1, len(ways))
    return [rules.link(config, name, Link(min(samples), connections, buffers))]


def _receive_buffer_limit() -> int | None:
    """The largest receive buffer that this system gives to a connection by itself."""
    try:
        return int(TCP_BUFFER_LIMITS.read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None
