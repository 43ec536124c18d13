"""A worker that loses, repeats or changes: `python -m tests.cluster.mirror_faults.sabotage lose --config
FILE`, or `lose:audited` for one topic alone.

It is the real worker with a hook between fetch and produce. The fault run must find out, which proves that
it can.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

HARM_EVERY, HARM_EVERY_OF_A_TOPIC = 97, 29
KINDS = ("lose", "repeat", "change")


class Sabotage:
    """Harms one batch of many, and none of the first, so that a run is under way when it happens."""

    def __init__(self, what: str) -> None:
        """`what`: one of KINDS, with `:topic` for the batches of that alone."""
        self._kind, _, self._topic = what.partition(":")
        if self._kind not in KINDS:
            raise SystemExit(f"what to do: {', '.join(KINDS)}")
        self._every = HARM_EVERY_OF_A_TOPIC if self._topic else HARM_EVERY
        self._count = 0

    def __call__(
        self, source: str, topic: str, partition: int, batch: memoryview
    ) -> Sequence[bytes | bytearray | memoryview]:
        if self._topic not in ("", topic):
            return [batch]
        self._count += 1
        if self._count % self._every:
            return [batch]
        if self._kind == "lose":
            return []
        if self._kind == "repeat":
            return [bytes(batch), bytes(batch)]
        changed = bytearray(batch)
        # The base timestamp is outside of the compressed records: one millisecond more.
        changed[27:35] = (int.from_bytes(changed[27:35], "big") + 1).to_bytes(8, "big")
        return [changed]


if __name__ == "__main__":
    from millrace.mirror.daemon import run

    raise SystemExit(run(sys.argv[sys.argv.index("--config") + 1], Sabotage(sys.argv[1])))
