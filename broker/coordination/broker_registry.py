"""A broker's place in its cluster: the folders of a new cluster, its id, and `/brokers/ids/<id>`.

Registration is an ephemeral znode. When the id is taken, its holder may be our own killed predecessor
whose session has not expired yet: wait for one session timeout, come back the moment the znode vanishes,
and otherwise give up with `BrokerIdTaken`. Called by `server/broker.py` at start and after a lost session.

`renew_leaderships` gives every partition that this broker led before it was restarted a new leader epoch.
A restart may have cut records that were never flushed, and their offsets are given again: only another
epoch tells readers that what they hold at these offsets is no longer what the log says. (Apache Kafka's
controller does the same when it sees a broker go and come back.)
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from dataclasses import replace

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration
from millrace.broker.coordination.session import NodeExists, NodeMissing, Session, SetData, VersionConflict
from millrace.broker.errors import BrokerIdTaken

log = structlog.get_logger("millrace.broker")

RENEWALS_PER_TRANSACTION = 500

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


async def renew_leaderships(session: Session, cache: MetadataCache, broker_id: int) -> None:
    """Begin a new leader epoch wherever this broker leads, as the freshly read cache shows it.

    Called before the local replicas take their roles. Writes are tied to the version that was read: where
    someone wrote meanwhile, the controller has decided anew, and that comes with an epoch of its own.
    """
    led = [
        (name, number)
        for name, info in cache.topics.items()
        for number, partition in info.partitions.items()
        if partition.leader == broker_id
    ]
    for start in range(0, len(led), RENEWALS_PER_TRANSACTION):
        chunk = led[start : start + RENEWALS_PER_TRANSACTION]
        try:
            await _renew(session, cache, chunk)
        except (VersionConflict, NodeMissing):
            for one in chunk:
                try:
                    await _renew(session, cache, [one])
                except (VersionConflict, NodeMissing):
                    log.debug("the controller was quicker", topic=one[0], partition=one[1])


async def _renew(session: Session, cache: MetadataCache, partitions: list[tuple[str, int]]) -> None:
    writes = []
    for topic, number in partitions:
        known = cache.partition(topic, number)
        if known is not None and known.state is not None:
            state = replace(known.state, leader_epoch=known.state.leader_epoch + 1)
            writes.append((topic, number, state, known.state_version))
    if not writes:
        return
    await session.commit(
        [
            SetData(paths.state_path(topic, number), paths.encode_state(state), version)
            for topic, number, state, version in writes
        ]
    )
    for topic, number, state, version in writes:
        cache.set_state(topic, number, state, version + 1)
