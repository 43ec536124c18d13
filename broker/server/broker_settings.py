"""A broker's settings in the words of the config APIs: its own, and what of them its topics inherit.

Which can be changed while it runs is `coordination/dynamic_configs.py`'s. Besides its settings a broker
tells, under Kafka's names, what clients look up there: who it is, where it listens, where its data lies.
Called by the handlers of DescribeConfigs, CreateTopics and both APIs that alter configs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from millrace.broker.config import SETTING_FIELDS, Address, BrokerConfig, BrokerSettings, setting_text
from millrace.broker.coordination.dynamic_configs import CHANGEABLE, LONGEST, RATES, usable
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import DEFAULT_BROKER, BrokerRegistration
from millrace.broker.errors import InvalidRequest
from millrace.broker.server.context import BrokerServices
from millrace.broker.server.topic_settings import DEFAULT_CONFIG, STATIC_BROKER_CONFIG, describe_topic_config
from millrace.broker.storage.log_config import SETTINGS

DYNAMIC_BROKER_CONFIG = 2
DYNAMIC_DEFAULT_BROKER_CONFIG = 3

_BOOLEAN, _STRING, _LONG, _DOUBLE, _LIST = 1, 2, 5, 6, 7
_TYPES = {"bool": _BOOLEAN, "str": _STRING, "int": _LONG, "float": _DOUBLE}
_PLAIN = BrokerSettings()

_LISTS = frozenset(setting.broker_name for setting in SETTINGS.values() if setting.kind == "list")

_HOUR_MS, _MINUTE_MS = 3_600_000, 60_000
_COARSER = (
    ("log.retention.hours", "log.retention.ms", _HOUR_MS),
    ("log.retention.minutes", "log.retention.ms", _MINUTE_MS),
    ("log.roll.hours", "log.roll.ms", _HOUR_MS),
)


class Level(NamedTuple):
    """Settings that were made in one place, and the protocol's number for that place."""

    source: int
    config: Mapping[str, str]


def broker_config_name(resource_name: str) -> str:
    """The znode's name for a resource of type BROKER; an empty name means every broker. Raises
    InvalidRequest."""
    if not resource_name:
        return DEFAULT_BROKER
    if not (resource_name.isascii() and resource_name.isdecimal()):
        raise InvalidRequest(f"{resource_name!r} is no broker id; an empty name stands for every broker")
    return str(int(resource_name))


def dynamic_levels(cache: MetadataCache, broker_id: int) -> list[Level]:
    """What was set while brokers run and holds for this one, the strongest first."""
    return [
        Level(source, usable(cache.broker_configs.get(name, {}))[0])
        for source, name in (
            (DYNAMIC_BROKER_CONFIG, str(broker_id)),
            (DYNAMIC_DEFAULT_BROKER_CONFIG, DEFAULT_BROKER),
        )
    ]


def describe_broker(
    config: BrokerConfig, cache: MetadataCache, names: Iterable[str] | None
) -> list[dict[str, Any]]:
    """Everything that this broker has under a name of Kafka's (or those named), with where it comes from."""
    settings, dynamic = config.settings, dynamic_levels(cache, config.id)
    entries = [
        _entry(name, synonyms_of(name, settings, dynamic), _type_of(name), read_only=name not in CHANGEABLE)
        for name in SETTING_FIELDS
    ]
    entries += [
        _entry(rate, [*_set_for(rate, dynamic), _synonym(rate, str(LONGEST), DEFAULT_CONFIG)], _LONG)
        for rate in RATES
    ]
    known = {entry["name"] for entry in entries}
    own = cache.broker_configs.get(str(config.id), {})
    entries += [
        _set_alone(name, value, DYNAMIC_BROKER_CONFIG) for name, value in own.items() if name not in known
    ]
    present = {entry["name"]: entry["value"] for entry in entries}
    facts = {**_facts(config, cache.brokers.get(config.id)), **_in_coarser_units(present)}
    entries += [
        _entry(name, [_synonym(name, value, STATIC_BROKER_CONFIG)], _STRING, read_only=True)
        for name, value in facts.items()
    ]
    return _named(entries, names)


def describe_every_broker(cache: MetadataCache, names: Iterable[str] | None) -> list[dict[str, Any]]:
    """What was set for all brokers while they run, and nothing else: as Kafka describes the empty name."""
    config = cache.broker_configs.get(DEFAULT_BROKER, {})
    return _named(
        [_set_alone(name, value, DYNAMIC_DEFAULT_BROKER_CONFIG) for name, value in config.items()], names
    )


def describe_topic(
    config: Mapping[str, str], broker: BrokerServices, names: Iterable[str] | None = None
) -> list[dict[str, Any]]:
    """Every setting (or those named) of a topic that has, or would have, `config` set."""
    settings = broker.config.settings
    dynamic = dynamic_levels(broker.metadata_cache, broker.config.id)
    return describe_topic_config(
        config,
        broker.replica_manager.log_defaults,
        names,
        inherited=lambda name: synonyms_of(name, settings, dynamic),
    )


def synonyms_of(name: str, settings: BrokerSettings, dynamic: Iterable[Level]) -> list[dict[str, Any]]:
    """Each place where a setting of a broker has a value, the one that holds first."""
    field = SETTING_FIELDS[name]
    value, plain = getattr(settings, field.name), getattr(_PLAIN, field.name)
    found = _set_for(name, dynamic)
    if value != plain or field.name in settings.given:
        found.append(_synonym(name, setting_text(value), STATIC_BROKER_CONFIG))
    return [*found, _synonym(name, setting_text(plain), DEFAULT_CONFIG)]


def _set_for(name: str, dynamic: Iterable[Level]) -> list[dict[str, Any]]:
    return [_synonym(name, level.config[name], level.source) for level in dynamic if name in level.config]


def _facts(config: BrokerConfig, registration: BrokerRegistration | None) -> dict[str, str | None]:
    """What is no setting here and has a name in Kafka's configuration."""
    folders = ",".join(str(folder) for folder in config.data)
    advertised = config.advertised or config.listen
    if registration is not None:
        advertised = Address(registration.host, registration.port)
    return {
        "broker.id": str(config.id),
        "node.id": str(config.id),
        "broker.rack": config.rack,
        "listeners": f"PLAINTEXT://{config.listen}",
        "advertised.listeners": f"PLAINTEXT://{advertised}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "security.inter.broker.protocol": "PLAINTEXT",
        "authorizer.class.name": "",
        "log.dir": str(config.data[0]),
        "log.dirs": folders,
        "zookeeper.connect": config.zookeeper,
    }


def _in_coarser_units(settings: Mapping[str, str]) -> dict[str, str | None]:
    """Times that Kafka knows under several names, where the coarser one can say them."""
    found: dict[str, str | None] = {}
    for name, finer, factor in _COARSER:
        count = int(settings[finer])
        if count < 0 or count % factor == 0:
            found[name] = str(count // factor if count >= 0 else count)
    return found


def _set_alone(name: str, value: str, source: int) -> dict[str, Any]:
    """Also what nobody can use, so that it can be taken away: tools delete only what they have seen."""
    return _entry(name, [_synonym(name, value, source)], _type_of(name))


def _type_of(name: str) -> int:
    if name in RATES:
        return _LONG
    if name in _LISTS:
        return _LIST
    field = SETTING_FIELDS.get(name)
    return _STRING if field is None else _TYPES[str(field.type)]


def _synonym(name: str, value: str | None, source: int) -> dict[str, Any]:
    return {"name": name, "value": value, "source": source}


def _entry(
    name: str, synonyms: list[dict[str, Any]], config_type: int, *, read_only: bool = False
) -> dict[str, Any]:
    return {
        "name": name,
        "value": synonyms[0]["value"],
        "read_only": read_only,
        "config_source": synonyms[0]["source"],
        "is_sensitive": False,
        "synonyms": synonyms,
        "config_type": config_type,
    }


def _named(entries: list[dict[str, Any]], names: Iterable[str] | None) -> list[dict[str, Any]]:
    if names is None:
        return entries
    by_name = {entry["name"]: entry for entry in entries}
    return [by_name[name] for name in names if name in by_name]
