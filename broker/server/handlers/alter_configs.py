"""AlterConfigs, versions 0 to 2: replaces all settings of a topic or a running broker by those given.

Takes effect on running logs. Of a broker's settings those in `dynamic_configs.py` can be changed while it
runs, by any broker; the others are refused with INVALID_REQUEST, as Apache Kafka does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any

from millrace.broker.errors import InvalidRequest, KafkaError
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import NO_ERROR, answer
from millrace.broker.server.broker_settings import broker_config_name
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.topic_settings import BROKER, TOPIC, Change, replacement

API = Api.ALTER_CONFIGS
VERSIONS = range(3)


async def handle(request: Any, context: RequestContext) -> Any:
    responses = []
    repeated = repeated_resources(request)
    for resource in request.resources:
        plan = partial(replacement, [(entry.name, entry.value) for entry in resource.configs])
        responses.append(await alter(resource, plan, request, context.broker, repeated))
    return answer(API, context.head.version, responses=responses)


def repeated_resources(request: Any) -> set[tuple[int, str]]:
    """Type and name of what stands in the request more than once."""
    counts = Counter((int(each.resource_type), each.resource_name) for each in request.resources)
    return {resource for resource, count in counts.items() if count > 1}


async def alter(
    resource: Any, plan: Any, request: Any, broker: BrokerServices, repeated: Collection[tuple[int, str]]
) -> dict[str, Any]:
    """Carry out the change that `plan()` returns (or refuses); also for the incremental API. Of what is
    `repeated` nothing is changed, as in Apache Kafka."""
    result = {
        "error_code": NO_ERROR,
        "error_message": None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
    }
    try:
        if (int(resource.resource_type), resource.resource_name) in repeated:
            raise InvalidRequest("the resource stands more than once in the request")
        change: Change = plan()
        if resource.resource_type == BROKER:
            await broker.controller.alter_broker_config(
                broker_config_name(resource.resource_name), change, validate_only=request.validate_only
            )
            return result
        if resource.resource_type != TOPIC:
            raise InvalidRequest(f"resource type {resource.resource_type} has no settings here")
        await broker.controller.alter_topic_config(
            resource.resource_name, change, validate_only=request.validate_only
        )
    except KafkaError as error:
        return result | {"error_code": error.code, "error_message": str(error)}
    return result
