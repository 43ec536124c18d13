"""The judges of the brokers' histories are put to the test themselves: each breach is seen, by its name."""

from __future__ import annotations

import pytest

from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.groups.record_layout import (
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
)
from millrace.broker.groups.values import GroupSnapshot
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.replication.partition import PartitionState
from tests.simulation.cluster.disk import CLIENT, Stored, VirtualLog
from tests.simulation.cluster.exactly_once import ExactlyOnce, numbered, output
from tests.simulation.cluster.group_promises import GroupPromises, signed
from tests.simulation.cluster.truth import Truth, Violation

UNCHECKED = "coordinator"
"""Where a batch comes from whose numbers the log does not look at."""


def logs_of(*payloads: str) -> dict[int, dict[int, VirtualLog]]:
    """Partition 0 on a broker for each of these, one letter a record: brokers 1, 2, …"""
    logs = {}
    for broker, letters in enumerate(payloads, start=1):
        logs[broker] = {0: VirtualLog()}
        logs[broker][0].append(0, list(letters))
    return logs


def truth_of(*payloads: str, isr: tuple[int, ...] = (), only_flushed: bool = False) -> Truth:
    """Broker 1 leads and has shown all that it holds."""
    logs = logs_of(*payloads)
    truth = Truth(logs, only_flushed=only_flushed)
    members = isr or tuple(logs)
    truth.state_written(0, PartitionState(1, 0, members, 1), tuple(logs))
    truth.shown(1, 0, 0, logs[1][0].end_offset)
    return truth


# -- records ----------------------------------------------------------------------------------------------


def test_what_holds_is_not_complained_of() -> None:
    truth = truth_of("abc", "abc", "ab")
    truth.acknowledge(0, 0, ["a", "b", "c"])
    truth.consumed(0, 1, [Stored(0, "b"), Stored(0, "c")])
    truth.check_replicas(0, {1: 3, 2: 3, 3: 2})
    truth.check_nothing_lost(0, 1, (1, 2))
    truth.state_written(0, PartitionState(2, 1, (2, 1), 1), (1, 2, 3))
    truth.controller_wrote(1, 1)
    truth.controller_elected(2)
    truth.controller_wrote(2, 2)


@pytest.mark.parametrize("member", [1, 2])
def test_a_committed_record_that_one_in_sync_has_not_is_lost(member: int) -> None:
    truth = truth_of("abc", "abc")
    truth.acknowledge(0, 1, ["b"])
    truth._logs[member][0].truncate_to(1)
    with pytest.raises(Violation, match="invariant 1: acknowledged"):
        truth.check_nothing_lost(0, 1, (1, 2))


def test_replicas_that_hold_another_record_below_the_high_watermark() -> None:
    truth = truth_of("abc", "axc")
    with pytest.raises(Violation, match="invariant 2"):
        truth.check_replicas(0, {1: 3, 2: 3})
    truth_of("abc", "axc").check_replicas(0, {1: 3, 2: 1})


def test_replicas_that_part_in_what_was_excused() -> None:
    truth = truth_of("abc", "abc")
    truth._excuse(0, [1])
    truth.check_replicas(0, {1: 3, 2: 3})
    truth = truth_of("abc", "axc")
    truth._excuse(0, [1])
    with pytest.raises(Violation, match="invariant 2: 0@1"):
        truth.check_replicas(0, {1: 3, 2: 3})


def test_an_offset_that_is_given_twice() -> None:
    truth = truth_of("abc", "axc")
    with pytest.raises(Violation, match="invariant 3"):
        truth.shown(2, 0, 0, 3)
    with pytest.raises(Violation, match="invariant 3: a consumer"):
        truth.consumed(0, 1, [Stored(0, "x")])
    with pytest.raises(Violation, match="its log has not"):
        truth.shown(1, 0, 0, 4)


def test_an_acknowledgement_of_what_is_not_committed() -> None:
    truth = truth_of("abc")
    for offset, payload in ((3, "d"), (1, "x")):
        with pytest.raises(Violation, match="acknowledged but not committed"):
            truth.acknowledge(0, offset, [payload])


def test_where_only_what_is_flushed_is_shown_nothing_is_excused() -> None:
    for only_flushed, excused in ((False, 3), (True, 0)):
        truth = truth_of("abc", only_flushed=only_flushed)
        truth.is_uninterrupted = lambda broker, partition: False
        truth._logs[1][0].truncate_to(0)
        truth.interrupted()
        assert truth.excused_count == excused


def test_two_controllers_in_one_epoch_and_one_of_a_former_one() -> None:
    truth = truth_of("a")
    truth.controller_elected(1)
    truth.controller_wrote(1, 1)
    with pytest.raises(Violation, match="invariant 4"):
        truth.controller_wrote(2, 1)
    truth.controller_elected(2)
    with pytest.raises(Violation, match="invariant 4"):
        truth.controller_wrote(1, 1)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (PartitionState(1, 5, (), 1), "is empty"),
        (PartitionState(1, 5, (1, 7), 1), "is kept by"),
        (PartitionState(1, 3, (1,), 1), "goes back"),
        (PartitionState(2, 4, (1, 2), 1), "two leaders"),
    ],
)
def test_states_that_must_not_be_written(state: PartitionState, said: str) -> None:
    truth = truth_of("a", "a")
    truth.state_written(0, PartitionState(1, 4, (1, 2), 1), (1, 2))
    with pytest.raises(Violation, match=said):
        truth.state_written(0, state, (1, 2))


# -- groups -----------------------------------------------------------------------------------------------


def stored(key: bytes, value: bytes) -> Stored:
    """A record of the offsets topic, in a batch of its own."""
    log = VirtualLog()
    log.append_batch(0, bytes(build_batch([Record(key, value, (), 0)])), 0, CLIENT)
    (record,) = log.read(0, 1, 1)
    return record


def generation(number: int) -> Stored:
    snapshot = GroupSnapshot("consumer", number, "range", None, 0, ())
    return stored(encode_group_key("g"), encode_group_value(snapshot))


def commit(offset: int, who: str = "m", in_generation: int = 1) -> Stored:
    value = encode_offset_value(CommittedOffset(offset, -1, signed(who, in_generation), 0))
    return stored(encode_offset_key("g", "t", 0), value)


@pytest.fixture
def promises() -> GroupPromises:
    found = GroupPromises(truth_of("a"))
    found.committed(generation(1))
    found.committed(commit(5))
    return found


def test_promises_that_are_kept(promises: GroupPromises) -> None:
    promises.assigned("g", 1, "m", [0])
    promises.acknowledged("g", 0, 5)
    promises.shown("g", 0, 5)
    promises.committed(generation(2))
    promises.committed(commit(6, "n", 2))
    promises.assigned("g", 2, "n", [0])
    promises.shown("g", 0, 6)


def test_an_offset_of_a_group_that_goes_back(promises: GroupPromises) -> None:
    with pytest.raises(Violation, match="invariant 5"):
        promises.committed(commit(4))
    promises.acknowledged("g", 0, 5)
    with pytest.raises(Violation, match="invariant 5"):
        promises.shown("g", 0, 4)


def test_generations_and_owners(promises: GroupPromises) -> None:
    with pytest.raises(Violation, match="back to 0"):
        promises.committed(generation(0))
    with pytest.raises(Violation, match="stands after the record of generation"):
        promises.committed(commit(6, in_generation=0))
    with pytest.raises(Violation, match="both own"):
        promises.committed(commit(6, "n"))
    with pytest.raises(Violation, match="the log has"):
        promises.assigned("g", 2, "m", [0])
    with pytest.raises(Violation, match="both own"):
        promises.assigned("g", 1, "n", [0])
    with pytest.raises(Violation, match="before it is committed"):
        promises.acknowledged("g", 0, 7)


def test_groups_are_not_judged_once_something_was_excused(promises: GroupPromises) -> None:
    promises._truth._excuse(0, [0])
    promises.committed(commit(4))


# -- transactions -----------------------------------------------------------------------------------------

KEY = ("app", 1, 1)


class Partitions:
    """Data partitions 0 and 1; what is put there is committed at once."""

    def __init__(self) -> None:
        self.judge = ExactlyOnce(truth_of("a"), 2)
        self.logs = {0: VirtualLog(), 1: VirtualLog()}

    def put(self, number: int, batch: bytes | bytearray) -> None:
        log = self.logs[number]
        written = log.append_batch(0, bytes(batch), 0, UNCHECKED)
        for offset in range(written.base_offset, written.last_offset + 1):
            record = log.get(offset)
            assert record is not None
            self.judge.committed(number, offset, record)

    def data(self, number: int, *taken: int, key: tuple[str, int, int] = KEY) -> None:
        records = [Record(b"", output(key, each), (), 0) for each in taken]
        self.put(
            number,
            build_batch(records, producer_id=7, producer_epoch=0, base_sequence=0, transactional=True),
        )

    def end(self, number: int, *, committed: bool) -> None:
        self.put(number, build_marker(7, 0, 0, committed, 0))

    def serve(self, number: int, count: int, aborted: list[tuple[int, int]] | None = None) -> None:
        self.judge.served(number, 0, self.logs[number].read(0, count, count), aborted or [])


def test_transactions_that_hold() -> None:
    parts = Partitions()
    parts.data(0, 0, 1)
    parts.serve(0, 0)
    parts.end(0, committed=True)
    parts.judge.promise(KEY, True, [output(KEY, 0), output(KEY, 1)])
    parts.serve(0, 3)
    later = ("app", 1, 2)
    parts.data(0, 2, key=later)
    parts.end(0, committed=False)
    parts.judge.promise(later, False, [output(later, 2)])
    parts.serve(0, 5, [(7, 3)])
    parts.judge.check_promises()
    parts.judge.check_stream("app", 2)
    assert parts.judge.open_transactions() == {}


def test_a_reader_of_committed_data_sees_what_it_must_not() -> None:
    parts = Partitions()
    parts.data(0, 0)
    with pytest.raises(Violation, match="invariant 6: 0 is shown up to 1"):
        parts.serve(0, 1)
    parts.end(0, committed=False)
    with pytest.raises(Violation, match="invariant 6: a reader of committed data shows"):
        parts.serve(0, 2)
    parts.serve(0, 2, [(7, 0)])


def test_a_reader_of_committed_data_does_not_see_what_it_should() -> None:
    parts = Partitions()
    parts.data(0, 0)
    parts.end(0, committed=True)
    with pytest.raises(Violation, match="invariant 6: a reader of committed data hides"):
        parts.serve(0, 2, [(7, 0)])


def test_transactions_that_end_in_two_ways() -> None:
    parts = Partitions()
    parts.data(0, 0)
    parts.data(1, 1)
    parts.end(0, committed=True)
    with pytest.raises(Violation, match="committed in one partition and aborted in another"):
        parts.end(1, committed=False)


def test_a_client_that_hears_otherwise() -> None:
    parts = Partitions()
    parts.data(0, 0)
    parts.end(0, committed=False)
    with pytest.raises(Violation, match="its client hears otherwise"):
        parts.judge.promise(KEY, True, [])
    parts = Partitions()
    parts.data(0, 0)
    parts.judge.promise(KEY, True, [])
    with pytest.raises(Violation, match="its client heard otherwise"):
        parts.end(0, committed=False)


def test_a_promise_that_the_log_does_not_keep() -> None:
    parts = Partitions()
    parts.data(0, 0)
    parts.end(0, committed=True)
    parts.judge.promise(KEY, True, [output(KEY, 0), output(KEY, 1)])
    with pytest.raises(Violation, match="is not there with"):
        parts.judge.check_promises()


def test_inputs_that_are_taken_twice_or_never() -> None:
    parts = Partitions()
    parts.data(0, 0)
    parts.end(0, committed=True)
    with pytest.raises(Violation, match="the group of app stands at 2"):
        parts.judge.check_stream("app", 2)
    parts.data(0, 0, key=("app", 1, 2))
    with pytest.raises(Violation, match="in two committed transactions"):
        parts.end(0, committed=True)


def test_one_marker_for_two_transactions() -> None:
    parts = Partitions()
    parts.data(0, 0)
    parts.data(0, 1, key=("app", 1, 2))
    with pytest.raises(Violation, match="one marker in 0 ends"):
        parts.end(0, committed=True)


def test_records_of_an_idempotent_producer() -> None:
    def counted(*counts: int) -> Partitions:
        parts = Partitions()
        for count in counts:
            record = Record(b"", numbered("p", count), (), 0)
            parts.put(0, build_batch([record], producer_id=9, producer_epoch=0, base_sequence=0))
        return parts

    for counts in ((1, 3), (1, 1), (2,)):
        with pytest.raises(Violation, match="comes after its record"):
            counted(*counts)
    parts = counted(1, 2)
    parts.judge.acknowledged("p", 0, [1, 2])
    parts.judge.check_promises()
    parts.judge.acknowledged("p", 0, [3])
    with pytest.raises(Violation, match="was acknowledged; 2 is the last"):
        parts.judge.check_promises()
