"""The broker's configuration: a YAML file and `--set` overrides, checked before anything starts.

`BrokerConfig` names what makes one broker different from the next (id, addresses, folders);
`BrokerSettings` holds everything with a sensible default under Kafka's own names: the field
`log_segment_bytes` is the key `log.segment.bytes` in the file, in `--set` and in DescribeConfigs.
Keys without a counterpart in Apache Kafka are `record.validation`, `visibility`, `metrics.listen`,
`connection.receive.buffer.bytes`, `connection.send.queue.bytes` and `log.format`.

`load_config` is called by the command line and the tests; every mistake is one `ConfigError` with the
field's path, the value found and what was expected. Unknown keys are mistakes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf

from millrace.broker.config_file import ConfigText, check_config, read_config
from millrace.broker.errors import ConfigError

LONGEST = 2**63 - 1
"""Kafka's "never" for counts and times."""


class Address(NamedTuple):
    """A `host:port` pair; IPv6 hosts are written in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: object) -> Address:
    """`127.0.0.1:9092`, `[::1]:9092`, `:9092` (all interfaces). Raises ValueError."""
    if isinstance(value, Address):
        return value
    host, separator, port = str(value).rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected host:port with a port from 0 to 65535")
    return Address(host.strip("[]") or "0.0.0.0", int(port))


def _integer(default: int, minimum: int = 0, maximum: int = LONGEST) -> Any:
    return dataclasses.field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def _choice(default: str, *others: str) -> Any:
    return dataclasses.field(default=default, metadata={"choices": (default, *others)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Kafka-named settings; a field's key is its name with dots for underscores."""

    # Topics.
    num_partitions: int = _integer(1, minimum=1)
    default_replication_factor: int = _integer(1, minimum=1, maximum=32767)
    auto_create_topics_enable: bool = True
    delete_topic_enable: bool = True
    # Logs: defaults of the topics' own settings.
    log_segment_bytes: int = _integer(1 << 30, minimum=14, maximum=2**31 - 1)
    log_roll_ms: int = _integer(168 * 3_600_000, minimum=1)
    log_retention_ms: int = _integer(168 * 3_600_000, minimum=-1)
    log_retention_bytes: int = _integer(-1, minimum=-1)
    log_index_interval_bytes: int = _integer(4096)
    log_index_size_max_bytes: int = _integer(10 << 20, minimum=4, maximum=2**31 - 1)
    log_flush_interval_messages: int = _integer(LONGEST, minimum=1)
    log_flush_interval_ms: int = _integer(LONGEST)
    log_cleanup_policy: str = _choice("delete", "compact", "compact,delete", "delete,compact")
    log_message_timestamp_type: str = _choice("CreateTime", "LogAppendTime")
    log_message_timestamp_before_max_ms: int = _integer(LONGEST)
    log_message_timestamp_after_max_ms: int = _integer(LONGEST)
    message_max_bytes: int = _integer(1_048_588, maximum=2**31 - 1)
    compression_type: str = _choice("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd")
    min_insync_replicas: int = _integer(1, minimum=1)
    log_cleaner_delete_retention_ms: int = _integer(86_400_000)
    log_cleaner_min_compaction_lag_ms: int = _integer(0)
    log_cleaner_max_compaction_lag_ms: int = _integer(LONGEST, minimum=1)
    log_segment_delete_delay_ms: int = _integer(60_000)
    # Logs: what the broker does in the background.
    log_retention_check_interval_ms: int = _integer(300_000, minimum=1)
    log_flush_scheduler_interval_ms: int = _integer(1_000, minimum=10)
    log_flush_offset_checkpoint_interval_ms: int = _integer(60_000, minimum=10)
    producer_id_expiration_ms: int = _integer(86_400_000, minimum=1)
    record_validation: str = _choice("full", "header")
    visibility: str = _choice("replicated", "flushed")
    # Groups.
    offsets_topic_num_partitions: int = _integer(50, minimum=1)
    offsets_topic_segment_bytes: int = _integer(100 << 20, minimum=1)
    offsets_topic_replication_factor: int = _integer(1, minimum=1, maximum=32767)
    offsets_retention_minutes: int = _integer(10_080, minimum=1)
    offsets_retention_check_interval_ms: int = _integer(600_000, minimum=1)
    offset_metadata_max_bytes: int = _integer(4096)
    group_initial_rebalance_delay_ms: int = _integer(3_000)
    group_min_session_timeout_ms: int = _integer(6_000)
    group_max_session_timeout_ms: int = _integer(1_800_000)
    group_max_size: int = _integer(2**31 - 1, minimum=1)
    # Network.
    socket_request_max_bytes: int = _integer(100 << 20, minimum=1024, maximum=2**31 - 1)
    fetch_max_bytes: int = _integer(8 << 20, minimum=1024)  # Kafka: 55 MiB; it bounds memory here
    max_connections: int = _integer(2**31 - 1, minimum=1)
    connections_max_idle_ms: int = _integer(600_000)
    connection_receive_buffer_bytes: int = _integer(64 << 10, minimum=4096)
    connection_send_queue_bytes: int = _integer(4 << 20, minimum=4096)
    # Cluster.
    zookeeper_session_timeout_ms: int = _integer(18_000, minimum=100)
    zookeeper_connection_timeout_ms: int = _integer(18_000, minimum=100)
    # Telemetry.
    metrics_listen: str = ""
    log_format: str = _choice("human", "json")

    def by_key(self) -> dict[str, Any]:
        """Every setting under its Kafka-style key."""
        return {key: getattr(self, field.name) for key, field in SETTING_FIELDS.items()}

    def texts(self) -> dict[str, str]:
        """Every setting as Kafka writes it, by its Kafka-style key."""
        return {key: setting_text(value) for key, value in self.by_key().items()}


SETTING_FIELDS: Mapping[str, dataclasses.Field[Any]] = {
    field.name.replace("_", "."): field for field in dataclasses.fields(BrokerSettings)
}
"""Kafka-style key -> field."""

# Kafka spells some times in two units; the finer one wins, as there.
_COARSER_UNITS = {
    "log.retention.minutes": ("log.retention.ms", 60_000),
    "log.retention.hours": ("log.retention.ms", 3_600_000),
    "log.roll.hours": ("log.roll.ms", 3_600_000),
}


def setting_text(value: object) -> str:
    """A setting as Kafka writes it: booleans in lower case."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_settings(values: Mapping[str, object], path: str = "settings") -> BrokerSettings:
    """Check Kafka-named settings and turn them into `BrokerSettings`. Raises ConfigError."""
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        if key in _COARSER_UNITS:
            finer, factor = _COARSER_UNITS[key]
            if finer not in values:
                count = _parse_integer(value, -1, LONGEST // factor, f"{path}.{key}")
                parsed[finer.replace(".", "_")] = count * factor if count >= 0 else -1
            continue
        field = SETTING_FIELDS.get(key)
        if field is None:
            raise ConfigError(f"{path}.{key}", value, f"a known setting{_nearest(key)}")
        parsed[field.name] = _parse_setting(field, value, f"{path}.{key}")
    return BrokerSettings(**parsed)


def _parse_setting(field: dataclasses.Field[Any], value: object, path: str) -> object:
    if field.type == "bool":
        text = str(value).strip().lower()
        if text not in ("true", "false"):
            raise ConfigError(path, value, "true or false")
        return text == "true"
    if field.type == "int":
        return _parse_integer(value, field.metadata["minimum"], field.metadata["maximum"], path)
    choices = field.metadata.get("choices")
    if choices and str(value) not in choices:
        raise ConfigError(path, value, "one of " + ", ".join(choices))
    return str(value)


def _parse_integer(value: object, minimum: int, maximum: int, path: str) -> int:
    expected = f"a whole number from {minimum} to {maximum}"
    if isinstance(value, bool):
        raise ConfigError(path, value, expected)
    try:
        number = int(str(value).strip())
    except ValueError:
        raise ConfigError(path, value, expected) from None
    if not minimum <= number <= maximum:
        raise ConfigError(path, value, expected)
    return number


def _nearest(key: str) -> str:
    import difflib

    matches = difflib.get_close_matches(key, [*SETTING_FIELDS, *_COARSER_UNITS], n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _settings(value: object) -> BrokerSettings:
    if isinstance(value, BrokerSettings):
        return value
    if value is None:
        return BrokerSettings()
    if not isinstance(value, Mapping):
        raise ConfigError("settings", value, "a mapping of setting names to values")
    return parse_settings(value)


class BrokerConfig(BaseModel):
    """One broker. `advertised` is what clients are told; by default the address listened on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: int = Field(ge=0, le=2**31 - 1)
    listen: Annotated[InstanceOf[Address], BeforeValidator(parse_address)]
    advertised: Annotated[InstanceOf[Address], BeforeValidator(parse_address)] | None = None
    zookeeper: str = Field(min_length=1, pattern=r"^[^/\s]+:\d+(,[^/\s]+:\d+)*(/\S*)?$")
    data: list[Path] = Field(min_length=1)
    rack: str | None = None
    settings: Annotated[InstanceOf[BrokerSettings], BeforeValidator(_settings)] = BrokerSettings()


_EXPECTATIONS = {
    "id": "a whole number from 0 to 2147483647",
    "listen": "host:port",
    "advertised": "host:port",
    "zookeeper": "host:port[,host:port...][/chroot]",
    "data": "a list of folders, at least one",
    "rack": "a name",
    "settings": "a mapping of setting names to values",
}


def load_config(path: Path | str | None, overrides: Mapping[str, object] | None = None) -> BrokerConfig:
    """Read `path` (YAML; None for no file) and lay `overrides` over it.

    An override is a field of `BrokerConfig` ("id", "listen", ...) or a Kafka-named setting. Raises
    ConfigError.
    """
    text = read_config(path, "id, listen, zookeeper, data") if path is not None else ConfigText("", {})
    values = text.content
    settings = values.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise ConfigError("settings", settings, _EXPECTATIONS["settings"])
    settings = dict(settings)
    for key, value in (overrides or {}).items():
        if key in BrokerConfig.model_fields:
            values[key] = value
        else:
            settings[key] = value
    values["settings"] = settings
    if isinstance(values.get("data"), str | Path):
        values["data"] = [values["data"]]
    return check_config(BrokerConfig, text, _EXPECTATIONS)
