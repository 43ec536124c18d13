"""A lane's side of an incremental fetch session (KIP-227): what has to be said this time.

The leader remembers what a session asked for and answers only what is new, so a round over thousands of
quiet partitions costs a frame of some bytes. The lane goes on saying from where each partition wants to read:
whoever asks otherwise than last time (a new offset, epoch or start) is said again, whoever is not to be
asked for now (it rests, or has left the lane) is forgotten, and comes back as a new one.

What the leader has said once it does not repeat. So whatever may have kept an answer from being taken, as a
lost connection, ends the session (`end`): the next request is a full one, which the leader answers in full.
Where it is one partition's that was not taken, as it came when the replica was in another epoch by then, that
one is let go of: if it is asked for next time too, the session ends; if not, it will be a new one anyway. A
leader that has no room for a session gets a full request every time.

Called by `replica_fetcher.py`, on the event loop. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from millrace.broker.protocol.hot_fetch import PartitionFetch, Topic
from millrace.broker.protocol.session_epochs import ReaderEpochs

Key = tuple[Topic, int]
Owner = TypeVar("Owner")


class Wanted(NamedTuple):
    """What one request says."""

    session_id: int
    session_epoch: int
    partitions: Sequence[PartitionFetch]
    forgotten: Sequence[Key]


class FollowerSession(Generic[Owner]):
    """What one lane asks its leader for. `Owner` is who a partition's answers belong to."""

    def __init__(self) -> None:
        self._epochs = ReaderEpochs()
        self._asked: dict[Key, tuple[Owner | None, PartitionFetch]] = {}

    def want(self, owners: Iterable[tuple[Owner, PartitionFetch]]) -> Wanted:
        """Ask for these partitions, each at most once, and no others."""
        before = self._asked
        now: dict[Key, tuple[Owner | None, PartitionFetch]] = {
            (question.topic, question.partition): (owner, question) for owner, question in owners
        }
        if any(before.get(key, asked)[0] is not asked[0] for key, asked in now.items()):
            self.end()  # what nobody took, or another owner, would not be said again
        self._asked = now
        session_id, epoch = self._epochs.id, self._epochs.epoch
        if self._epochs.is_full:
            return Wanted(session_id, epoch, [question for _, question in now.values()], ())
        changed = [
            question for key, (_, question) in now.items() if key not in before or before[key][1] != question
        ]
        return Wanted(session_id, epoch, changed, [key for key in before if key not in now])

    def asked(self, key: Key) -> tuple[Owner | None, PartitionFetch] | None:
        """Whose an answer is (None: nobody's any more), and to which question; None where there was none."""
        return self._asked.get(key)

    def answered(self, session_id: int) -> None:
        """The leader's answer names the session; 0 where there is none (any more)."""
        self._epochs.answered(session_id)

    def let_go(self, key: Key) -> None:
        """Its owner is gone, or has not taken all that the leader has said."""
        if key in self._asked:
            self._asked[key] = None, self._asked[key][1]

    def end(self) -> None:
        """Say everything anew next time, when the leader also learns that it can forget this session."""
        self._epochs.end()
        self._asked = {}
