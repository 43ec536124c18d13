"""`audit.yaml`: which clusters, topics and windows are audited, and where state and report go.

`load_config(path)` is called by the command line; `AuditConfig` goes inward. Everything is frozen after
loading. Unknown keys are errors; every error is one `ConfigError` line with the field's path, the value found
and what was expected.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from millrace.broker.config_file import ConfigText, check_config, read_config
from millrace.broker.errors import ConfigError

_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|h|d)")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):(\d{1,5})")
_DURATION_EXPECTED = "a duration such as 60s, 10m or 1d"


def _duration_ms(value: Any) -> int:
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or int(found[1]) == 0:
        raise ValueError(_DURATION_EXPECTED)
    return int(found[1]) * _UNIT_MS[found[2]]


def _grace_ms(value: Any) -> int:
    return 0 if value in ("0", "0s", 0) else _duration_ms(value)


def _address(value: Any) -> str:
    found = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if found is None or not 0 < int(found[2]) < 65536:
        raise ValueError("an address as host:port")
    return str(value)


DurationMs = Annotated[int, BeforeValidator(_duration_ms)]
GraceMs = Annotated[int, BeforeValidator(_grace_ms)]
Address = Annotated[str, BeforeValidator(_address)]
Name = Annotated[str, Field(min_length=1, max_length=249, pattern=r"^[A-Za-z0-9._-]+$")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class ClusterConfig(_Model):
    """One cluster and the part it plays. `topics` maps an audited topic to its name in this cluster."""

    bootstrap: Annotated[list[Address], Field(min_length=1)]
    tier: Literal["source", "aggregate"]
    topics: dict[Name, Name] = {}

    def topic_here(self, topic: str) -> str:
        return self.topics.get(topic, topic)


class AuditConfig(_Model):
    """The whole file. `window` is the producers' counting window; `grace` how long after it verdicts wait."""

    clusters: Annotated[dict[Name, ClusterConfig], Field(min_length=1)]
    topics: Annotated[list[Name], Field(min_length=1)]
    window_ms: DurationMs = Field(default=60_000, alias="window")
    grace_ms: GraceMs = Field(default=30_000, alias="grace")
    producers: list[str] = []
    state: Path = Path("audit-state")
    report: Path = Path("audit-report")

    @model_validator(mode="after")
    def _topics_are_known(self) -> AuditConfig:
        for name, cluster in self.clusters.items():
            for topic in cluster.topics:
                if topic not in self.topics:
                    raise ValueError(f"clusters.{name}.topics.{topic} = {topic}: one of topics {self.topics}")
        return self

    def sources(self) -> dict[str, ClusterConfig]:
        return {name: cluster for name, cluster in self.clusters.items() if cluster.tier == "source"}

    def aggregates(self) -> dict[str, ClusterConfig]:
        return {name: cluster for name, cluster in self.clusters.items() if cluster.tier == "aggregate"}


def load_config(path: Path | str) -> AuditConfig:
    """Read and check `audit.yaml`. Relative `state` and `report` are taken from the file's own folder."""
    path = Path(path)
    config = check_config(AuditConfig, read_config(path, "clusters, topics, window, grace"))
    root = path.resolve().parent
    return config.model_copy(update={"state": root / config.state, "report": root / config.report})


def parse_config(content: dict[str, Any], where: str = "audit config") -> AuditConfig:
    """Check an already parsed config (the demo builds one in memory)."""
    return check_config(AuditConfig, ConfigText(where, content))


def parse_duration_ms(where: str, text: str) -> int:
    """A duration given as an option; raises ConfigError naming `where`."""
    try:
        return _duration_ms(text)
    except ValueError as problem:
        raise ConfigError(where, text, str(problem)) from problem


def parse_addresses(where: str, text: str) -> list[str]:
    """`host:port,host:port` given as an option; raises ConfigError naming `where`."""
    try:
        return [_address(part.strip()) for part in text.split(",")]
    except ValueError as problem:
        raise ConfigError(where, text, f"{problem}, or several with commas") from problem
