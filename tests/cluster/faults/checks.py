"""What must hold after every round, judged from what was read and what the load has written down. Pure.

Each check returns one line per breach, with partition and offset, at most `MOST_LINES` of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import islice

from tests.cluster.faults.records import (
    Contents,
    Found,
    GroupJournal,
    Identity,
    Outcome,
    ProducerJournal,
    TransactionJournal,
    identity_of,
)

MOST_LINES = 12

Places = Mapping[Identity, Sequence[tuple[int, int]]]
"""Where a record is: (partition, offset), once for each time that it is there."""


def places_of(contents: Contents, topic: str) -> Places:
    found: dict[Identity, list[tuple[int, int]]] = {}
    for (name, partition), records in contents.items():
        if name == topic:
            for record in records:
                found.setdefault(identity_of(record.value), []).append((partition, record.offset))
    return found


Senders = Callable[[int, int], tuple[int, int]]
"""(partition, offset) → producer id and epoch that the record was sent under."""


def resent(places: Places, sender_of: Senders) -> set[Identity]:
    """Records that the client sent again under another producer epoch: no broker can know them.

    librdkafka with several requests in flight does so when a batch was refused and the one behind it is out
    of order (confluentinc/librdkafka#4953), and the application is not told.
    """
    return {
        identity
        for identity, where in places.items()
        if len(where) > 1 and len({sender_of(*place) for place in where}) == len(where)
    }


def check_acknowledged(
    journal: ProducerJournal, places: Places, resent: Container[Identity] = ()
) -> list[str]:
    """Every acknowledged record is where its producer was told; none is there twice, known or not, unless
    the client has `resent` it."""
    lost, doubled = [], []
    for number, (partition, offset) in journal.acknowledged.items():
        if (partition, offset) not in places.get(Identity(journal.name, number), ()):
            where = places.get(Identity(journal.name, number), ())
            seen = f", it is at {list(where)}" if where else ""
            lost.append(f"lost: {journal.name}:{number}, {journal.topic}-{partition}@{offset}{seen}")
    for number in journal.sent:
        where = places.get(Identity(journal.name, number), ())
        if len(where) > 1 and Identity(journal.name, number) not in resent:
            doubled.append(f"doubled: {journal.name}:{number} of {journal.topic} is at {list(where)}")
    return _first(lost) + _first(doubled)


def check_order(contents: Contents, resent: Container[Identity] = ()) -> list[str]:
    """The numbers of one producer only grow within a partition; those that the client has `resent` say
    nothing."""
    breaches = []
    for (topic, partition), records in contents.items():
        latest: dict[str, tuple[int, int]] = {}
        for record in records:
            producer, number = identity = identity_of(record.value)
            if identity in resent:
                continue
            known, at = latest.get(producer, (-1, -1))
            if number <= known:
                breaches.append(
                    f"out of order: {producer}:{number}, {topic}-{partition}@{record.offset}, comes after "
                    f"{producer}:{known}@{at}"
                )
            latest[producer] = number, record.offset
    return _first(breaches)


def check_transactions(journal: TransactionJournal, places: Places) -> list[str]:
    """Of what was committed everything is visible once; of what was aborted nothing; never a part."""
    breaches = []
    for transaction in journal.transactions:
        counts = {
            number: len(places.get(Identity(journal.name, number), ())) for _, number in transaction.records
        }
        there = [number for number, count in counts.items() if count]
        doubled = [number for number, count in counts.items() if count > 1]
        wrong = ""
        if doubled:
            wrong = f"is visible twice: {_spots(journal, doubled, places)}"
        elif transaction.outcome is Outcome.COMMITTED and len(there) < len(counts):
            missing = [f"{number} of partition {part}" for part, number in transaction.records]
            gone = [text for text, number in zip(missing, counts, strict=True) if not counts[number]]
            wrong = f"was committed and lacks {gone}"
        elif transaction.outcome is Outcome.ABORTED and there:
            wrong = f"was aborted and is visible: {_spots(journal, there, places)}"
        elif transaction.outcome is Outcome.UNKNOWN and 0 < len(there) < len(counts):
            wrong = f"is visible in part: {_spots(journal, there, places)} of {len(counts)}"
        if wrong:
            breaches.append(f"transaction {transaction.name} {wrong}")
    return _first(breaches)


def _spots(journal: TransactionJournal, numbers: Iterable[int], places: Places) -> str:
    return f"{journal.topic} " + "; ".join(
        f"{number} at {list(places[Identity(journal.name, number)])}"
        for number in islice(numbers, MOST_LINES)
    )


def check_copies(contents: Contents, source: str, target: str) -> list[str]:
    """Every record of the source is in the same partition of the target, once and in the same order."""
    breaches = []
    for (topic, partition), records in contents.items():
        if topic != source:
            continue
        copies = contents[(target, partition)]
        wanted = [record.value for record in records]
        if [record.value for record in copies] == wanted:
            continue
        known: dict[bytes, list[int]] = {}
        for record in copies:
            known.setdefault(record.value, []).append(record.offset)
        for record in records:
            at = known.pop(record.value, [])
            if len(at) != 1:
                text = f"copied {len(at)} times, to {at}" if at else "not copied"
                breaches.append(f"{text}: {_short(record)} of {source}-{partition}")
        breaches += [
            f"a copy of nothing: {value[:40]!r} at {target}-{partition}@{at}" for value, at in known.items()
        ]
        if not breaches:
            breaches.append(f"{target}-{partition} has the records of {source} in another order")
    return _first(breaches)


def check_seen(journal: GroupJournal, contents: Contents) -> list[str]:
    """What a member saw at an offset is there now, and was the same each time."""
    now = {
        (topic, partition, record.offset): record.value
        for (topic, partition), records in contents.items()
        for record in records
    }
    breaches = list(journal.contradictions)
    for (topic, partition, offset), value in list(journal.seen.items()):
        held = now.get((topic, partition, offset))
        if held != value:
            text = "nothing visible" if held is None else f"{held[:40]!r}"
            breaches.append(f"seen and gone: {value[:40]!r} at {topic}-{partition}@{offset}, now {text}")
    return _first(breaches)


def unseen(journal: GroupJournal, contents: Contents) -> list[str]:
    """Visible records that the group has not been given yet."""
    return [
        f"not given to group {journal.name}: {_short(record)} of {topic}-{partition}"
        for (topic, partition), records in contents.items()
        for record in records
        if (topic, partition, record.offset) not in journal.seen
    ]


def check_commits(
    group: str,
    known: Mapping[tuple[str, int], int],
    found: Mapping[tuple[str, int], int],
) -> list[str]:
    """What was committed before, or acknowledged, is not below it now. -1 stands for nothing."""
    return _first(
        f"committed offset of group {group} in {key[0]}-{key[1]} went from {before} to {found.get(key, -1)}"
        for key, before in known.items()
        if found.get(key, -1) < before
    )


def check_replicas(name: str, logs: Mapping[int, bytes]) -> list[str]:
    """All replicas have the same bytes. `logs` are whole logs by broker."""
    if len(set(logs.values())) <= 1:
        return []
    longest = max(logs.values(), key=len)
    breaches = []
    for broker, log in logs.items():
        if log != longest:
            same = next(
                (at for at, (one, other) in enumerate(zip(log, longest, strict=False)) if one != other),
                min(len(log), len(longest)),
            )
            breaches.append(
                f"{name} on broker {broker} has {len(log)} bytes of {len(longest)}, other ones from {same} on"
            )
    return breaches


def check_compacted(name: str, logs: Mapping[int, Mapping[int, object]]) -> list[str]:
    """Replicas that each compact for themselves hold the same record wherever more than one has one."""
    breaches = []
    known: dict[int, tuple[int, object]] = {}
    for broker, records in logs.items():
        for offset, record in records.items():
            first, other = known.setdefault(offset, (broker, record))
            if other != record:
                breaches.append(f"{name}@{offset} differs on brokers {first} and {broker}")
    return _first(breaches)


def _short(record: Found) -> str:
    return f"{record.value[:40]!r}@{record.offset}"


def _first(lines: Iterable[str]) -> list[str]:
    found = list(lines)
    if len(found) > MOST_LINES:
        return [*found[:MOST_LINES], f"... and {len(found) - MOST_LINES} more like these"]
    return found
