"""CRC-32C inside compiled loops: for many small batches, where one call of Python's a batch would cost more
than the checksum.

Called by other kernels only. On x86 with SSE 4.2 and on 64-bit ARM with the CRC extension it is the
processor's own instruction (one stream: about 10 GB/s on x86, where `checksum.crc32c` reaches 25 GB/s on
large buffers but needs 0.2 µs a call); elsewhere eight table look-ups a word. numba's cache keeps machine
code apart by processor, so one folder serves all. (Nothing was run on ARM: there LLVM has checked how the
instructions are declared, no more.)

Invariant: the callers have checked that `[start, end)` lies in the buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_SIGNATURE = types.uint32(_BYTES, types.int64, types.int64)
_intrinsic: Any = intrinsic  # what it makes is called inside kernels only, with one argument less
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected


class Instruction(NamedTuple):
    """How LLVM calls a processor's instruction for a word of eight bytes and for a single byte. It takes a
    checksum of `crc_bits` bits and gives one; a byte is passed as a number of `byte_bits` bits."""

    feature: str
    word: str
    byte: str
    word_crc_bits: int
    byte_bits: int


INSTRUCTIONS = {
    "x86_64": Instruction(
        "sse4.2", "llvm.x86.sse42.crc32.64.64", "llvm.x86.sse42.crc32.32.8", word_crc_bits=64, byte_bits=8
    ),
    "aarch64": Instruction(
        "crc", "llvm.aarch64.crc32cx", "llvm.aarch64.crc32cb", word_crc_bits=32, byte_bits=32
    ),
}


def _own_instruction() -> Instruction | None:
    architecture = binding.get_process_triple().partition("-")[0]
    known = INSTRUCTIONS.get("aarch64" if architecture == "arm64" else architecture)
    return known if known is not None and binding.get_host_cpu_features().get(known.feature, False) else None


_OWN = _own_instruction()
_USED = _OWN or INSTRUCTIONS["x86_64"]  # of another processor nothing is compiled (see `_by_instruction`)


def call_for_word(builder: Any, instruction: Instruction, crc: Any, word: Any) -> Any:
    """The checksum (an i32 of LLVM's) after eight bytes."""
    crc_type = ir.IntType(instruction.word_crc_bits)
    kind = ir.FunctionType(crc_type, [crc_type, ir.IntType(64)])
    function = cgutils.get_or_insert_function(builder.module, kind, instruction.word)
    is_wide = instruction.word_crc_bits > 32
    given = builder.zext(crc, crc_type) if is_wide else crc
    made = builder.call(function, [given, word])
    return builder.trunc(made, ir.IntType(32)) if is_wide else made


def call_for_byte(builder: Any, instruction: Instruction, crc: Any, byte: Any) -> Any:
    """The same after one byte (an i8)."""
    i32, byte_type = ir.IntType(32), ir.IntType(instruction.byte_bits)
    kind = ir.FunctionType(i32, [i32, byte_type])
    function = cgutils.get_or_insert_function(builder.module, kind, instruction.byte)
    return builder.call(function, [crc, builder.zext(byte, byte_type) if byte_type.width > 8 else byte])


@_intrinsic
def _crc_word(_typing: Any, crc: Any, word: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return call_for_word(builder, _USED, *arguments)

    return types.uint32(types.uint32, types.uint64), generate


@_intrinsic
def _crc_byte(_typing: Any, crc: Any, byte: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return call_for_byte(builder, _USED, *arguments)

    return types.uint32(types.uint32, types.uint8), generate


@_intrinsic
def _word_at(_typing: Any, buffer: Any, position: Any) -> Any:
    """Eight bytes in the machine's order, at any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0])
        place = builder.gep(array.data, [arguments[1]])
        word = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(buffer, types.int64), generate


# Without a signature it is compiled where a kernel uses it: another processor's instruction would end the
# process.
@njit(cache=True, nogil=True)
def _by_instruction(buffer: Any, start: Any, end: Any) -> Any:
    crc = np.uint32(0xFFFFFFFF)
    position = np.int64(start)
    while position + 8 <= end:
        crc = _crc_word(crc, _word_at(buffer, position))
        position += 8
    while position < end:
        crc = _crc_byte(crc, buffer[position])
        position += 1
    return crc ^ np.uint32(0xFFFFFFFF)


def _make_tables() -> Any:
    """Table n gives the effect of a byte that n further bytes follow."""
    tables = np.zeros((8, 256), np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        tables[0, byte] = crc
    for number in range(1, 8):
        before = tables[number - 1]
        tables[number] = (before >> 8) ^ tables[0][before & 0xFF]
    return tables


_TABLES = _make_tables()


@njit(_SIGNATURE, cache=True, nogil=True)
def _by_tables(buffer: Any, start: Any, end: Any) -> Any:
    crc = np.uint32(0xFFFFFFFF)
    position = np.int64(start)
    while position + 8 <= end:
        mixed = np.uint32(0)
        for number in range(8):
            byte = np.uint32(buffer[position + number])
            if number < 4:
                byte ^= (crc >> np.uint32(8 * number)) & np.uint32(0xFF)
            mixed ^= _TABLES[7 - number, byte]
        crc = mixed
        position += 8
    while position < end:
        crc = (crc >> np.uint32(8)) ^ _TABLES[0, (crc ^ np.uint32(buffer[position])) & np.uint32(0xFF)]
        position += 1
    return crc ^ np.uint32(0xFFFFFFFF)


crc32c_within = _by_tables if _OWN is None else _by_instruction
"""`crc32c_within(buffer, start, end) -> uint32`, for kernels: CRC-32C of the bytes `[start, end)`."""
