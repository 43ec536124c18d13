"""What idempotent and transactional clients were promised, checked against what the cluster commits.

Fed by the truth with every committed record, in order: from the markers alone it knows which transactions are
open and how each one ended, without the product's own bookkeeping. Invariant 6 and what goes with it:

- a batch of an idempotent producer is there once, in the order of its sequence, and none is missing that was
  acknowledged;
- the records between a producer's first and the marker are of one transaction of the client, and a
  transaction ends in the same way in all its partitions;
- what a client heard (committed, aborted) is how it ended, with all its records;
- a reader of committed data sees nothing from the first record of an open transaction on, nor anything
  aborted;
- every input of a stream is in the committed outputs once, and the group's offset says how far it went.

Once a loss of power has excused a record nothing of this can be judged, and nothing is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tests.simulation.cluster.disk import Stored
from tests.simulation.cluster.truth import Truth, Violation

Key = tuple[str, int, int]
"""A transaction of a client: transactional id, number of the producer's life, number of the transaction."""


def output(key: Key, taken: int) -> bytes:
    """The record that a transaction makes of an input."""
    return "|".join(map(str, ("stream", *key, taken))).encode()


def numbered(producer: str, count: int) -> bytes:
    """The record that an idempotent producer sends as its `count`-th."""
    return f"numbered|{producer}|{count}".encode()


@dataclass(slots=True)
class _Partition:
    """What the committed records of a data partition come to. `outcomes`: by offset, how the record's
    transaction ended; a plain record is committed."""

    end: int = 0
    open: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    first_open: dict[int, int] = field(default_factory=dict)
    outcomes: dict[int, bool] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def stable_end(self) -> int:
        """Nobody who reads committed data may see further."""
        return min(self.first_open.values(), default=self.end)


class ExactlyOnce:
    """See the module."""

    def __init__(self, truth: Truth, data_partitions: int) -> None:
        self._truth = truth
        self._partitions = {number: _Partition() for number in range(data_partitions)}
        self._ended: defaultdict[Key, set[bool]] = defaultdict(set)
        self._written: defaultdict[Key, set[bytes]] = defaultdict(set)
        self._promised: dict[Key, tuple[bool, frozenset[bytes]]] = {}
        self._numbered: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self.inputs_done: defaultdict[str, set[int]] = defaultdict(set)
        self.transactions_promised = 0
        self.is_current_leader: Callable[[int, int], bool] = lambda broker, partition: True

    @property
    def is_judged(self) -> bool:
        return not self._truth.excused_count

    def _break(self, text: str) -> None:
        if self.is_judged:
            raise Violation(text)

    # -- what clients hear ---------------------------------------------------------------------------

    def promise(self, key: Key, committed: bool, values: Iterable[bytes]) -> None:
        """A client was told how its transaction ended; `values` are those that were acknowledged in it."""
        if committed not in self._ended.get(key, {committed}):
            self._break(f"{key} has ended with committed={not committed}; its client hears otherwise")
        self._promised[key] = (committed, frozenset(values))
        self.transactions_promised += 1

    def acknowledged(self, producer: str, partition: int, counts: Iterable[int]) -> None:
        self._numbered[producer, partition].update(counts)

    # -- what is committed ---------------------------------------------------------------------------

    def committed(self, number: int, offset: int, record: Stored) -> None:
        partition = self._partitions.get(number)
        if partition is None:
            return
        partition.end = offset + 1
        batch = record.batch
        if batch is None or batch.header.producer_id < 0:
            partition.outcomes[offset] = True
        elif batch.marker is not None:
            self._end(number, partition, batch.header.producer_id, batch.marker.committed)
        else:
            assert isinstance(record.payload, tuple)
            value: bytes = record.payload[1]
            if batch.header.is_transactional:
                partition.first_open.setdefault(batch.header.producer_id, offset)
                partition.open.setdefault(batch.header.producer_id, []).append((offset, value))
            else:
                partition.outcomes[offset] = True
                self._count(number, partition, value)

    def _count(self, number: int, partition: _Partition, value: bytes) -> None:
        _, producer, count = value.decode().split("|")
        last = partition.counts.get(producer, 0)
        if int(count) != last + 1:
            self._break(f"{producer}'s record {count} comes after its record {last} in {number}")
        partition.counts[producer] = int(count)

    def _end(self, number: int, partition: _Partition, producer_id: int, committed: bool) -> None:
        partition.first_open.pop(producer_id, None)
        keys: set[Key] = set()
        for offset, value in partition.open.pop(producer_id, ()):
            partition.outcomes[offset] = committed
            _, transactional_id, life, count, taken = value.decode().split("|")
            key = (transactional_id, int(life), int(count))
            keys.add(key)
            if not committed:
                continue
            self._written[key].add(value)
            done = self.inputs_done[transactional_id]
            if int(taken) in done:
                self._break(f"input {taken} of {transactional_id} is in two committed transactions: {key}")
            done.add(int(taken))
        if len(keys) > 1:
            self._break(f"one marker in {number} ends {sorted(keys)}")
        for key in keys:
            self._ended[key].add(committed)
            if len(self._ended[key]) > 1:
                self._break(f"{key} is committed in one partition and aborted in another")
            promised = self._promised.get(key)
            if promised is not None and promised[0] != committed:
                self._break(f"{key} ends with committed={committed} in {number}; its client heard otherwise")

    # -- what is read --------------------------------------------------------------------------------

    def served(
        self, number: int, offset: int, records: Sequence[Stored], aborted: Sequence[tuple[int, int]]
    ) -> None:
        """A leader answers a reader of committed data."""
        if not self.is_judged:
            return
        partition = self._partitions[number]
        end = offset + len(records)
        if records and end > partition.stable_end:
            self._break(
                f"invariant 6: {number} is shown up to {end}; a transaction is open or not safely ended "
                f"from {partition.stable_end} on"
            )
        waiting = sorted(aborted, key=lambda one: one[1])
        skipped: set[int] = set()
        for at, record in enumerate(records, start=offset):
            batch = record.batch
            if batch is None:
                continue
            producer_id = batch.header.producer_id
            while waiting and waiting[0][1] <= batch.header.last_offset:
                skipped.add(waiting.pop(0)[0])
            if batch.marker is not None:
                if not batch.marker.committed:
                    skipped.discard(producer_id)
                continue
            is_shown = not (batch.header.is_transactional and producer_id in skipped)
            if is_shown != partition.outcomes.get(at, True):
                word = "shows" if is_shown else "hides"
                self._break(
                    f"invariant 6: a reader of committed data {word} {record.payload} at {number}@{at}"
                )

    # -- the end -------------------------------------------------------------------------------------

    def open_transactions(self) -> dict[int, list[int]]:
        """Producer ids that nobody has ended, by partition."""
        return {number: list(each.first_open) for number, each in self._partitions.items() if each.first_open}

    def check_promises(self) -> None:
        for key, (committed, values) in self._promised.items():
            if committed and not values <= self._written[key]:
                missing = sorted(values - self._written[key])
                self._break(f"{key} was committed, and is not there with {missing}")
        for (producer, number), counts in self._numbered.items():
            last = self._partitions[number].counts.get(producer, 0)
            if counts and max(counts) > last:
                self._break(
                    f"{producer}'s record {max(counts)} in {number} was acknowledged; {last} is the last"
                )

    def check_stream(self, transactional_id: str, offset: int) -> None:
        """The group of a stream has committed `offset` (0: nothing)."""
        done = self.inputs_done[transactional_id]
        if done != set(range(offset)):
            self._break(
                f"the group of {transactional_id} stands at {offset}; of its inputs are missing in the "
                f"committed outputs {sorted(set(range(offset)) - done)[:5]}, and too many there "
                f"{sorted(done - set(range(offset)))[:5]}"
            )
