"""How far behind a source partition is, in records and in seconds. Pure.

The log ends at its high watermark. What lies behind the last stable offset is in open transactions and cannot
be carried yet, and waits all the same: a transaction that nobody ends is a lag that grows.

Called by `pipeline` (a sample with every fetch answer), by `source_logs` (samples of what is not fetched now)
and by `metrics`. Seconds come from samples of (log end, time) and never from the records' own timestamps:
replayed data of another year is not a year behind.
"""

from __future__ import annotations

from bisect import bisect_right

MAX_SAMPLES = 512


class LagSamples:
    """Samples of one partition's log end, oldest first, thinned so that the row stays short.

    `seconds_behind(position)` is the age of the oldest sample whose log end lies behind `position`: since
    then at least one record has been waiting. For a backlog that was there before the first sample it is a
    lower bound, counted from when this worker, or the one before it (`resume`), first saw it.
    """

    def __init__(self) -> None:
        self._log_ends: list[int] = []  # growing
        self._at_ms: list[int] = []
        self.log_end = -1  # read at each turn of fetching; it changes here alone
        """The last log end seen, or -1 before the first sample."""
        self._stable_end = -1
        self._held_since_ms = -1
        self._sampled_at_ms = -1

    @property
    def stable_end(self) -> int:
        """The last stable offset as it was last told, or -1: what lies behind it is in open transactions."""
        return self._stable_end

    def held_ms(self, now_ms: int) -> int:
        """For how long a transaction has held back what follows the last stable offset; 0: none does."""
        return 0 if self._held_since_ms < 0 else max(0, now_ms - self._held_since_ms)

    @property
    def sampled_at_ms(self) -> int:
        return self._sampled_at_ms

    def resume(self, position: int, waiting_since_ms: int, log_end: int) -> None:
        """What the last owner knew: since when a record has been waiting at `position`, and where the log
        ended (-1: it did not know). Before any sample."""
        self.log_end = log_end
        if waiting_since_ms >= 0:
            self._log_ends.append(position + 1)
            self._at_ms.append(waiting_since_ms)

    def sample(self, log_end: int, now_ms: int, stable_end: int = -1) -> None:
        """The log ends at `log_end` now, and is stable up to `stable_end` (-1: not told). An end before the
        last one is a truncated log's (or a new leader's that does not know yet how far others are): what lies
        below it waits as long as before."""
        self._sampled_at_ms = since_ms = now_ms
        if stable_end >= 0:
            if stable_end >= log_end:
                self._held_since_ms = -1
            elif stable_end != self._stable_end or self._held_since_ms < 0:
                self._held_since_ms = now_ms
            self._stable_end = stable_end
        if log_end == self.log_end:
            return
        self.log_end = log_end
        if self._log_ends and log_end < self._log_ends[-1]:
            kept = bisect_right(self._log_ends, log_end)
            since_ms = self._at_ms[kept]
            del self._log_ends[kept:], self._at_ms[kept:]
        if self._log_ends and self._log_ends[-1] == log_end:
            return
        self._log_ends.append(log_end)
        self._at_ms.append(since_ms)
        if len(self._log_ends) > MAX_SAMPLES:
            self._thin()

    def first_seen_ms(self, offset: int) -> int | None:
        """When the log end was first seen behind `offset`; None when that is not known (any more)."""
        index = bisect_right(self._log_ends, offset)
        return self._at_ms[index] if index < len(self._at_ms) else None

    def records_behind(self, position: int) -> int:
        return max(0, self.log_end - position)

    def seconds_behind(self, position: int, now_ms: int) -> float:
        self._forget_before(position)
        if not self._at_ms:
            return 0.0
        return max(0, now_ms - self._at_ms[0]) / 1000.0

    def _forget_before(self, position: int) -> None:
        passed = bisect_right(self._log_ends, position)
        del self._log_ends[:passed]
        del self._at_ms[:passed]

    def _thin(self) -> None:
        # Of every two neighbours one is kept, with the later end and the earlier time: offsets between the
        # two then look older than they are, so lag is never understated.
        is_odd = len(self._log_ends) % 2
        last = (self._log_ends[-1:], self._at_ms[-1:]) if is_odd else ([], [])
        self._log_ends = self._log_ends[1::2] + last[0]
        self._at_ms = self._at_ms[: len(self._at_ms) - is_odd : 2] + last[1]
