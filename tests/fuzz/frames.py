"""Frames that a broker should survive: valid requests of every API and version, and what becomes of them.

`Seeds` makes valid requests with `kio` (and the hand-written codecs, where there is no schema) from a seeded
generator: the same seed gives the same frames. `mutate` breaks one: bytes, lengths, counts, cuts, copies,
splices; record batches are also broken inside, with a checksum that fits again, so that the damage reaches
what reads records.
"""

from __future__ import annotations

import dataclasses
import random
import struct
import uuid
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from crc32c import crc32c

from millrace.broker.protocol.compression import CODEC_IDS
from millrace.broker.protocol.frames import Api, encode_request
from millrace.broker.protocol.hot_fetch import FetchRequest, PartitionFetch
from millrace.broker.protocol.hot_fetch import encode_request as encode_fetch
from millrace.broker.protocol.hot_produce import encode_request as encode_produce
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.server.answers import build_entity, request_type
from millrace.broker.server.dispatch import Handler

TOPICS = ("fuzz-0", "fuzz-1", "fuzz-2")
NAMES = (*TOPICS, "", "no-such-topic", "__consumer_offsets", "a/b", ".", "ü" * 40, "x" * 300)
GROUPS = tuple(f"group-{number}" for number in range(8))
CLIENTS = ("fuzz", None, "", "c" * 100)

EDGES_32 = (-1, -2, 0, 1, 2, 127, 128, 255, 256, 32_767, 32_768, 65_536, 2**24, 2**31 - 1, -(2**31))
EDGES_16 = (-1, -2, 0, 1, 255, 256, 32_767, -32_768)
EDGES_64 = (*EDGES_32, 2**63 - 1, -(2**63), 2**40)

CRC_POSITION, CRC_BEGIN = 17, 21

# A request that changes the cluster costs milliseconds of ZooKeeper's time: one of these for so many others.
RARE = {
    Api.CREATE_TOPICS: 200,
    Api.CREATE_PARTITIONS: 400,
    Api.DELETE_TOPICS: 400,
    Api.ALTER_CONFIGS: 200,
    Api.INCREMENTAL_ALTER_CONFIGS: 200,
    Api.ALTER_CLIENT_QUOTAS: 200,
    Api.ALTER_PARTITION_REASSIGNMENTS: 200,
    Api.ELECT_LEADERS: 200,
    Api.DELETE_RECORDS: 20,
    Api.JOIN_GROUP: 20,
    Api.INIT_PRODUCER_ID: 50,
    Api.ADD_PARTITIONS_TO_TXN: 20,
    Api.ADD_OFFSETS_TO_TXN: 50,
    Api.END_TXN: 50,
    Api.OFFSET_COMMIT: 10,
    Api.TXN_OFFSET_COMMIT: 20,
    Api.WRITE_TXN_MARKERS: 20,
    Api.DESCRIBE_CONFIGS: 10,
    Api.METADATA: 3,
}


class Seeds:
    """Valid requests for the given handlers. `topic_ids` are ids that exist."""

    def __init__(
        self, handlers: Sequence[Handler], rng: random.Random, topic_ids: Sequence[uuid.UUID] = ()
    ) -> None:
        self._rng = rng
        self._topic_ids = [*topic_ids, uuid.UUID(int=0), uuid.UUID(int=7)]
        self._kinds = [(handler.api_key, version) for handler in handlers for version in handler.versions]
        self._weights = [
            (20 if key in (Api.PRODUCE, Api.FETCH) else 1) / RARE.get(Api(key), 1) for key, _ in self._kinds
        ]

    def next(self) -> bytes:
        """One frame, size included."""
        ((api_key, version),) = self._rng.choices(self._kinds, self._weights)
        return self.frame(api_key, version)

    def frame(self, api_key: int, version: int) -> bytes:
        if api_key == Api.PRODUCE:
            return self._produce(version)
        if api_key == Api.FETCH:
            return self._fetch(version)
        if (api_key, version) == (Api.LIST_OFFSETS, 0):
            return self._list_offsets_v0()
        request = build_entity(
            request_type(api_key, version), self._fields(request_type(api_key, version), api_key)
        )
        return bytes(encode_request(request, self._rng.randrange(2**31), self._rng.choice(CLIENTS)))

    def _fields(self, entity: type[Any], api_key: int) -> dict[str, Any]:
        return {field.name: self._value(field, field.type, api_key) for field in dataclasses.fields(entity)}

    def _value(self, field: Any, annotation: Any, api_key: int) -> Any:
        rng, origin, name = self._rng, get_origin(annotation), field.name
        if origin in (UnionType, Union):
            if rng.random() < 0.2:
                return None
            annotation = next(part for part in get_args(annotation) if part is not NoneType)
            return self._value(field, annotation, api_key)
        if origin is tuple:
            return [
                self._value(field, get_args(annotation)[0], api_key) for _ in range(rng.choice([0, 1, 1, 2]))
            ]
        if dataclasses.is_dataclass(annotation):
            return self._fields(annotation, api_key)  # type: ignore[arg-type]
        kind = field.metadata.get("kafka_type", "")
        if kind.startswith("timedelta"):
            return rng.choice([0, 1, 5, 20]) if "session" not in name else rng.choice([0, 100, 6_000])
        return self._plain(kind, name)

    def _plain(self, kind: str, name: str) -> Any:
        rng = self._rng
        match kind:
            case "string":
                if "group" in name:
                    return rng.choice(GROUPS)
                if "topic" in name or name == "name":
                    return rng.choice(NAMES if rng.random() < 0.3 else TOPICS)
                return rng.choice(("", "range", "consumer", "x", "member-1", "ü"))
            case "bool":
                return name == "validate_only" or rng.random() < 0.5
            case "uuid":
                return rng.choice(self._topic_ids)
            case "bytes" | "records":
                return rng.randbytes(rng.choice([0, 1, 30]))
            case "float64":
                return rng.choice([0.0, -1.0, 1e9, 1.5])
            case "int8":
                return rng.choice([0, 1, 2, 4])
            case "int16" | "int32":
                # Never many partitions or replicas by request: that is asked for by mutation, and refused.
                return rng.choice([-1, 0, 1, 2, 3])
            case "int64":
                return rng.choice([-2, -1, 0, 1, 5, 1_700_000_000_000])
            case _:
                return 0

    def batch(self) -> bytearray:
        """A record batch, compressed or not, now and then idempotent."""
        rng = self._rng
        records = [
            Record(
                key=rng.choice([None, b"", b"key"]),
                value=rng.choice([None, b"", rng.randbytes(rng.choice([1, 20, 300]))]),
                headers=(("h", rng.choice([None, b"", b"v"])),) * rng.choice([0, 0, 1, 3]),
                timestamp_ms=1_700_000_000_000 + number,
                offset=number,
            )
            for number in range(rng.choice([1, 1, 2, 30]))
        ]
        codec = rng.choice([0, 0, 0, *CODEC_IDS.values()])
        identity: dict[str, Any] = {}
        if rng.random() < 0.2:
            identity = {
                "producer_id": rng.randrange(5),
                "producer_epoch": 0,
                "base_sequence": rng.randrange(3),
            }
        return build_batch(records, compression=codec, **identity)

    def _produce(self, version: int) -> bytes:
        rng = self._rng
        batches: dict[tuple[str, int], Any] = {}
        for _ in range(rng.choice([1, 1, 2])):
            where = (rng.choice(NAMES if rng.random() < 0.1 else TOPICS), rng.choice([0, 0, 0, 1, 7]))
            batches[where] = broken_inside(self.batch(), rng) if rng.random() < 0.3 else self.batch()
        return b"".join(
            encode_produce(
                version,
                rng.randrange(2**31),
                rng.choice(("fuzz", "")),
                batches,
                acks=rng.choice([-1, 0, 1, 1, 1, 5]),
                timeout_ms=rng.choice([0, 20]),
                transactional_id=rng.choice([None] * 9 + ["txn"]),
            )
        )

    def _fetch(self, version: int) -> bytes:
        rng = self._rng

        def topic() -> Any:
            return rng.choice(self._topic_ids) if version >= 13 else rng.choice(TOPICS)

        asked = [
            PartitionFetch(
                topic(),
                rng.choice([0, 0, 0, 1, -1]),
                rng.choice([-1, 0, 1, 10, 10**9]),
                rng.choice([0, 1, 1_000, 1 << 20, -1]),
                rng.choice([-1, 0, 1]),
                rng.choice([-1, -1, 0]),
            )
            for _ in range(rng.choice([0, 1, 1, 2]))
        ]
        request = FetchRequest(
            rng.choice([0, 0, 0, 5]),
            rng.choice([0, 1, 1 << 30]),
            rng.choice([0, 1, 1 << 20, 2**31 - 1]),
            rng.random() < 0.3,
            asked,
            rng.choice([0, 0, 5]),
            rng.choice([-1, -1, 0, 1]),
            [(topic(), 0)] if rng.random() < 0.1 else (),
            "",
            rng.choice([-1] * 9 + [1]),
        )
        return encode_fetch(version, rng.randrange(2**31), "fuzz", request)

    def _list_offsets_v0(self) -> bytes:
        rng = self._rng
        name = rng.choice(TOPICS).encode()
        body = struct.pack(">iih", -1, 1, len(name)) + name
        body += struct.pack(
            ">iiqi", 1, rng.choice([0, 9]), rng.choice([-1, -2, -3, 0, 10**13]), rng.choice(EDGES_32)
        )
        head = struct.pack(">hhih", Api.LIST_OFFSETS, 0, 1, 4) + b"fuzz"
        return struct.pack(">i", len(head) + len(body)) + head + body


def broken_inside(batch: bytearray, rng: random.Random) -> bytes:
    """A batch whose checksum fits although something in it does not; at times its length lies, too."""
    damaged = bytearray(_damaged(bytes(batch[CRC_BEGIN:]), rng))
    out = batch[:CRC_BEGIN] + damaged
    struct.pack_into(">I", out, CRC_POSITION, crc32c(bytes(damaged)))
    if rng.random() < 0.7:
        struct.pack_into(">i", out, 8, len(out) - 12)
    return bytes(out)


def mutate(frame: bytes, other: bytes, rng: random.Random) -> bytes:
    """What a broken, hostile or confused peer may send instead of `frame`; `other` is to be mixed in."""
    match rng.randrange(12):
        case 0:
            return frame
        case 1:
            return rng.randbytes(rng.choice([1, 4, 8, 40, 500]))
        case 2:
            return struct.pack(">i", rng.choice(EDGES_32)) + frame[4:]
        case 3:
            return frame[: rng.randrange(len(frame))]
        case 4:
            return _sized(struct.pack(">hh", rng.randrange(-1, 80), rng.randrange(-1, 20)) + frame[8:])
        case 5:
            cut = rng.randrange(4, len(frame))
            return _sized(frame[4:cut] + other[rng.randrange(4, len(other)) :])
        case 6:
            return _sized(frame[4:] + rng.randbytes(rng.randrange(1, 60)))
        case _:
            # The header's fixed part stays, so that the body is what is looked at.
            return _sized(frame[4:12] + _damaged(frame[12:], rng))


def _sized(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def _damaged(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        if len(out) < 9:
            return bytes(out) + rng.randbytes(4)
        at = rng.randrange(len(out) - 8)
        match rng.randrange(9):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                struct.pack_into(">i", out, at, rng.choice(EDGES_32))
            case 3:
                struct.pack_into(">h", out, at, rng.choice(EDGES_16))
            case 4:
                struct.pack_into(">q", out, at, rng.choice(EDGES_64))
            case 5:
                out[at : at + rng.choice([1, 4, 8])] = b"\xff" * rng.choice([1, 5, 9])
            case 6:
                del out[at : at + rng.choice([1, 2, 8, 50])]
            case 7:
                size = rng.choice([1, 4, 30])
                out[at:at] = out[at : at + size]
            case _:
                del out[at:]
    return bytes(out)
