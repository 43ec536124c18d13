"""What a consumer knows of the places that its group has committed: `commit` without offsets sets none back.

Held by `consumer` and given to the client as its `on_commit`. confluent-kafka's own `commit` without offsets
commits what is beyond the last place that it has committed, and has _NO_OFFSET for the rest; so does one that
waits for a report here. Of other members' commits it knows nothing: a partition that goes is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

OnCommit = Callable[[Any, list[Any]], None]


class KnownCommits:
    """`tell` is the application's `on_commit`. No lock, for which a signal's handler would wait for ever."""

    def __init__(self, tell: OnCommit | None) -> None:
        self._tell = tell
        self._places: dict[tuple[str, int], tuple[int, int]] = {}

    def __call__(self, error: Any, places: list[Any]) -> None:
        if error is None:
            self.note(places)
        if self._tell is not None:
            self._tell(error, places)

    def note(self, places: Iterable[Any]) -> None:
        """They were committed (TopicPartition or alike), but for those with an error."""
        for each in places:
            if each.error is None and each.offset >= 0:
                self._places[each.topic, each.partition] = _order(each)

    def forget(self, places: Iterable[tuple[str, int]] | None) -> None:
        """These partitions, None: all."""
        for place in list(self._places) if places is None else places:
            self._places.pop(place, None)

    def beyond(self, places: Iterable[Any], waiting: Iterable[Any]) -> list[Any]:
        """Of these, those beyond what was committed or, later than that, is waiting to be."""
        known = {**self._places, **{(each.topic, each.partition): _order(each) for each in waiting}}
        return [
            each
            for each in places
            if (last := known.get((each.topic, each.partition))) is None or _is_beyond(_order(each), last)
        ]


def _order(place: Any) -> tuple[int, int]:
    """(leader epoch or -1, offset)"""
    epoch = place.leader_epoch
    return -1 if epoch is None else epoch, place.offset


def _is_beyond(place: tuple[int, int], last: tuple[int, int]) -> bool:
    """By the epoch first, as a log that was shortened has another; by the offset where one has none."""
    return place > last if min(place[0], last[0]) >= 0 else place[1] > last[1]
