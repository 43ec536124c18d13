"""The garbage collector of a server: at its start, and while very many objects are made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from millrace.broker.telemetry import garbage
from millrace.broker.telemetry.garbage import (
    keep,
    left_alone,
    look_at_all,
    look_at_time,
    settle,
)


def test_process_that_collects_garbage_already_stays_as_it_is() -> None:
    frozen = gc.get_freeze_count()
    settle()
    assert gc.isenabled() and gc.get_freeze_count() == frozen


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a process of our own, with nothing kept yet."""
    monkeypatch.setattr(garbage, "_is_settled", True)
    monkeypatch.setattr(garbage, "_not_kept", 0)
    monkeypatch.setattr(garbage, "_has_kept", False)
    monkeypatch.setattr(garbage, "_looked_at_all", 0.0)
    yield
    gc.unfreeze()


class Linked:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("settled")
def test_what_stays_is_looked_at_once_and_then_no_more() -> None:
    frozen = gc.get_freeze_count()
    stays, garbage_so_far = [[]], weakref.ref(Linked())
    keep(garbage.KEPT_AT - 1)
    assert gc.get_freeze_count() == frozen
    keep(1)
    assert garbage_so_far() is None
    assert gc.get_freeze_count() > frozen
    assert not any(known is stays for known in gc.get_objects())
    comes_later = [[]]
    keep(garbage.KEPT_AT - 1)
    assert any(known is comes_later for known in gc.get_objects())


def test_what_comes_after_the_start_is_kept_and_what_the_start_counted_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_is_settled", "_not_kept", "_looked_at_all"):
        monkeypatch.setattr(garbage, name, getattr(garbage, name))
    gc.disable()
    try:
        keep(10 * garbage.KEPT_AT)  # of what the start has made
        settle()
        later = [[]]
        keep(garbage.KEPT_AT - 1)
        assert any(known is later for known in gc.get_objects())
        keep(1)
        assert not any(known is later for known in gc.get_objects())
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.usefixtures("settled")
def test_what_was_kept_is_looked_through_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a cycle that nobody knew of would hold what it holds for ever."""
    now = [1_000_000.0]
    monkeypatch.setattr(garbage.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(garbage, "_looked_at_all", now[0])
    linked = Linked()
    known = weakref.ref(linked)
    keep(garbage.KEPT_AT)
    del linked
    gc.collect()
    assert known() is not None
    now[0] += garbage.ALL_AGAIN_SECONDS - 1
    look_at_all()
    assert known() is not None
    now[0] += 1
    with left_alone():
        look_at_all()
        assert known() is not None
    look_at_all()
    assert known() is None
    later = [[]]
    now[0] += garbage.ALL_AGAIN_SECONDS
    look_at_all()  # nothing has been kept since
    assert any(known is later for known in gc.get_objects())


@pytest.mark.usefixtures("settled")
def test_nothing_is_looked_at_while_garbage_is_left_alone() -> None:
    """What a large request makes would be looked through, and it is about to go."""
    with left_alone():
        frozen = gc.get_freeze_count()
        keep(garbage.KEPT_AT)
        assert gc.get_freeze_count() <= frozen
    keep(1)
    assert gc.get_freeze_count() > frozen


def test_process_that_others_began_keeps_nothing_frozen() -> None:
    frozen = gc.get_freeze_count()
    keep(garbage.KEPT_AT)
    assert gc.get_freeze_count() == frozen


def test_garbage_is_left_alone_until_the_last_who_asked_for_it_has_ended() -> None:
    assert gc.isenabled()
    with left_alone():
        with left_alone():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_one_after_another_cannot_keep_garbage_from_being_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or two clients that ask for very much in turn would have it pile up without end."""
    now = [1_000.0]
    monkeypatch.setattr(garbage.time, "monotonic", lambda: now[0])
    with left_alone():
        now[0] += garbage.LONGEST_SECONDS
        with left_alone():
            assert not gc.isenabled()
        now[0] += 0.1
        with left_alone():
            assert gc.isenabled()
    with left_alone():
        assert not gc.isenabled()
        look_at_time()
        assert not gc.isenabled()
        now[0] += garbage.LONGEST_SECONDS + 0.1
        look_at_time()
        assert gc.isenabled()


def test_where_garbage_is_not_collected_nobody_turns_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.disable()
    try:
        monkeypatch.setattr(garbage, "LONGEST_SECONDS", -1.0)
        with left_alone(), left_alone():
            look_at_time()
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
