from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millrace.audit.scanning.cells import BASE_STEP, Cell, SeenSet, merge_cells
from millrace.audit.scanning.repeats import Repeats
from tests.cells import again_of, count_repeats, encode_bitmaps


def cells_of(sequences, **changes):
    """The cells that a scan makes of records in one chunk, in order of offset."""
    distinct, repeats = count_repeats(np.array(sequences, dtype=np.uint64))
    cells = []
    for number, (base, bitmap) in enumerate(encode_bitmaps(distinct)):
        fields = {
            "tier": "source",
            "cluster": "ewr",
            "topic": "flights",
            "partition": 0,
            "stream": "0" * 16,
            "producer": "AA",
            "window_start_ms": 0,
            "chunk_start": 0,
            "count": len(sequences) if number == 0 else 0,
            "byte_count": 0,
            "first_offset": 0,
            "last_offset": len(sequences) - 1,
            "base": base,
            "bitmap": bitmap,
            "again": again_of(repeats, base),
        }
        cells.append(Cell(**{**fields, **changes}))
    return cells


sequences = st.lists(st.integers(1, 60) | st.integers(BASE_STEP - 3, BASE_STEP + 3), max_size=60)


@given(st.lists(sequences, max_size=4))
def test_adding_cells_is_the_sum_of_multisets(chunks):
    seen = SeenSet()
    for chunk in chunks:
        for cell in cells_of(chunk):
            seen.add(cell)
    truth = Counter(sequence for chunk in chunks for sequence in chunk)
    assert set(seen.sequences) == set(truth)
    assert seen.repeats == Repeats.of({sequence: copies - 1 for sequence, copies in truth.items()})
    assert seen.count == sum(truth.values())


@given(sequences, sequences)
def test_merging_two_sums_is_adding_all_their_cells(left, right):
    one, two, both = SeenSet(), SeenSet(), SeenSet()
    for cell in cells_of(left):
        one.add(cell)
        both.add(cell)
    for cell in cells_of(right):
        two.add(cell)
        both.add(cell)
    one.merge(two)
    assert one == both


def test_a_dense_cell_takes_less_than_two_bits_a_record():
    ((_, bitmap),) = encode_bitmaps(np.arange(1, 10_001, dtype=np.uint64))
    assert len(bitmap) * 8 / 10_000 < 2
    with_losses = np.array([sequence for sequence in range(1, 10_001) if sequence % 97], dtype=np.uint64)
    ((_, bitmap),) = encode_bitmaps(with_losses)
    assert len(bitmap) * 8 / 10_000 < 2


def test_append_times_widen_and_unknown_ones_do_not_count():
    seen = SeenSet()
    for first_ms, last_ms in ((50, 60), (-1, -1), (10, 55)):
        for cell in cells_of([1], first_append_ms=first_ms, last_append_ms=last_ms):
            seen.add(cell)
    assert (seen.first_append_ms, seen.last_append_ms) == (10, 60)


def test_digests_add_up_and_one_unknown_makes_the_sum_unknown():
    seen = SeenSet()
    for digest in (1 << 63, 1 << 63, 5):
        for cell in cells_of([1], digest=digest):
            seen.add(cell)
    assert seen.digest == 5
    for cell in cells_of([2]):
        seen.add(cell)
    assert seen.digest is None


def test_cells_are_merged_by_tier_and_window():
    cells = cells_of([1, 2]) + cells_of([3], window_start_ms=1000) + cells_of([1], tier="aggregate")
    seen = merge_cells(cells)
    assert set(seen["source"][0].sequences) == {1, 2}
    assert set(seen["source"][1000].sequences) == {3}
    assert set(seen["aggregate"][0].sequences) == {1}
