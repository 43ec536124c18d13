"""How fast a source may be read: a token bucket over fetched bytes. Pure.

Called by `source`, one bucket for each source cluster, shared by its fetch loops. A fetch may ask for what is
in the bucket; what it brought is spent afterwards, so a batch that is larger than the bucket is paid for by
waiting. Over any stretch of time no more than `rate × time + one second's worth + one fetch of each loop` is
read.
"""

from __future__ import annotations

BURST_S = 1.0


class TokenBucket:
    """Fills with `rate` bytes a second up to one second's worth; without a rate it holds nobody up."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._tokens = 0.0
        self._filled_at_ms = 0

    def set_rate(self, bytes_per_second: float | None, now_ms: int) -> None:
        """Another limit from now on. What was read too much under the old one is still owed. Raises
        ValueError for a limit that is not above zero (to read nothing is to pause)."""
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"a rate of {bytes_per_second} bytes a second; to read nothing, pause")
        self._fill(now_ms)
        if self._rate is None:
            self._tokens = 0.0
        self._rate = bytes_per_second
        self._filled_at_ms = now_ms
        if bytes_per_second is not None:
            self._tokens = min(self._tokens, bytes_per_second * BURST_S)

    def room(self, now_ms: int) -> int | None:
        """Bytes that may be asked for now, 0 or less when there are none; None: no limit."""
        if self._rate is None:
            return None
        self._fill(now_ms)
        return int(self._tokens)

    def wait_ms(self, wanted: int, now_ms: int) -> int:
        """How long until `wanted` bytes (or as many as the bucket holds) may be asked for; 0: now."""
        if self._rate is None:
            return 0
        self._fill(now_ms)
        missing = min(wanted, self._rate * BURST_S) - self._tokens
        return 0 if missing <= 0 else int(missing / self._rate * 1000) + 1

    def spend(self, size: int) -> None:
        """These bytes were read."""
        if self._rate is not None:
            self._tokens -= size

    def _fill(self, now_ms: int) -> None:
        # A clock that was set back fills nothing; it must not empty the bucket either.
        passed_ms = max(0, now_ms - self._filled_at_ms)
        self._filled_at_ms = now_ms
        if self._rate is not None:
            self._tokens = min(self._rate * BURST_S, self._tokens + self._rate * passed_ms / 1000)
