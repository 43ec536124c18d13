"""The broker's configuration: a YAML file and `--set` overrides, checked before anything starts.

`BrokerConfig` names what makes one broker different from the next (id, addresses, folders);
`BrokerSettings` holds everything with a sensible default under Kafka's own names: the field
`log_segment_bytes` is the key `log.segment.bytes` in the file, in `--set` and in DescribeConfigs.
Keys without a counterpart in Apache Kafka are `record.validation`, `visibility`, `metrics.listen`,
`connection.receive.buffer.bytes`, `connection.send.queue.bytes`, `queued.max.response.bytes` and
`log.format`.

`load_config` is called by the command line and the tests; every mistake is one `ConfigError` with the
field's path, the value found and what was expected. Unknown keys are mistakes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf

from millrace.broker.config_file import ConfigText, ListenAddress, check_config, read_config
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.address import ADDRESS_EXPECTED, CONNECT_EXPECTED, Address, parse_servers
from millrace.broker.storage.log_config import SETTINGS

LONGEST = 2**63 - 1
"""Kafka's "never" for counts and times."""


def parse_connection_limits(text: str) -> dict[str, int]:
    """`host:limit,host:limit` as in `max.connections.per.ip.overrides`; hosts are names or addresses, an IPv6
    address as it stands. Raises ValueError."""
    limits: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        host, separator, limit = part.rpartition(":")
        if not separator or not host or not limit.strip().isdigit() or int(limit) > 2**31 - 1:
            raise ValueError("expected host:limit, several with commas")
        limits[host.strip().strip("[]")] = int(limit)
    return limits


def _connect_string(text: str) -> str:
    servers, slash, chroot = text.partition("/")
    return ",".join(map(str, parse_servers(servers))) + slash + chroot


def _check_listener_if_any(text: str) -> None:
    if text:
        Address.parse_listener(text)


def _integer(default: int, minimum: int = 0, maximum: int = LONGEST) -> Any:
    return dataclasses.field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def _text(default: str, check: Callable[[str], object]) -> Any:
    """`check` raises ValueError, whose text says what was expected."""
    return dataclasses.field(default=default, metadata={"check": check})


def _choice(default: str, *others: str) -> Any:
    return dataclasses.field(default=default, metadata={"choices": (default, *others)})


_OF_TOPICS = {setting.broker_name: setting for setting in SETTINGS.values()}


def _topics_default(key: str) -> Any:
    """What topics have that do not set it themselves: default and bounds are those of their own setting."""
    setting = _OF_TOPICS[key]
    value = setting.parse(setting.default)
    default = setting.default if isinstance(value, frozenset) else value
    return dataclasses.field(default=default, metadata={"setting": setting})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Kafka-named settings; a field's key is its name with dots for underscores."""

    # Topics.
    num_partitions: int = _integer(1, minimum=1)
    default_replication_factor: int = _integer(1, minimum=1, maximum=32767)
    auto_create_topics_enable: bool = True
    delete_topic_enable: bool = True
    # Logs: defaults of the topics' own settings.
    log_segment_bytes: int = _topics_default("log.segment.bytes")
    log_roll_ms: int = _topics_default("log.roll.ms")
    log_retention_ms: int = _topics_default("log.retention.ms")
    log_retention_bytes: int = _topics_default("log.retention.bytes")
    log_index_interval_bytes: int = _topics_default("log.index.interval.bytes")
    log_index_size_max_bytes: int = _topics_default("log.index.size.max.bytes")
    log_flush_interval_messages: int = _topics_default("log.flush.interval.messages")
    log_flush_interval_ms: int = _topics_default("log.flush.interval.ms")
    log_cleanup_policy: str = _topics_default("log.cleanup.policy")
    log_message_timestamp_type: str = _topics_default("log.message.timestamp.type")
    log_message_timestamp_before_max_ms: int = _topics_default("log.message.timestamp.before.max.ms")
    log_message_timestamp_after_max_ms: int = _topics_default("log.message.timestamp.after.max.ms")
    message_max_bytes: int = _topics_default("message.max.bytes")
    compression_type: str = _topics_default("compression.type")
    min_insync_replicas: int = _topics_default("min.insync.replicas")
    log_cleaner_delete_retention_ms: int = _topics_default("log.cleaner.delete.retention.ms")
    log_cleaner_min_compaction_lag_ms: int = _topics_default("log.cleaner.min.compaction.lag.ms")
    log_cleaner_max_compaction_lag_ms: int = _topics_default("log.cleaner.max.compaction.lag.ms")
    # Logs: what the broker does in the background.
    log_cleaner_enable: bool = True
    log_cleaner_backoff_ms: int = _integer(15_000, minimum=10)
    log_cleaner_dedupe_buffer_size: int = _integer(128 << 20, minimum=1 << 20)
    log_cleaner_min_cleanable_ratio: float = _topics_default("log.cleaner.min.cleanable.ratio")
    log_cleaner_io_max_bytes_per_second: int = _integer(LONGEST, minimum=1)
    log_retention_check_interval_ms: int = _integer(300_000, minimum=1)
    log_flush_scheduler_interval_ms: int = _integer(1_000, minimum=10)
    log_flush_offset_checkpoint_interval_ms: int = _integer(60_000, minimum=10)
    producer_id_expiration_ms: int = _integer(86_400_000, minimum=1)
    record_validation: str = _choice("full", "header")
    visibility: str = _choice("replicated", "flushed")
    # Groups.
    offsets_topic_num_partitions: int = _integer(50, minimum=1)
    offsets_topic_segment_bytes: int = _integer(100 << 20, minimum=1)
    offsets_topic_replication_factor: int = _integer(3, minimum=1, maximum=32767)
    offsets_commit_timeout_ms: int = _integer(5_000, minimum=1, maximum=2**31 - 1)
    offsets_retention_minutes: int = _integer(10_080, minimum=1)
    offsets_retention_check_interval_ms: int = _integer(600_000, minimum=1)
    offset_metadata_max_bytes: int = _integer(4096)
    group_initial_rebalance_delay_ms: int = _integer(3_000)
    group_min_session_timeout_ms: int = _integer(6_000)
    group_max_session_timeout_ms: int = _integer(1_800_000)
    group_max_size: int = _integer(2**31 - 1, minimum=1)
    # Transactions.
    transaction_state_log_num_partitions: int = _integer(50, minimum=1)
    transaction_state_log_segment_bytes: int = _integer(100 << 20, minimum=1)
    transaction_state_log_replication_factor: int = _integer(3, minimum=1, maximum=32767)
    transaction_state_log_min_isr: int = _integer(2, minimum=1)
    transaction_max_timeout_ms: int = _integer(900_000, minimum=1, maximum=2**31 - 1)
    transaction_abort_timed_out_transaction_cleanup_interval_ms: int = _integer(10_000, minimum=1)
    transaction_remove_expired_transaction_cleanup_interval_ms: int = _integer(3_600_000, minimum=1)
    transaction_partition_verification_enable: bool = True
    transactional_id_expiration_ms: int = _integer(604_800_000, minimum=1)
    # Network.
    socket_request_max_bytes: int = _integer(100 << 20, minimum=1024, maximum=2**31 - 1)
    fetch_max_bytes: int = _integer(8 << 20, minimum=1024)  # Kafka: 55 MiB; it bounds memory here
    queued_max_request_bytes: int = _integer(256 << 20, minimum=-1)  # Kafka: -1, no bound
    queued_max_response_bytes: int = _integer(64 << 20, minimum=-1)
    max_connections: int = _integer(2**31 - 1, minimum=1)
    max_connections_per_ip: int = _integer(2**31 - 1)
    max_connections_per_ip_overrides: str = _text("", parse_connection_limits)
    connections_max_idle_ms: int = _integer(600_000)
    connection_receive_buffer_bytes: int = _integer(64 << 10, minimum=4096)
    connection_send_queue_bytes: int = _integer(4 << 20, minimum=4096)
    max_incremental_fetch_session_cache_slots: int = _integer(1_000)
    # Quotas: bytes a second of each client id that has none of its own.
    quota_producer_default: int = _integer(LONGEST, minimum=1)
    quota_consumer_default: int = _integer(LONGEST, minimum=1)
    quota_window_num: int = _integer(11, minimum=2, maximum=1_000)
    quota_window_size_seconds: int = _integer(1, minimum=1, maximum=3_600)
    # Replication.
    replica_lag_time_max_ms: int = _integer(30_000, minimum=1)
    replica_fetch_max_bytes: int = _integer(1 << 20, maximum=2**31 - 1)
    replica_fetch_response_max_bytes: int = _integer(10 << 20, maximum=2**31 - 1)
    replica_fetch_wait_max_ms: int = _integer(500, maximum=60_000)
    replica_fetch_min_bytes: int = _integer(1, maximum=2**31 - 1)
    replica_high_watermark_checkpoint_interval_ms: int = _integer(5_000, minimum=10)
    # Cluster.
    zookeeper_session_timeout_ms: int = _integer(18_000, minimum=100)
    zookeeper_connection_timeout_ms: int = _integer(18_000, minimum=100)
    unclean_leader_election_enable: bool = _topics_default("unclean.leader.election.enable")
    auto_leader_rebalance_enable: bool = True
    leader_imbalance_check_interval_seconds: int = _integer(300, minimum=1, maximum=2**31 - 1)
    leader_imbalance_per_broker_percentage: int = _integer(10, maximum=100)
    controlled_shutdown_enable: bool = True
    controlled_shutdown_max_retries: int = _integer(3, maximum=1000)
    controlled_shutdown_retry_backoff_ms: int = _integer(5_000, maximum=3_600_000)
    # Telemetry.
    metrics_listen: str = _text("", _check_listener_if_any)
    log_format: str = _choice("human", "json")
    # No setting itself.
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    """Fields that were asked for by name, whatever their value; the others hold defaults."""

    def by_key(self) -> dict[str, Any]:
        """Every setting under its Kafka-style key."""
        return {key: getattr(self, field.name) for key, field in SETTING_FIELDS.items()}

    def texts(self) -> dict[str, str]:
        """Every setting as Kafka writes it, by its Kafka-style key."""
        return {key: setting_text(value) for key, value in self.by_key().items()}


SETTING_FIELDS: Mapping[str, dataclasses.Field[Any]] = {
    field.name.replace("_", "."): field
    for field in dataclasses.fields(BrokerSettings)
    if field.name != "given"
}
"""Kafka-style key -> field."""

# Kafka spells some times in two units; the finer one wins, as there.
_COARSER_UNITS = {
    "log.retention.minutes": ("log.retention.ms", 60_000),
    "log.retention.hours": ("log.retention.ms", 3_600_000),
    "log.roll.hours": ("log.roll.ms", 3_600_000),
}

_OWN_KEYS = {
    "advertised.listeners": "advertised",
    "broker.id": "id",
    "broker.rack": "rack",
    "listeners": "listen",
    "log.dir": "data",
    "log.dirs": "data",
    "node.id": "id",
    "zookeeper.connect": "zookeeper",
}
"""Kafka's name -> the field of `BrokerConfig`."""


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
    settings = BrokerSettings(**parsed, given=frozenset(parsed))
    if not settings.max_connections_per_ip and not settings.max_connections_per_ip_overrides:
        raise ConfigError(
            f"{path}.max.connections.per.ip", 0, "1 or more, or max.connections.per.ip.overrides beside it"
        )
    return settings


def parse_setting(key: str, value: object) -> object:
    """One setting under its Kafka-style key, as `BrokerSettings` keeps it. Raises ConfigError."""
    return _parse_setting(SETTING_FIELDS[key], value, key)


def _parse_setting(field: dataclasses.Field[Any], value: object, path: str) -> object:
    if (setting := field.metadata.get("setting")) is not None:
        try:
            parsed = setting.parse(str(value).strip())
        except ValueError:
            raise ConfigError(path, value, setting.expected) from None
        return str(value) if isinstance(parsed, frozenset) else parsed
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
    if (check := field.metadata.get("check")) is not None:
        try:
            check(str(value))
        except ValueError as error:
            raise ConfigError(path, value, str(error).removeprefix("expected ")) from None
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

    if key in _OWN_KEYS:
        return f" (did you mean {_OWN_KEYS[key]}, which stands beside settings?)"
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
    listen: ListenAddress
    advertised: ListenAddress | None = None
    zookeeper: Annotated[str, Field(pattern=r"^[^/]+(/\S*)?$"), AfterValidator(_connect_string)]
    data: list[Path] = Field(min_length=1)
    rack: str | None = None
    settings: Annotated[InstanceOf[BrokerSettings], BeforeValidator(_settings)] = BrokerSettings()


_EXPECTATIONS = {
    "id": "a whole number from 0 to 2147483647",
    "listen": ADDRESS_EXPECTED,
    "advertised": ADDRESS_EXPECTED,
    "zookeeper": CONNECT_EXPECTED,
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
