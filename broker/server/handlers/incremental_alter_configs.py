"""IncrementalAlterConfigs, versions 0 and 1: set, delete, append to or subtract from single settings.

Takes effect on running logs. Of a broker's settings those in `dynamic_configs.py` can be changed while it
runs, by any broker; the others are refused with INVALID_REQUEST, as Apache Kafka does it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.handlers.alter_configs import alter, repeated_resources
from millrace.broker.server.topic_settings import BROKER, increments
from millrace.broker.storage.log_config import SETTINGS

API = Api.INCREMENTAL_ALTER_CONFIGS
VERSIONS = range(2)


async def handle(request: Any, context: RequestContext) -> Any:
    broker = context.broker
    responses = []
    repeated = repeated_resources(request)
    for resource in request.resources:
        operations = [(entry.name, entry.config_operation, entry.value) for entry in resource.configs]
        lists = _lists(resource.resource_type, broker)
        plan = partial(increments, operations, lists)
        responses.append(await alter(resource, plan, request, broker, repeated))
    return answer(API, context.head.version, responses=responses)


def _lists(resource_type: int, broker: BrokerServices) -> dict[str, str]:
    """The settings that are lists, with what holds while they are not set."""
    defaults = broker.replica_manager.log_defaults
    lists = [setting for setting in SETTINGS.values() if setting.kind == "list"]
    if resource_type == BROKER:
        return {setting.broker_name: defaults.value_of(setting.name) for setting in lists}
    return {setting.name: defaults.value_of(setting.name) for setting in lists}
