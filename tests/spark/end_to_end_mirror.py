"""A mirror that loses, repeats, changes and turns around chosen records: `python end_to_end_mirror.py CONFIG
FAULTS`, started by `end_to_end_world` in place of `millrace mirror run`.

It is the ordinary mirror with a hook between fetch and produce. FAULTS is a folder; `<topic>.json` in it
names records by the part of their value before the first `|`: `{"lose": [...], "repeat": [...], "corrupt":
[...], "spoil": {name: how}, "reorder": true}`; `spoil` is of the identity in the header. A file is written
before the records that it names are sent, so it is always known when they pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.records import Record, build_batch, read_records
from millrace.mirror.daemon import run

Buffer = bytes | bytearray | memoryview


class Faults:
    """The hook."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, source: str, topic: str, partition: int, batch: memoryview) -> Sequence[Buffer]:
        try:
            wanted = json.loads((self._folder / f"{topic}.json").read_text())
        except FileNotFoundError:
            return [batch]
        records = read_records(batch)
        kept = [copy for record in records for copy in _copies(record, wanted)]
        if wanted.get("reorder"):
            kept.reverse()
        if kept == list(records):
            return [batch]
        return [build_batch(kept, compression=parse_header(batch).compression)] if kept else []


def _copies(record: Record, wanted: dict[str, Any]) -> list[Record]:
    value = record.value or b""
    name = value.partition(b"|")[0].decode("latin-1")
    if name in wanted.get("lose", ()):
        return []
    if how := wanted.get("spoil", {}).get(name):
        headers = [
            (key, _spoilt(content or b"", how) if key == "_mr" else content)
            for key, content in record.headers
        ]
        return [replace(record, headers=tuple(each for each in headers if each[1] is not None))]
    if name in wanted.get("corrupt", ()):
        return [replace(record, value=value[:-1] + bytes([value[-1] ^ 1]))]
    return [record] * (2 if name in wanted.get("repeat", ()) else 1)


def _spoilt(identity: bytes, how: str) -> bytes | None:
    """An identity that no reader can take, or takes for another producer's; None: it is gone."""
    if how == "future":
        return b"\x07" + identity[1:]
    if how == "cut":
        return identity[:12]
    if how == "huge":
        return identity[:9] + b"\xff" + identity[10:]
    return identity[:23] + b"ZZ@elsewhere" if how == "name" else None


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Faults(Path(sys.argv[2]))))
