"""A reader's side of an incremental fetch session (KIP-227): what has to be said this time, and of whom
nothing is new.

The broker remembers what a session asked for and answers what is new alone, so a fetch of many partitions
costs what those cost that something happens to. Who asks goes on saying from where each partition is to be
read; of that, this says what is another than last time, and forgets who is not asked for.

    what the broker has said once it does not   so whatever keeps an answer from being taken ends the session
    repeat                                      (`end`): the next request says all, and is answered in full;
                                                and where logs end is kept here, as it was said last
    it reads in the order in which partitions   so it had room for all that stand before the first one that it
    came, and who was given records within a    gave records (`had_room`): who of those is not named could not
    session goes to the end                     be given any
    an error is said again each time            so who is not named has none
    who gets nothing stays where it is          so one whose records come late (from a remote store) keeps the
                                                others waiting until all is said anew, in another order
                                                (`passes_over`)

Sessions are for who asks by topic id. Brokers without ids (before Apache Kafka 3.1) may read first, time and
again, those of which they have something to say (KAFKA-12330): they are told all each time. So is one that
has no room for a session.

Held by who fetches again and again over one connection, one fetch at a time; used by `raw_fetch`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias
from uuid import UUID

from millrace.broker.client.metadata import NO_TOPIC_ID
from millrace.broker.protocol.hot_fetch import Topic
from millrace.broker.protocol.session_epochs import FINAL_EPOCH, NO_SESSION, ReaderEpochs
from millrace.broker.protocol.topic_partition import TopicPartition


class FetchPosition(NamedTuple):
    """Where to read on. `current_leader_epoch` fences old leaders; `last_fetched_epoch` (of the last batch
    before `offset`) makes the leader say where this reader's history leaves its own; -1 asks for neither.
    `topic_id` says which topic of that name is meant."""

    offset: int
    current_leader_epoch: int = -1
    last_fetched_epoch: int = -1
    topic_id: UUID = NO_TOPIC_ID


Position: TypeAlias = tuple[TopicPartition, FetchPosition]


class LogEnds(NamedTuple):
    """As a broker says them; -1: it does not."""

    high_watermark: int
    last_stable_offset: int


class Answer(NamedTuple):
    """Of one partition."""

    key: TopicPartition
    ends: LogEnds
    has_records: bool


class Wanted(NamedTuple):
    """What one request says."""

    session_id: int
    session_epoch: int
    partitions: Sequence[Position]
    forgotten: Sequence[tuple[Topic, int]]


class FetchSession:
    """See the module's text. `lasts` False: for one fetch alone, which asks for no session."""

    def __init__(self, *, lasts: bool = True) -> None:
        self._lasts = lasts
        self._epochs = ReaderEpochs()
        self._by_id = False
        self._max_bytes = 0
        # What the broker was told, in the order in which it reads.
        self._asked: dict[TopicPartition, FetchPosition] = {}
        self._names: dict[UUID, str] = {}
        self._ends: dict[TopicPartition, LogEnds] = {}  # as they were told last
        self._named: set[TopicPartition] = set()  # by the last answer
        self._given: list[TopicPartition] = []  # records, by the last answer
        self._is_of_all = False
        self._is_over = False
        self.said_all = True
        """Whether the last request did."""

    def have_ids(self, positions: Mapping[TopicPartition, FetchPosition]) -> bool:
        """Whether all say which topic is meant."""
        known = self._asked if self._by_id else {}
        # Comparing ids is what costs here, so those that were asked for so before are not looked at.
        return all(known.get(key) is at or at.topic_id != NO_TOPIC_ID for key, at in positions.items())

    def want(
        self, positions: Mapping[TopicPartition, FetchPosition], max_bytes: int, *, by_id: bool
    ) -> Wanted:
        """Ask for these partitions and no others, at most `max_bytes` of each. `by_id`: the request names
        topics by id."""
        if self._is_over or by_id is not self._by_id:
            self._epochs.end()
            self._is_over, self._by_id = False, by_id
        if not self.said_all:
            for key in self._given:
                self._asked[key] = self._asked.pop(key)
        self._given = []
        self.said_all = self._epochs.is_full
        if self.said_all:
            said = self._as_said(positions.items())
            self._asked, self._ends, self._max_bytes = dict(said), {}, max_bytes
            self._names = {at.topic_id: topic for (topic, _), at in said} if by_id else {}
            epoch = self._epochs.epoch if self._lasts and by_id else FINAL_EPOCH
            return Wanted(self._epochs.id, epoch, said, ())
        asked = self._asked
        changed = {
            key: at for key, at in positions.items() if (known := asked.get(key)) is not at and known != at
        }
        forgotten = [self._forget(key) for key in [key for key in asked if key not in positions]]
        forgotten += [
            self._forget(key)
            for key, at in changed.items()
            if key in asked and asked[key].topic_id != at.topic_id
        ]
        said = self._as_said((changed if max_bytes == self._max_bytes else {**asked, **changed}).items())
        self._max_bytes = max_bytes
        for key, at in said:
            asked[key] = at  # a new one comes last
            self._names[at.topic_id] = key[0]
        return Wanted(self._epochs.id, self._epochs.epoch, said, forgotten)

    def _as_said(self, positions: Iterable[Position]) -> list[Position]:
        """In the order of a request, which lists partitions by topic."""
        by_topic: dict[Topic, list[Position]] = {}
        for key, at in positions:
            by_topic.setdefault(at.topic_id if self._by_id else key[0], []).append((key, at))
        return [each for of_topic in by_topic.values() for each in of_topic]

    def _forget(self, key: TopicPartition) -> tuple[Topic, int]:
        self._ends.pop(key, None)
        return self._asked.pop(key).topic_id, key[1]

    def key_of(self, topic: Topic, partition: int) -> TopicPartition | None:
        """Whom an answer is of; None where it was not asked for."""
        name = self._names.get(topic) if isinstance(topic, UUID) else topic
        if name is None or (at := self._asked.get((name, partition))) is None:
            return None
        return (name, partition) if not self._by_id or at.topic_id == topic else None

    def answered(self, session_id: int, named: Sequence[Answer], *, is_throttled: bool = False) -> bool:
        """An answer names the session (0: there is none, or none any more), and these partitions.
        `is_throttled`: it may have left out others because of a quota. Whether it is about those that were
        asked for, all where all had to be said."""
        self._named = {each.key for each in named}
        self._given = [each.key for each in named if each.has_records]
        self._ends.update((each.key, each.ends) for each in named)
        self._is_of_all = not (is_throttled and not self._named)
        self._epochs.answered(session_id if self._lasts and self._by_id else NO_SESSION)
        return self._named == self._asked.keys() if self.said_all else self._named <= self._asked.keys()

    def quiet(self) -> dict[TopicPartition, LogEnds]:
        """Of whom the last answer says, by not naming them, that nothing is new: no records, no error, and
        the log's ends as they were told last, which are these."""
        if not self._is_of_all:
            return {}
        return {key: ends for key, ends in self._ends.items() if key not in self._named}

    @property
    def passes_over(self) -> bool:
        """Whether the last answer gave nothing to somebody whose log goes on."""
        given, asked = set(self._given), self._asked
        return any(
            key not in given and ends.last_stable_offset > asked[key].offset
            for key, ends in self._ends.items()
        )

    @property
    def says_all_next(self) -> bool:
        return self._is_over or self._epochs.is_full

    def had_room(self) -> set[TopicPartition]:
        """For whom the last answer had room, and gave them no records."""
        found, given = set[TopicPartition](), set(self._given)
        for key in self._asked:
            if key in given:
                break
            found.add(key)
        return found

    def end(self) -> None:
        """Say all next time, when the broker also learns that it can forget this session. An answer that is
        under way is still one to what was asked."""
        self._is_over = True
