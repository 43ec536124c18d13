"""A broker's place in its cluster: the folders of a new cluster, its id, and `/brokers/ids/<id>`.

Registration is an ephemeral znode. When the id is taken, its holder may be our own killed predecessor
whose session has not expired yet: wait for one session timeout, come back the moment the znode vanishes,
and otherwise give up with `BrokerIdTaken`. Called by `server/broker.py` at start and after a lost session.

`leave_in_sync_sets` is the rule for a broker that was restarted: before it registers, it leaves every
in-sync set that has another member, because membership was for what it had before, and records that were
never flushed may be gone. Where it is the only member it stays, in a new leader epoch: a restart may have cut
records whose offsets are given again, and only another epoch tells readers that what they hold at these
offsets is no longer what the log says. A broker whose logs were all closed cleanly has lost nothing and stays
in sync; it begins a new epoch where it leads. (Apache Kafka's controller does the first when it sees a broker
go, and KIP-966 does it for every unclean start.) Where it was not in sync, its leader may be about to take it
in for what it had before, as slowly as ZooKeeper is reached from there: the state is written as it is, and
the leader's write no longer fits its version (what KIP-903 is for). A topic whose znode cannot be understood
is in nobody's picture, as in Apache Kafka; its in-sync sets are left all the same, for the day on which it
can.
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
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.partition import NO_LEADER, PartitionState

log = structlog.get_logger("millrace.broker")

RENEWALS_PER_TRANSACTION = 500
TRANSACTIONS_AT_ONCE = 4
"""Each waits for ZooKeeper's disk, not for the others."""

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
    while True:
        try:
            await session.create(path, paths.encode_broker(registration, now_ms), ephemeral=True)
            return
        except NodeExists:
            await wait_for_id(session, registration.broker_id)
        try:
            if (await session.get(path)).owner == session.id:
                await session.set(path, paths.encode_broker(registration, now_ms))
                return
        except NodeMissing:
            continue


async def wait_for_id(session: Session, broker_id: int) -> None:
    """Until no other session holds the id. Raises BrokerIdTaken when one does for longer than the session of
    a killed broker would last."""
    path = paths.broker_path(broker_id)
    wait_ms = session.session_timeout_ms * EXPIRY_MARGIN
    deadline = asyncio.get_running_loop().time() + wait_ms / 1000
    waiting = False
    while True:
        gone = asyncio.Event()
        try:
            holder = await session.get(path, gone.set)
        except NodeMissing:
            return
        if holder.owner == session.id:
            return
        if not waiting:
            waiting = True
            log.info(
                "the broker id is still registered; waiting for its session to end",
                broker_id=broker_id,
                at_most_ms=round(wait_ms),
            )
        try:
            async with asyncio.timeout_at(deadline):
                await gone.wait()
        except TimeoutError:
            other = paths.decode_broker(broker_id, holder.data)
            raise BrokerIdTaken(
                f"broker id {broker_id} is in use by the broker at {other.host}:{other.port}; "
                "stop that one or give this one another id"
            ) from None


async def deregister(session: Session, broker_id: int) -> None:
    """Give the id back, if it is ours."""
    path = paths.broker_path(broker_id)
    try:
        # A ZooKeeper that does not answer for so long has ended the session, and the registration with it.
        async with asyncio.timeout(session.session_timeout_ms / 1000):
            node = await session.get(path)
            if node.owner == session.id:
                await session.delete(path, node.version)
    except NodeMissing:
        return
    except TimeoutError:
        log.warning("the broker id was not given back: ZooKeeper does not answer", broker_id=broker_id)


async def leave_in_sync_sets(
    session: Session, cache: MetadataCache, broker_id: int, *, was_clean: bool
) -> None:
    """Give up what this broker's earlier life had, as the freshly read cache shows it. `was_clean`: all logs
    were closed in order, so nothing of them is missing.

    Called before the broker registers and before its replicas take their roles. Writes are tied to the
    version that was read; where someone wrote meanwhile, the partition is looked at again.
    """
    keys = [(name, number) for name, info in cache.topics.items() for number in info.partitions]
    chunks = [
        keys[start : start + RENEWALS_PER_TRANSACTION]
        for start in range(0, len(keys), RENEWALS_PER_TRANSACTION)
    ]
    changed = 0
    for start in range(0, len(chunks), TRANSACTIONS_AT_ONCE):
        together = (
            _restart_chunk(session, cache, broker_id, chunk, was_clean)
            for chunk in chunks[start : start + TRANSACTIONS_AT_ONCE]
        )
        changed += sum(await asyncio.gather(*together))
    for name in sorted(set(await session.children(paths.TOPICS)) - cache.topics.keys()):
        changed += await _restart_unread(session, cache, broker_id, name, was_clean)
    if changed:
        log.info("partitions left or begun anew after a restart", partitions=changed, clean=was_clean)


async def _restart_chunk(
    session: Session, cache: MetadataCache, broker_id: int, keys: list[TopicPartition], was_clean: bool
) -> int:
    try:
        return await _restart(session, cache, broker_id, keys, was_clean)
    except (VersionConflict, NodeMissing):
        return sum([await _restart_one(session, cache, broker_id, key, was_clean) for key in keys])


async def _restart_one(
    session: Session, cache: MetadataCache, broker_id: int, key: TopicPartition, was_clean: bool
) -> int:
    while True:
        try:
            return await _restart(session, cache, broker_id, [key], was_clean)
        except NodeMissing:
            return 0
        except VersionConflict:
            node = await session.get(paths.state_path(*key))
            cache.set_state(*key, paths.decode_state(node.data), node.version)


async def _restart(
    session: Session, cache: MetadataCache, broker_id: int, keys: list[TopicPartition], was_clean: bool
) -> int:
    writes = []
    for key in keys:
        known = cache.partition(*key)
        if known is None or known.state is None:
            continue
        alive = frozenset(broker for broker in cache.brokers if cache.is_alive(broker, *key))
        state = restarted(known.state, known.replicas, broker_id, alive, was_clean=was_clean)
        if state is not None:
            writes.append((key, state, known.state_version))
    if writes:
        await session.commit(
            [
                SetData(paths.state_path(*key), paths.encode_state(state), version)
                for key, state, version in writes
            ]
        )
    for key, state, version in writes:
        cache.set_state(*key, state, version + 1)
    return len(writes)


async def _restart_unread(
    session: Session, cache: MetadataCache, broker_id: int, topic: str, was_clean: bool
) -> int:
    """As `_restart`, of a topic that is not in the picture: the states alone are asked."""
    try:
        names = await session.children(paths.partitions_path(topic))
    except NodeMissing:
        return 0  # deleted meanwhile, or nobody has led it yet
    changed = 0
    for number in sorted(int(name) for name in names if name.isdigit()):
        path = paths.state_path(topic, number)
        alive = frozenset(broker for broker in cache.brokers if cache.is_alive(broker, topic, number))
        while True:
            try:
                node = await session.get(path)
                known = paths.decode_state(node.data)
                state = restarted(known, (), broker_id, alive, was_clean=was_clean)
                if state is not None:
                    await session.set(path, paths.encode_state(state), node.version)
                    changed += 1
            except VersionConflict:
                continue
            except NodeMissing:
                pass
            except ValueError as error:
                log.error(
                    "a partition's state cannot be understood: before it is mended, take this broker out of "
                    "its in-sync set",
                    topic=topic,
                    partition=number,
                    error=str(error),
                )
            break
    return changed


def restarted(
    state: PartitionState,
    replicas: tuple[int, ...],
    broker_id: int,
    alive: frozenset[int],
    *,
    was_clean: bool,
) -> PartitionState | None:
    """The state of a partition once a broker that kept a replica of it has been restarted (the same state:
    only in a new version); None where its restart makes no difference. Pure."""
    others = tuple(broker for broker in state.isr if broker != broker_id)
    if others == state.isr:
        may_be_taken_in = broker_id in replicas and state.leader != NO_LEADER
        return state if may_be_taken_in and not was_clean else None
    if was_clean or not others:
        return replace(state, leader_epoch=state.leader_epoch + 1) if state.leader == broker_id else None
    leader = state.leader
    if leader == broker_id:
        in_order = sorted(others, key=lambda one: replicas.index(one) if one in replicas else len(replicas))
        leader = next((broker for broker in in_order if broker in alive), in_order[0])
    return replace(state, leader=leader, leader_epoch=state.leader_epoch + 1, isr=others)
