"""Checksums of the protocol and of the project's own files.

Three functions, three uses: `crc32c` guards record batches and is computed by hardware; `crc32` is the
checksum of Kafka's old message sets (magic 0 and 1); `crc32c_reference` computes CRC-32C by a table, by
another author's code, and is the oracle of the first as well as the guard of small files of our own.

Called by the batch codec, storage and the audit's journal. Pure.
"""

from __future__ import annotations

import zlib

import crc32c as _crc32c
import crcmod.predefined

Buffer = bytes | bytearray | memoryview

_reference = crcmod.predefined.mkPredefinedCrcFun("crc-32c")

crc32c = _crc32c.crc32c
"""`crc32c(data, value=0) -> int`: CRC-32C of any contiguous buffer, continued from `value`."""


def crc32c_reference(data: Buffer, value: int = 0) -> int:
    """CRC-32C by `crcmod`: the same numbers as `crc32c`, sixty times slower."""
    # crcmod's C extension reads bytes only.
    return int(_reference(bytes(data), value))


def crc32(data: Buffer, value: int = 0) -> int:
    """CRC-32 (IEEE 802.3), as in message sets of magic 0 and 1."""
    return zlib.crc32(data, value)
