"""A target cluster with transactions, as far as the mirror's commit rules can tell it from a real one.

Used by `mirror_history`. Every method is one request, carried out at once and wholly; what is lost
or late is the scheduler's affair. Transactions are those of version 1 (KIP-98, and KIP-890's first part: a
leader asks the coordinator before it takes a batch of a transaction).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.mirror.delivery.lane import Outcome
from millrace.mirror.topics.routes import SourcePartition, TargetPartition

POSITIONS = TargetPartition("positions", 0)
GROUP = TargetPartition("group", 0)
Record = tuple[SourcePartition, int]


class Refused(Exception):
    """`concurrent`, `fenced`, `invalid`, `generation`, `unknown_member`."""

    @property
    def reason(self) -> str:
        return str(self.args[0])


@dataclass(eq=False)
class Transaction:
    holder: tuple[int, int]  # producer id and epoch
    state: str = "open"  # open, commit, abort
    partitions: set[TargetPartition] = field(default_factory=set)
    unmarked: set[TargetPartition] = field(default_factory=set)


@dataclass(eq=False)
class TransactionalId:
    producer_id: int
    epoch: int = 0
    transaction: Transaction | None = None  # the open one, or the last


@dataclass
class Log:
    """Entries in order: (transaction, records), or (transaction, None) for its marker."""

    entries: list[tuple[Transaction, list[Record] | None]] = field(default_factory=list)
    sequences: dict[tuple[int, int], deque[tuple[int, int]]] = field(default_factory=dict)
    forgotten: set[tuple[int, int]] = field(default_factory=set)
    # What has been looked at: entries are only ever added, so that no more is looked at twice.
    _marked: set[int] = field(default_factory=set)
    _seen_count: int = 0
    _stable: int = 0

    def forget_idle(self) -> None:
        """Producers that have no transaction open here are known no more: any sequence of theirs fits."""
        marked = {id(transaction) for transaction, records in self.entries if records is None}
        busy = {transaction.holder for transaction, _ in self.entries if id(transaction) not in marked}
        for holder in [each for each in self.sequences if each not in busy]:
            del self.sequences[holder]
            self.forgotten.add(holder)

    def last_stable_offset(self) -> int:
        """Where the first transaction begins that has no marker yet."""
        entries = self.entries
        if self._seen_count < len(entries):
            new = entries[self._seen_count :]
            self._marked.update(id(transaction) for transaction, records in new if records is None)
            self._seen_count = len(entries)
            while self._stable < len(entries):
                transaction, records = entries[self._stable]
                if records is not None and id(transaction) not in self._marked:
                    break
                self._stable += 1
        return self._stable

    def committed(self, end: int | None = None) -> Iterable[Record]:
        for transaction, records in self.entries[:end]:
            if records is not None and transaction.state == "commit":
                yield from records


class Target:
    def __init__(self) -> None:
        self.logs: dict[TargetPartition, Log] = {}
        self.ids: dict[str, TransactionalId] = {}
        self.refused: set[Record] = set()  # limits and timestamps are looked at before sequences
        self.members: set[str] = set()
        self.generation = 0

    def log(self, partition: TargetPartition) -> Log:
        log = self.logs.get(partition)
        if log is None:
            log = self.logs[partition] = Log()
        return log

    # --- transactions ----------------------------------------------------------------------------

    def init(self, name: str) -> tuple[int, int]:
        known = self.ids.get(name)
        if known is None:
            known = self.ids[name] = TransactionalId(len(self.ids) + 1)
            return known.producer_id, known.epoch
        transaction = known.transaction
        if transaction is not None and transaction.state == "open":
            known.epoch += 1
            self._decide(transaction, "abort")
        if transaction is not None and transaction.unmarked:
            raise Refused("concurrent")
        known.epoch += 1
        known.transaction = None
        return known.producer_id, known.epoch

    def add(self, name: str, epoch: int, partitions: Iterable[TargetPartition]) -> None:
        known = self._checked(name, epoch)
        transaction = known.transaction
        if transaction is not None and transaction.unmarked:
            raise Refused("concurrent")
        if transaction is None or transaction.state != "open":
            transaction = known.transaction = Transaction((known.producer_id, known.epoch))
        transaction.partitions |= set(partitions)

    def end(self, name: str, epoch: int, *, commit: bool) -> None:
        known = self._checked(name, epoch)
        transaction, wanted = known.transaction, "commit" if commit else "abort"
        if transaction is None or transaction.state not in ("open", wanted):
            raise Refused("invalid")
        if transaction.state == "open":
            self._decide(transaction, wanted)
        elif transaction.unmarked:
            raise Refused("concurrent")

    def time_out(self, name: str) -> None:
        known = self.ids[name]
        if known.transaction is not None and known.transaction.state == "open":
            known.epoch += 1
            self._decide(known.transaction, "abort")

    def mark(self, name: str, partition: TargetPartition) -> None:
        transaction = self.ids[name].transaction
        if transaction is not None and partition in transaction.unmarked:
            transaction.unmarked.discard(partition)
            self.log(partition).entries.append((transaction, None))

    @staticmethod
    def _decide(transaction: Transaction, state: str) -> None:
        transaction.state = state
        transaction.unmarked = set(transaction.partitions)

    def _checked(self, name: str, epoch: int) -> TransactionalId:
        known = self.ids[name]
        if known.epoch != epoch:
            raise Refused("fenced")
        return known

    def _open_with(self, name: str, epoch: int, partition: TargetPartition) -> Transaction:
        transaction = self._checked(name, epoch).transaction
        if transaction is None or transaction.state != "open" or partition not in transaction.partitions:
            raise Refused("invalid")
        return transaction

    # --- batches and the group -------------------------------------------------------------------

    def produce(
        self, name: str, epoch: int, partition: TargetPartition, sequence: int, records: list[Record]
    ) -> Outcome:
        """Five batches of a producer are remembered, as by `lane`'s rules; raises Refused."""
        transaction = self._open_with(name, epoch, partition)
        log = self.log(partition)
        if partition != POSITIONS and not self.refused.isdisjoint(records):
            return Outcome.REFUSED
        holder = (self.ids[name].producer_id, epoch)
        recent = log.sequences.setdefault(holder, deque(maxlen=5))
        if (sequence, len(records)) in recent:
            return Outcome.ACKNOWLEDGED
        if sequence != (sum(recent[-1]) if recent else 0) and (recent or holder not in log.forgotten):
            return Outcome.OUT_OF_ORDER
        recent.append((sequence, len(records)))
        log.entries.append((transaction, records))
        return Outcome.ACKNOWLEDGED

    def fence(self, name: str, epoch: int, member: str, generation: int) -> None:
        """TxnOffsetCommit."""
        self._open_with(name, epoch, GROUP)
        if member not in self.members:
            raise Refused("unknown_member")
        if generation != self.generation:
            raise Refused("generation")
