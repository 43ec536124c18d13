"""The description of a sandbox: which clusters and mirrors run on this machine, at which addresses.

Read from YAML by `Sandbox.from_file` and built in memory by the demo, which takes free ports. Frozen after
loading; unknown keys and references to clusters that are not listed are errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from millrace.broker.config_file import ConfigText, ServerAddress, check_config, read_config
from millrace.broker.errors import ConfigError

DEFAULT_FILE = Path(__file__).with_name("three-datacenters.yaml")

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ZooKeeperSpec(_Section):
    listen: ServerAddress
    heap_mib: int = Field(default=128, ge=32)


class ClusterSpec(_Section):
    """One broker; `settings` are Kafka-named and lie over those that suit a sandbox."""

    listen: ServerAddress
    settings: dict[str, str | int | bool] = {}


class TopicPatterns(_Section):
    include: list[str] = Field(min_length=1)
    exclude: list[str] = []


class MirrorSpec(_Section):
    """One mirror, with as many processes as it has control addresses."""

    name: Name
    target: Name
    sources: list[Name] = Field(min_length=1)
    topics: TopicPatterns
    control: list[ServerAddress] = Field(min_length=1)


class SandboxSpec(_Section):
    """`data`: the sandbox's folder; in a file a relative path is from the file's own."""

    name: Name
    data: Path
    zookeeper: ZooKeeperSpec
    clusters: dict[Name, ClusterSpec] = Field(min_length=1)
    mirrors: list[MirrorSpec] = []

    @field_validator("data")
    @classmethod
    def _data_lies_beside_the_file(cls, value: Path, info: ValidationInfo) -> Path:
        folder = (info.context or {}).get("folder")
        return value.expanduser() if folder is None else folder / value.expanduser()

    @model_validator(mode="after")
    def _references_and_addresses_hold(self) -> SandboxSpec:
        names_before: set[str] = set()
        for index, mirror in enumerate(self.mirrors):
            if mirror.name in names_before:
                raise ConfigError(f"mirrors[{index}].name", mirror.name, "a name that no other mirror has")
            names_before.add(mirror.name)
            for field, names in (("target", [mirror.target]), ("sources", mirror.sources)):
                for name in names:
                    if name not in self.clusters:
                        raise ConfigError(
                            f"mirrors[{index}].{field}", name, f"one of {', '.join(self.clusters)}"
                        )
        seen: set[str] = set()
        for path, address in self._addresses():
            if address in seen:
                raise ConfigError(path, address, "an address that nothing else here has")
            seen.add(address)
        return self

    def _addresses(self) -> list[tuple[str, str]]:
        return [
            ("zookeeper.listen", self.zookeeper.listen),
            *((f"clusters.{name}.listen", cluster.listen) for name, cluster in self.clusters.items()),
            *(
                (f"mirrors[{index}].control", address)
                for index, mirror in enumerate(self.mirrors)
                for address in mirror.control
            ),
        ]


def load_spec(path: Path) -> SandboxSpec:
    """Reads and checks a sandbox file. Raises ConfigError with the field's path, value and expectation."""
    return check_config(SandboxSpec, read_config(path, "name, data, zookeeper and clusters"))


def parse_spec(content: dict[str, Any], *, where: str) -> SandboxSpec:
    return check_config(SandboxSpec, ConfigText(where, content))
