"""`audit.yaml`: which clusters, topics and windows are audited, and where state and report go.

`load_config(path)` is called by the command line; `AuditConfig` goes inward. Everything is frozen after
loading. Unknown keys are errors; every error is one `ConfigError` line with the field's path, the value found
and what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    model_validator,
)

from millrace.audit.reconciliation.verdicts import PRODUCED
from millrace.broker.client.security import Security
from millrace.broker.config_file import ConfigText, ServerAddress, check_config, read_config
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.address import CONNECT_EXPECTED, parse_servers
from millrace.broker.protocol.system_topics import AUDIT_TOPIC
from millrace.broker.times import time_ms

NAME_MARK = "@"  # in no topic's name
DEFAULT_KEEP_MS = 30 * 86_400_000
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"([0-9]+)\s*(ms|s|m|h|d)")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_DURATION_EXPECTED = "a duration such as 60s, 10m or 1d"
_MOST_MS = 100_000 * _UNIT_MS["d"]  # 273 years: what a timer takes
_LONGEST = len(str(_MOST_MS))
Names = TypeVar("Names", tuple[str, ...], list[str])
SHOWN = 80
"""characters of an option's value in the line about it"""


def _duration_ms(value: Any) -> int:
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    digits = found[1].lstrip("0") if found is not None else ""
    if found is None or not digits:
        raise ValueError(_DURATION_EXPECTED)
    ms = int(digits[:_LONGEST]) * _UNIT_MS[found[2]]
    if len(digits) > _LONGEST or ms > _MOST_MS:
        raise ValueError(f"{_DURATION_EXPECTED}, at most {_MOST_MS // _UNIT_MS['d']}d")
    return ms


def _grace_ms(value: Any) -> int:
    return 0 if value in ("0", "0s", 0) else _duration_ms(value)


def _keep_ms(value: Any) -> int | None:
    return None if value in (None, "forever") else _duration_ms(value)


def _connect_string(value: Any) -> str:
    hosts, slash, chroot = value.partition("/") if isinstance(value, str) else ("", "", "")
    try:
        servers = parse_servers(hosts)
    except ValueError as problem:
        raise ValueError(CONNECT_EXPECTED) from problem
    if slash and (not chroot or chroot.endswith("/") or "//" in chroot):
        raise ValueError(CONNECT_EXPECTED)
    return ",".join(map(str, servers)) + slash + chroot


def _topic_names(value: Any) -> Any:
    """One name or several; always held as a tuple."""
    return [value] if isinstance(value, str) else value


def _distinct(value: Names) -> Names:
    if not value or len(set(value)) != len(value):
        raise ValueError("one or several names, each once")
    return value


def _folder_place(value: Any) -> Any:
    """A local path, or the URI of a Hadoop file system (`hdfs://`, `s3a://`, `file:///`), kept as text."""
    if isinstance(value, str) and _URI.match(value):
        if value.partition(":")[2].strip("/") == "":
            raise ValueError("a path or a URI with a path")
        return value.rstrip("/")
    return Path(value) if isinstance(value, str | Path) else value


def _topic_list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("a list of topics, such as [orders, flights]")
    return value


def _address_list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("a list such as [host:9092]")
    return value


def _renamed_topics(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(
            "audited topics with their names in this cluster, such as {flights: ewr.flights}; "
            "a topic that has its own name here is left out"
        )
    return value


def _group(value: Any) -> Any:
    """A group that is only named."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict | BaseModel):
        raise ValueError("a group's name, or {name: ..., topics: [...]} with the topics that it reads")
    return value


def _groups(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError("a list of groups, such as [billing, {name: search, topics: [orders]}]")
    return value


def _roster_member(value: Any) -> Any:
    """A producer that is only named."""
    if isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict | BaseModel):
        raise ValueError("a producer's name, or {name: ..., since: 2013-01-01T00:00:00Z}")
    return value


def _groups_by_cluster(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("clusters with the groups that read them, such as {agg: [billing]}")
    return value


DurationMs = Annotated[int, BeforeValidator(_duration_ms)]
GraceMs = Annotated[int, BeforeValidator(_grace_ms)]
Name = Annotated[str, Field(min_length=1, max_length=249, pattern=r"^[A-Za-z0-9._-]+$")]
TopicNames = Annotated[tuple[Name, ...], BeforeValidator(_topic_names), AfterValidator(_distinct)]
Folder = Annotated[Path | str, BeforeValidator(_folder_place)]
Topics = Annotated[list[Name], BeforeValidator(_topic_list), Field(min_length=1), AfterValidator(_distinct)]
SparkSetting = Annotated[str, Field(pattern=r"^spark\.\S+$")]
KeepMs = Annotated[int | None, BeforeValidator(_keep_ms)]


def audited_topic(place_topic: str) -> str:
    """The audited topic of a place's topic (see `ClusterConfig.places`)."""
    return place_topic.partition(NAME_MARK)[0]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class ClusterConfig(_Model):
    """One cluster and the part it plays.

    `topics` maps an audited topic to its name in this cluster, or to several names where sources arrive under
    different ones. `mirror` says who fills an aggregate: Millrace's mirror, which keeps positions there, or a
    `foreign` one, whose progress is known by arrivals only. `events` are the names under which a mirror
    brings other clusters' events topics here (`told_elsewhere`).
    """

    bootstrap: Annotated[list[ServerAddress], BeforeValidator(_address_list), Field(min_length=1)]
    tier: Literal["source", "aggregate"]
    topics: Annotated[dict[Name, TopicNames], BeforeValidator(_renamed_topics)] = {}
    mirror: Literal["millrace", "foreign"] = "millrace"
    security: Security = Security()
    events: TopicNames | None = None

    def told_elsewhere(self, audit_topic: str) -> tuple[str, ...]:
        """Topics of this cluster with what is told in other clusters. Where none are named, those that
        MirrorMaker 2 makes: it brings `flights` of ewr as `ewr.flights`, and so the events topic."""
        if self.events is not None:
            return tuple(name for name in self.events if name != audit_topic)
        prefixes = [
            here.removesuffix(topic)
            for topic, names in self.topics.items()
            for here in names
            if here.endswith(f".{topic}")
        ]
        return tuple(f"{prefix}{audit_topic}" for prefix in dict.fromkeys(prefixes))

    def topics_here(self, topic: str) -> tuple[str, ...]:
        """The names under which the audited topic lies in this cluster; at least one."""
        return self.topics.get(topic, (topic,))

    def places(self, topic: str) -> dict[str, str]:
        """{name in this cluster: topic of its places}. A place (cluster, topic, partition) must be one log:
        where the topic lies under several names, the name is added to it, `flights@ewr.flights`."""
        names = self.topics_here(topic)
        return {name: topic if len(names) == 1 else f"{topic}{NAME_MARK}{name}" for name in names}


class GroupConfig(_Model):
    """A consumer group that is audited as a tier. `topics` are the audited topics that it is expected to
    read; None: all of them."""

    name: Annotated[str, Field(min_length=1, max_length=249)]
    topics: Topics | None = None


Groups = Annotated[
    list[Annotated[GroupConfig, BeforeValidator(_group)]], BeforeValidator(_groups), Field(min_length=1)
]


class RosterMember(_Model):
    """A producer that must tell of every window that reaches beyond `since` (0: of every window)."""

    name: Annotated[str, Field(min_length=1, max_length=249)]
    since_ms: Annotated[int, BeforeValidator(time_ms)] = Field(default=0, alias="since")


class ZooKeeperConfig(_Model):
    """Where the completeness watermarks are told, beside the report: `connect` is host:port,.../chroot."""

    connect: Annotated[str, BeforeValidator(_connect_string)]
    path: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")] = "/millrace/audit"
    timeout_ms: DurationMs = Field(default=10_000, alias="timeout")


class AuditConfig(_Model):
    """The whole file. `window` is the producers' counting window; `grace` how long after it verdicts wait;
    `audit_topic` is where producers and consumers tell their counts (their `millrace.audit.topic`).

    `groups` {cluster: consumer groups} are audited as tiers `group:<group>`, each for all topics or for those
    that it names. `keep` is how long the evidence
    of a window stays in the state after its verdict last changed (None, `forever`: always). `content`:
    digests are compared too. `state` and `report` are local folders (Path) or URIs of Hadoop file systems
    (str).
    `reader` chooses who reads the clusters: our own reader or Spark's Kafka connector. `spark` are settings
    of Spark by their names, before ours (`spark.executor.memory: 4g`).
    """

    clusters: Annotated[dict[Name, ClusterConfig], Field(min_length=1)]
    topics: Topics
    audit_topic: Name = AUDIT_TOPIC
    window_ms: DurationMs = Field(default=60_000, alias="window")
    grace_ms: GraceMs = Field(default=30_000, alias="grace")
    producers: list[Annotated[RosterMember, BeforeValidator(_roster_member)]] = []
    groups: Annotated[dict[Name, Groups], BeforeValidator(_groups_by_cluster)] = {}
    content: bool = False
    reader: Literal["millrace", "spark-kafka"] = "millrace"
    spark: dict[SparkSetting, str] = {}
    keep_ms: KeepMs = Field(default=DEFAULT_KEEP_MS, alias="keep")
    zookeeper: ZooKeeperConfig | None = None
    state: Folder = Path("audit-state")
    report: Folder = Path("audit-report")

    _text: ConfigText | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _fits_together(self) -> AuditConfig:
        mistakes = list(self._mistakes())
        if mistakes:
            first, *further = mistakes
            raise ConfigError(first.path, first.value, first.expected, tuple(further))
        return self

    def _mistakes(self) -> Iterator[ConfigError]:
        topics, clusters = ", ".join(self.topics), ", ".join(sorted(self.clusters))
        for name, cluster in self.clusters.items():
            if name == PRODUCED:
                yield ConfigError(f"clusters.{name}", name, "another name: producers are called so")
            for topic in cluster.topics:
                if topic not in self.topics:
                    yield ConfigError(f"clusters.{name}.topics.{topic}", topic, f"one of topics: {topics}")
            if cluster.tier == "source" and cluster.mirror != "millrace":
                yield ConfigError(f"clusters.{name}.mirror", cluster.mirror, "tier aggregate for this key")
        if len(self.clusters) > 1 and not self.sources():
            yield ConfigError(
                "clusters", ", ".join(self.clusters), "tier source for those that producers write to"
            )
        members: set[str] = set()
        for number, member in enumerate(self.producers):
            if member.name in members:
                yield ConfigError(f"producers[{number}]", member.name, "it once")
            members.add(member.name)
        known: dict[str, str] = {}
        for name, groups in self.groups.items():
            if name not in self.clusters:
                yield ConfigError(f"groups.{name}", name, f"one of clusters: {clusters}")
                continue
            for number, group in enumerate(groups):
                where = f"groups.{name}[{number}]"
                if group.name in known:
                    other = known[group.name]
                    meant = "it once" if other == name else f"a group of one cluster; groups.{other} has it"
                    yield ConfigError(where, group.name, meant)
                known.setdefault(group.name, name)
                for topic in group.topics or ():
                    if topic not in self.topics:
                        yield ConfigError(f"{where}.topics", topic, f"one of topics: {topics}")

    def where(self, path: str) -> str:
        """`audit.yaml:3: topics[1]`: where the file has the field, for errors that are found later."""
        return path if self._text is None else self._text.where(path)

    def roster(self) -> dict[str, int]:
        """{producer that must tell of every window: since when, ms}"""
        return {member.name: member.since_ms for member in self.producers}

    def group_names(self) -> set[str]:
        return {group.name for groups in self.groups.values() for group in groups}

    def sources(self) -> dict[str, ClusterConfig]:
        return {name: cluster for name, cluster in self.clusters.items() if cluster.tier == "source"}

    def aggregates(self) -> dict[str, ClusterConfig]:
        return {name: cluster for name, cluster in self.clusters.items() if cluster.tier == "aggregate"}


def load_config(path: Path | str) -> AuditConfig:
    """Read and check `audit.yaml`. Relative `state` and `report` are taken from the file's own folder."""
    path = Path(path)
    text = read_config(path, "clusters, topics, window, grace")
    config = check_config(AuditConfig, text)
    root = path.resolve().parent
    places = {"state": config.state, "report": config.report}
    loaded = config.model_copy(
        update={name: root / place if isinstance(place, Path) else place for name, place in places.items()}
    )
    loaded._text = text
    return loaded


def parse_config(content: dict[str, Any], where: str = "audit config") -> AuditConfig:
    """Check an already parsed config (the demo builds one in memory)."""
    text = ConfigText(where, content)
    config = check_config(AuditConfig, text)
    config._text = text
    return config


def parse_duration_ms(where: str, text: str) -> int:
    """A duration given as an option; raises ConfigError naming `where`."""
    try:
        return _duration_ms(text)
    except ValueError as problem:
        raise ConfigError(where, text[:SHOWN], str(problem)) from problem


def duration_text(ms: int) -> str:
    """A duration as the file has it: `60s` is `1m`."""
    unit = max((each for each in _UNIT_MS if ms % _UNIT_MS[each] == 0), key=lambda each: _UNIT_MS[each])
    return f"{ms // _UNIT_MS[unit]}{unit}"


def parse_addresses(where: str, text: str) -> list[str]:
    """`host:port,host:port` given as an option; raises ConfigError naming `where`."""
    try:
        return [str(address) for address in parse_servers(text)]
    except ValueError as problem:
        raise ConfigError(where, text, f"{problem}, or several with commas") from problem
