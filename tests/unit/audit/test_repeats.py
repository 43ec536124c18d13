"""Extra copies as sets: the sums and differences of counting them one by one."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from millrace.audit.scanning.repeats import Repeats

bags = st.dictionaries(
    st.integers(1, 12) | st.integers((1 << 32) - 2, (1 << 32) + 2),
    st.integers(1, 9) | st.integers(1, 1 << 40),
)


@given(bags, bags)
def test_adding_is_the_sum_of_the_copies_of_each(left, right):
    total = Repeats.of(left)
    total.add_all(Repeats.of(right))
    truth = Counter(left) + Counter(right)
    assert total == Repeats.of(truth) and total.total == sum(truth.values())
    assert set(total.sequences) == set(truth) and bool(total) == bool(truth)


@given(bags, st.sets(st.integers(1, 12)), st.integers(0, 9))
def test_so_many_copies_more_of_each_of_a_set(bag, more, copies):
    total, sequences = Repeats.of(bag), BitMap64(more)
    total.add(sequences, copies)
    assert total == Repeats.of(Counter(bag) + Counter(dict.fromkeys(more, copies)))
    assert set(sequences) == more, "what is given stays as it is"


@given(bags, bags)
def test_beyond_another_is_what_is_more_of_each_and_never_less_than_none(left, right):
    mine, other = Repeats.of(left), Repeats.of(right)
    assert mine.beyond(other) == Repeats.of(Counter(left) - Counter(right))
    assert (mine, other) == (Repeats.of(left), Repeats.of(right)), "what is compared stays as it is"


@given(bags, st.sets(st.integers(1, 12)))
def test_those_of_some_sequences(bag, some):
    found = Repeats.of(bag).within(BitMap64(some))
    assert found == Repeats.of({each: count for each, count in bag.items() if each in some})


def test_a_copy_is_one_of_its_own():
    first = Repeats.of({1: 1})
    second = first.copy()
    second.add(BitMap64([1]))
    assert (first.total, second.total) == (1, 2)


@given(bags)
def test_each_tells_what_was_put_in_by_sequence(bag):
    repeats = Repeats.of(bag)
    assert list(repeats.each()) == sorted(bag.items())
    assert all(repeats.of_sequence(sequence) == bag.get(sequence, 0) for sequence in (*bag, 13))
