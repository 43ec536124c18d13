"""Broker settings that may be changed while brokers run, in the words of the config APIs.

Which these are is `coordination/dynamic_configs.py`'s; those that are read at start are described by
`topic_settings.py`. Called by the handlers of DescribeConfigs and of both APIs that alter configs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.broker.coordination.dynamic_configs import DYNAMIC_SETTINGS
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import DEFAULT_BROKER
from millrace.broker.errors import InvalidRequest
from millrace.broker.server.topic_settings import DEFAULT_CONFIG

DYNAMIC_BROKER_CONFIG = 2
DYNAMIC_DEFAULT_BROKER_CONFIG = 3
_TYPES = {"boolean": 1, "string": 2, "int": 3, "long": 5, "double": 6}


def broker_config_name(resource_name: str) -> str:
    """The znode's name for a resource of type BROKER; an empty name means every broker. Raises
    InvalidRequest."""
    if not resource_name:
        return DEFAULT_BROKER
    if not resource_name.isdigit():
        raise InvalidRequest(f"{resource_name!r} is no broker id; an empty name stands for every broker")
    return str(int(resource_name))


def describe_dynamic(
    cache: MetadataCache, broker_id: int, names: Iterable[str] | None
) -> list[dict[str, Any]]:
    """Every dynamic setting of a broker (or those named), with where its value comes from."""
    levels = (
        (DYNAMIC_BROKER_CONFIG, cache.broker_configs.get(str(broker_id), {})),
        (DYNAMIC_DEFAULT_BROKER_CONFIG, cache.broker_configs.get(DEFAULT_BROKER, {})),
    )
    wanted = DYNAMIC_SETTINGS if names is None else [name for name in names if name in DYNAMIC_SETTINGS]
    entries = []
    for name in wanted:
        setting = DYNAMIC_SETTINGS[name]
        synonyms = [
            {"name": name, "value": config[name], "source": source}
            for source, config in levels
            if name in config
        ]
        synonyms.append({"name": name, "value": setting.default, "source": DEFAULT_CONFIG})
        entries.append(
            {
                "name": name,
                "value": synonyms[0]["value"],
                "read_only": False,
                "config_source": synonyms[0]["source"],
                "is_sensitive": False,
                "synonyms": synonyms,
                "config_type": _TYPES[setting.kind],
            }
        )
    return entries
