"""AddOffsetsToTxn, versions 0 to 4: a transaction will commit offsets of a group.

To the coordinator that is one more partition of the transaction: the group's, of `__consumer_offsets`. The
offsets themselves go to the group's coordinator by TxnOffsetCommit.
"""

from __future__ import annotations

from typing import Any

from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.java_hash import coordinator_partition
from millrace.broker.protocol.system_topics import OFFSETS_TOPIC
from millrace.broker.server.answers import answer
from millrace.broker.server.context import RequestContext
from millrace.broker.server.transaction_requests import fenced_code, producer_of

API = Api.ADD_OFFSETS_TO_TXN
VERSIONS = range(5)

_PRODUCER_FENCED_FROM = 2


async def handle(request: Any, context: RequestContext) -> Any:
    broker = context.broker
    offsets = broker.metadata_cache.topic(OFFSETS_TOPIC)
    width = len(offsets.partitions) if offsets else broker.config.settings.offsets_topic_num_partitions
    partition = (OFFSETS_TOPIC, coordinator_partition(request.group_id, width))
    error = await broker.transactions.add_partitions(
        request.transactional_id, producer_of(request), [partition]
    )
    version = context.head.version
    return answer(API, version, error_code=fenced_code(error, version, _PRODUCER_FENCED_FROM))
