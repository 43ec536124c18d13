"""What a task of the Spark source is told, and the options of a read whose ranges are pinned already. Pure.

`ReadOptions` travels to the workers. `parse_options` makes it of what the job gives to `read_pinned` (and to
the connector's reader in its place); `kafka_options` makes it of what users give to `format("millrace")`.
Names and values are text; a wrong one is one `ConfigError` line.

    ranges          JSON list of `OffsetRange`s                                required
    bootstraps      JSON {cluster: [host:port, ...]}                           required
    securities      JSON {cluster: its `security` section of audit.yaml}       default: none of them has one
    window          length of a window                                         default 60s
    tasks           how many tasks of even size to plan                        default 4
    chunk_offsets   offsets a cell may span                                    default 1048576
    fetch_max_bytes most bytes of one fetch                                    default 8388608
    digest          true: sum the records' content digests in cells            default false
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.audit.config import SHOWN, parse_addresses, parse_duration_ms
from millrace.audit.scanning.credentials import Login
from millrace.audit.spark.task_plan import OffsetRange
from millrace.broker.errors import ConfigError

CHUNK_OFFSETS = 1 << 20  # bounds what a gap or a mirror's position can leave undecided
FETCH_MAX_BYTES = 8 << 20  # large enough to hide a long round trip, small enough to hold two a worker
CELLS, RECORDS = "cells", "records"

_KNOWN = (
    "ranges",
    "bootstraps",
    "securities",
    "window",
    "tasks",
    "chunk_offsets",
    "fetch_max_bytes",
    "digest",
)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The checked options. `ranges` is None where they are pinned only when Spark plans the read.

    For records: `headers` and `identity` add columns, `read_committed` leaves out aborted transactions (cells
    never count them), `fail_on_loss` refuses offsets that are gone instead of passing over them.
    """

    bootstraps: Mapping[str, Sequence[str]]
    ranges: tuple[OffsetRange, ...] | None = None
    mode: str = CELLS
    window_ms: int = 60_000
    tasks: int = 4
    chunk_offsets: int = CHUNK_OFFSETS
    fetch_max_bytes: int = FETCH_MAX_BYTES
    securities: Mapping[str, Login] = field(default_factory=dict)
    digest: bool = False
    read_committed: bool = True
    fail_on_loss: bool = True
    headers: bool = False
    identity: bool = False


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """Check the options of a pinned read; raises ConfigError."""
    given = {name.lower(): value for name, value in options.items()}
    for name in given:
        if name not in _KNOWN:
            # Its value is not shown: it may be the password of an option that another client has.
            raise ConfigError("option", name, f"one of {', '.join(_KNOWN)}")
    bootstraps = _bootstraps(json_option(given, "bootstraps", dict))
    securities = json_option(given, "securities", dict) if "securities" in given else {}
    for name, section in securities.items():
        if name not in bootstraps or not isinstance(section, dict):
            known = ", ".join(bootstraps)
            raise ConfigError("option securities", name, f"a section for each of the clusters {known}")
    return ReadOptions(
        bootstraps=bootstraps,
        ranges=_ranges(json_option(given, "ranges", list), bootstraps),
        window_ms=parse_duration_ms("option window", given.get("window", "60s")),
        tasks=count_option(given, "tasks", 4, 1, 100_000),
        chunk_offsets=count_option(given, "chunk_offsets", CHUNK_OFFSETS, 1, 1 << 40),
        fetch_max_bytes=count_option(given, "fetch_max_bytes", FETCH_MAX_BYTES, 1 << 10, 1 << 30),
        securities=securities,
        digest=flag_option(given, "digest"),
    )


def json_option(given: Mapping[str, str], name: str, kind: type) -> Any:
    """The value of a JSON option; `given` has its name in lower case. Raises ConfigError."""
    text = given.get(name.lower(), "")
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError):
        value = None
    except _Repeated as error:
        raise ConfigError(f"option {name}", f"the key {error} twice", "it once") from None
    if not isinstance(value, kind):
        # Of security sections nothing is shown: a secret may stand where a reference belongs.
        shown = "text that is not shown" if name in ("security", "securities") else text[:SHOWN]
        raise ConfigError(f"option {name}", shown, f"a JSON {'list' if kind is list else 'object'}")
    return value


class _Repeated(Exception):
    """A key that stands twice in one JSON object, of which Python would silently take the last."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Repeated(json.dumps(key)[:SHOWN])
        found[key] = value
    return found


def flag_option(given: Mapping[str, str], name: str, default: bool = False) -> bool:
    text = given.get(name.lower(), str(default))
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"option {name}", text, "true or false")
    return text.lower() == "true"


def count_option(given: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = given.get(name.lower(), str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_number or not least <= int(text) <= most:
        raise ConfigError(f"option {name}", text[:SHOWN], f"a whole number from {least} to {most}")
    return int(text)


def _bootstraps(given: Mapping[str, Any]) -> dict[str, list[str]]:
    """{cluster: addresses}, checked."""
    found: dict[str, list[str]] = {}
    for name, addresses in given.items():
        if not isinstance(addresses, list) or not addresses or not all(type(a) is str for a in addresses):
            raise ConfigError(f"option bootstraps, {name}", addresses, "a list of host:port")
        found[name] = [each for text in addresses for each in parse_addresses("option bootstraps", text)]
    return found


def _ranges(given: Sequence[Any], bootstraps: Mapping[str, Any]) -> tuple[OffsetRange, ...]:
    """Offset ranges of known clusters, checked."""
    ranges = []
    for number, each in enumerate(given):
        where = f"option ranges[{number}]"
        try:
            range_ = OffsetRange(**each)
        except TypeError as problem:
            expected = str(problem).replace("OffsetRange.__init__() ", "")
            raise ConfigError(
                where, str(each)[:SHOWN], f"the fields of an offset range ({expected})"
            ) from problem
        numbers = (range_.partition, range_.first_offset, range_.end_offset)
        if not all(type(n) is int and n >= 0 for n in numbers) or range_.first_offset > range_.end_offset:
            raise ConfigError(where, str(each)[:SHOWN], "partition, first_offset <= end_offset, from 0")
        if range_.cluster not in bootstraps:
            raise ConfigError(
                f"{where}.cluster", range_.cluster, f"one of bootstraps ({', '.join(bootstraps)})"
            )
        ranges.append(range_)
    return tuple(ranges)
