"""Topic settings as the config APIs show and change them, and the changes of any settings.

The names, types and defaults of topic settings are storage's (`log_config.SETTINGS`); this module puts them
into the protocol's words, `broker_settings.py` does it for a broker's. Called by the handlers of
DescribeConfigs, CreateTopics, AlterConfigs and IncrementalAlterConfigs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millrace.broker.errors import InvalidConfig, InvalidRequest
from millrace.broker.storage.log_config import IGNORED_SETTINGS, SETTINGS, LogConfig, Setting

TOPIC = 2
BROKER = 4

SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3

# Where a value comes from, in the protocol's numbers.
DYNAMIC_TOPIC_CONFIG = 1
STATIC_BROKER_CONFIG = 4
DEFAULT_CONFIG = 5

_TYPES = {"boolean": 1, "string": 2, "int": 3, "long": 5, "double": 6, "list": 7}

_PLAIN = LogConfig()

Synonym = dict[str, Any]
"""A place where a setting has a value, as DescribeConfigs tells it: name, value, source."""

Change = Callable[[Mapping[str, str]], Mapping[str, str]]


def describe_topic_config(
    config: Mapping[str, str],
    defaults: LogConfig,
    names: Iterable[str] | None = None,
    inherited: Callable[[str], list[Synonym]] | None = None,
) -> list[dict[str, Any]]:
    """Every setting (or those named) of a topic that has, or would have, `config` set, with where its value
    comes from. `inherited` says it of the broker's setting that gives a default, the place that holds first;
    without it `defaults` are taken for what the broker's file says."""
    effective, unusable = LogConfig.usable_part(config, defaults)
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
        synonyms = _of_file(setting, defaults) if inherited is None else inherited(setting.broker_name)
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


def _of_file(setting: Setting, defaults: LogConfig) -> list[Synonym]:
    value, builtin = defaults.value_of(setting.name), _PLAIN.value_of(setting.name)
    synonyms: list[Synonym] = [{"name": setting.broker_name, "value": builtin, "source": DEFAULT_CONFIG}]
    if value != builtin:
        synonyms.insert(0, {"name": setting.broker_name, "value": value, "source": STATIC_BROKER_CONFIG})
    return synonyms


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


def replacement(configs: Iterable[tuple[str, str | None]]) -> Change:
    """AlterConfigs: what is given replaces everything that was set. Raises InvalidRequest."""
    given: dict[str, str] = {}
    for name, value in configs:
        if name in given:
            raise InvalidRequest(f"named more than once: {name}")
        if value is None:
            raise InvalidRequest(f"{name}: no value given")
        given[name] = value
    return lambda _present: given


def increments(operations: Iterable[tuple[str, int, str | None]], lists: Mapping[str, str]) -> Change:
    """IncrementalAlterConfigs: (name, operation, value) one after the other. `lists` are the settings that
    are lists, with what holds while they are not set. Raises InvalidRequest, InvalidConfig."""
    steps = list(operations)
    repeated = [name for name, count in Counter(name for name, _, _ in steps).items() if count > 1]
    if repeated:
        raise InvalidRequest(f"named more than once: {', '.join(sorted(repeated))}")
    for name, operation, value in steps:
        if operation not in (SET, DELETE, APPEND, SUBTRACT):
            raise InvalidRequest(f"{name}: unknown operation {operation}")
        if operation != DELETE and value is None:
            raise InvalidRequest(f"{name}: no value given")
        if operation in (APPEND, SUBTRACT) and name not in lists:
            raise InvalidConfig(f"{name} is not a list: nothing can be appended to or taken from it")

    def change(present: Mapping[str, str]) -> Mapping[str, str]:
        config = dict(present)
        for name, operation, value in steps:
            if operation == DELETE:
                config.pop(name, None)
            elif operation == SET:
                config[name] = value or ""
            else:
                config[name] = _list_change(config.get(name, lists[name]), operation, value or "")
        return config

    return change


def _list_change(present: str, operation: int, value: str) -> str:
    items = [item for item in present.split(",") if item]
    named = [item for item in value.split(",") if item]
    if operation == APPEND:
        present_items = set(items)
        return ",".join(items + [item for item in named if item not in present_items])
    gone = set(named)
    return ",".join(item for item in items if item not in gone)
