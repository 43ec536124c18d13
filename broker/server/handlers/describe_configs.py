"""DescribeConfigs, versions 1 to 4: settings of topics and of this broker.

A broker describes itself only, and under the empty name what was set for all of them while they run, as in
Apache Kafka. Documentation strings are not given. A resource that is named more than once is described once;
between two of very many, others have their turn.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.coordination.controller_client import check_topic_name
from millrace.broker.errors import InvalidRequest, KafkaError, UnknownTopicOrPartition
from millrace.broker.protocol.frames import Api
from millrace.broker.replication.off_loop import Turns
from millrace.broker.server.answers import NO_ERROR, answer_of
from millrace.broker.server.broker_settings import describe_broker, describe_every_broker, describe_topic
from millrace.broker.server.context import BrokerServices, RequestContext
from millrace.broker.server.topic_settings import BROKER, TOPIC

API = Api.DESCRIBE_CONFIGS
VERSIONS = range(1, 5)


async def handle(request: Any, context: RequestContext) -> Any:
    turns = Turns()
    results = []
    for resource in dict.fromkeys(request.resources):
        results.append(_describe(resource, request.include_synonyms, context.broker))
        await turns.maybe()
    count = sum(len(result["configs"]) for result in results)
    return await answer_of(count, context.head, results=results)


def _describe(resource: Any, include_synonyms: bool, broker: BrokerServices) -> dict[str, Any]:
    result = {
        "error_code": NO_ERROR,
        "error_message": None,
        "resource_type": resource.resource_type,
        "resource_name": resource.resource_name,
        "configs": [],
    }
    try:
        entries = _entries(resource, broker)
    except KafkaError as error:
        return result | {"error_code": error.code, "error_message": str(error)}
    if not include_synonyms:
        for entry in entries:
            entry["synonyms"] = []
    return result | {"configs": entries}


def _entries(resource: Any, broker: BrokerServices) -> list[dict[str, Any]]:
    names, keys = resource.resource_name, resource.configuration_keys
    if resource.resource_type == TOPIC:
        info = broker.metadata_cache.topic(names)
        if info is None:
            check_topic_name(names)
            raise UnknownTopicOrPartition(f"there is no topic {names}")
        return describe_topic(info.config, broker, keys or None)
    if resource.resource_type == BROKER:
        if names == "":
            return describe_every_broker(broker.metadata_cache, keys or None)
        if names != str(broker.config.id):
            raise InvalidRequest(f"this is broker {broker.config.id}; ask broker {names} itself")
        return describe_broker(broker.config, broker.metadata_cache, keys or None)
    raise InvalidRequest(f"resource type {resource.resource_type} has no settings here")
