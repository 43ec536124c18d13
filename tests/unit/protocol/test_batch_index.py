"""Many batches at once: the index of a fetch answer, and the checksums that are computed with it."""

from __future__ import annotations

import random

import pytest
from llvmlite import binding, ir

from millrace.broker.protocol import crc_kernels
from millrace.broker.protocol.batch import HEADER_SIZE, iterate_batches, seal, stamp_offset_and_epoch
from millrace.broker.protocol.batch_index import damaged_rows, index_of
from millrace.broker.protocol.batch_kernels import (
    B_ATTRIBUTES,
    B_BASE_MS,
    B_BASE_OFFSET,
    B_CHECK,
    B_COUNT,
    B_CRC,
    B_END,
    B_LAST_OFFSET,
    B_MAGIC,
    B_MAX_MS,
    B_POSITION,
    B_PRODUCER_ID,
    B_RECORDS,
    CRC_IN_KERNEL_BELOW,
    CRC_RIGHT,
    CRC_UNCHECKED,
)
from millrace.broker.protocol.records import Record, build_batch

SIZES = (0, 10, 3_000, CRC_IN_KERNEL_BELOW, 20_000)


def batches(rng: random.Random, count: int) -> list[bytearray]:
    made, offset = [], 7
    for _ in range(count):
        records = [Record(b"k", rng.randbytes(rng.choice(SIZES)), (), rng.randrange(1 << 40))]
        records += [Record(None, b"v", (), rng.randrange(1 << 40)) for _ in range(rng.randrange(3))]
        batch = build_batch(records, compression=rng.choice((0, 3)), producer_id=rng.choice((-1, 1 << 40)))
        stamp_offset_and_epoch(batch, offset, 3)
        offset += len(records) + rng.randrange(2)
        made.append(batch)
    return made


def test_rows_of_the_index_are_the_headers_of_the_batches() -> None:
    data = b"".join(batches(random.Random(1), 60))
    _, index = index_of(data)
    expected = [
        {
            B_POSITION: position,
            B_RECORDS: position + HEADER_SIZE,
            B_END: position + header.size,
            B_BASE_OFFSET: header.base_offset,
            B_ATTRIBUTES: header.attributes,
            B_BASE_MS: header.base_timestamp,
            B_MAX_MS: header.max_timestamp,
            B_PRODUCER_ID: header.producer_id,
            B_COUNT: header.record_count,
            B_LAST_OFFSET: header.last_offset,
            B_CRC: header.crc,
            B_MAGIC: header.magic,
            B_CHECK: CRC_UNCHECKED if header.size >= CRC_IN_KERNEL_BELOW else CRC_RIGHT,
        }
        for position, header in iterate_batches(data)
    ]
    assert [dict(enumerate(row)) for row in index.tolist()] == [
        {column: row[column] for column in sorted(row)} for row in expected
    ]


def test_batches_with_a_wrong_checksum_are_found_whatever_their_size() -> None:
    rng = random.Random(2)
    for _ in range(30):
        made = batches(rng, 40)
        damaged = sorted(rng.sample(range(len(made)), rng.randrange(5)))
        for number in damaged:
            place = rng.choice((17, 21, 60, len(made[number]) - 1))
            made[number][place] ^= 1 << rng.randrange(8)
        assert damaged_rows(*index_of(b"".join(made))).tolist() == damaged


def test_index_ends_where_the_answer_was_cut_or_a_length_lies() -> None:
    whole = batches(random.Random(3), 5)
    data = b"".join(whole)
    for end in range(0, len(data), 61):
        expected = sum(1 for number in range(5) if end >= sum(map(len, whole[: number + 1])))
        assert len(index_of(data[:end])[1]) == expected
    for length in (0, 48, -1, (1 << 31) - 1, len(whole[2])):
        lying = bytearray(whole[2])
        lying[8:12] = length.to_bytes(4, "big", signed=True)
        assert len(index_of(b"".join([*whole[:2], lying]))[1]) == 2


def test_entry_of_an_old_format_has_no_checksum_that_could_be_wrong() -> None:
    (batch,) = batches(random.Random(4), 1)
    batch[16] = 1
    seal(batch)
    batch[17] ^= 1
    buffer, index = index_of(batch)
    assert index[0, B_MAGIC] == 1 and not len(damaged_rows(buffer, index))


@pytest.mark.parametrize("architecture", crc_kernels.INSTRUCTIONS)
def test_instructions_are_declared_as_llvm_knows_them(architecture: str) -> None:
    """LLVM knows the instructions of every processor, whichever it makes code for here."""

    def check(instruction: crc_kernels.Instruction) -> None:
        module = ir.Module()
        word, byte, crc = ir.IntType(64), ir.IntType(8), ir.IntType(32)
        function = ir.Function(module, ir.FunctionType(crc, [crc, word, byte]), "crc")
        builder = ir.IRBuilder(function.append_basic_block())
        after_word = crc_kernels.call_for_word(builder, instruction, *function.args[:2])
        builder.ret(crc_kernels.call_for_byte(builder, instruction, after_word, function.args[2]))
        binding.parse_assembly(str(module)).verify()

    instruction = crc_kernels.INSTRUCTIONS[architecture]
    check(instruction)
    wrong = {8: 32, 32: 8}[instruction.byte_bits]
    with pytest.raises(RuntimeError, match="Intrinsic has incorrect argument type"):
        check(instruction._replace(byte_bits=wrong))
