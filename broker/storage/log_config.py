"""Settings of one partition's log: Kafka's topic settings, checked once, as a frozen value.

`SETTINGS` is the one table of topic settings: name, the broker-wide setting that gives its default, type,
default and bounds. DescribeConfigs and CreateTopics answer from it, `LogConfig` and the broker-wide settings
(`broker/config.py`) have their defaults and bounds from it. Settings
that a topic may carry but that change nothing here (throttles, tiered storage) are in `IGNORED_SETTINGS`,
so that tools written for Apache Kafka can set them.

Who sets a topic's settings is held to all of them (`given_by_administrator`), to the form of those too that
change nothing, and to what two of them say together. A log has to be served whatever they
say by then (`usable_part`): what can be used holds, nothing is removed while something cannot, and what
protects acknowledged records and cannot be read is as strict as it may have been.

Called by the log manager, the topic handlers and the broker's configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from millrace.broker.errors import InvalidConfig
from millrace.broker.protocol.throttle_settings import EVERY_REPLICA, FOLLOWER_REPLICAS, LEADER_REPLICAS

_MAX_INT = 2**31 - 1
_MAX_LONG = 2**63 - 1
_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Setting:
    """One topic setting; `parse` raises ValueError with what was expected."""

    name: str
    broker_name: str
    kind: str  # Kafka's type: int, long, double, boolean, string, list
    default: str
    parse: Callable[[str], Any]
    expected: str

    @property
    def field_name(self) -> str:
        return _FIELD_NAMES.get(self.name, self.name.replace(".", "_"))


# Attributes that are named otherwise than their setting.
_FIELD_NAMES = {
    "message.timestamp.type": "timestamp_type",
    "message.timestamp.before.max.ms": "timestamp_before_max_ms",
    "message.timestamp.after.max.ms": "timestamp_after_max_ms",
}


def _integer(name: str, broker_name: str, kind: str, default: int, least: int) -> Setting:
    greatest = _MAX_INT if kind == "int" else _MAX_LONG

    def parse(text: str) -> int:
        value = _whole(text)
        if not least <= value <= greatest:
            raise ValueError
        return value

    return Setting(name, broker_name, kind, str(default), parse, f"a whole number from {least} to {greatest}")


def _whole(text: str) -> int:
    """As Java reads it: Python would take 1_000, and digits of every script."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError
    return int(text)


def _choice(name: str, broker_name: str, default: str, *choices: str) -> Setting:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return Setting(name, broker_name, "string", default, parse, "one of " + ", ".join(choices))


def _policies(text: str) -> frozenset[str]:
    policies = frozenset(part.strip() for part in text.split(",") if part.strip())
    if not policies <= {"delete", "compact"}:
        raise ValueError
    return policies


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for setting in (
        _integer("segment.bytes", "log.segment.bytes", "int", 1 << 30, 14),
        _integer("segment.ms", "log.roll.ms", "long", 7 * _DAY_MS, 1),
        _integer("segment.index.bytes", "log.index.size.max.bytes", "int", 10 << 20, 4),
        _integer("index.interval.bytes", "log.index.interval.bytes", "int", 4096, 0),
        _integer("retention.ms", "log.retention.ms", "long", 7 * _DAY_MS, -1),
        _integer("retention.bytes", "log.retention.bytes", "long", -1, -1),
        _integer("flush.messages", "log.flush.interval.messages", "long", _MAX_LONG, 1),
        _integer("flush.ms", "log.flush.interval.ms", "long", _MAX_LONG, 0),
        _integer("max.message.bytes", "message.max.bytes", "int", 1_048_588, 0),
        Setting(
            "cleanup.policy", "log.cleanup.policy", "list", "delete", _policies, "delete, compact or both"
        ),
        _integer("delete.retention.ms", "log.cleaner.delete.retention.ms", "long", _DAY_MS, 0),
        _integer("min.compaction.lag.ms", "log.cleaner.min.compaction.lag.ms", "long", 0, 0),
        _integer("max.compaction.lag.ms", "log.cleaner.max.compaction.lag.ms", "long", _MAX_LONG, 1),
        Setting(
            "min.cleanable.dirty.ratio",
            "log.cleaner.min.cleanable.ratio",
            "double",
            "0.5",
            _ratio,
            "a number from 0 to 1",
        ),
        _choice(
            "message.timestamp.type",
            "log.message.timestamp.type",
            "CreateTime",
            "CreateTime",
            "LogAppendTime",
        ),
        _integer(
            "message.timestamp.before.max.ms", "log.message.timestamp.before.max.ms", "long", _MAX_LONG, 0
        ),
        _integer(
            "message.timestamp.after.max.ms", "log.message.timestamp.after.max.ms", "long", _MAX_LONG, 0
        ),
        _choice(
            "compression.type",
            "compression.type",
            "producer",
            "producer",
            "uncompressed",
            "gzip",
            "snappy",
            "lz4",
            "zstd",
        ),
        _integer("min.insync.replicas", "min.insync.replicas", "int", 1, 1),
        Setting(
            "unclean.leader.election.enable",
            "unclean.leader.election.enable",
            "boolean",
            "false",
            _boolean,
            "true or false",
        ),
    )
}


def _any_text(_: str) -> None:
    pass


def _throttled(text: str) -> None:
    """`*`, nothing, or pairs."""
    pairs = [pair.strip() for pair in text.rstrip(", ").split(",")]
    if pairs not in ([EVERY_REPLICA], [""]) and not all(
        re.fullmatch("[0-9]+:[0-9]+", pair) for pair in pairs
    ):
        raise ValueError


def _within(least: int, greatest: int, *others: int) -> Callable[[str], None]:
    def check(text: str) -> None:
        value = _whole(text)
        if not least <= value <= greatest and value not in others:
            raise ValueError

    return check


_REPLICAS = "partition:broker, with commas between several, or *"
_IGNORED: dict[str, tuple[Callable[[str], object], str]] = {
    # What is deleted goes as soon as no reader is in it.
    "file.delete.delay.ms": (_within(0, _MAX_LONG), "a whole number from 0"),
    "preallocate": (_boolean, "true or false"),
    "segment.jitter.ms": (_within(0, _MAX_LONG), "a whole number from 0"),
    "message.format.version": (_any_text, "a version"),
    "message.downconversion.enable": (_boolean, "true or false"),
    "message.timestamp.difference.max.ms": (_within(0, _MAX_LONG), "a whole number from 0"),
    LEADER_REPLICAS: (_throttled, _REPLICAS),
    FOLLOWER_REPLICAS: (_throttled, _REPLICAS),
    "compression.gzip.level": (_within(1, 9, -1), "1 to 9, or -1"),
    "compression.lz4.level": (_within(1, 17), "1 to 17"),
    "compression.zstd.level": (_within(-131_072, 22), "-131072 to 22"),
}
"""{setting: (what raises ValueError for a wrong value, what is expected)}, in Apache Kafka's bounds"""
IGNORED_SETTINGS = frozenset(_IGNORED)


UNREADABLE = "unreadable.settings"
"""No setting: stands among those of a topic where they cannot be read, with the reason as its value. It is
refused as an unknown setting is, by whoever is given it, until someone takes it away."""

_STRICTEST = {
    "min.insync.replicas": _MAX_INT,  # as many as there are replicas
    "flush.messages": 1,
    "unclean.leader.election.enable": False,
}


def _default(name: str) -> Any:
    return SETTINGS[name].parse(SETTINGS[name].default)


@dataclass(frozen=True)
class LogConfig:
    """Settings of one log. Sizes are bytes; -1 means no limit in `retention_ms` and `retention_bytes`."""

    segment_bytes: int = _default("segment.bytes")
    segment_ms: int = _default("segment.ms")
    segment_index_bytes: int = _default("segment.index.bytes")
    index_interval_bytes: int = _default("index.interval.bytes")
    retention_ms: int = _default("retention.ms")
    retention_bytes: int = _default("retention.bytes")
    flush_messages: int = _default("flush.messages")
    flush_ms: int = _default("flush.ms")
    max_message_bytes: int = _default("max.message.bytes")
    cleanup_policy: frozenset[str] = _default("cleanup.policy")
    delete_retention_ms: int = _default("delete.retention.ms")
    min_compaction_lag_ms: int = _default("min.compaction.lag.ms")
    max_compaction_lag_ms: int = _default("max.compaction.lag.ms")
    min_cleanable_dirty_ratio: float = _default("min.cleanable.dirty.ratio")
    timestamp_type: str = _default("message.timestamp.type")
    timestamp_before_max_ms: int = _default("message.timestamp.before.max.ms")
    timestamp_after_max_ms: int = _default("message.timestamp.after.max.ms")
    compression_type: str = _default("compression.type")
    min_insync_replicas: int = _default("min.insync.replicas")
    unclean_leader_election_enable: bool = _default("unclean.leader.election.enable")
    producer_id_expiration_ms: int = _DAY_MS  # a broker's setting, the same for every topic

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def is_deleted_by_retention(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def roll_ms(self) -> int:
        """Longest time that a segment takes appends: what must be compacted by a time is closed by then."""
        return min(self.segment_ms, self.max_compaction_lag_ms) if self.is_compacted else self.segment_ms

    def keeping_everything(self) -> LogConfig:
        """For a log whose topic's settings are not known: nothing of it goes by age or size, and nothing is
        compacted. What the defaults take away, the topic's own settings may be there to keep."""
        return replace(self, retention_ms=-1, retention_bytes=-1, cleanup_policy=frozenset({"delete"}))

    def without_knowing(self, names: Collection[str]) -> LogConfig:
        """While these settings of a topic cannot be known: everything is kept, and what of them protects
        acknowledged records is taken at its strictest."""
        strictest: dict[str, Any] = {
            SETTINGS[name].field_name: value for name, value in _STRICTEST.items() if name in names
        }
        return replace(self.keeping_everything(), **strictest)

    @classmethod
    def from_topic_config(
        cls, settings: Mapping[str, str | None], defaults: LogConfig | None = None
    ) -> LogConfig:
        """A topic's settings over `defaults`; a value of None takes the default.

        Raises InvalidConfig, naming the setting, for an unknown name or a wrong value.
        """
        values: dict[str, Any] = {}
        for name, text in settings.items():
            if name in IGNORED_SETTINGS or text is None:
                continue
            if name == UNREADABLE:
                raise InvalidConfig(
                    f"the topic's settings cannot be read ({text}): set those that are to hold, "
                    f"and delete {name}"
                )
            setting = SETTINGS.get(name)
            if setting is None:
                raise InvalidConfig(f"unknown topic setting {name}")
            try:
                values[setting.field_name] = setting.parse(str(text).strip())
            except ValueError:
                raise InvalidConfig(f"{name}: got {text!r}, expected {setting.expected}") from None
        return replace(defaults or cls(), **values)

    @classmethod
    def given_by_administrator(
        cls, settings: Mapping[str, str | None], defaults: LogConfig | None = None
    ) -> LogConfig:
        """As `from_topic_config`; raises InvalidConfig, too, for what changes nothing here and would be
        refused by Apache Kafka, and for two that contradict each other."""
        for name, text in settings.items():
            if name not in _IGNORED or text is None:
                continue
            check, expected = _IGNORED[name]
            try:
                check(str(text).strip())
            except ValueError:
                raise InvalidConfig(f"{name}: got {text!r}, expected {expected}") from None
        config = cls.from_topic_config(settings, defaults)
        if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
            raise InvalidConfig(
                f"min.compaction.lag.ms: got {config.min_compaction_lag_ms}, expected no more than "
                f"max.compaction.lag.ms, which is {config.max_compaction_lag_ms}"
            )
        return config

    @classmethod
    def usable_part(
        cls, settings: Mapping[str, str | None], defaults: LogConfig | None = None
    ) -> tuple[LogConfig, dict[str, str]]:
        """What a log is served by, whatever its topic's settings are; and why some cannot be used, by name.
        While there are any, everything is kept, and one that protects acknowledged records and is not known
        is taken at its strictest."""
        try:
            return cls.from_topic_config(settings, defaults), {}
        except InvalidConfig:
            usable: dict[str, str | None] = {}
            unusable: dict[str, str] = {}
        for name, text in settings.items():
            try:
                cls.from_topic_config({name: text})
            except InvalidConfig as error:
                unusable[name] = str(error)
            else:
                usable[name] = text
        unknown = SETTINGS.keys() - usable.keys() if UNREADABLE in unusable else unusable.keys()
        return cls.from_topic_config(usable, defaults).without_knowing(unknown), unusable

    @classmethod
    def for_recovery(cls, settings: Mapping[str, str | None] | None, defaults: LogConfig) -> LogConfig | None:
        """By what a log is recovered whose topic has these settings (None: the topic is not known). None
        where they do not say whether it is compacted: its holes would be taken for damage."""
        if settings is None:
            return None
        config, unusable = cls.usable_part(settings, defaults)
        return None if unusable else config

    @classmethod
    def from_broker_config(cls, settings: Mapping[str, str]) -> LogConfig:
        """The defaults that a broker's own settings (`log.segment.bytes` …) give to every topic.

        Names that are not about logs are left to others. Raises InvalidConfig.
        """
        given = {
            setting.name: settings[setting.broker_name]
            for setting in SETTINGS.values()
            if setting.broker_name in settings
        }
        config = cls.from_topic_config(given)
        if "producer.id.expiration.ms" in settings:
            config = replace(config, producer_id_expiration_ms=int(settings["producer.id.expiration.ms"]))
        return config

    def value_of(self, name: str) -> str:
        """A setting as DescribeConfigs shows it."""
        value = getattr(self, SETTINGS[name].field_name)
        if isinstance(value, frozenset):
            return ",".join(sorted(value, reverse=True))
        if isinstance(value, bool):
            return str(value).lower()
        return str(value)


_missing = {setting.field_name for setting in SETTINGS.values()} - {f.name for f in fields(LogConfig)}
if _missing:
    raise RuntimeError(f"settings without a field in LogConfig: {_missing}")
