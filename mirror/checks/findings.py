"""What `check` finds, as values, and the rules that need nothing but values. Pure.

Called by `check` and `permissions`. A finding is one line for a person: how bad, where in the config, which
cluster or topic, what will happen and what to do. An error is what keeps the mirror from working as it was
told to; a warning is what the operator should know; both name the line of the config that is responsible.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from millrace.broker.client.admin import ConfigValue
from millrace.broker.wording import count_of, some
from millrace.mirror.config import MirrorConfig
from millrace.mirror.gaps.gaps import GapClass, GapPolicy
from millrace.mirror.topics.internal_topics import LeftOut, left_out_sentences
from millrace.mirror.topics.name_clashes import clash_sentence
from millrace.mirror.topics.routes import Feed, uneven_feeds
from millrace.mirror.topics.second_names import second_name_sentence
from millrace.mirror.topics.topic_configs import (
    differences,
    follows_its_source,
    settings_to_begin_with,
)

MEGABYTE = 1_000_000


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """`where` is a cluster, or a topic on it; `place` the line and field of the config, empty where there is
    none. `is_passing`: a cluster that is away, which a running mirror waits for."""

    severity: Severity
    where: str
    message: str
    place: str = ""
    is_passing: bool = False

    @property
    def sentence(self) -> str:
        """Without the severity, as a process says it that ends for this reason."""
        return (
            f"{self.place}: {self.where}: {self.message}" if self.place else f"{self.where}: {self.message}"
        )

    def __str__(self) -> str:
        return f"{self.severity.value:<8} {self.sentence}"


@dataclass(frozen=True, slots=True)
class Selected:
    """A topic that a source's patterns select, and where it goes."""

    source: str
    topic: str
    partitions: int
    target: str
    partition_offset: int = 0

    @property
    def feed(self) -> Feed:
        return Feed(self.source, self.topic, self.partitions, self.partition_offset)

    def __str__(self) -> str:
        """`orders`, or `orders → renamed` where it has another name on the target."""
        return self.topic if self.target == self.topic else f"{self.topic} → {self.target}"


def left_out(config: MirrorConfig, source: str, topics: Sequence[LeftOut]) -> list[Finding]:
    """Topics that a source's patterns select and that are never carried. One that a pattern names is a
    mistake: somebody expects it at the target."""
    place = config.place(config.source_path(source, "topics.include"))
    findings = [
        Finding(
            Severity.WARNING,
            f"{source}/{each.topic}",
            f"is named in topics.include and never carried: {each.reason}; take it out of topics.include, or "
            "give it another name at the source where it is a topic of your own",
            place,
        )
        for each in topics
        if each.is_named
    ]
    if matched := left_out_sentences(each for each in topics if not each.is_named):
        message = f"never carried, though topics.include matches them: {'; '.join(matched)}"
        findings.append(Finding(Severity.OK, source, message, place))
    return findings


def name_clashes(config: MirrorConfig, selected: Iterable[Selected]) -> list[Finding]:
    """Topics that would meet in one target topic, and be mixed there: of one source, or of several where the
    pattern is to tell them apart."""
    meeting: dict[tuple[str, str], set[str]] = {}
    for each in selected:
        meeting.setdefault((each.source, each.target), set()).add(each.topic)
        if config.naming_rule.names_cluster(each.source, each.topic):
            places = meeting.setdefault((config.target.cluster, each.target), set())
            places.add(f"{each.source}/{each.topic}")
    return [
        Finding(
            Severity.ERROR,
            where,
            clash_sentence(topics, target),
            config.place("naming"),
        )
        for (where, target), topics in sorted(meeting.items())
        if len(topics) > 1
    ]


def second_names(config: MirrorConfig, ids: Mapping[str, str | None]) -> list[Finding]:
    """Two names for one cluster: as source and target that is a loop of its own. `ids`: what the clusters of
    the config call themselves (None: they do not say), the target first, and what is new last."""
    first: dict[str, str] = {}
    findings: list[Finding] = []
    for name, cluster_id in ids.items():
        if cluster_id is not None and first.setdefault(cluster_id, name) != name:
            message = second_name_sentence(first[cluster_id], cluster_id)
            findings.append(
                Finding(Severity.ERROR, name, message, config.place(path_of(config, name, "bootstrap")))
            )
    return findings


def path_of(config: MirrorConfig, cluster: str, key: str) -> str:
    """The path of a field of the target's section, or of a source's."""
    is_target = cluster == config.target.cluster
    return f"target.{key}" if is_target else config.source_path(cluster, key)


def idle_renames(
    config: MirrorConfig, selected: Sequence[Selected], answering: Collection[str]
) -> list[Finding]:
    """Keys of `naming.rename` that name no selected topic: mistyped ones leave their topics their names.
    Nothing is said of sources that are not `answering`."""
    findings: list[Finding] = []
    for key in config.naming.rename:
        cluster, _, topic = key.rpartition("/")
        sources = {cluster} if cluster else {source.cluster for source in config.sources}
        there = {each.topic for each in selected if each.source in sources}
        if topic in there or not sources <= set(answering):
            continue
        close = difflib.get_close_matches(topic, sorted(there), n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        message = f"{topic} is no topic that is selected now, so nothing is renamed by it{hint}"
        place = config.place(f"naming.rename.{key}")
        findings.append(Finding(Severity.WARNING, cluster or config.name, message, place))
    return findings


def shared_partitions(config: MirrorConfig, selected: Iterable[Selected]) -> list[Finding]:
    """Target topics whose sources write different partitions of them, with no rule that says so."""
    feeding: dict[str, list[Selected]] = {}
    for each in selected:
        feeding.setdefault(each.target, []).append(each)
    findings: list[Finding] = []
    for target, feeds in sorted(feeding.items()):
        sentence = uneven_feeds(target, [each.feed for each in feeds])
        if sentence is None or config.partition_counts == "widest":
            continue
        narrowest = min(feeds, key=lambda each: each.feed.target_partitions.stop)
        place = config.place(config.source_path(narrowest.source, "topics.include"))
        findings.append(Finding(Severity.WARNING, f"{config.target.cluster}/{target}", sentence, place))
    return findings


def widths(
    config: MirrorConfig, selected: Iterable[Selected], there: Mapping[str, int], may_widen: bool
) -> list[Finding]:
    """Target topics that have fewer partitions than their sources need. `there`: how many they have."""
    findings: list[Finding] = []
    for each in selected:
        needed, count = each.feed.target_partitions.stop, there.get(each.target)
        if count is None or count >= needed:
            continue
        place = config.place(config.source_path(each.source, "topics.include"))
        message = f"has {count_of(count, 'partition')}, {each.source}/{each.topic} needs {needed}"
        if may_widen:
            message += ": the mirror will add them"
        else:
            message += (
                ", and the mirror may not add them (Alter on the topic): partitions from "
                f"{count} on would not be carried"
            )
        severity = Severity.WARNING if may_widen else Severity.ERROR
        findings.append(Finding(severity, f"{config.target.cluster}/{each.target}", message, place))
    return findings


def settings_in_step(
    config: MirrorConfig,
    target_topic: str,
    source: Mapping[str, ConfigValue],
    there: Mapping[str, ConfigValue] | None,
    defaults: Mapping[str, ConfigValue],
) -> Mapping[str, ConfigValue]:
    """What a target topic has once the mirror has made it or brought it in step. `source`: of the topic that
    decides; `there`: what it has now, None where it is not made yet; `defaults`: what the target gives to a
    topic that sets nothing, as far as that is known."""
    exclude = config.config_sync.exclude
    changes: Mapping[str, str | None] = {}
    if there is None:
        changes = settings_to_begin_with(target_topic, source, exclude)
    elif config.config_sync.enabled and follows_its_source(target_topic):
        changes = differences(source, there, exclude)
    settings = dict(defaults if there is None else there)
    for key, value in changes.items():
        if value is not None:
            settings[key] = ConfigValue(value, is_set=True)
        elif key in defaults:
            settings[key] = defaults[key]
    return settings


def settings(
    config: MirrorConfig,
    each: Selected,
    source: Mapping[str, ConfigValue],
    target: Mapping[str, ConfigValue],
) -> Iterable[Finding]:
    """Settings of a target topic that change what a mirrored batch becomes there. `target`: as they will be
    (`settings_in_step`)."""
    where = f"{config.target.cluster}/{each.target}"
    place = config.place(config.source_path(each.source, "topics.include"))
    limit, largest = _largest_batch(target), _largest_batch(source)
    if limit is not None and largest is not None and limit < largest:
        is_skipped = config.gaps.policy(GapClass.TOO_LARGE) is GapPolicy.SKIP
        message = (
            f"max.message.bytes {limit} is below the source's {largest}: larger batches are split, and a "
            f"record that is too large alone {'is left out' if is_skipped else 'stops its partition'} "
            "(gaps.too_large); raise it at the target"
        )
        yield Finding(Severity.WARNING, where, message, place)
    codec = _value(target, "compression.type", "producer")
    if codec != "producer":
        message = (
            f"compression.type {codec} makes the target compress every batch again; with producer it keeps "
            "them as they are"
        )
        yield Finding(Severity.WARNING, where, message, place)
    if _value(target, "message.timestamp.type", "CreateTime") == "LogAppendTime":
        message = (
            "message.timestamp.type LogAppendTime: the target replaces every record's timestamp; with "
            "CreateTime it keeps them"
        )
        yield Finding(Severity.WARNING, where, message, place)


def together(findings: Iterable[Finding]) -> list[Finding]:
    """What is the same of several topics is one line: a target's defaults are those of all that it has."""
    of: dict[tuple[Severity, str, str], list[str]] = {}
    for each in findings:
        of.setdefault((each.severity, each.message, each.place), []).append(each.where)
    return [
        Finding(severity, some(where), message, place) for (severity, message, place), where in of.items()
    ]


def _value(configs: Mapping[str, ConfigValue], key: str, default: str) -> str:
    return (configs[key].value if key in configs else None) or default


def _largest_batch(configs: Mapping[str, ConfigValue]) -> int | None:
    """None: not told."""
    told = _value(configs, "max.message.bytes", "")
    return int(told) if told else None


@dataclass(frozen=True, slots=True)
class Link:
    """What bounds the bytes from a source: `buffers` are sizes in bytes by their names, of which the smallest
    is what one connection carries in a round trip."""

    round_trip_s: float
    connections: int
    buffers: Mapping[str, int]

    @property
    def narrowest(self) -> str:
        return min(self.buffers, key=lambda name: (self.buffers[name], name))

    @property
    def bytes_per_s(self) -> float:
        return self.connections * self.buffers[self.narrowest] / max(self.round_trip_s, 1e-6)


def link(config: MirrorConfig, source: str, measured: Link) -> Finding:
    """Whether a link can carry what is wanted of it, and what to change when not."""
    found = config.source(source)
    wanted = found.wanted_mb_per_s if found is not None else None
    rate = measured.bytes_per_s / MEGABYTE
    name = measured.narrowest
    message = (
        f"round trip {measured.round_trip_s * 1000:.1f} ms: at most {rate:,.0f} MB/s over "
        f"{count_of(measured.connections, 'connection')}, by {name}={measured.buffers[name]}"
    )
    if wanted is None or rate >= wanted:
        return Finding(Severity.OK, source, message)
    needed = int(wanted * MEGABYTE * measured.round_trip_s / measured.connections) + 1
    return Finding(
        Severity.WARNING,
        source,
        f"{message}; {wanted:g} MB/s are wanted: that takes {needed} bytes (a send buffer of -1 lets the "
        f"system choose), or more connections (sources[{source}].connections)",
        config.place(config.source_path(source, "wanted_mb_per_s")),
    )


def too_few_brokers(config: MirrorConfig, setting: str, factor: int, brokers: int) -> Finding:
    """The target cannot make the topic that its transactions are kept in."""
    return no_transactions(
        config,
        f"{setting}={factor}, and it has {count_of(brokers, 'broker')}, so it cannot make the topic that "
        "transactions are kept in",
        cure=f"add brokers or lower {setting}",
    )


def no_transactions(config: MirrorConfig, reason: str, *, cure: str = "") -> Finding:
    """`cure`: what would give it some."""
    choice = "choose `delivery: at_least_once`, which repeats records after a failure"
    message = f"it lacks transactions: {reason}; {f'{cure}; or {choice}' if cure else choice}"
    return Finding(Severity.ERROR, config.target.cluster, message, config.place("delivery"))


def sorted_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Errors first, otherwise in the order given."""
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))
