"""Producer ids that are unique in the cluster, from blocks that `/latest_producer_id_block` grants.

A broker takes a block of 1,000 ids with a compare-and-set write and hands them out one by one; what is
left of a block when the broker stops is never used. Called by the InitProducerId handler.
"""

from __future__ import annotations

import asyncio

from millrace.broker.coordination import paths
from millrace.broker.coordination.paths import ProducerIdBlock
from millrace.broker.coordination.session import NodeExists, NodeMissing, Session, VersionConflict

BLOCK_SIZE = 1_000


class ProducerIds:
    """Hands out ids; asks ZooKeeper once for each block."""

    def __init__(self, session: Session, broker_id: int) -> None:
        self._session = session
        self._broker_id = broker_id
        self._next = 0
        self._last = -1
        self._lock = asyncio.Lock()

    async def take(self) -> int:
        """A producer id that no one else has. Raises SessionError while ZooKeeper cannot be reached."""
        async with self._lock:
            if self._next > self._last:
                block = await self._claim()
                self._next, self._last = block.first, block.last
            producer_id = self._next
            self._next += 1
            return producer_id

    async def _claim(self) -> ProducerIdBlock:
        while True:
            try:
                node = await self._session.get(paths.PRODUCER_ID_BLOCK)
            except NodeMissing:
                block = ProducerIdBlock(self._broker_id, 0, BLOCK_SIZE - 1)
                try:
                    await self._session.create(paths.PRODUCER_ID_BLOCK, paths.encode_producer_id_block(block))
                except NodeExists:
                    continue
                return block
            first = paths.decode_producer_id_block(node.data).last + 1
            block = ProducerIdBlock(self._broker_id, first, first + BLOCK_SIZE - 1)
            try:
                await self._session.set(
                    paths.PRODUCER_ID_BLOCK, paths.encode_producer_id_block(block), node.version
                )
            except VersionConflict:
                continue
            return block
