"""Which records of a batch its producer is told of when the whole of it is refused (KIP-467). Pure.

A batch is taken or refused as a whole. Where single records are at fault, its producer can mend just those
and send the others again, if it is told which they are: to clients the others have failed for their company
only. Called by `batch_validation.py` once it knows that a batch is refused.
"""

from __future__ import annotations

from millrace.broker.errors import InvalidRecord, InvalidTimestamp
from millrace.broker.protocol.batch import NO_TIMESTAMP, BatchHeader
from millrace.broker.protocol.records import Refusal, refused_records
from millrace.broker.storage.log_config import LogConfig

_MIN_LONG, _MAX_LONG = -(2**63), 2**63 - 1


def takes_timestamps(least: int, greatest: int, config: LogConfig, now_ms: int) -> bool:
    """Whether timestamps from `least` to `greatest` may be written. A missing one may."""
    if greatest > _MAX_LONG or greatest - now_ms > config.timestamp_after_max_ms:
        return False
    return least == NO_TIMESTAMP or now_ms - least <= config.timestamp_before_max_ms


def refusal_of_records(
    section: memoryview, header: BatchHeader, config: LogConfig, now_ms: int
) -> InvalidRecord | InvalidTimestamp:
    """The error for a batch some of whose records the topic does not take, with all of them named.

    `section` are the records, decompressed and found whole. As in Apache Kafka the error is InvalidTimestamp
    where any record's time is at fault.
    """
    base = header.base_timestamp
    times = range(_MIN_LONG, _MAX_LONG + 1)
    if config.timestamp_type == "CreateTime":
        least = min(max(now_ms - config.timestamp_before_max_ms - base, _MIN_LONG), _MAX_LONG)
        greatest = min(now_ms + config.timestamp_after_max_ms, _MAX_LONG) - base
        times = range(least, min(greatest, _MAX_LONG) + 1)
    found = refused_records(
        section,
        header.record_count,
        keys_required=config.is_compacted,
        times=times,
        unset=NO_TIMESTAMP - base,
    )
    reasons = {reason: _sentence(reason, config) for reason in {reason for _, reason in found}}
    named = tuple((place, f"record {place}: {reasons[reason]}") for place, reason in found)
    kind = InvalidTimestamp if reasons.keys() & {"too old", "too new"} else InvalidRecord
    others = f" (and {len(named) - 1} more are refused)" if len(named) > 1 else ""
    error = kind(named[0][1] + others if named else "records of the batch are refused")
    error.record_errors = named
    return error


def _sentence(reason: Refusal, config: LogConfig) -> str:
    match reason:
        case "no key":
            return "it has no key, and the topic is compacted"
        case "too old":
            return (
                "its timestamp is more than message.timestamp.before.max.ms = "
                f"{config.timestamp_before_max_ms} before the broker's clock"
            )
        case "too new":
            return (
                "its timestamp is more than message.timestamp.after.max.ms = "
                f"{config.timestamp_after_max_ms} after the broker's clock"
            )
