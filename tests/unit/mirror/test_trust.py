"""What a partition keeps in mind of a log beyond one fetch offset."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from millrace.broker.client.raw_fetch import FetchedPartition
from millrace.broker.errors import CorruptMessage
from millrace.mirror.batches.coalesce import BatchWalk, Unvouched
from millrace.mirror.batches.placement import reaching
from millrace.mirror.sources.doubt import Found
from millrace.mirror.sources.trust import Trust
from tests.unit.mirror.pipeline_stage import answer, batch

LARGE = 40_000


def taken(trust: Trust, given: FetchedPartition, from_offset: int, most: int = 100) -> list[int]:
    """The offsets of what is believed of an answer, of so many batches at most."""
    found: list[int] = []
    for number, each in enumerate(
        trust.believed(BatchWalk(), given, from_offset, 1 << 20, lambda *_: None), 1
    ):
        found += each.offsets
        if number == most:
            break
    return found


def nothing(_trust: Trust) -> None: ...


def forgets(trust: Trust) -> None:
    trust.forget_order()


def looks(trust: Trust) -> None:
    trust.at(4).refused(Unvouched("alone", reaching(batch(2, [LARGE] * 4), 4)), 0)
    question = trust.take_question(4)
    assert question is not None and question.suspect is not None
    assert trust.take_question(4) is None, "one look at a time"
    assert trust.looked(question, Found(is_in_order=True, mark=question.suspect.mark), 4, 0)


@pytest.mark.parametrize(("meanwhile", "is_taken"), [(nothing, False), (forgets, True), (looks, True)])
def test_batch_may_not_claim_to_begin_before_the_last_one_ended(
    meanwhile: Callable[[Trust], None], is_taken: bool
) -> None:
    trust = Trust()
    assert taken(trust, answer(batch(0, [LARGE] * 4)), 0) == [0, 1, 2, 3]
    meanwhile(trust)
    overlapping = answer(batch(2, [LARGE] * 4), batch(6, [LARGE]))
    if is_taken:
        assert taken(trust, overlapping, 4) == [4, 5, 6]
    else:
        with pytest.raises(Unvouched):
            taken(trust, overlapping, 4)


def test_answer_that_was_not_taken_to_its_end_says_nothing_of_where_a_batch_ended() -> None:
    trust = Trust()
    first, second = batch(0, [LARGE] * 4), batch(4, [LARGE])
    assert taken(trust, answer(first, second), 0, most=1) == [0, 1, 2, 3]
    assert taken(trust, answer(batch(2, [LARGE] * 4), batch(6, [LARGE])), 4) == [4, 5, 6]


def test_what_a_look_found_is_nothing_once_the_offset_is_another() -> None:
    trust = Trust()
    trust.at(4).refused(Unvouched("alone"), 0)
    question = trust.take_question(4)
    assert question is not None
    assert not trust.looked(question, Found(5, misplaced_up_to=90), 7, 0)
    assert taken(trust, answer(batch(7, [LARGE])), 7) == [7], "nor is one known to be misplaced"


def test_what_is_believed_of_an_answer_comes_before_the_error_of_the_rest() -> None:
    trust, found = Trust(), list[int]()
    bad = batch(1, [LARGE])
    bad[-1] ^= 1
    with pytest.raises(CorruptMessage):
        for each in trust.believed(BatchWalk(), answer(batch(0, [LARGE]), bad), 0, 1 << 20, lambda *_: None):
            found += each.offsets
    assert found == [0]
