"""DescribeCluster, versions 0 and 1: brokers, controller, cluster id.

Endpoint types (version 1) other than brokers are refused: there are no controller endpoints.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.errors import MismatchedEndpointType
from millrace.broker.protocol.frames import Api
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext

API = Api.DESCRIBE_CLUSTER
VERSIONS = range(2)

BROKERS = 1


async def handle(request: Any, context: RequestContext) -> Any:
    cache, version = context.broker.metadata_cache, context.head.version
    if getattr(request, "endpoint_type", BROKERS) != BROKERS:
        return answer(API, version, error_code=MismatchedEndpointType.code)
    return answer(
        API,
        version,
        cluster_id=cache.cluster_id,
        controller_id=cache.controller_id,
        brokers=[
            {"broker_id": known.broker_id, "host": known.host, "port": known.port, "rack": known.rack}
            for known in cache.brokers.values()
        ],
    )
