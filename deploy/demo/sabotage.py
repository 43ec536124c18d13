"""A mirror that loses and repeats chosen records: the demo's own entry point, which no config can reach.

Started by the demo as `python -m millrace.deploy.demo.sabotage CONFIG TARGETS DEEDS` in place of `millrace
mirror run`. It is the ordinary mirror with a hook between fetch and produce. A batch without a chosen record
passes untouched; one with such a record is taken apart and built again without it, or with it twice. What
was done is written to DEEDS before the batch goes on: a killed mirror has not done more than it said, and
the one that follows it adds to that.

Most batches are let go by a search for the chosen sequences' bytes; only one that holds such is decoded.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from millrace.audit.contract.header import HEADER_KEY, InvalidIdentity, RecordIdentity, decode_identity
from millrace.broker.protocol.batch import parse_header
from millrace.broker.protocol.records import Record, build_batch, read_records, records_section
from millrace.deploy.demo.injection import DUPLICATE, LOSE, Deeds, Injected, Target, read_targets

Buffer = bytes | bytearray | memoryview


class Sabotage:
    """The hook. `deeds` is read when it is there, and rewritten, whole, each time a record is harmed."""

    def __init__(self, targets: Sequence[Target], deeds: Path):
        self._targets: dict[tuple[str, str], dict[tuple[str, int], str]] = defaultdict(dict)
        for target in targets:
            records = self._targets[target.datacenter, target.topic]
            records[target.producer, target.sequence] = target.action
        self._deeds_path = deeds
        former = [json.loads(deeds.read_text(encoding="utf-8"))] if deeds.exists() else []
        known = Deeds.merge(former)
        self._lost: set[Injected] = set(known.lost)
        self._duplicated: set[Injected] = set(known.duplicated)

    def __call__(self, source: str, topic: str, partition: int, batch: memoryview) -> Sequence[Buffer]:
        targets = self._targets.get((source, topic))
        if not targets:
            return [batch]
        header = parse_header(batch)
        section = bytes(records_section(batch, header))
        if not any(sequence.to_bytes(8, "big") in section for _, sequence in targets):
            return [batch]
        records = read_records(batch)
        kept = self._harm(topic, records, targets)
        if len(kept) == len(records) and all(a is b for a, b in zip(kept, records, strict=True)):
            return [batch]
        return [build_batch(kept, compression=header.compression)] if kept else []

    def _harm(
        self, topic: str, records: Sequence[Record], targets: dict[tuple[str, int], str]
    ) -> list[Record]:
        kept: list[Record] = []
        before = len(self._lost) + len(self._duplicated)
        for record in records:
            identity = _identity(record)
            action = targets.get((identity.producer, identity.sequence)) if identity else None
            if identity is None or action is None:
                kept.append(record)
                continue
            deed = Injected(topic, identity.producer, identity.stream, identity.sequence)
            if action == LOSE:
                self._lost.add(deed)
            elif action == DUPLICATE:
                self._duplicated.add(deed)
                kept += [record, record]
        if len(self._lost) + len(self._duplicated) != before:
            self._write_deeds()
        return kept

    def _write_deeds(self) -> None:
        deeds = Deeds(frozenset(self._lost), frozenset(self._duplicated))
        temporary = self._deeds_path.with_suffix(".new")
        temporary.write_text(json.dumps(deeds.as_json()), encoding="utf-8")
        temporary.replace(self._deeds_path)


def _identity(record: Record) -> RecordIdentity | None:
    for name, value in record.headers:
        if name == HEADER_KEY:
            try:
                return decode_identity(value)
            except InvalidIdentity:
                return None
    return None


def main() -> int:
    from millrace.mirror.daemon import run

    config, targets, deeds = (Path(argument) for argument in sys.argv[1:4])
    return run(config, Sabotage(read_targets(targets), deeds))


if __name__ == "__main__":
    sys.exit(main())
