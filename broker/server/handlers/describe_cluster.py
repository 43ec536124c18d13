"""DescribeCluster, versions 0 and 1: brokers, controller, cluster id.

Endpoint types (version 1) other than brokers are refused: there are no controller endpoints. There is no
authorizer: who asks for the operations that it may do is told all there are.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.errors import MismatchedEndpointType
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.operations import ALL_ON_CLUSTER, NOT_ASKED
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
        cluster_authorized_operations=(
            ALL_ON_CLUSTER if request.include_cluster_authorized_operations else NOT_ASKED
        ),
        brokers=[
            {"broker_id": known.broker_id, "host": known.host, "port": known.port, "rack": known.rack}
            for known in cache.brokers.values()
        ],
    )
