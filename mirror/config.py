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
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from millrace.broker.config_file import ConfigText, check_config, read_config
from millrace.broker.errors import ConfigError
from millrace.mirror.gaps import GapClass, GapPolicy
from millrace.mirror.routes import Naming

MEBIBYTE = 1 << 20
NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


def _address(value: str) -> str:
    match = ADDRESS.fullmatch(value)
    if match is None or int(match[2]) > 65535:
        raise ValueError('an address "host:port"')
    return value


def _name(value: str) -> str:
    if NAME.fullmatch(value) is None:
        raise ValueError("a name of letters, digits, '.', '_' and '-'")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"a regular expression ({error})") from None
    return value


def _start(value: Any) -> Any:
    if isinstance(value, str) and value in ("earliest", "latest"):
        return value
    if isinstance(value, bool):
        raise ValueError("earliest, latest or a time")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError('earliest, latest or a time such as "2024-01-31T00:00:00Z"') from None
    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=UTC)
        return int(moment.timestamp() * 1000)
    raise ValueError('earliest, latest or a time such as "2024-01-31T00:00:00Z"')


Address = Annotated[str, AfterValidator(_address)]
Name = Annotated[str, AfterValidator(_name)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Start = Annotated[Literal["earliest", "latest"] | int, BeforeValidator(_start)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TopicPatterns(_Section):
    include: tuple[Pattern, ...] = Field(min_length=1)
    exclude: tuple[Pattern, ...] = ()


class ClusterConfig(_Section):
    cluster: Name
    bootstrap: tuple[Address, ...] = Field(min_length=1)


class SourceConfig(ClusterConfig):
    topics: TopicPatterns
    start: Start = "earliest"


class TargetConfig(ClusterConfig):
    # -1 asks for the target's own default.
    replication_factor: int = Field(default=-1, ge=-1)


class ControlConfig(_Section):
    listen: Address = "127.0.0.1:8090"


class RenameConfig(_Section):
    rename: dict[str, Name] = Field(min_length=1)


class GapsConfig(_Section):
    """What to do at a gap: `default`, or another policy for one class."""

    default: GapPolicy = GapPolicy.STOP
    expired: GapPolicy | None = None
    recreated: GapPolicy | None = None
    truncated: GapPolicy | None = None
    too_large: GapPolicy | None = None
    refused: GapPolicy | None = None
    corrupt: GapPolicy | None = None
    position_lost: GapPolicy | None = None

    def policy(self, gap_class: GapClass) -> GapPolicy:
        return getattr(self, gap_class.value) or self.default


class FetchConfig(_Section):
    max_wait_ms: int = Field(default=500, ge=1, le=30_000)
    max_bytes: int = Field(default=8 * MEBIBYTE, ge=64 << 10)
    partition_max_bytes: int = Field(default=4 * MEBIBYTE, ge=16 << 10)


class GroupConfig(_Section):
    session_timeout_ms: int = Field(default=10_000, ge=1_000)
    rebalance_timeout_ms: int = Field(default=60_000, ge=1_000)


class MirrorConfig(_Section):
    name: Name
    target: TargetConfig
    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    delivery: Literal["at_least_once"] = "at_least_once"
    naming: str | RenameConfig = "identity"
    control: ControlConfig = ControlConfig()
    gaps: GapsConfig = GapsConfig()
    fetch: FetchConfig = FetchConfig()
    group: GroupConfig = GroupConfig()
    in_flight_bytes: int = Field(default=64 * MEBIBYTE, ge=MEBIBYTE)
    discovery_interval_ms: int = Field(default=2_000, ge=100, le=600_000)
    position_interval_ms: int = Field(default=250, ge=10, le=60_000)
    drain_timeout_ms: int = Field(default=20_000, ge=0)

    @field_validator("delivery", mode="before")
    @classmethod
    def _delivery_exists(cls, value: object) -> object:
        if value == "exactly_once":
            raise ValueError("at_least_once (exactly_once is not available in this version)")
        return value

    @field_validator("naming")
    @classmethod
    def _naming_names_the_topic(cls, value: str | RenameConfig) -> str | RenameConfig:
        if isinstance(value, str) and value != "identity":
            left = value.replace("{topic}", "").replace("{cluster}", "")
            if "{topic}" not in value or re.fullmatch(r"[A-Za-z0-9._-]*", left) is None:
                raise ValueError('identity, a pattern such as "{cluster}.{topic}", or {rename: {old: new}}')
        return value

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

    @property
    def naming_rule(self) -> Naming:
        if isinstance(self.naming, RenameConfig):
            return Naming(rename=dict(self.naming.rename))
        return Naming() if self.naming == "identity" else Naming(pattern=self.naming)

    @property
    def group_id(self) -> str:
        return f"millrace-mirror.{self.name}"

    def source(self, cluster: str) -> SourceConfig | None:
        return next((source for source in self.sources if source.cluster == cluster), None)


def load_config(path: Path | str) -> MirrorConfig:
    """Reads and checks mirror.yaml. Raises ConfigError with the field's path, its value and what was
    expected; of several errors the first, with the number of the others."""
    return check_config(MirrorConfig, read_config(path, "name, target and sources"))


def parse_config(settings: Mapping[str, Any], *, where: str = "mirror.yaml") -> MirrorConfig:
    """Checks settings that are already a mapping. Raises ConfigError as `load_config` does."""
    return check_config(MirrorConfig, ConfigText(where, dict(settings)))
