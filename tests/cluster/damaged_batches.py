"""Bits of a source's disk that change: batches whose log lies there, as a test's mirrors will read them."""

from __future__ import annotations

from millrace.broker.protocol.batch import iterate_batches
from tests.pairs import Pair

PLACES = {"length": 11, "low bit of the base offset": 7, "high bit of the base offset": 3}


def damage(pair: Pair, topic: str, number: int, where: str, partition: int = 0) -> None:
    """Flips a bit of the source's disk: in the last byte of a batch ("records"), or at a place of its
    header. Once more, and it is whole again."""
    batches = [
        (path, data, position, header)
        for path in sorted(pair.source.log_folder(topic, partition).glob("*.log"))
        for data in [path.read_bytes()]
        for position, header in iterate_batches(memoryview(data))
    ]
    path, data, position, header = batches[number]
    place = position + (header.size - 1 if where == "records" else PLACES[where])
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([data[place] ^ 0x10]))
