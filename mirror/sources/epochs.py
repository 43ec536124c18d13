"""Where the leader epochs of what was fetched begin: how a source's other history is found. Pure.

Held by `progress`, asked by `source` when a leader says that histories part. A leader answers (epoch, end):
the newest epoch of its own that is not above ours, and where it ends there. Ours may have left that epoch
earlier than the leader did: between the two lie records of the leader's that were never fetched (the rule by
which a follower truncates, KIP-595).
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.broker.client.metadata import NO_TOPIC_ID, TopicMetadata

# An epoch changes with every change of the leader. Forgetting old ones errs towards their successor's begin.
MAX_EPOCHS = 256


class EpochHistory:
    """(epoch, first offset fetched in it), ascending. Of what was fetched before this assignment the last
    epoch alone is known, and where it began if the position tells; else it is taken to begin at the position,
    an upper bound."""

    def __init__(self, epoch: int, offset: int) -> None:
        self._starts: list[tuple[int, int]] = [(epoch, offset)]

    def begin_of(self, epoch: int) -> int:
        """The first offset that was fetched in it; -1 where that is not known."""
        return next((start for each, start in self._starts if each == epoch >= 0), -1)

    def fetched(self, epoch: int, offset: int) -> None:
        """A batch of another epoch than the last one begins at `offset`."""
        self._starts.append((epoch, offset))
        if len(self._starts) > MAX_EPOCHS:
            del self._starts[0]

    def cut(self, offset: int) -> None:
        """What begins at `offset` or later is forgotten."""
        starts = self._starts
        while len(starts) > 1 and starts[-1][1] >= offset:
            starts.pop()

    def newest_first(self) -> list[int]:
        """Those that are known of what was fetched."""
        return [epoch for epoch, _ in reversed(self._starts) if epoch >= 0]

    def parts_at(self, epoch: int, end_offset: int, offset: int) -> tuple[int, int]:
        """Where our history, up to `offset`, leaves that of a leader that answered (`epoch`, `end_offset`),
        as far as one answer tells: (offset to go back to, epoch to ask with there).

        That epoch is our own of the record before, so that the leader can say whether histories part even
        earlier. Where nothing of ours is known that far back, it is the leader's, and its word is taken."""
        bounds = [start for each, start in self._starts if each > epoch]
        back_to = min([end_offset, offset, *bounds])
        ours = [each for each, start in self._starts if start < back_to]
        known = ours[-1] if ours else self._starts[0][0]
        # Asked with an epoch that the leader has just left out, it would say the same again.
        return back_to, known if 0 <= known <= epoch and back_to < offset else epoch


def untold(topics: Iterable[TopicMetadata]) -> str | None:
    """What a source does not tell of a topic that is deleted and created again; None: it tells all."""
    without_ids = [topic for topic in topics if topic.topic_id == NO_TOPIC_ID]
    if not without_ids:
        return None
    if all(each.leader_epoch < 0 for topic in without_ids for each in topic.partitions.values()):
        return (
            "it tells neither topic ids nor leader epochs (Apache Kafka before 2.1): a topic that is deleted "
            "and created again is noticed only while it is shorter than what was carried; create topics anew "
            "under other names"
        )
    return (
        "it tells no topic ids (Apache Kafka before 2.8): a topic that is deleted and created again is known "
        "by its leader epochs, and not at all where it has come to the same epoch and length before it is "
        "fetched from; create topics anew under other names"
    )
