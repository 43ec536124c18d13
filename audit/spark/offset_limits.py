"""Where a read of a topic begins and ends in each partition, by the rules of Spark's Kafka connector. Pure.

`kafka_options` makes `Limit`s of what the user gave, `pinning` asks the cluster for what they need and calls
`bounds_of`. Rules:

- offsets that are given one by one name every partition that is read, and no other;
- a time is the first offset at or after it; where no record is as young, an end is the log's end, and a start
  is refused or the log's end, as `startingOffsetsByTimestampStrategy` says;
- what is asked for and not there (retention took it, the log is shorter) fails the read, or with
  `failOnDataLoss` false is left out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millrace.broker.errors import ConfigError
from millrace.broker.protocol.topic_partition import TopicPartition

EARLIEST, LATEST = -2, -1
NONE_SO_YOUNG = -1
"""The offset that a cluster gives for a time after its last record."""

Bounds = tuple[int, int]
"""[first offset, end offset)"""


@dataclass(frozen=True, slots=True)
class Limit:
    """One end of a read, as the user gave it: `offsets` or `times_ms` by partition, or one `time_ms` for all;
    none of them is `default`, EARLIEST or LATEST. `option` is its name, for errors."""

    option: str
    default: int
    offsets: Mapping[TopicPartition, int] | None = None
    times_ms: Mapping[TopicPartition, int] | None = None
    time_ms: int | None = None
    or_latest: bool = False

    def asked_times(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Which times the cluster must be asked for. Raises ConfigError."""
        if self.time_ms is not None:
            return dict.fromkeys(partitions, self.time_ms)
        if self.times_ms is None:
            return {}
        _check_complete(self.option, self.times_ms, partitions)
        return dict(self.times_ms)


def bounds_of(
    logs: Mapping[TopicPartition, Bounds],
    start: Limit,
    end: Limit,
    started: Mapping[TopicPartition, int],
    ended: Mapping[TopicPartition, int],
    fail_on_loss: bool,
) -> dict[TopicPartition, Bounds]:
    """What is read of each partition, from the bounds of its log; `started` and `ended` are the offsets that
    the cluster gave for the limits' times. Raises ConfigError."""
    for limit in (start, end):
        if limit.offsets is not None:
            _check_complete(limit.option, limit.offsets, logs)
    found = {}
    for key, (log_start, log_end) in logs.items():
        first = _offset(start, key, log_start, log_end, started, fail_on_loss)
        last = _offset(end, key, log_start, log_end, ended, fail_on_loss)
        if first > last and start.offsets is not None and end.offsets is not None:
            raise ConfigError(f"option {end.option}, {_name(key)}", last, f"an offset from {first} on")
        found[key] = (first, max(first, last))
    return found


def _offset(
    limit: Limit,
    key: TopicPartition,
    log_start: int,
    log_end: int,
    by_time: Mapping[TopicPartition, int],
    fail_on_loss: bool,
) -> int:
    if key in by_time:
        offset = by_time[key]
        if offset == NONE_SO_YOUNG and not limit.or_latest:
            time_ms = limit.time_ms if limit.times_ms is None else limit.times_ms[key]
            raise ConfigError(
                f"option {limit.option}, {_name(key)}",
                time_ms,
                "a time that some record is as young as, or startingOffsetsByTimestampStrategy latest",
            )
        return log_end if offset == NONE_SO_YOUNG else min(max(offset, log_start), log_end)
    offset = limit.default if limit.offsets is None else limit.offsets[key]
    if offset in (EARLIEST, LATEST):
        return log_start if offset == EARLIEST else log_end
    if fail_on_loss and not log_start <= offset <= log_end:
        raise ConfigError(
            f"option {limit.option}, {_name(key)}",
            offset,
            f"an offset from {log_start} to {log_end}, which is what the log holds, or failOnDataLoss false",
        )
    return min(max(offset, log_start), log_end)


def _check_complete(
    option: str, given: Mapping[TopicPartition, int], partitions: Iterable[TopicPartition]
) -> None:
    read = set(partitions)
    for missing in sorted(read - set(given)):
        raise ConfigError(f"option {option}", f"nothing for {_name(missing)}", "every partition that is read")
    for other in sorted(set(given) - read):
        raise ConfigError(f"option {option}", _name(other), "none but the partitions that are read")


def _name(key: TopicPartition) -> str:
    return f"{key[0]}-{key[1]}"
