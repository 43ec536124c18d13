"""Where logs of the target begin, as far as it tells. Called by `translate` and `map_keeper`."""

from __future__ import annotations

from collections.abc import Collection

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.offsets import EARLIEST
from millrace.mirror.topics.routes import TargetPartition


async def log_starts(target: Cluster, partitions: Collection[TargetPartition]) -> dict[TargetPartition, int]:
    """Their first offsets; what the target does not have (now), or has no leader of, is left out. Raises what
    it says."""
    if not partitions:
        return {}
    view = await target.metadata(sorted({each.topic for each in partitions}), max_age_ms=0)
    there = {
        (each.topic, each.partition): EARLIEST
        for each in partitions
        if view.leader(each.topic, each.partition) is not None
    }
    begins = await target.list_offsets(there) if there else {}
    return {TargetPartition(*key): found.offset for key, found in begins.items()}
