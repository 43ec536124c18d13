"""Reads where the mirrors stand, from their control ports and from the source clusters.

Called by the demo while it waits. A partition has arrived when the mirror that owns it has a position at the
source's end; the ends are asked of the sources themselves, so a mirror that has not yet noticed new records
cannot look finished.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.broker.client.cluster import Cluster
from millrace.broker.errors import MillraceError
from millrace.broker.protocol.address import Address

ClusterPartition = tuple[str, str, int]
"""(source cluster, topic, partition)"""

STATUS_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Positions of all partitions that a mirror that answers owns; `problems` are open gaps."""

    positions: Mapping[ClusterPartition, int]
    lag: int
    all_answered: bool
    problems: tuple[str, ...]

    def mirrored(self, topic: str) -> int:
        return sum(position for (_, name, _), position in self.positions.items() if name == topic)

    def has_reached(self, ends: Mapping[ClusterPartition, int]) -> bool:
        return all(self.positions.get(place, 0) >= end for place, end in ends.items())


def standing(control_addresses: Iterable[str]) -> Standing:
    """Asks every mirror process for its `/status`; one that does not answer is left out."""
    positions: dict[ClusterPartition, int] = {}
    lag, all_answered = 0, True
    problems: list[str] = []
    for address in control_addresses:
        status = _status(address)
        if status is None:
            all_answered = False
            continue
        for partition in status["partitions"]:
            place = (partition["source"], partition["topic"], partition["partition"])
            if partition["position"] is not None:
                positions[place] = max(positions.get(place, 0), partition["position"])
            lag += partition.get("lag_records") or 0
            if gap := partition.get("gap"):
                problems.append(f"{'/'.join(map(str, place))}: {gap['class']}: {gap['reason']}")
    return Standing(positions, lag, all_answered, tuple(problems))


def source_ends(sources: Mapping[str, str], topics: Sequence[str]) -> dict[ClusterPartition, int]:
    """End offsets of `topics` in every source cluster (`{cluster: address}`)."""

    async def of_one(cluster: str, address: str) -> dict[ClusterPartition, int]:
        async with Cluster(cluster, [address], client_id="demo") as connected:
            metadata = await connected.metadata(list(topics))
            keys = [key for topic in topics for key in metadata.partitions(topic)]
            listed = await connected.list_offsets(dict.fromkeys(keys, -1))
            return {(cluster, topic, number): listed[topic, number].offset for topic, number in keys}

    async def of_all() -> dict[ClusterPartition, int]:
        found = await asyncio.gather(*(of_one(cluster, address) for cluster, address in sources.items()))
        return {place: end for ends in found for place, end in ends.items()}

    return asyncio.run(of_all())


def create_topics(
    clusters: Mapping[str, str], topic: str, partitions: int, configs: Mapping[str, str]
) -> None:
    """Creates `topic` in every cluster."""
    from millrace.broker.client import admin

    async def in_one(cluster: str, address: str) -> None:
        async with Cluster(cluster, [address], client_id="demo") as connected:
            await admin.create_topic(connected, topic, partitions, 1, configs)

    async def in_all() -> None:
        await asyncio.gather(*(in_one(cluster, address) for cluster, address in clusters.items()))

    asyncio.run(in_all())


def _status(address: str) -> dict[str, Any] | None:
    host, port = Address.parse(address)
    connection = http.client.HTTPConnection(host, port, timeout=STATUS_TIMEOUT_S)
    try:
        connection.request("GET", "/status")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            return None
        status: dict[str, Any] = json.loads(body)
    except (OSError, http.client.HTTPException):
        return None
    except ValueError as error:
        raise MillraceError(f"the mirror at {address} does not answer in JSON: {error}") from None
    finally:
        connection.close()
    return status
