"""The helper that waits in all other tests, under a clock of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests import waiting
from tests.waiting import Clock, Deadline, DeadlinePassed, until, until_async


class Time:
    """Goes on only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.clock = Clock(lambda: self.now, self.sleep, self.sleep_async)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_async(self, seconds: float) -> None:
        self.sleep(seconds)


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "factor", lambda: 1.0)


@pytest.fixture
def time() -> Time:
    return Time()


def in_a_loop(condition: Callable[[], Any], what: Any = "", **options: Any) -> Any:
    return asyncio.run(until_async(condition, what, **options))


both = pytest.mark.parametrize("wait", [until, in_a_loop])


@both
def test_what_holds_at_once_is_returned_without_a_pause(wait, time):
    assert wait(lambda: "leader 3", "a leader", clock=time.clock) == "leader 3"
    assert time.slept == []


@both
def test_what_comes_later_is_asked_for_at_the_interval(wait, time):
    answers = iter([None, [], 0, "here"])
    assert wait(lambda: next(answers), "it", every_s=0.5, clock=time.clock) == "here"
    assert time.slept == [0.5, 0.5, 0.5]


@both
def test_what_never_comes_is_named_with_the_time_and_what_was_seen_last(wait, time):
    with pytest.raises(DeadlinePassed) as told:
        wait(dict, "the topic is led", within_s=7, every_s=1, clock=time.clock)
    assert str(told.value) == "not within 7 s: the topic is led; last seen: {}"
    assert time.now == 107


@both
def test_a_description_is_asked_for_when_it_is_too_late(wait, time):
    seen: list[int] = []
    with pytest.raises(DeadlinePassed, match="3 of 9 records"):
        wait(
            lambda: seen.append(1),
            lambda: f"{len(seen)} of 9 records",
            within_s=2,
            every_s=1,
            clock=time.clock,
        )


@both
def test_a_condition_without_a_description_is_quoted(wait, time):
    with pytest.raises(DeadlinePassed, match=r"not within 60 s: .*lambda: not \"true\".*; last seen: False"):
        wait(lambda: not "true", every_s=30, clock=time.clock)


@both
def test_an_error_that_is_expected_is_asked_past(wait, time):
    answers = iter([ConnectionRefusedError("not yet"), OSError("nor now"), "here"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert wait(ask, "an answer", retry=(OSError,), clock=time.clock) == "here"


@both
def test_an_expected_error_that_stays_is_what_was_seen_last(wait, time):
    def ask() -> str:
        raise ConnectionRefusedError("nobody listens")

    with pytest.raises(DeadlinePassed, match="last seen: ConnectionRefusedError: nobody listens"):
        wait(ask, "an answer", retry=(OSError,), clock=time.clock)


@both
@pytest.mark.parametrize(("error", "retry"), [(ValueError("torn"), (OSError,)), (OSError("torn"), ())])
def test_an_error_that_nobody_expects_goes_through_at_once(wait, time, error, retry):
    def ask() -> str:
        raise error

    with pytest.raises(type(error), match="torn"):
        wait(ask, "an answer", retry=retry, clock=time.clock)
    assert time.slept == []


@both
def test_who_stood_still_past_the_deadline_looks_once_more(wait, time):
    """The process was not run for an hour between two looks; what it waited for has come meanwhile."""
    answers = iter([False, True])

    def ask() -> bool:
        answer = next(answers)
        if not answer:
            time.now += 3_600
        return answer

    assert wait(ask, "it", clock=time.clock)


@both
def test_the_logs_of_those_who_were_waited_for_are_quoted(wait, time, tmp_path):
    (tmp_path / "broker.log").write_bytes(b"first line\n" + b"x" * 5_000 + b"\nno leader \xff")
    broker = SimpleNamespace(log_path=tmp_path / "broker.log")
    with pytest.raises(DeadlinePassed) as told:
        wait(lambda: False, "a leader", logs_of=[broker, tmp_path / "none.log"], clock=time.clock)
    head, first, second = str(told.value).split("\n---")
    assert head.startswith("not within 60 s: a leader")
    assert "broker.log" in first and first.endswith("no leader \ufffd") and "first line" not in first
    assert "none.log" in second and "cannot be read" in second


def test_a_slow_machine_is_given_more_time_and_the_complaint_says_so(time, monkeypatch):
    monkeypatch.setattr(waiting, "factor", lambda: 2.5)
    assert waiting.patience(10) == 25
    with pytest.raises(DeadlinePassed, match=r"not within 25 s \(10 s × 2\.5\): it;"):
        until(lambda: False, "it", within_s=10, every_s=1, clock=time.clock)
    assert time.now == 125


def test_a_coroutine_is_asked_like_a_function(time):
    answers = iter([0, 5])

    async def ask() -> int:
        await asyncio.sleep(0)
        return next(answers)

    assert in_a_loop(ask, "it", clock=time.clock) == 5


def test_a_question_that_hangs_is_given_up_at_the_deadline(monkeypatch):
    monkeypatch.setattr(waiting, "LAST_LOOK_S", 0.01)

    async def ask() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(DeadlinePassed, match="no answer to the question"):
        in_a_loop(ask, "an answer", within_s=0.01)


def test_a_question_that_times_out_by_itself_fails_as_it_does(time):
    async def ask() -> None:
        raise TimeoutError("the broker's word")

    with pytest.raises(TimeoutError, match="the broker's word"):
        in_a_loop(ask, "an answer", clock=time.clock)
    with pytest.raises(DeadlinePassed, match="the broker's word"):
        in_a_loop(ask, "an answer", retry=(TimeoutError,), clock=time.clock)


def test_a_deadline_is_checked_by_who_does_the_work(time):
    deadline = Deadline("the records of t", within_s=10, clock=time.clock)
    time.now += 9
    deadline.check()
    assert deadline.left_s == 1
    time.now += 2
    assert deadline.has_passed and deadline.left_s == 0
    with pytest.raises(DeadlinePassed, match=r"not within 10 s: the records of t; last seen: \[1, 2\]"):
        deadline.check([1, 2])


def test_what_is_too_long_to_read_is_cut(time):
    with pytest.raises(DeadlinePassed) as told:
        Deadline("it", within_s=0, clock=time.clock).check("x" * 100_000)
    assert len(str(told.value)) < 2 * waiting.LONGEST


@pytest.mark.parametrize(
    ("took_s", "factor"),
    [
        (waiting.QUIET_S / 2, 1.0),
        (waiting.QUIET_S, 1.0),
        (waiting.QUIET_S * 3, 3.0),
        (waiting.QUIET_S * 500, waiting.MOST),
    ],
)
def test_the_factor_is_how_much_longer_a_piece_of_work_takes_here(time, took_s, factor):
    assert waiting.measured(lambda: time.sleep(took_s), lambda: time.now) == pytest.approx(factor)


@pytest.mark.parametrize("given", ["much", "", "-1", "0", "nan", "inf"])
def test_a_factor_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match=f"MILLRACE_TEST_PATIENCE={given}: a factor"):
        waiting.parsed(given)


def test_who_knows_better_says_the_factor(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv(waiting.VARIABLE, "40")
    assert waiting.factor.__wrapped__() == 40
    monkeypatch.delenv(waiting.VARIABLE)
    monkeypatch.setattr(waiting, "measured", lambda: 3.0)
    assert waiting.factor.__wrapped__() == 3
