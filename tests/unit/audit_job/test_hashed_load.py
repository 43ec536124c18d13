"""The load of the proofs at size: what its compiled loop writes is what real producers' logs have."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, defaultdict

import numpy as np
import pytest

from millrace.audit.contract.events import decode_event
from millrace.audit.contract.header import decode_identity
from millrace.broker.client.producer import partition_for_key
from millrace.broker.protocol.batch import parse_header, verify_crc
from millrace.broker.protocol.records import read_records
from tests.proofs.hashed_load import MERGED, SENT, count_events, drawn, even, slices
from tests.proofs.hundred_million import sendings

START_MS = 1_356_998_400_000


# What a proof at size is made with, compiled at its first use: 30 s of a gate.
pytestmark = pytest.mark.long


@pytest.mark.parametrize(("layout", "codec"), [(SENT, "none"), (MERGED, "lz4")])
def test_every_record_stands_once_in_the_partition_of_its_key(layout, codec):
    sending = even(20, 3_000, START_MS, 180_000, 7, linger_ms=2_000, codec=codec)
    lost, repeated = drawn(sending, 2, 1), drawn(sending, 3, 2)
    found: Counter[tuple[str, int]] = Counter()
    owners: defaultdict[int, set[str]] = defaultdict(set)
    sizes, senders = [], []
    for part in slices(sending, layout, without=lost, twice=repeated):
        for partition, batches in part.items():
            for batch in batches:
                header = parse_header(batch)
                verify_crc(batch, 0, header)
                records = list(read_records(batch))
                assert header.record_count == len(records) == header.last_offset_delta + 1
                assert header.max_timestamp == max(each.timestamp_ms for each in records)
                sizes.append(len(records))
                names = set()
                for each in records:
                    identity = decode_identity(dict(each.headers)["_mr"])
                    assert partition_for_key(each.key, 7) == partition
                    assert identity.created_ms == each.timestamp_ms
                    found[identity.producer, identity.sequence] += 1
                    owners[partition].add(identity.producer)
                    names.add(identity.producer)
                senders.append(len(names))
    everything = Counter({sending.place(number): 1 for number in range(3_000)})
    everything.subtract(sending.place(number) for number in lost)
    everything.update(sending.place(number) for number in repeated)
    assert found == +everything and max(found.values()) == 2
    assert all(len(names) == 20 for names in owners.values())  # all streams are interleaved
    assert max(sizes) > 1 and (max(senders) == 1) is (layout == SENT)


def test_the_events_tell_each_record_once_in_its_window():
    sending = even(5, 1_000, START_MS + 30_000, 150_000, 3)
    told = set()
    for _, value in count_events(sending, START_MS):
        event = decode_event(value)
        for sequence in event.acknowledged:
            told.add((event.producer, sequence, event.window_start_ms))
    times = sending.created_ms(np.arange(1_000)).tolist()
    assert told == {(*sending.place(number), times[number] // 60_000 * 60_000) for number in range(1_000)}


def test_one_producer_has_a_third_of_the_records_and_one_partition_half():
    given = Namespace(partitions=7, producers=20, linger=1_000, codec="none", seed=3, skewed=True)
    first, others = sendings(given, 6_000, START_MS, 180_000)
    assert first.record_count == 2_000 and others.record_count == 4_000 // 19 * 19
    assert (first.who.tolist(), others.who.tolist()) == ([0], list(range(1, 20)))
    assert not set(first.streams.tolist()) & set(others.streams.tolist())
    for sending in (first, others):
        found = Counter(
            {
                partition: sum(parse_header(batch).record_count for batch in batches)
                for part in slices(sending, SENT)
                for partition, batches in part.items()
            }
        )
        assert 0.5 < max(found.values()) / found.total() < 0.65 and len(found) == 7
