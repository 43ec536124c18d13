"""Runs of operations that ZooKeeper takes, by the bytes that kazoo makes of them."""

from __future__ import annotations

import pytest
from kazoo.protocol import serialization
from kazoo.security import OPEN_ACL_UNSAFE

from millrace.broker.coordination.session import Check, Create, Delete, Operation, SetData, operation_bytes
from millrace.broker.coordination.transactions import MOST_BYTES, MOST_OPERATIONS, cut

PATH, DATA = "/brokers/topics/t/partitions/0/state", b"x" * 77


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        (Create(PATH, DATA), serialization.Create(PATH, DATA, OPEN_ACL_UNSAFE, 0)),
        (SetData(PATH, DATA, 3), serialization.SetData(PATH, DATA, 3)),
        (Delete(PATH, 3), serialization.Delete(PATH, 3)),
        (Check(PATH, 3), serialization.CheckVersion(PATH, 3)),
    ],
)
def test_no_operation_is_more_bytes_than_it_counts_for(operation: Operation, sent: object) -> None:
    empty = len(serialization.Transaction([]).serialize())
    assert 0 <= operation_bytes(operation) - (len(serialization.Transaction([sent]).serialize()) - empty) <= 4


def test_runs_are_full_and_in_order() -> None:
    operations = [SetData(f"{PATH}{number:04}", b"x" * 9_000) for number in range(1_000)]
    runs = list(cut(operations))
    assert [each for run in runs for each in run] == operations
    one = operation_bytes(operations[0])
    assert [len(run) for run in runs[:-1]] == [MOST_BYTES // one] * (len(runs) - 1)


def test_runs_of_small_operations_are_bounded_by_their_number() -> None:
    operations = [Delete(f"/{number}") for number in range(2 * MOST_OPERATIONS + 1)]
    assert [len(run) for run in cut(operations)] == [MOST_OPERATIONS, MOST_OPERATIONS, 1]


def test_what_stands_beside_each_run_takes_its_room() -> None:
    operations = [SetData(f"{PATH}{number}", b"x" * 9_000) for number in range(3)]
    one = operation_bytes(operations[0])
    assert [len(run) for run in cut(operations, beside=MOST_BYTES - 2 * one)] == [2, 1]
    assert [len(run) for run in cut(operations, beside=MOST_BYTES)] == [1, 1, 1]


def test_nothing_is_cut_into_no_runs() -> None:
    assert list(cut([])) == []
