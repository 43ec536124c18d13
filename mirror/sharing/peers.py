"""Which workers the mirror has and where each answers, as the group tells it. Pure.

Called by `worker` around the group's messages (`assignment`): each worker adds its address to its claim, the
leader adds the addresses of all to every share. So every worker knows every other as of the last rebalance,
nothing has to be kept or expire anywhere, and a worker that is gone is gone from the list with its seat.

The share also says how many partitions of each source there are in all: a limit of a source in bytes/s is
split between the workers by it (`share_of_rate`).

Both are additions to messages that others write and read: what is not there was left out by an older worker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.broker.protocol.foreign_json import read_json
from millrace.mirror.topics.routes import SourcePartition


@dataclass(frozen=True, slots=True)
class Peer:
    """`url` is None where the worker's claim names none."""

    id: str
    url: str | None


@dataclass(frozen=True, slots=True)
class Crew:
    """All workers as of the last rebalance, and the partitions of each source that were to be shared out."""

    workers: tuple[Peer, ...] = ()
    partition_counts: Mapping[str, int] = field(default_factory=dict)

    def share_of_rate(self, source: str, owned: int, bytes_per_second: float) -> float:
        """This worker's part of a limit, by its part of the source's partitions. While the whole is not
        known, the workers have equal parts: together never more than the limit."""
        total = self.partition_counts.get(source, 0)
        if owned <= 0 or total < owned:
            return bytes_per_second / max(1, len(self.workers))
        return bytes_per_second * owned / total


def add_address(claim: bytes, url: str) -> bytes:
    """A worker's claim that says where the worker answers."""
    return _with(claim, {"url": url})


def add_crew(share: bytes, claims: Mapping[str, bytes], partitions: Iterable[SourcePartition]) -> bytes:
    """A worker's share that names all workers. `claims` are their claims as the group has them."""
    counts = Counter(partition.source for partition in partitions)
    workers = {member: _url_of(claim) for member, claim in sorted(claims.items())}
    return _with(share, {"workers": workers, "counts": dict(sorted(counts.items()))})


def crew_of(share: bytes) -> Crew:
    """What `add_crew` added; an empty crew where nothing was."""
    message = _message(share)
    workers, counts = message.get("workers"), message.get("counts")
    return Crew(
        tuple(Peer(str(member), url if isinstance(url, str) else None) for member, url in workers.items())
        if isinstance(workers, dict)
        else (),
        {str(source): count for source, count in counts.items() if isinstance(count, int)}
        if isinstance(counts, dict)
        else {},
    )


def _url_of(claim: bytes) -> str | None:
    url = _message(claim).get("url")
    return url if isinstance(url, str) else None


def _with(message: bytes, more: Mapping[str, Any]) -> bytes:
    return json.dumps({**_message(message), **more}, separators=(",", ":"), sort_keys=True).encode()


def _message(data: bytes) -> dict[str, Any]:
    try:
        message = read_json(data)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
