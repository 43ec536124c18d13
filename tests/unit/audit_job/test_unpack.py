"""Unpacking whole fetches: the compiled LZ4 decoder beside the library, and buffers that are used again."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import lz4.frame
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh32_intdigest

from millrace.audit.scanning.cell_rows import NOTE_UNREAD
from millrace.audit.scanning.counting import CellCounter
from millrace.audit.scanning.range_reader import DAMAGED, index_fetched
from millrace.audit.scanning.unpack import Unpacker
from millrace.audit.spark.task_plan import OffsetRange
from millrace.audit.spark.task_reader import _read_cells, count_batches
from millrace.broker.errors import KafkaError
from millrace.broker.protocol.compression import CODEC_IDS, LZ4, compress, decompress
from millrace.broker.protocol.lz4_kernels import NO_ROOM, SLACK, UNKNOWN, decode_frame
from tests import seeds
from tests.cells import rows_of

EVERYTHING = (0, 1 << 62)


def decoded(frame: bytes, room: int = 1 << 20, before: bytes = b"", behind: bytes = b"") -> bytes | int:
    """What the kernel makes of a frame, or why it does not; nothing outside its bounds may change."""
    source = np.frombuffer(before + frame + behind, np.uint8)
    source.flags.writeable = False
    target = np.full(room + SLACK + 64, 0xA5, np.uint8)
    out = decode_frame(source, len(before), len(before) + len(frame), target[: room + SLACK], 0)
    assert (target[room + SLACK :] == 0xA5).all(), "wrote beyond the buffer"
    return bytes(target[:out]) if out >= 0 else out


def texts(seed: int, count: int) -> list[bytes]:
    """Data of all kinds: noise, runs with every short period, lines of text."""
    rng = random.Random(seed)
    made = [b"", b"a", b"abc" * 5000, bytes(200_000), rng.randbytes(100_000)]
    made += [bytes(range(period)) * (300 // period) for period in range(1, 20)]
    for _ in range(count):
        words = [rng.randbytes(rng.randrange(1, 24)) for _ in range(rng.randrange(1, 40))]
        made.append(b"".join(rng.choice(words) for _ in range(rng.randrange(1, 3000))))
    return made


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("block_size", [4, 5, 6, 7])
def test_frames_of_every_kind_decode_to_what_went_in(linked, block_size):
    seed = seeds.given()
    for text in texts(seed, 25):
        for level in (0, 9):
            for store_size in (False, True):
                frame = lz4.frame.compress(
                    text, level, block_size=block_size, block_linked=linked, store_size=store_size
                )
                assert decoded(frame, before=b"x" * 3, behind=b"y" * 40) == text
                assert decoded(frame) == text, "at the very end of the fetch"


@settings(deadline=None)
@given(st.binary(max_size=2000))
def test_the_project_s_own_frames_decode(text):
    assert decoded(compress(LZ4, text)) == text


def test_damage_is_never_decoded_to_anything_else_than_the_library_says():
    seed = seeds.given()
    rng = random.Random(seed)
    kept = 0
    for text in texts(seed, 20):
        good = lz4.frame.compress(text[:5000], block_linked=rng.random() < 0.5)
        for _ in range(150):
            bad = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
            if rng.random() < 0.2:
                bad = bad[: rng.randrange(len(bad))]
            found = decoded(bytes(bad))
            if isinstance(found, bytes):
                kept += 1
                try:
                    assert found == bytes(decompress(LZ4, bytes(bad), 1 << 20))
                except KafkaError as problem:
                    raise AssertionError(f"the library refuses what was decoded: {bytes(bad)!r}") from problem
    assert kept, "damage within literals decodes"


def test_what_the_decoder_does_not_know_is_left_to_the_library():
    text = b"flight " * 100
    frame = lz4.frame.compress(text)
    for other in (
        lz4.frame.compress(text, content_checksum=True),
        lz4.frame.compress(text, block_checksum=True),
        frame + frame,
        b"\x50\x2a\x4d\x18\x02\0\0\0ab" + frame,
        frame[:-1],
        b"",
    ):
        assert decoded(other) == UNKNOWN


def frame_of(block: bytes, flags: int = 0x60) -> bytes:
    """A frame of one block, made by hand."""
    descriptor = bytes((flags, 0x40))
    checksum = bytes((xxh32_intdigest(descriptor) >> 8 & 255,))
    size = len(block).to_bytes(4, "little")
    return b"\x04\x22\x4d\x18" + descriptor + checksum + size + block + bytes(4)


@pytest.mark.parametrize(
    ("match", "last", "decodes"), [(8, 5, True), (8, 4, False), (4, 8, True), (4, 7, False), (20, 5, True)]
)
def test_a_block_that_does_not_end_as_blocks_must_is_left_to_the_library(match, last, decodes):
    extra = bytes((match - 19,)) if match >= 19 else b""
    block = (
        bytes((0x40 | min(match - 4, 15),)) + b"abcd" + b"\x04\0" + extra + bytes((last << 4,)) + b"z" * last
    )
    plain = (b"abcd" * 6)[: 4 + match] + b"z" * last
    assert decoded(frame_of(block)) == (plain if decodes else UNKNOWN)


@pytest.mark.parametrize("flags", [0x40, 0x60])
def test_a_match_never_reaches_behind_the_beginning(flags):
    """Nor, where blocks are independent, behind its block: what lies there is another batch's."""
    assert decoded(frame_of(b"\x44abcd\x05\0\x80zzzzzzzz", flags)) == UNKNOWN
    two = frame_of(b"\x10a", flags)[:-4]
    reaching = b"\x14b\x02\0\x80zzzzzzzz"
    two += len(reaching).to_bytes(4, "little") + reaching + bytes(4)
    assert decoded(two) == (b"ab" + b"abababab" + b"z" * 8 if flags == 0x40 else UNKNOWN)


def test_a_frame_larger_than_the_room_left_says_so():
    frame = lz4.frame.compress(b"flight " * 1000)
    assert decoded(frame, room=6999) == NO_ROOM
    assert decoded(frame, room=7000) == b"flight " * 1000
    assert decoded(lz4.frame.compress(random.Random(1).randbytes(5000)), room=4999) == NO_ROOM


def traffic(build, seed: int) -> tuple[bytes, int]:
    """Batches of all codecs and sizes in random order, sequences from 1 on."""
    rng = random.Random(seed)
    content, sequence = b"", 0
    for _ in range(80):
        count = rng.choice((1, 3, 40, 400))
        values = [rng.choice((b"", b"v" * 50, rng.randbytes(200))) for _ in range(count)]
        section = b"".join(
            build.stamped(i, 1, sequence + i + 1, value=value) for i, value in enumerate(values)
        )
        name = rng.choice(sorted(CODEC_IDS))
        packed = section if name == "none" else bytes(compress(CODEC_IDS[name], section))
        if name == "lz4" and rng.random() < 0.3:
            packed = lz4.frame.compress(section, content_checksum=True)
        batch = bytearray(build.batch(sequence, [packed], attributes=CODEC_IDS[name]))
        batch[23:27] = (count - 1).to_bytes(4, "big")
        batch[57:61] = count.to_bytes(4, "big")
        content += batch
        sequence += count
    return content, sequence


@pytest.mark.parametrize("buffer_size", [100, 2_000, 1 << 20])
def test_every_record_of_every_codec_is_counted_once_whatever_the_buffer(build, buffer_size):
    seed = seeds.given()
    content, last = traffic(build, seed)
    counter = CellCounter(1000, 1 << 20)
    count_batches(counter, index_fetched(content), *EVERYTHING, Unpacker(buffer_size))
    (row,) = rows_of(counter.take())
    assert list(row.sequences) == list(range(1, last + 1)) and row.repeats == {}
    assert counter.totals().untrusted == {} and counter.totals().records == last


def test_batches_that_cannot_be_unpacked_are_told_and_their_neighbours_counted(build):
    section = build.stamped(0, 1, 1)
    content = b""
    for offset, codec in enumerate((3, 3, 1, 2, 4, 3, 1)):
        packed = b"nothing of the kind" if offset in (1, 2, 4) else bytes(compress(codec, section))
        content += build.batch(offset, [packed], attributes=codec)
    content += build.batch(7, [b"?"], attributes=5)
    told: Counter[str] = Counter()
    counted = sum(
        len(part.index[part.index[:, 11] == 2])
        for part in Unpacker().parts(index_fetched(content), lambda reason: told.update([reason]))
    )
    assert told == {
        "batch that cannot be decompressed (CorruptMessage)": 3,
        "batch that cannot be decompressed (UnsupportedCompressionType)": 1,
    }
    assert counted == 4


@pytest.mark.parametrize(
    ("codec", "section"),
    [(LZ4, b"no frame at all"), (4, b"no frame either"), (7, b"of a codec to come"), (0, b"\xff" * 40)],
)
def test_a_batch_whose_records_cannot_be_had_leaves_its_offsets_unread_and_not_lost(build, codec, section):
    """Its checksum is right: it is as its producer made it, and may hold any record that is sought."""
    content = build.batch(4, [build.stamped(0, 1, 1)])
    content += build.batch(5, [section, b"", b""], attributes=codec)
    content += build.batch(8, [build.stamped(0, 1, 2)])
    counter, unread = CellCounter(1000, 1 << 20), []
    count_batches(counter, index_fetched(content), *EVERYTHING, None, lambda *offsets: unread.append(offsets))
    assert unread == [(5, 8, DAMAGED)]
    assert sum(counter.totals().untrusted.values()) == 1
    assert [list(row.sequences) for row in rows_of(counter.take())] == [[1, 2]]


def test_a_task_notes_the_offsets_of_a_batch_that_it_could_not_read(build):
    content = build.batch(5, [b"no frame", b"", b""], attributes=LZ4)
    reader = SimpleNamespace(read=lambda *_: [index_fetched(content)])
    options = SimpleNamespace(window_ms=1000, chunk_offsets=1 << 20, digest=False)
    range_ = OffsetRange("ewr", "ewr", "flights", "flights", 0, 0, 10)
    rows = pa.Table.from_batches(_read_cells(reader, [range_], options)).to_pylist()
    unread = [row for row in rows if (row["note"] or "").startswith(NOTE_UNREAD)]
    assert [(row["note"], row["first_offset"], row["last_offset"]) for row in unread] == [
        (NOTE_UNREAD + DAMAGED, 5, 7)
    ]


def test_skipped_batches_stay_skipped_when_they_are_compressed(build):
    content = build.batch(0, [bytes(compress(LZ4, build.stamped(0, 1, 1)))], attributes=LZ4)
    content += build.batch(1, [bytes(compress(LZ4, build.stamped(0, 1, 2)))], attributes=LZ4)
    batches = index_fetched(content)
    batches.index[0, 11] = 0
    counter = CellCounter(1000, 1 << 20)
    count_batches(counter, batches, *EVERYTHING)
    assert [list(row.sequences) for row in rows_of(counter.take())] == [[2]]
