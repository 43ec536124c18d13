"""Byte-rate quotas by client id: who has used how much, and for how long a client has to be kept waiting.

Apache Kafka's rules (KIP-13, KIP-219, its `Rate` over sampled windows), so that a client behaves towards
both brokers alike: usage is summed in samples of a second, eleven of them make the window; a request that
lifts the rate over the limit is answered at once with a throttle time, after which the rate would be back at
the limit, and its connection is not read from for that long. A client that comes out of silence may use ten
seconds' worth at once, and waits for it afterwards. A fetch over its limit is answered empty, and what it
would have carried is not counted. Every client id has a window of its own; a limit set for one id wins over
the `<default>` that was set while running, which wins over the broker's own setting.

The shares of request time (`request_percentage`), limits by user and by address, and the rate of topic
changes do not exist here: there is one user, and one thread.

Called by the produce and fetch handlers, which look at `produce.active` and `fetch.active` and at nothing
else while no limit is set; limits come from `coordination/client_quotas.py`. Pure: times are passed in, of
the steady clock: set back, the time of day would make one sample of all that follows, and throttle for ever.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

PRODUCER_BYTE_RATE = "producer_byte_rate"
CONSUMER_BYTE_RATE = "consumer_byte_rate"
QUOTA_KEYS = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE)

UNLIMITED = 2**63 - 1
"""Apache Kafka's "no limit" in `quota.producer.default` and `quota.consumer.default`."""


LONGEST_THROTTLE_MS = 2**31 - 1
"""What an answer can tell: twenty-four days, which a limit of next to nothing, set to shut a client out, soon
comes to."""


class Window(NamedTuple):
    """What a rate is measured over: `quota.window.num` samples of `quota.window.size.seconds` each."""

    sample_count: int = 11
    sample_ms: int = 1_000

    @property
    def size_ms(self) -> int:
        return self.sample_count * self.sample_ms

    @property
    def full_ms(self) -> int:
        """All samples but the one that is being filled."""
        return (self.sample_count - 1) * self.sample_ms


DEFAULT_WINDOW = Window()

ClientLimits = Mapping[str | None, Mapping[str, float]]
"""What was set while running: client id (None: the default of all) -> quota key -> bytes a second."""


class Rate:
    """Bytes a second of one client, measured as Apache Kafka does."""

    __slots__ = ("_samples", "_window")

    def __init__(self, window: Window = DEFAULT_WINDOW) -> None:
        self._window = window
        # [begin, last use, bytes]; one more than the window has, for the one that overlaps its beginning.
        self._samples: deque[list[int]] = deque(maxlen=window.sample_count + 1)

    def record(self, size: int, steady_ms: int) -> None:
        """Count `size` bytes; a negative size takes back what was counted before."""
        samples = self._samples
        if not samples or steady_ms - samples[-1][0] >= self._window.sample_ms:
            samples.append([steady_ms, steady_ms, 0])
        sample = samples[-1]
        sample[1] = steady_ms
        sample[2] += size

    def measure(self, steady_ms: int) -> tuple[float, int]:
        """Bytes a second, and the window they were measured over in ms.

        The window counts as at least ten full samples long, whatever has passed since the first use.
        """
        samples, (sample_count, sample_ms) = self._samples, self._window
        while samples and steady_ms - samples[0][1] >= self._window.size_ms:
            samples.popleft()
        elapsed_ms = steady_ms - samples[0][0] if samples else 0
        missing = sample_count - 1 - elapsed_ms // sample_ms
        if missing > 0:
            elapsed_ms += missing * sample_ms
        window_ms = max(elapsed_ms, 1)
        return sum(sample[2] for sample in samples) * 1000 / window_ms, window_ms

    def is_forgotten(self, steady_ms: int) -> bool:
        """Whether nothing of it lies in the window any more."""
        return not self._samples or steady_ms - self._samples[-1][1] >= self._window.size_ms


class ByteQuota:
    """The limits of one kind of traffic, and every limited client's use of it."""

    __slots__ = ("_by_client", "_default", "_rates", "_swept_ms", "_window", "active")

    def __init__(self, default: float = UNLIMITED, window: Window = DEFAULT_WINDOW) -> None:
        self._window = window
        self._default = float(default)
        self._by_client: dict[str, float] = {}
        self._rates: dict[str, Rate] = {}
        self._swept_ms = 0
        self.active = default != UNLIMITED
        """Whether any client has a limit: all that an unlimited broker looks at."""

    def set_limits(self, default: float, by_client: Mapping[str, float]) -> None:
        """Take in new limits; what clients have used stays counted."""
        self._default = float(default)
        self._by_client = dict(by_client)
        self.active = default != UNLIMITED or bool(by_client)
        if not self.active:
            self._rates.clear()

    def limit_of(self, client_id: str | None) -> float:
        """Bytes a second. A client without a name has no limit, as in Apache Kafka."""
        if not client_id:
            return UNLIMITED
        return self._by_client.get(client_id, self._default)

    def charge(self, client_id: str | None, size: int, steady_ms: int) -> int:
        """Count `size` bytes; for how many ms the client must be kept waiting."""
        limit = self.limit_of(client_id)
        if limit >= UNLIMITED or client_id is None:
            return 0
        if steady_ms - self._swept_ms >= self._window.size_ms:
            self._sweep(steady_ms)
        rate = self._rates.get(client_id)
        if rate is None:
            rate = self._rates[client_id] = Rate(self._window)
        rate.record(size, steady_ms)
        measured, window_ms = rate.measure(steady_ms)
        if measured <= limit:
            return 0
        # So long that the same bytes over the window and this time make the limit's rate.
        return round(min((measured - limit) / limit * window_ms, LONGEST_THROTTLE_MS))

    def take_back(self, client_id: str | None, size: int, steady_ms: int) -> None:
        """Bytes that were charged for and are not carried after all."""
        rate = self._rates.get(client_id or "")
        if rate is not None:
            rate.record(-size, steady_ms)

    def most_at_once(self, client_id: str | None) -> int:
        """More than this many bytes would be over the limit whenever they are asked for."""
        limit = self.limit_of(client_id)
        return sys.maxsize if limit >= UNLIMITED else int(limit * self._window.full_ms / 1000)

    def _sweep(self, steady_ms: int) -> None:
        """Forget clients that have been silent for a window: names are theirs to choose, memory is ours."""
        self._swept_ms = steady_ms
        self._rates = {name: rate for name, rate in self._rates.items() if not rate.is_forgotten(steady_ms)}

    def __len__(self) -> int:
        """Clients whose use is being counted."""
        return len(self._rates)


class ClientQuotas:
    """Both kinds, and what was set for them."""

    __slots__ = ("_consumer_default", "_producer_default", "fetch", "limits", "produce")

    def __init__(
        self,
        producer_default: int = UNLIMITED,
        consumer_default: int = UNLIMITED,
        window: Window = DEFAULT_WINDOW,
    ) -> None:
        self._producer_default = producer_default
        self._consumer_default = consumer_default
        self.produce = ByteQuota(producer_default, window)
        self.fetch = ByteQuota(consumer_default, window)
        self.limits: ClientLimits = {}

    def apply(self, limits: ClientLimits) -> None:
        """The whole of what is set in the cluster; it replaces what was there before."""
        self.limits = limits
        for quota, key, own in (
            (self.produce, PRODUCER_BYTE_RATE, self._producer_default),
            (self.fetch, CONSUMER_BYTE_RATE, self._consumer_default),
        ):
            by_client = {name: values[key] for name, values in limits.items() if name and key in values}
            quota.set_limits(limits.get(None, {}).get(key, own), by_client)
