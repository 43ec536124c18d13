"""A broker on its way out lets others take over first, so that clients only move and nothing is lost.

It marks its registration as leaving. The controller (perhaps this very broker) then gives its leaderships to
other in-sync members and takes it out of the in-sync sets; leaders do not take it in again. It goes on
serving until there is nothing left that another could take over, or until its time is up: then the controller
does the same when the registration vanishes, only later. A broker that is alone has no one to wait for.

Called by `server/broker.py` before anything else is stopped.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from millrace.broker.coordination import paths
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration
from millrace.broker.coordination.session import (
    NodeMissing,
    Session,
    SessionError,
    SessionState,
    VersionConflict,
)

log = structlog.get_logger("millrace.broker")


def still_held(cache: MetadataCache, broker_id: int) -> int:
    """Partitions in whose in-sync set the broker is while another member stays, which could lead alone."""
    staying = {broker for broker, known in cache.brokers.items() if not known.leaving} - {broker_id}
    return sum(
        1
        for name, info in cache.topics.items()
        for number, partition in info.partitions.items()
        if partition.state is not None
        and broker_id in partition.state.isr
        and any(
            member in staying and member in partition.replicas and cache.is_alive(member, name, number)
            for member in partition.state.isr
        )
    )


async def hand_over(
    session: Session, cache: MetadataCache, registration: BrokerRegistration, *, at_most_ms: int, now_ms: int
) -> None:
    """Returns when nothing is held any more or when `at_most_ms` have passed; says so in the log if it was
    the time."""
    broker_id = registration.broker_id
    if not still_held(cache, broker_id) or session.state is not SessionState.CONNECTED:
        return
    path = paths.broker_path(broker_id)
    leaving = paths.encode_broker(replace(registration, leaving=True), now_ms)
    try:
        async with asyncio.timeout(at_most_ms / 1000):
            node = await session.get(path)
            if node.owner != session.id:
                return
            await session.set(path, leaving, node.version)
    except (NodeMissing, VersionConflict, SessionError, TimeoutError) as error:
        log.warning("leaving without handing over: ZooKeeper does not answer", error=str(error))
        return
    started = asyncio.get_running_loop().time()
    held = still_held(cache, broker_id)
    log.info("handing over to the other brokers", partitions=held)
    if await cache.changed(lambda: not still_held(cache, broker_id), at_most_ms):
        took_ms = round((asyncio.get_running_loop().time() - started) * 1000)
        log.info("handed over", partitions=held, took_ms=took_ms)
    else:
        log.warning(
            "leaving although not everything was handed over; the controller elects new leaders when it sees "
            "this broker gone",
            partitions=still_held(cache, broker_id),
            waited_ms=at_most_ms,
        )
