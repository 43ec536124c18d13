"""Streams: order, positions, what a rebalance or a rewind leaves behind, bounds, bad batches."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Sequence

import pytest

from millrace.broker.coordination.zookeeper_consumer.messages import Message, unpack
from millrace.broker.coordination.zookeeper_consumer.rules import RebalanceFailed
from millrace.broker.coordination.zookeeper_consumer.streams import ConsumerClosed, Reading, StreamQueue
from millrace.broker.errors import CorruptMessage
from millrace.broker.protocol.batch import parse_header, seal
from millrace.broker.protocol.records import Record, build_batch, read_records
from tests.waiting import patience

ME = "this thread"


def batch(
    start: int, count: int, *, control: bool = False, producer_id: int = -1, codec: int = 0
) -> bytearray:
    if control:
        # Version 0, type 0: an abort marker.
        records = [Record(struct.pack(">hh", 0, 0), b"\x00" * 6)]
    else:
        records = [Record(None, b"%d" % number, (), number) for number in range(start, start + count)]
    return build_batch(
        records,
        base_offset=start,
        control=control,
        producer_id=producer_id,
        transactional=producer_id >= 0,
        compression=codec,
    )


def joined(*batches: bytearray) -> memoryview:
    return memoryview(b"".join(batches))


def make(
    max_chunks: int = 10, max_size: int = 1 << 20, read_committed: bool = True
) -> tuple[StreamQueue, list[int]]:
    room: list[int] = []
    queue = StreamQueue(
        "t/0",
        max_chunks=max_chunks,
        max_size=max_size,
        read_committed=read_committed,
        on_room=lambda: room.append(1),
    )
    return queue, room


def reading(queue: StreamQueue, partition: int = 0, offset: int = 0) -> Reading:
    made = Reading(("t", partition), queue)
    queue.rewind(made, offset)
    return made


def drain(queue: StreamQueue) -> list[Message]:
    taken = []
    while (message := queue.take(ME)) is not None:
        taken.append(message)
    return taken


def offsets(messages: Sequence[Message]) -> list[tuple[int, int]]:
    return [(message.partition, message.offset) for message in messages]


def test_messages_come_in_order_from_the_offset_that_was_asked_for() -> None:
    queue, _ = make()
    one = reading(queue, offset=3)
    assert queue.put(one, one.epoch, joined(batch(0, 10), batch(10, 5), batch(15, 1, codec=4)), ())
    assert queue.fetch_position(one) == (16, one.epoch)
    assert offsets(drain(queue)) == [(0, at) for at in range(3, 16)]
    assert queue.position(one) == 16


def test_a_message_is_finished_when_the_next_is_asked_for_or_its_holder_commits() -> None:
    queue, _ = make()
    one = reading(queue)
    queue.put(one, one.epoch, joined(batch(0, 3)), ())
    queue.take(ME)
    assert queue.position(one) == 0
    assert queue.position(one, "another thread") == 0
    assert queue.position(one, ME) == 1
    queue.take(ME)
    queue.take(ME)
    assert queue.position(one) == 2
    assert queue.take(ME) is None
    assert queue.position(one) == 3


def test_the_position_passes_what_holds_no_messages() -> None:
    """Control batches, aborted transactions, and a batch whose last records were compacted away."""
    queue, _ = make()
    one = reading(queue)
    compacted = batch(0, 2)
    struct.pack_into(">i", compacted, 23, 9)  # last offset delta
    seal(compacted)
    data = joined(compacted, batch(10, 5, producer_id=7), batch(15, 1, control=True, producer_id=7))
    queue.put(one, one.epoch, data, ((7, 10),))
    assert offsets(drain(queue)) == [(0, 0), (0, 1)]
    assert queue.position(one) == 16 and one.delivered == 16


def test_reading_uncommitted_shows_aborted_messages_but_no_control_records() -> None:
    queue, _ = make(read_committed=False)
    one = reading(queue)
    queue.put(
        one, one.epoch, joined(batch(0, 2, producer_id=7), batch(2, 1, control=True, producer_id=7)), ()
    )
    assert offsets(drain(queue)) == [(0, 0), (0, 1)]


def test_after_a_revocation_nothing_of_the_partition_is_delivered() -> None:
    queue, _ = make()
    gone, kept = reading(queue, 0), reading(queue, 1)
    queue.put(gone, gone.epoch, joined(batch(0, 5)), ())
    queue.put(kept, kept.epoch, joined(batch(0, 2)), ())
    queue.put(gone, gone.epoch, joined(batch(5, 5)), ())
    epoch = gone.epoch
    assert queue.take(ME) is not None and queue.take(ME) is not None
    queue.revoke([gone])
    # An answer that was under way comes too late.
    queue.put(gone, epoch, joined(batch(5, 5)), ())
    assert offsets(drain(queue)) == [(1, 0), (1, 1)]
    assert queue.position(gone) == 2
    assert queue.fetch_position(gone)[0] == 2


def test_a_revocation_leaves_the_message_in_hand_unfinished() -> None:
    queue, _ = make()
    one = reading(queue)
    queue.put(one, one.epoch, joined(batch(0, 5)), ())
    queue.take(ME)
    queue.take(ME)
    queue.revoke([one])
    assert (one.finished, one.delivered) == (1, 2)
    queue.take(ME)
    assert one.finished == 2


def test_a_rewind_forgets_the_message_in_hand() -> None:
    queue, _ = make()
    one = reading(queue)
    queue.put(one, one.epoch, joined(batch(0, 5)), ())
    queue.take(ME)
    queue.take(ME)
    queue.rewind(one, 0)
    assert queue.take(ME) is None
    assert queue.position(one, ME) == 0
    assert queue.fetch_position(one)[0] == 0


def test_a_jump_waits_behind_what_is_queued() -> None:
    queue, _ = make()
    one = reading(queue)
    queue.put(one, one.epoch, joined(batch(0, 2)), ())
    assert not queue.jump(one, one.epoch, 50)
    assert queue.fetch_position(one)[0] == 50
    queue.put(one, one.epoch, joined(batch(50, 1)), ())
    assert offsets(drain(queue)) == [(0, 0), (0, 1), (0, 50)]
    assert queue.position(one) == 51
    assert queue.jump(one, one.epoch, 70) and queue.position(one) == 70
    assert not queue.jump(one, one.epoch - 1, 90) and queue.position(one) == 70


def test_a_jump_does_not_finish_the_message_in_hand() -> None:
    queue, _ = make()
    one = reading(queue)
    queue.put(one, one.epoch, joined(batch(0, 1)), ())
    queue.take(ME)
    assert not queue.jump(one, one.epoch, 50)
    assert queue.position(one) == 0
    queue.take(ME)
    assert queue.position(one) == 50


def test_a_full_queue_has_no_room_until_a_chunk_is_opened() -> None:
    queue, room = make(max_chunks=2)
    one = reading(queue)
    assert queue.room == 1 << 20
    for start in range(2):
        queue.put(one, one.epoch, joined(batch(start, 1)), ())
    assert queue.room == 0 and room == []
    queue.take(ME)
    assert queue.room > 0 and room == [1]
    small, room = make(max_size=100)
    one = reading(small)
    small.put(one, one.epoch, joined(batch(0, 20)), ())
    assert small.room == 0
    small.take(ME)
    assert small.room == 100 and room == [1]


def test_a_cut_batch_is_not_queued() -> None:
    queue, _ = make()
    one = reading(queue)
    whole = batch(0, 5)
    assert not queue.put(one, one.epoch, memoryview(bytes(whole[:-1])), ())
    assert queue.put(one, one.epoch, joined(whole, batch(5, 5)[:-1]), ())
    assert queue.fetch_position(one)[0] == 5


def test_a_damaged_batch_is_named_fetched_again_and_passed_by_a_rewind() -> None:
    queue, room = make()
    one = reading(queue)
    bad = batch(2, 2)
    bad[-1] ^= 1
    for _ in range(2):
        queue.put(one, one.epoch, joined(batch(0, 2), bad), ())
        while queue.fetch_position(one)[0] != one.delivered:
            try:
                queue.take(ME)
            except CorruptMessage as error:
                assert "t-0" in str(error) and "offset 2" in str(error)
                break
        assert queue.fetch_position(one)[0] == 2, "to be fetched again from the bad batch"
        assert queue.position(one) == 2
        assert room.pop()
    queue.rewind(one, 4)
    queue.put(one, one.epoch, joined(batch(4, 1)), ())
    assert offsets(drain(queue)) == [(0, 4)]


def test_a_closed_queue_and_a_failed_one_say_so_at_once() -> None:
    queue, _ = make()
    one = reading(queue)
    queue.put(one, one.epoch, joined(batch(0, 5)), ())
    queue.take(ME)
    queue.fail(RebalanceFailed("no"))
    for _ in range(2):
        with pytest.raises(RebalanceFailed, match="no"):
            queue.take(ME)
    queue, _ = make()
    waiting = threading.Thread(target=lambda: queue.wait(None))
    waiting.start()
    queue.close()
    waiting.join(patience())
    assert not waiting.is_alive()
    with pytest.raises(ConsumerClosed):
        queue.take(ME)


def test_waiting_ends_with_news_or_with_the_time() -> None:
    queue, _ = make()
    one = reading(queue)
    assert not queue.wait(0.01)
    threading.Timer(0.05, lambda: queue.put(one, one.epoch, joined(batch(0, 1)), ())).start()
    assert queue.wait(patience())


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_take_while_partitions_come_and_go_see_no_stale_message(seed: int) -> None:
    """A reader races with puts, revocations and rewinds: every message is the partition's next one."""
    rng = random.Random(seed)
    queue, _ = make(max_chunks=1_000)
    one = reading(queue)
    expected, lock, count = 0, threading.Lock(), 0
    wrong: list[tuple[int, int]] = []
    stop = threading.Event()

    def read() -> None:
        nonlocal expected, count
        while not stop.is_set():
            with lock:
                message = queue.take(ME)
                if message is not None:
                    if message.offset != expected:
                        wrong.append((message.offset, expected))
                    expected = message.offset + 1
                    count += 1

    reader = threading.Thread(target=read)
    reader.start()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and reader.is_alive():
        at, epoch = queue.fetch_position(one)
        assert at is not None
        queue.put(one, epoch, joined(batch(at, rng.randint(1, 30), codec=rng.choice((0, 4)))), ())
        if rng.random() < 0.2:
            with lock:
                expected = rng.choice((0, max(0, expected - 5), expected))
                queue.rewind(one, expected)
        elif rng.random() < 0.2:
            queue.revoke([one])
    stop.set()
    reader.join(patience())
    assert count > 0 and not wrong, f"seed {seed}: (delivered, expected) {wrong[:3]}"


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("count", [1, 5, 6, 7, 100])
def test_unpacking_gives_what_the_plain_reader_gives(codec: int, count: int) -> None:
    rng = random.Random(codec * 1000 + count)

    def blob() -> bytes | None:
        return rng.choice((None, b"", rng.randbytes(rng.randint(1, 300))))

    records = [
        Record(
            blob(),
            blob(),
            tuple(("h" * rng.randint(0, 200), blob()) for _ in range(rng.choice((0, 0, 3)))),
            rng.randint(0, 1 << 40),
        )
        for _ in range(count)
    ]
    for attributes in (0, 8):  # 8: log append time
        data = build_batch(records, base_offset=1 << 33, compression=codec)
        struct.pack_into(">h", data, 21, codec | attributes)
        found = unpack("t", 3, memoryview(data), parse_header(data))
        assert found == [
            Message("t", 3, each.offset, each.timestamp_ms, each.key, each.value, tuple(each.headers))
            for each in read_records(data)
        ]
        assert all(type(each) is Message for each in found)
