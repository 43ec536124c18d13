"""Topic and broker settings as the config APIs show and change them.

The names, types and defaults of topic settings are storage's (`log_config.SETTINGS`), those of broker
settings `BrokerSettings`; this module puts them into the protocol's words. Called by the handlers of
DescribeConfigs, AlterConfigs and IncrementalAlterConfigs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millrace.broker.config import SETTING_FIELDS, BrokerSettings, setting_text
from millrace.broker.coordination.metadata_cache import TopicInfo
from millrace.broker.errors import InvalidConfig, InvalidRequest
from millrace.broker.storage.log_config import IGNORED_SETTINGS, SETTINGS, LogConfig

TOPIC = 2
BROKER = 4

SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3

# Where a value comes from, in the protocol's numbers.
DYNAMIC_TOPIC_CONFIG = 1
STATIC_BROKER_CONFIG = 4
DEFAULT_CONFIG = 5

_TYPES = {"boolean": 1, "string": 2, "int": 3, "long": 5, "double": 6, "list": 7}
_BROKER_TYPES = {"bool": 1, "str": 2, "int": 5, "float": 6}

Change = Callable[[Mapping[str, str]], Mapping[str, str]]


def describe_topic(
    info: TopicInfo, defaults: LogConfig, settings: BrokerSettings, names: Iterable[str] | None
) -> list[dict[str, Any]]:
    """Every setting of a topic (or those named), with where its value comes from."""
    return describe_topic_config(info.config, defaults, names)


def describe_topic_config(
    config: Mapping[str, str], defaults: LogConfig, names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """The same for a topic that has (or would have) `config` set."""
    effective, unusable = LogConfig.usable_part(config, defaults)
    plain = LogConfig()
    shown_too = (
        name for name in config if name not in SETTINGS and (name in unusable or name in IGNORED_SETTINGS)
    )
    known = [*SETTINGS, *shown_too]
    wanted = known if names is None else [name for name in names if name in known]
    entries = []
    for name in wanted:
        if name not in SETTINGS:
            # Shown so that it can be taken away, and is not set again and again by who finds it missing.
            entries.append(_without_effect(name, config[name]))
            continue
        setting = SETTINGS[name]
        inherited, builtin = defaults.value_of(name), plain.value_of(name)
        synonyms = [{"name": setting.broker_name, "value": builtin, "source": DEFAULT_CONFIG}]
        if inherited != builtin:
            synonyms.insert(
                0, {"name": setting.broker_name, "value": inherited, "source": STATIC_BROKER_CONFIG}
            )
        if name in config:
            synonyms.insert(0, {"name": name, "value": config[name], "source": DYNAMIC_TOPIC_CONFIG})
        entries.append(
            {
                "name": name,
                # A list keeps the order in which it was given, as in Apache Kafka.
                "value": (
                    synonyms[0]["value"]
                    if setting.kind == "list" or name in unusable
                    else effective.value_of(name)
                ),
                "read_only": False,
                "config_source": synonyms[0]["source"],
                "is_sensitive": False,
                "synonyms": synonyms,
                "config_type": _TYPES[setting.kind],
            }
        )
    return entries


def _without_effect(name: str, value: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "read_only": False,
        "config_source": DYNAMIC_TOPIC_CONFIG,
        "is_sensitive": False,
        "synonyms": [{"name": name, "value": value, "source": DYNAMIC_TOPIC_CONFIG}],
        "config_type": _TYPES["string"],
    }


def describe_broker(settings: BrokerSettings, names: Iterable[str] | None) -> list[dict[str, Any]]:
    """Every setting of this broker (or those named); all are set at start."""
    plain = BrokerSettings().texts()
    wanted = list(SETTING_FIELDS) if names is None else [name for name in names if name in SETTING_FIELDS]
    entries = []
    for name in wanted:
        field = SETTING_FIELDS[name]
        value = setting_text(getattr(settings, field.name))
        source = DEFAULT_CONFIG if value == plain[name] else STATIC_BROKER_CONFIG
        entries.append(
            {
                "name": name,
                "value": value,
                "read_only": True,
                "config_source": source,
                "is_sensitive": False,
                "synonyms": [{"name": name, "value": value, "source": source}],
                "config_type": _BROKER_TYPES[str(field.type)],
            }
        )
    return entries


def replacement(configs: Iterable[tuple[str, str | None]]) -> Change:
    """AlterConfigs: what is given replaces everything that was set."""
    given = {name: value for name, value in configs if value is not None}
    return lambda _present: given


def increments(operations: Iterable[tuple[str, int, str | None]], defaults: Mapping[str, str]) -> Change:
    """IncrementalAlterConfigs: (name, operation, value) one after the other. Raises InvalidRequest,
    InvalidConfig."""
    steps = list(operations)
    repeated = {name for name, _, _ in steps if sum(name == other for other, _, _ in steps) > 1}
    if repeated:
        raise InvalidRequest(f"named more than once: {', '.join(sorted(repeated))}")
    for name, operation, value in steps:
        if operation not in (SET, DELETE, APPEND, SUBTRACT):
            raise InvalidRequest(f"{name}: unknown operation {operation}")
        if operation != DELETE and value is None:
            raise InvalidRequest(f"{name}: no value given")
        if operation in (APPEND, SUBTRACT) and (name not in SETTINGS or SETTINGS[name].kind != "list"):
            raise InvalidConfig(f"{name} is not a list: nothing can be appended to or taken from it")

    def change(present: Mapping[str, str]) -> Mapping[str, str]:
        config = dict(present)
        for name, operation, value in steps:
            if operation == DELETE:
                config.pop(name, None)
            elif operation == SET:
                config[name] = value or ""
            else:
                config[name] = _list_change(config.get(name, defaults.get(name, "")), operation, value or "")
        return config

    return change


def _list_change(present: str, operation: int, value: str) -> str:
    items = [item for item in present.split(",") if item]
    named = [item for item in value.split(",") if item]
    if operation == APPEND:
        return ",".join(items + [item for item in named if item not in items])
    return ",".join(item for item in items if item not in named)
