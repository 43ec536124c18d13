"""What a broker must know of topics before it opens their logs: whether the cluster has them, and by which
settings. A log is recovered by its topic's own settings, because the offsets of a compacted one have holes
that the defaults would take for damage.

Called by `server/broker.py` at its start, before there is a picture of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from millrace.broker.coordination import paths
from millrace.broker.coordination.session import NodeMissing, Session


async def read_topic_configs(session: Session, topics: Collection[str]) -> dict[str, dict[str, str]]:
    """The settings of those of `topics` that the cluster has, as `paths.decode_topic_config` gives them.
    Raises SessionError."""
    present = sorted(set(topics).intersection(await session.children(paths.TOPICS)))

    async def read(topic: str) -> dict[str, str]:
        try:
            node = await session.get(paths.topic_config_path(topic))
        except NodeMissing:
            return {}
        return paths.decode_topic_config(topic, node.data)

    return dict(zip(present, await asyncio.gather(*map(read, present)), strict=True))
