"""The judgement of the fault run is put to the test itself: each breach is seen, and nothing else is."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from tests.cluster.faults import checks
from tests.cluster.faults.plan import OF_A_PROCESS, Kind, rounds
from tests.cluster.faults.records import (
    COPIES,
    EVENTS,
    ORDERS,
    Found,
    GroupJournal,
    Outcome,
    ProducerJournal,
    Transaction,
    TransactionJournal,
)


def contents(topic: str, *values: str) -> dict[tuple[str, int], list[Found]]:
    """Partition 0 of a topic with these values, `producer:number`."""
    return {(topic, 0): [Found(offset, f"{value}:".encode()) for offset, value in enumerate(values)]}


def journal(**acknowledged: int) -> ProducerJournal:
    """Producer `p`; n3=7 says that number 3 was acknowledged at offset 7."""
    known = {int(name[1:]): (0, offset) for name, offset in acknowledged.items()}
    return ProducerJournal("p", EVENTS, sent=dict.fromkeys(range(9), 0), acknowledged=known)


def judged(known: ProducerJournal, *values: str) -> list[str]:
    return checks.check_acknowledged(known, checks.places_of(contents(EVENTS, *values), EVENTS))


def test_acknowledged_records_are_where_they_were_said_to_be() -> None:
    assert judged(journal(n0=0, n1=1), "p:0", "p:1", "p:2") == []
    assert judged(journal(n0=0, n1=1), "p:0", "p:2") == ["lost: p:1, events-0@1"]
    assert judged(journal(n0=1), "p:0") == ["lost: p:0, events-0@1, it is at [(0, 0)]"]
    assert judged(journal(), "p:5", "p:5") == ["doubled: p:5 of events is at [(0, 0), (0, 1)]"]
    assert judged(journal(), "q:5", "q:5") == []


def test_only_what_has_another_sender_was_sent_again() -> None:
    found = checks.places_of(contents(EVENTS, "p:5", "p:5"), EVENTS)
    assert checks.resent(found, lambda partition, offset: (7, 0)) == set()
    again = checks.resent(found, lambda partition, offset: (7, offset))
    assert checks.check_acknowledged(journal(), found, again) == []
    assert checks.check_order(contents(EVENTS, "p:5", "p:5"), again) == []


def test_order_is_kept_for_each_producer() -> None:
    assert checks.check_order(contents(EVENTS, "p:1", "q:1", "p:2", "q:7", "p:9")) == []
    (breach,) = checks.check_order(contents(EVENTS, "p:1", "p:3", "p:2"))
    assert breach == "out of order: p:2, events-0@2, comes after p:3@1"


def transacted(outcome: Outcome, *visible: str) -> list[str]:
    known = TransactionJournal("w", ORDERS, [Transaction("w #0", [(0, 0), (0, 1)], outcome)])
    return checks.check_transactions(known, checks.places_of(contents(ORDERS, *visible), ORDERS))


def test_transactions_are_seen_whole_or_not_at_all() -> None:
    both, part, nothing = ("w:0", "w:1"), ("w:0",), ()
    assert transacted(Outcome.COMMITTED, *both) == []
    assert "lacks ['1 of partition 0']" in transacted(Outcome.COMMITTED, *part)[0]
    assert "lacks" in transacted(Outcome.COMMITTED, *nothing)[0]
    assert transacted(Outcome.ABORTED, *nothing) == []
    assert "was aborted and is visible" in transacted(Outcome.ABORTED, *part)[0]
    assert transacted(Outcome.UNKNOWN, *nothing) == transacted(Outcome.UNKNOWN, *both) == []
    assert "in part" in transacted(Outcome.UNKNOWN, *part)[0]
    assert "twice" in transacted(Outcome.COMMITTED, *both, "w:1")[0]


def test_copies_are_the_source_once_and_in_order() -> None:
    source = contents(EVENTS, "p:0", "p:1")

    def copied(*values: str) -> list[str]:
        return checks.check_copies(source | contents(COPIES, *values), EVENTS, COPIES)

    assert copied("p:0", "p:1") == []
    assert copied("p:0") == ["not copied: b'p:1:'@1 of events-0"]
    assert "copied 2 times, to [1, 2]" in copied("p:0", "p:1", "p:1")[0]
    assert "another order" in copied("p:1", "p:0")[0]
    assert "a copy of nothing" in copied("p:0", "p:1", "p:2")[0]


def test_what_a_group_has_seen_stays() -> None:
    group = GroupJournal("g")
    group.saw(EVENTS, 0, 0, b"p:0:")
    assert checks.check_seen(group, contents(EVENTS, "p:0")) == []
    assert "seen and gone" in checks.check_seen(group, contents(EVENTS, "p:1"))[0]
    assert "nothing visible" in checks.check_seen(group, contents(EVENTS))[0]
    group.saw(EVENTS, 0, 0, b"p:9:")
    assert "and then" in checks.check_seen(group, contents(EVENTS, "p:0"))[0]
    assert checks.unseen(group, contents(EVENTS, "p:0", "p:1")) == [
        "not given to group g: b'p:1:'@1 of events-0"
    ]


def test_committed_offsets_never_fall() -> None:
    key = (EVENTS, 0)
    assert checks.check_commits("g", {key: 5}, {key: 5}) == []
    assert checks.check_commits("g", {key: 5}, {key: 4})[0].endswith("went from 5 to 4")
    assert checks.check_commits("g", {key: 0}, {})[0].endswith("went from 0 to -1")


def test_replicas_are_the_same_bytes() -> None:
    assert checks.check_replicas("t-0", {1: b"abc", 2: b"abc"}) == []
    assert "from 1 on" in checks.check_replicas("t-0", {1: b"abc", 2: b"axc", 3: b"abc"})[0]
    assert "has 2 bytes of 3" in checks.check_replicas("t-0", {1: b"ab", 2: b"abc"})[0]
    assert checks.check_compacted("t-0", {1: {0: "a", 5: "b"}, 2: {5: "b"}}) == []
    assert checks.check_compacted("t-0", {1: {5: "b"}, 2: {5: "c"}}) == ["t-0@5 differs on brokers 1 and 2"]


def test_a_seed_brings_the_same_faults_and_all_kinds() -> None:
    kinds = list(Kind)
    plan = list(islice(rounds(5, kinds), 20))
    assert plan == list(islice(rounds(5, kinds), 20)) != list(islice(rounds(6, kinds), 20))
    counts = Counter(fault.kind for faults in plan for fault in faults)
    assert set(counts) == set(kinds)
    assert min(counts.values()) >= 2
    for faults in plan:
        processes = [fault.nodes for fault in faults if fault.kind in OF_A_PROCESS]
        assert len(processes) == len(set(processes)), "one fault at a time has to do with a process"
