"""Two sources of a config that are one cluster: one of them is carried, or every record would be there twice.

Called by `route_guard` with every look at a source; `check` and a reload say the same beforehand, as far as
the clusters answer then.

Invariant: the source that is carried already stays, whatever comes later; where none is, the one that was
seen first. What other workers of the mirror carry counts: it is what the mirror has told.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

import structlog

from millrace.mirror.topics.route_records import RouteKey
from millrace.mirror.topics.routes import Route

log = structlog.get_logger("millrace.mirror.topics.second_names")


def second_name_sentence(first: str, cluster_id: str) -> str:
    """What a source is, and what to do: the same at start, in `check`, at a reload and in the log."""
    return f"is the same cluster as {first} (id {cluster_id}); list each cluster once"


class SecondNames:
    """What is refused for its source's name, by source and topic, with the sentence that says why."""

    def __init__(self) -> None:
        self.refused: dict[RouteKey, str] = {}
        self._ids: dict[str, str] = {}  # of the sources, in the order in which they were first seen

    def looked(self, source: str, cluster_id: str) -> None:
        """The source has told which cluster it is."""
        self._ids[source] = cluster_id

    def forget(self, source: str) -> None:
        """The source is no longer one of the mirror's."""
        self._ids.pop(source, None)
        self._clear(source)

    def refuses(
        self, source: str, topics: Collection[str], others: Collection[str], told: Mapping[RouteKey, Route]
    ) -> bool:
        """Whether nothing of a source that was seen may be carried; `refused` says it then, of its `topics`.
        `others`: the sources of the config; `told`: what the mirror has told."""
        first = self._first(self._ids[source], source, others, told)
        before = {key for key in self.refused if key[0] == source}
        self._clear(source)
        if first == source:
            if before:
                log.info("source no longer refused", source=source)
            return False
        sentence = f"{source} {second_name_sentence(first, self._ids[source])}"
        self.refused |= {(source, topic): sentence for topic in topics}
        if topics and not before:
            log.error("source refused", source=source, reason=sentence)
        return True

    def _first(
        self, cluster_id: str, source: str, others: Collection[str], told: Mapping[RouteKey, Route]
    ) -> str:
        """Of the sources that are this cluster the one to carry."""
        since: dict[str, int] = {}
        for key, route in told.items():
            if len(key) == 2 and not route.is_proposed and route.source_cluster_id == cluster_id:
                since[key[0]] = min(since.get(key[0], sys.maxsize), route.since_ms)
        order = list(self._ids)
        # What was told of a source may be of another cluster that once had its name.
        same = {
            name
            for name in {*others, source}
            if (self._ids[name] == cluster_id if name in self._ids else name in since)
        }
        return min(
            same,
            key=lambda name: (
                since.get(name, sys.maxsize),
                order.index(name) if name in order else len(order),
                name,
            ),
        )

    def _clear(self, source: str) -> None:
        for key in [key for key in self.refused if key[0] == source]:
            del self.refused[key]
