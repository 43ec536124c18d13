import sys
import threading
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.audit.clients.session import FOLD_INTERVAL, LONGEST_RUN, StreamClosed, StreamSession
from millrace.audit.clients.told_stream import PROMISE_MARGIN_MS, ProducerIdentity
from millrace.audit.contract.events import CLOSED, HEARTBEAT, OPENED, CountEvent, StreamEvent

IDENTITY = ProducerIdentity("00000000000000cd", "AA@ewr", "h", "a", "ewr")


def session(**changes):
    settings = {"window_ms": 1000, "lease_ms": 60_000, **changes}
    return StreamSession(IDENTITY, "flights", "00000000000000ab", **settings)


def split(events):
    counts = {event.window_start_ms: event for event in events if isinstance(event, CountEvent)}
    (stream,) = [event for event in events if isinstance(event, StreamEvent)]
    return counts, stream


def test_numbers_run_from_one_and_windows_go_by_creation_time():
    stream = session()
    assert [stream.assign(ms)[1] for ms in (5, 1005, 7)] == [1, 2, 3]
    assert [stream.assign(ms)[0].start_ms for ms in (999, 1000, 5)] == [0, 1000, 0]


def test_reports_are_cumulative_numbered_and_only_of_changed_windows():
    stream = session()
    first, second = stream.assign(0), stream.assign(1000)
    first[0].acknowledge(first[1], 10)
    counts, event = split(stream.report(1))
    assert (event.state, event.last_assigned, event.last_settled) == (OPENED, 2, 1)
    assert {start: (c.report, set(c.acknowledged)) for start, c in counts.items()} == {0: (1, {1})}
    third = stream.assign(1)
    third[0].acknowledge(third[1], 7)
    counts, event = split(stream.report(2))
    assert (event.state, event.last_settled) == (HEARTBEAT, 1)
    report = counts[0]
    assert (report.report, set(report.acknowledged), report.count, report.byte_count) == (2, {1, 3}, 2, 17)
    second[0].acknowledge(second[1], 1)
    assert set(split(stream.report(3))[0]) == {1000}
    assert split(stream.report(4))[0] == {}


def test_the_last_report_closes_and_calls_what_is_pending_ambiguous():
    stream = session()
    for created_ms in (0, 0, 1000):
        stream.assign(created_ms)
    window, _ = stream.assign(1000)
    window.acknowledge(4, 1)
    counts, event = split(stream.close(5))
    assert (event.state, event.last_assigned, event.last_settled) == (CLOSED, 4, 4)
    assert set(counts[0].ambiguous) == {1, 2} and set(counts[1000].ambiguous) == {3}
    with pytest.raises(StreamClosed):
        stream.assign(0)


def test_a_number_that_was_not_taken_goes_to_the_next_record_or_fails():
    stream = session()
    stream.give_back(*stream.assign(0))
    window, sequence = stream.assign(1000)
    assert (window.start_ms, sequence) == (1000, 1)
    window.acknowledge(sequence, 1)
    stream.give_back(*stream.assign(0))
    counts, event = split(stream.close(0))
    assert set(counts[0].failed) == {2}
    assert (event.last_assigned, event.last_settled) == (2, 2)


def test_an_undelivered_report_is_sent_again_with_a_new_number():
    stream = session()
    window, sequence = stream.assign(0)
    window.acknowledge(sequence, 1)
    (report, _) = stream.report(0)
    stream.report_again(report)
    assert split(stream.report(0))[0][0].report == 2


def test_the_promise_waits_for_pending_windows_and_never_goes_back():
    stream = session()
    window, sequence = stream.assign(100_500)
    assert split(stream.report(105_000))[1].no_earlier_than_ms == 100_000
    window.acknowledge(sequence, 1)
    assert split(stream.report(105_000))[1].no_earlier_than_ms == 105_000 - PROMISE_MARGIN_MS
    assert split(stream.report(90_000))[1].no_earlier_than_ms == 105_000 - PROMISE_MARGIN_MS
    stream.forgo_promises()
    assert split(stream.report(110_000))[1].no_earlier_than_ms is None


def test_a_report_that_is_being_made_does_not_bring_back_a_promise_that_was_forgone(monkeypatch):
    stream = session()
    application = threading.Thread(target=stream.forgo_promises)

    def meanwhile():
        application.start()
        application.join(0.05)
        return ()

    monkeypatch.setattr(stream, "_pending_starts", meanwhile)
    stream.report(10_000)
    application.join()
    assert stream.promise_ms is None


@pytest.mark.parametrize("created_ms", [-1, 1 << 48])
def test_an_impossible_creation_time_burns_no_number(created_ms):
    stream = session()
    with pytest.raises(ValueError, match="creation time"):
        stream.assign(created_ms)
    assert stream.assign(0)[1] == 1


def test_many_unpolled_acknowledgements_are_folded_on_the_way():
    stream = session()
    for _ in range(FOLD_INTERVAL + 2 * LONGEST_RUN):
        window, sequence = stream.assign(0)
        window.acknowledge(sequence, 1)
    assert len(window.fresh) <= 2 * 2 * LONGEST_RUN


def take(stream, created_ms):
    """As `producer` does for every record: without the lock where it can."""
    window = stream.current
    in_window = window.start_ms <= created_ms < window.end_ms
    sequence = next(window.numbers, 0) if in_window else 0
    return (window, sequence) if sequence else stream.assign(created_ms)


@given(st.randoms(use_true_random=False))
def test_numbers_taken_without_the_lock_have_no_holes_and_are_counted_in_their_windows(rng):
    stream, taken = session(), {}
    for _ in range(rng.randint(1, 300)):
        action, created_ms = rng.random(), rng.choice((0, 0, 0, 1000, 2000))
        if action < 0.85:
            window, sequence = take(stream, created_ms)
            assert sequence not in taken
            taken[sequence] = window.start_ms
        elif action < 0.9:
            run = stream.assign_run(created_ms, 5)
            if run is not None:
                taken.update(dict.fromkeys(range(run[1], run[1] + 5), run[0].start_ms))
        else:
            stream.report(1)
        assert stream.last_assigned == len(taken)
    stream.report(1)
    per_window = Counter(taken.values())
    assert {start: each.assigned_count for start, each in stream.windows.items()} == per_window
    assert sorted(taken) == list(range(1, len(taken) + 1))
    *_, end = stream.close(1)
    assert (end.last_assigned, end.last_settled) == (len(taken), len(taken))
    assert next(stream.current.numbers, 0) == 0
    with pytest.raises(StreamClosed):
        take(stream, 0)


def test_a_number_that_the_end_of_a_stream_took_back_is_nobodys():
    """A thread that has looked the window up already finds no number in it, and asks again."""
    stream = session()
    window, _ = stream.assign(0)
    *_, end = stream.close(1)
    assert end.last_assigned == 1 and next(window.numbers, 0) == 0


def test_threads_that_take_numbers_while_others_report_never_share_one():
    stream, mine = session(), [[] for _ in range(4)]
    go_on = threading.Event()

    def produce(taken):
        for number in range(20_000):
            taken.append(take(stream, number // 5000 * 1000))

    def report():
        while not go_on.is_set():
            stream.report(1)

    threads = [threading.Thread(target=produce, args=(each,)) for each in mine]
    reporting = threading.Thread(target=report)
    reporting.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        go_on.set()
        reporting.join()
    numbers = [sequence for taken in mine for _, sequence in taken]
    assert sorted(numbers) == list(range(1, 80_001))
    per_window = Counter(window.start_ms for taken in mine for window, _ in taken)
    stream.report(1)
    assert {start: each.assigned_count for start, each in stream.windows.items()} == per_window


def test_records_of_one_moment_take_numbers_of_the_run_that_everyone_takes_from():
    stream = session()
    window, first = stream.assign(10_500)
    stream.keep_moment(window, 10_500, b"end")
    since_ns, until_ns, numbers, created_ms, of, suffix = stream.moment
    assert (since_ns, until_ns) == (10_500_000_000, 10_501_000_000)
    assert (created_ms, of, suffix) == (10_500, window, b"end")
    assert [first, next(numbers), stream.assign(10_500)[1], next(numbers)] == [1, 2, 3, 4]
    assert stream.last_assigned == 4
    split(stream.report(10_600))
    assert window.assigned_count == 4


@pytest.mark.parametrize("end", [lambda s: s.assign(11_000), lambda s: s.assign_run(10_500, 3),
                                 lambda s: s.give_back(s.current, 1), lambda s: s.close(10_600)])  # fmt: skip
def test_a_moment_ends_with_its_run(end):
    stream = session()
    window, _ = stream.assign(10_500)
    stream.keep_moment(window, 10_500, b"")
    end(stream)
    assert next(stream.moment[2], 0) == 0


def test_a_moment_that_a_promise_has_passed_gives_no_number_to_anyone():
    """The clock may be set back into it, and a thread may have looked it up already."""
    stream = session()
    window, sequence = stream.assign(10_500)
    stream.keep_moment(window, 10_500, b"")
    looked_up = stream.moment
    window.acknowledge(sequence, 1)
    stream.report(10_500 + PROMISE_MARGIN_MS)
    assert next(looked_up[2]) == 2  # The promise is this very millisecond.
    window.acknowledge(2, 1)
    stream.report(10_501 + PROMISE_MARGIN_MS)
    assert next(looked_up[2], 0) == next(stream.moment[2], 0) == 0


def test_no_moment_is_kept_where_promise_window_or_reserve_forbid_it():
    stream = session()
    window, sequence = stream.assign(10_500)
    empty = stream.moment
    stream.reserved = sequence
    stream.keep_moment(window, 10_500, b"")
    assert stream.moment is empty
    stream.reserved = stream.run_end
    window.acknowledge(sequence, 1)
    stream.report(20_000)
    stream.keep_moment(window, 10_500, b"")
    assert stream.moment is empty
    stream.assign(21_000)
    stream.keep_moment(window, 10_999, b"")
    assert stream.moment is empty


def test_an_acknowledgement_that_comes_while_others_are_folded_is_kept():
    window, _ = session().assign(0)

    class Interrupted(list):
        def __getitem__(self, part):
            taken = super().__getitem__(part)
            if len(self) == 4:
                window.acknowledge(3, 1)
            return taken

    window.fresh = Interrupted([1, 1, 2, 1])
    assert set(window.fold()) == {1, 2}
    assert set(window.fold()) == {3}


actions = st.lists(
    st.tuples(
        st.sampled_from(["assign", "ack", "ambiguous", "failed", "back", "report"]), st.integers(0, 4000)
    ),
    max_size=80,
)


@given(actions)
def test_every_number_has_exactly_one_fate_in_the_final_reports(steps):
    """Oracle: plain sets. Numbers are covered without holes, and what was acknowledged is said as such."""
    stream, pending, newest = session(), [], {}
    truth = {"acknowledged": set(), "ambiguous": set(), "failed": set()}
    for action, number in steps:
        if action == "assign":
            pending.append(stream.assign(number))
        elif action == "report":
            newest.update(split(stream.report(number))[0])
        elif pending:
            window, sequence = pending.pop(number % len(pending))
            if action == "ack":
                window.acknowledge(sequence, 1)
                truth["acknowledged"].add(sequence)
            elif action == "ambiguous":
                stream.mark_ambiguous(window, sequence)
                truth["ambiguous"].add(sequence)
            elif action == "failed":
                stream.mark_failed(window, sequence)
                truth["failed"].add(sequence)
            else:
                stream.give_back(window, sequence)
    truth["ambiguous"] |= {sequence for _, sequence in pending}
    counts, event = split(stream.close(0))
    newest.update(counts)
    said = {fate: [s for c in newest.values() for s in getattr(c, fate)] for fate in truth}
    assert set(said["acknowledged"]) == truth["acknowledged"]
    assert set(said["ambiguous"]) == truth["ambiguous"]
    assert set(said["failed"]) >= truth["failed"]
    assert sorted(chain(*said.values())) == list(range(1, event.last_assigned + 1))
    assert event.last_settled == event.last_assigned


def test_threads_never_share_a_number_and_counts_stay_exact():
    stream = session()
    taken: list[list[int]] = [[] for _ in range(4)]

    def work(numbers):
        for _ in range(3000):
            window, sequence = stream.assign(0)
            numbers.append(sequence)
            window.acknowledge(sequence, 1)

    threads = [threading.Thread(target=work, args=(numbers,)) for numbers in taken]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stream.report(0)
    assert sorted(chain(*taken)) == list(range(1, 12_001))
    counts, _ = split(stream.close(0))
    assert not counts or counts[0].count == 12_000
    assert stream.pending_count == 0
