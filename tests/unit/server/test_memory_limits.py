"""What all connections together may hold."""

from __future__ import annotations

from millrace.broker.server.memory_limits import (
    SMALLEST_ANSWER_LIMIT,
    STALL_SECONDS,
    UNBOUNDED,
    AnswerBacklog,
    RequestMemory,
)

MIB = 1 << 20


def never() -> None:
    raise AssertionError("nobody waits")


def test_memory_is_given_up_to_its_bound() -> None:
    memory = RequestMemory(100)
    assert memory.take("a", 60, never)
    assert memory.take("b", 40, never)
    assert not memory.has_room(1)
    memory.give_back("a", 60, whole=True)
    assert memory.used == 40


def test_one_request_may_exceed_the_bound_and_the_others_wait_in_turn() -> None:
    memory = RequestMemory(100)
    told: list[str] = []
    shortages: list[int] = []
    memory.on_shortage = lambda: shortages.append(1)
    assert memory.take("a", 80, never)
    assert memory.take("b", 80, never)  # the one that may
    assert memory.take("b", 80, never)  # and goes on
    assert not memory.take("a", 80, lambda: told.append("a"))
    assert not memory.take("c", 80, lambda: told.append("c"))
    assert (len(shortages), memory.refusals) == (2, 2)
    memory.give_back("b", 80, whole=False)
    assert told == []
    memory.give_back("b", 80, whole=True)
    assert told == ["a"]
    assert memory.take("a", 80, never)  # now it is its turn to exceed
    memory.give_back("a", 160, whole=True)
    assert told == ["a", "c"]
    assert memory.used == 0


def test_small_requests_have_a_reserve() -> None:
    memory = RequestMemory(100)
    told: list[str] = []
    assert memory.take("large", 100, never)
    assert memory.take("another", 1, never)
    assert not memory.take("third", 1, lambda: told.append("third"))
    assert memory.take("small", 49, never, request_size=1 << 20)
    assert not memory.take("small", 1, lambda: told.append("small"), request_size=1 << 20)
    memory.give_back("small", 49, whole=True)
    assert memory.take("small", 49, never, request_size=1 << 20)


def test_who_leaves_waits_no_more() -> None:
    memory = RequestMemory(10)
    told: list[str] = []
    assert memory.take("a", 20, never)
    assert not memory.take("b", 20, lambda: told.append("b"))
    memory.give_back("b", 0, whole=True)
    memory.give_back("a", 20, whole=True)
    assert told == []
    assert not memory.waiting


def test_unbounded_memory_is_only_counted() -> None:
    memory = RequestMemory(UNBOUNDED)
    assert memory.take("a", 1 << 40, never)
    assert memory.has_room(1 << 40)


def test_answers_get_smaller_as_the_backlog_fills() -> None:
    backlog = AnswerBacklog(64 * MIB, 8 * MIB, 4 * MIB)
    assert (backlog.answer_limit, backlog.queue_limit) == (8 * MIB, 4 * MIB)
    held = 0
    for number in range(1_000):
        size = backlog.answer_limit
        backlog.set(number, size, 0.0)
        held += size
    assert backlog.held == held <= 64 * MIB + 1_000 * SMALLEST_ANSWER_LIMIT
    assert backlog.answer_limit == backlog.queue_limit == SMALLEST_ANSWER_LIMIT
    for number in range(1_000):
        backlog.set(number, 0, 1.0)
    assert (backlog.held, backlog.answer_limit, len(backlog)) == (0, 8 * MIB, 0)


def test_who_has_not_read_for_longest_goes_first_and_only_when_there_is_need() -> None:
    backlog = AnswerBacklog(10 * MIB, 8 * MIB, 4 * MIB)
    for number in range(8):
        backlog.set(number, MIB, float(number))
    assert backlog.overdue(STALL_SECONDS - 1) == []
    # 8 MiB are held, half of 10 is the aim: three have to go.
    assert backlog.overdue(STALL_SECONDS + 100) == [0, 1, 2]
    assert backlog.overdue(STALL_SECONDS + 1) == [0, 1]
    backlog.progressed(0, 50.0)
    backlog.progressed("stranger", 50.0)
    backlog.set(1, MIB // 2, 50.0)  # it reads
    backlog.set(2, 2 * MIB, 50.0)  # more is queued, nothing was read
    assert backlog.overdue(50.0) == [2, 3, 4]
    for number in range(4):
        backlog.set(number, 0, 60.0)
    assert backlog.overdue(1e9) == []  # what is left does no harm
    assert AnswerBacklog(UNBOUNDED, 1, 1).overdue(1e9) == []


def test_unbounded_backlog_changes_no_limit() -> None:
    backlog = AnswerBacklog(UNBOUNDED, 8 * MIB, 4 * MIB)
    backlog.set("a", 1 << 40, 0.0)
    assert (backlog.answer_limit, backlog.queue_limit) == (8 * MIB, 4 * MIB)
