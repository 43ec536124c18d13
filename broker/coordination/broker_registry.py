"""A broker's place in its cluster: the folders of a new cluster, its id, and `/brokers/ids/<id>`.

Registration is an ephemeral znode. When the id is taken, its holder may be our own killed predecessor
whose session has not expired yet: wait for one session timeout, come back the moment the znode vanishes,
and otherwise give up with `BrokerIdTaken`. Called by `server/broker.py` at start and after a lost session.
"""

from __future__ import annotations

import asyncio
import base64
import uuid

import structlog
from millrace.broker.coordination import paths
from millrace.broker.coordination.paths import BrokerRegistration
from millrace.broker.coordination.session import NodeExists, NodeMissing, Session
from millrace.broker.errors import BrokerIdTaken

log = structlog.get_logger("millrace.broker")

EXPIRY_MARGIN = 1.6
"""ZooKeeper expires sessions in steps of its tick, at most half of any timeout it grants: wait past that."""


async def prepare_cluster(session: Session) -> str:
    """Make the lasting folders where they are missing; return the cluster's id, new or old."""
    await asyncio.gather(*(session.ensure(path) for path in paths.PERSISTENT_ROOTS))
    fresh = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    try:
        await session.create(paths.CLUSTER_ID, paths.encode_cluster_id(fresh))
    except NodeExists:
        return paths.decode_cluster_id((await session.get(paths.CLUSTER_ID)).data)
    return fresh


async def register(session: Session, registration: BrokerRegistration, now_ms: int) -> None:
    """Claim the broker's id. Raises BrokerIdTaken when another live broker keeps it."""
    path = paths.broker_path(registration.broker_id)
    wait_ms = session.session_timeout_ms * EXPIRY_MARGIN
    deadline = asyncio.get_running_loop().time() + wait_ms / 1000
    waiting = False
    while True:
        try:
            await session.create(path, paths.encode_broker(registration, now_ms), ephemeral=True)
            return
        except NodeExists:
            gone = asyncio.Event()
        try:
            holder = await session.get(path, gone.set)
        except NodeMissing:
            continue
        if holder.owner == session.id:
            await session.set(path, paths.encode_broker(registration, now_ms))
            return
        if not waiting:
            waiting = True
            log.info(
                "the broker id is still registered; waiting for its session to end",
                broker_id=registration.broker_id,
                at_most_ms=round(wait_ms),
            )
        try:
            await asyncio.wait_for(gone.wait(), deadline - asyncio.get_running_loop().time())
        except TimeoutError:
            other = paths.decode_broker(registration.broker_id, holder.data)
            raise BrokerIdTaken(
                f"broker id {registration.broker_id} is in use by the broker at {other.host}:{other.port}; "
                "stop that one or give this one another id"
            ) from None


async def deregister(session: Session, broker_id: int) -> None:
    """Give the id back, if it is ours."""
    path = paths.broker_path(broker_id)
    try:
        node = await session.get(path)
        if node.owner == session.id:
            await session.delete(path, node.version)
    except NodeMissing:
        return
