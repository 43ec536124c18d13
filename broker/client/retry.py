"""How long to wait before trying again (exponential back-off with jitter), and how long one try may take of
the time that all have, as pure rules.

Used by everything in this package that repeats a request. It neither sleeps nor draws random numbers: the
caller passes a number from [0, 1) and waits itself, so a test or a simulator can pin every delay.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackOff:
    """Delays `first_ms`, `first_ms * factor`, … up to `limit_ms`, each spread by ± `jitter`.

    The spread keeps many clients that lost the same broker from returning in step.
    """

    first_ms: float = 50.0
    limit_ms: float = 1_000.0
    factor: float = 2.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.first_ms <= self.limit_ms or self.factor < 1 or not 0 <= self.jitter < 1:
            raise ValueError(f"not a back-off: {self}")

    def delay_ms(self, failure_count: int, random_unit: float) -> float:
        """The wait after the `failure_count`-th failure in a row (the first is 1); 0 before any."""
        if failure_count <= 0:
            return 0.0
        # The exponent is bounded: after a night of failures factor ** count would overflow a float.
        middle_ms = min(self.limit_ms, self.first_ms * self.factor ** min(failure_count - 1, 64))
        return middle_ms * (1 + self.jitter * (2 * random_unit - 1))


# What one server of many gets at the least: TCP, TLS and a login over a slow link take that long.
_LEAST_SHARE_MS = 3_000


def share_ms(left_ms: float, tries_left: int, whole_ms: float) -> float:
    """How long the next of `tries_left` tries may take where `left_ms` are left of `whole_ms` for all: an
    even share, so that servers that are stuck leave time for one that is not. With very many it would be too
    short for any; then not all get one."""
    least_ms = min(_LEAST_SHARE_MS, whole_ms / 3)
    return min(left_ms, max(left_ms / tries_left, least_ms))


# Between two attempts at one request, and between two passes over the bootstrap servers.
REQUEST_BACK_OFF = BackOff(first_ms=50, limit_ms=1_000)
# Between two attempts to open a connection to the same server.
RECONNECT_BACK_OFF = BackOff(first_ms=50, limit_ms=2_000)
# Between two attempts at a server that refused a login or a certificate.
REFUSED_BACK_OFF = BackOff(first_ms=500, limit_ms=10_000)
