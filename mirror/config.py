"""mirror.yaml: what a mirror is told, checked once at the edge.

Called by `daemon` and `check` (and by the sandbox, which builds a `MirrorConfig` in code). Only `name`,
`target` and `sources` are needed; every other key has a default that suits most. Unknown keys are errors,
and every error names the field's path, its value and what was expected.

    name: aggregate
    target: {cluster: agg, bootstrap: ["127.0.0.1:9392"]}
    sources:
      - cluster: ewr
        bootstrap: ["127.0.0.1:9092"]
        topics: {include: ["flights", "orders\\\\..*"], exclude: [".*\\\\.tmp"]}
        start: earliest
    control: {listen: "127.0.0.1:8090"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from millrace.broker.client.security import Secret, Security
from millrace.broker.config_file import (
    OLDER_NAME,
    ConfigText,
    ListenAddress,
    ServerAddress,
    all_in_one,
    check_config,
    read_config,
)
from millrace.broker.errors import ConfigError
from millrace.broker.expectations import one_of
from millrace.broker.protocol.address import Address
from millrace.mirror.batches.coalesce import COALESCE_BELOW, MERGED_SIZE
from millrace.mirror.config_types import (
    MEBIBYTE,
    Name,
    Pattern,
    Section,
    Start,
    TopicName,
    WorkerName,
)
from millrace.mirror.gaps.gaps import GapClass, GapPolicy
from millrace.mirror.topics.internal_topics import why_never_written
from millrace.mirror.topics.routes import Naming, TopicSelector


class TopicPatterns(Section):
    include: tuple[Pattern, ...] = Field(min_length=1)
    exclude: tuple[Pattern, ...] = ()


class GroupSyncConfig(Section):
    """Which consumer groups of a source have their positions kept up on the target, and how often."""

    include: tuple[Pattern, ...] = Field(min_length=1)
    exclude: tuple[Pattern, ...] = ()
    interval_ms: int = Field(default=10_000, ge=100, le=3_600_000)


class ClusterConfig(Section):
    cluster: Name
    bootstrap: tuple[ServerAddress, ...] = Field(min_length=1)
    security: Security = Security()


class SourceConfig(ClusterConfig):
    topics: TopicPatterns
    start: Start = "earliest"
    groups: GroupSyncConfig | None = None
    # A consumer group on the source in which positions are committed, for tools that show lag there.
    progress_group: str | None = Field(default=None, min_length=1, max_length=249)
    # Added to the partition's number on the target, where sources must not share partitions.
    partition_offset: int = Field(default=0, ge=0, le=100_000)
    # To each of its brokers, each with a part of the partitions: over a long link one connection carries no
    # more than the smaller of both ends' socket buffers in a round trip.
    connections: int = Field(default=1, ge=1, le=32)
    # What the link must carry; `check` compares it with round trip and buffers.
    wanted_mb_per_s: float | None = Field(default=None, gt=0)


class TargetConfig(ClusterConfig):
    # -1 asks for the target's own default.
    replication_factor: int = Field(default=-1, ge=-1)


class ControlConfig(Section):
    """`token` lets control calls come over the network; `advertised` is the address that other workers and
    `millrace mirror status` find this one by, where it is another than `listen`."""

    listen: ListenAddress = Address("127.0.0.1", 8090)
    advertised: ServerAddress | None = None
    token: Secret | None = None


class NamingConfig(Section):
    """`pattern` for all topics, `rename` for some: a key is a topic, or `cluster/topic` for one source's."""

    pattern: str = "identity"
    rename: dict[str, TopicName] = Field(default_factory=dict)

    @field_validator("pattern")
    @classmethod
    def _pattern_names_the_topic(cls, value: str) -> str:
        left = value.replace("{topic}", "").replace("{cluster}", "")
        is_pattern = "{topic}" in value and re.fullmatch(r"[A-Za-z0-9._-]*", left) is not None
        if value != "identity" and not is_pattern:
            raise ValueError('identity, a pattern such as "{cluster}.{topic}", or {rename: {old: new}}')
        return value


class ConfigSyncConfig(Section):
    """Topic settings follow the source's, except `topic_configs.TARGET_OWN_CONFIGS` and `exclude`."""

    enabled: bool = True
    interval_ms: int = Field(default=5_000, ge=100, le=3_600_000)
    exclude: tuple[str, ...] = ()


class GapsConfig(Section):
    """What to do at a gap: `default`, or another policy for one class."""

    default: GapPolicy = GapPolicy.STOP
    expired: GapPolicy | None = None
    recreated: GapPolicy | None = None
    truncated: GapPolicy | None = None
    too_large: GapPolicy | None = None
    unpacked_too_large: GapPolicy | None = None
    refused: GapPolicy | None = None
    corrupt: GapPolicy | None = None
    position_lost: GapPolicy | None = None

    def policy(self, gap_class: GapClass) -> GapPolicy:
        return getattr(self, gap_class.value) or self.default


class FetchConfig(Section):
    """`max_bytes` of an answer and `partition_max_bytes` of each partition in it; what is far behind is asked
    for up to `behind_max_bytes` at once (where that is less than the others, it changes nothing), as far as
    `in_flight_bytes` allows."""

    max_wait_ms: int = Field(default=500, ge=1, le=30_000)
    max_bytes: int = Field(default=8 * MEBIBYTE, ge=64 << 10)
    partition_max_bytes: int = Field(default=4 * MEBIBYTE, ge=16 << 10)
    behind_max_bytes: int = Field(default=16 * MEBIBYTE, ge=0)

    @property
    def most_bytes(self) -> int:
        """Of any answer, but for a batch that is larger."""
        return max(self.max_bytes, self.behind_max_bytes)


class BatchesConfig(Section):
    """What becomes of the source's batches. `auto`: neighbours smaller than `coalesce_below` become one batch
    of up to `coalesce_bytes`, or of what the target takes. `pass_through`: each keeps the records that its
    producer put into it, byte for byte, unless the target could not take it so (holes, append time, size)."""

    mode: Literal["auto", "pass_through"] = "auto"
    coalesce_below: int = Field(default=COALESCE_BELOW, ge=0, le=MEBIBYTE)
    coalesce_bytes: int = Field(default=MERGED_SIZE, ge=1 << 10, le=16 * MEBIBYTE)


class GroupConfig(Section):
    """`instance_id` is the worker's name in the group, which no other worker has: with it a restart within
    the session timeout moves no partition (`seat`). `{env: VARIABLE}` where workers share one file."""

    instance_id: WorkerName | None = None
    session_timeout_ms: int = Field(default=10_000, ge=1_000)
    rebalance_timeout_ms: int = Field(default=60_000, ge=1_000)


class MirrorConfig(Section):
    name: Name
    target: TargetConfig
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    delivery: Literal["exactly_once", "at_least_once"] = "exactly_once"
    # Transactions that one worker has open at the same time, each for its share of the partitions.
    lanes: int = Field(default=4, ge=1, le=64)
    naming: NamingConfig = NamingConfig()
    config_sync: ConfigSyncConfig = ConfigSyncConfig()
    # What to do where sources merge into one topic and have different numbers of partitions.
    partition_counts: Literal["widest"] | None = None
    control: ControlConfig = ControlConfig()
    gaps: GapsConfig = GapsConfig()
    fetch: FetchConfig = FetchConfig()
    group: GroupConfig = GroupConfig()
    batches: BatchesConfig = BatchesConfig()
    # The older name of `batches.coalesce_below`.
    coalesce_below: int | None = Field(default=None, ge=0, le=MEBIBYTE, json_schema_extra=OLDER_NAME)
    in_flight_bytes: int = Field(default=64 * MEBIBYTE, ge=MEBIBYTE)
    discovery_interval_ms: int = Field(default=2_000, ge=100, le=600_000)
    position_interval_ms: int = Field(default=250, ge=10, le=60_000)
    drain_timeout_ms: int = Field(default=20_000, ge=0)

    _text: ConfigText | None = PrivateAttr(default=None)

    @field_validator("naming", mode="before")
    @classmethod
    def _naming_may_be_a_pattern_alone(cls, value: Any) -> Any:
        return {"pattern": value} if isinstance(value, str) else value

    @field_validator("config_sync", mode="before")
    @classmethod
    def _config_sync_may_be_on_or_off_alone(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value

    @field_validator("batches", mode="before")
    @classmethod
    def _batches_may_be_a_mode_alone(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _coalesce_below_is_said_once(self) -> MirrorConfig:
        if self.coalesce_below is not None and "coalesce_below" in self.batches.model_fields_set:
            raise ConfigError(
                "coalesce_below", self.coalesce_below, "batches.coalesce_below alone, its new name"
            )
        return self

    @model_validator(mode="after")
    def _clusters_differ(self) -> MirrorConfig:
        seen: set[str] = set()
        for index, source in enumerate(self.sources):
            if source.cluster == self.target.cluster or source.cluster in seen:
                raise ConfigError(
                    f"sources[{index}].cluster", source.cluster, "a name that no other cluster here has"
                )
            seen.add(source.cluster)
            shared = set(source.bootstrap) & set(self.target.bootstrap)
            if shared:
                raise ConfigError(
                    f"sources[{index}].bootstrap", sorted(shared)[0], "an address that is not the target's"
                )
        return self

    @model_validator(mode="after")
    def _renamed_sources_exist(self) -> MirrorConfig:
        known = [source.cluster for source in self.sources]
        mistakes = [
            ConfigError(f"naming.rename.{key}", cluster, f"a source's cluster: {one_of(known, cluster)}")
            for key in self.naming.rename
            for cluster, slash, _ in [key.rpartition("/")]
            if slash and cluster not in known
        ]
        if mistakes:
            raise all_in_one(mistakes)
        return self

    @model_validator(mode="after")
    def _renamed_topics_are_their_users(self) -> MirrorConfig:
        mistakes = [
            ConfigError(f"naming.rename.{key}", name, f"another name: {reason}")
            for key, name in self.naming.rename.items()
            # A topic that keeps its name is no other one's records.
            if name != key.rpartition("/")[2] and (reason := why_never_written(name)) is not None
        ]
        if mistakes:
            raise all_in_one(mistakes)
        return self

    @model_validator(mode="after")
    def _renamed_topics_of_a_source_differ(self) -> MirrorConfig:
        """What the config alone can tell: two topics of one source that are renamed to one name. Whether the
        topics that patterns select meet is seen when the source has told them (`name_clashes`)."""
        rename = self.naming.rename
        selects = {
            each.cluster: TopicSelector(each.topics.include, each.topics.exclude).selects
            for each in self.sources
        }
        first: dict[tuple[str, str], str] = {}
        for key, name in rename.items():
            named, slash, topic = key.rpartition("/")
            clusters = [each for each in selects if selects[each](topic) and named in ("", each)]
            # A name without a source, which several may have, says of none that it has both.
            if len(clusters) != 1 or (not slash and f"{clusters[0]}/{topic}" in rename):
                continue
            other = first.setdefault((clusters[0], name), topic)
            if other != topic:
                raise ConfigError(
                    f"naming.rename.{key}",
                    name,
                    f"another name than {other} of {clusters[0]} has: their partitions would be mixed",
                )
        return self

    @property
    def naming_rule(self) -> Naming:
        return Naming(
            "{topic}" if self.naming.pattern == "identity" else self.naming.pattern,
            dict(self.naming.rename),
            {source.cluster: source.partition_offset for source in self.sources if source.partition_offset},
        )

    @property
    def coalescing(self) -> tuple[int, int]:
        """Bytes below which batches are merged (0: none is), and of what they become."""
        below = self.batches.coalesce_below if self.coalesce_below is None else self.coalesce_below
        return 0 if self.batches.mode == "pass_through" else below, self.batches.coalesce_bytes

    @property
    def group_id(self) -> str:
        return f"millrace-mirror.{self.name}"

    def source(self, cluster: str) -> SourceConfig | None:
        return next((source for source in self.sources if source.cluster == cluster), None)

    def place(self, path: str) -> str:
        """`mirror.yaml:7: sources[0].topics`: where a field stands in the file that this was read from."""
        return self._text.where(path) if self._text is not None else path

    def source_path(self, cluster: str, field: str = "") -> str:
        """The path of a source's section, or of a field of it, for `place`."""
        number = next(index for index, each in enumerate(self.sources) if each.cluster == cluster)
        return f"sources[{number}]" + (f".{field}" if field else "")


def load_config(path: Path | str) -> MirrorConfig:
    """Reads and checks mirror.yaml. Raises ConfigError with the field's path, its value and what was
    expected; of several errors the first, with the number of the others."""
    return _checked(_read(path))


def load_control(path: Path | str) -> ControlConfig:
    """The `control` section, for who speaks with a worker: the secrets and certificates of the clusters are
    the worker's, and so is its name in the group; they need not be here. Raises ConfigError as `load_config`
    does."""
    text = _read(path)
    content = {
        key: _without_security(value) if key in ("target", "sources") else value
        for key, value in text.content.items()
        if key != "group"
    }
    return check_config(MirrorConfig, replace(text, content=content)).control


def parse_config(settings: Mapping[str, Any], *, where: str = "mirror.yaml") -> MirrorConfig:
    """Checks settings that are already a mapping. Raises ConfigError as `load_config` does."""
    return _checked(ConfigText(where, dict(settings)))


def _read(path: Path | str) -> ConfigText:
    return read_config(path, "name, target and sources")


def _without_security(section: object) -> object:
    """A cluster's section, or a list of them."""
    if isinstance(section, list):
        return [_without_security(each) for each in section]
    if isinstance(section, dict):
        return {key: value for key, value in section.items() if key != "security"}
    return section


def _checked(text: ConfigText) -> MirrorConfig:
    config = check_config(MirrorConfig, text)
    config._text = text
    return config
