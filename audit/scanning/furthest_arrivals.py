"""Up to where each partition's records have arrived, by the columns of one stream's cells. Pure.

Called by `runs.arrivals` inside Spark's workers. The rule is `tier_reading.passage_by_arrivals`, which looks
at each cell; here a partition's cells are looked at from its end, until one says more than any before it
could. Where a mirror keeps no positions no cells are united (`cell_union`), so there may be one a record: of
a partition of which the newest records arrived, a handful is made to sets and compared.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap64

from millrace.audit.scanning.cell_columns import codes_of, numbers_of
from millrace.audit.scanning.cells import NO_PLACE, decode_bitmap
from millrace.audit.scanning.stream_cells import StreamCells

FoundPassage = tuple[str, str, int, str, int]
"""(cluster, topic, partition, topic id, next offset)"""


def furthest_arrivals(upstream: StreamCells, arrived: StreamCells) -> Iterator[FoundPassage]:
    """How far each upstream partition was carried, as far as anything of it has arrived.

    Topics of one name and different ids are kept apart, and so are topics of different names. What more than
    one of the `upstream` cells holds proves nothing, wherever they stand.
    """
    there = _by_window(arrived)
    if not there or not len(upstream):
        return
    copied = upstream.held_twice()
    rows = upstream.rows
    in_time = pc.is_in(rows["window_start_ms"], value_set=pa.array(list(there), pa.int64()))
    rows = rows.filter(pc.and_(in_time, pc.not_equal(rows["partition"], NO_PLACE)))
    if not rows.num_rows:
        return
    names = {name: codes_of(rows[name]) for name in ("cluster", "topic", "topic_id")}
    keys = np.column_stack([codes for codes, _ in names.values()] + [numbers_of(rows["partition"])])
    places, place_of = np.unique(keys, axis=0, return_inverse=True)
    firsts, lasts, counts, windows, bases = (
        numbers_of(rows[name]) for name in ("first_offset", "last_offset", "count", "window_start_ms", "base")
    )
    sets = rows["bitmap"]  # left where they are: few are looked at
    order = np.lexsort((-lasts, place_of.ravel()))
    bounds = np.searchsorted(place_of.ravel()[order], np.arange(len(places) + 1))
    for place, first, end in zip(places.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        next_offset = -1
        for row in order[first:end].tolist():
            if lasts[row] < next_offset:
                break  # it could not say more, nor could any behind it
            sequences = decode_bitmap(int(bases[row]), sets[row].as_py()) - copied
            downstream = there[int(windows[row])]
            if sequences.isdisjoint(downstream):
                continue
            is_whole = counts[row] == len(sequences) and sequences.issubset(downstream)
            next_offset = max(next_offset, int(lasts[row]) + 1 if is_whole else int(firsts[row]))
        if next_offset >= 0:
            cluster, topic, topic_id = (
                texts[code] for code, (_, texts) in zip(place, names.values(), strict=False)
            )
            yield cluster, topic, place[-1], topic_id, next_offset


def _by_window(arrived: StreamCells) -> dict[int, BitMap64]:
    """{window_start_ms: what was seen of it}."""
    there: dict[int, BitMap64] = {}
    for by_window in arrived.seen().values():
        for start_ms, seen in by_window.items():
            there[start_ms] = there[start_ms] | seen.sequences if start_ms in there else seen.sequences
    return there
