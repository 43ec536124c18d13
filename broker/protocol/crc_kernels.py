"""CRC-32C inside compiled loops: for many small batches, where one call of Python's a batch would cost more
than the checksum.

Called by other kernels only. On x86 with SSE 4.2 it is the processor's own instruction (one stream: about
10 GB/s, where `checksum.crc32c` reaches 25 GB/s on large buffers but needs 0.2 µs a call); elsewhere eight
table look-ups a word. numba's cache keeps machine code apart by processor, so one folder serves both.

Invariant: the callers have checked that `[start, end)` lies in the buffer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_SIGNATURE = types.uint32(_BYTES, types.int64, types.int64)
_intrinsic: Any = intrinsic  # what it makes is called inside kernels only, with one argument less
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected


def _has_instruction() -> bool:
    if not binding.get_process_triple().startswith("x86_64"):
        return False
    return bool(binding.get_host_cpu_features().get("sse4.2", False))


@_intrinsic
def _crc_word(_typing: Any, crc: Any, word: Any) -> Any:
    """The instruction for eight bytes: (crc, word) -> crc, both as 64-bit numbers."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        i64 = ir.IntType(64)
        kind = ir.FunctionType(i64, [i64, i64])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.64.64")
        return builder.call(function, arguments)

    return types.uint64(types.uint64, types.uint64), generate


@_intrinsic
def _crc_byte(_typing: Any, crc: Any, byte: Any) -> Any:
    """The instruction for one byte."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        i32 = ir.IntType(32)
        kind = ir.FunctionType(i32, [i32, ir.IntType(8)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse42.crc32.32.8")
        return builder.call(function, arguments)

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


@njit(_SIGNATURE, cache=True, nogil=True)
def _by_instruction(buffer: Any, start: Any, end: Any) -> Any:
    wide = np.uint64(0xFFFFFFFF)
    position = np.int64(start)
    while position + 8 <= end:
        wide = _crc_word(wide, _word_at(buffer, position))
        position += 8
    crc = np.uint32(wide)
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


HAS_INSTRUCTION = _has_instruction()

crc32c_within = _by_instruction if HAS_INSTRUCTION else _by_tables
"""`crc32c_within(buffer, start, end) -> uint32`, for kernels: CRC-32C of the bytes `[start, end)`."""
