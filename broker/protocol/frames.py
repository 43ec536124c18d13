"""Frames: what stands around every message on a connection.

A frame is a size (i32, not counting itself) and that many bytes: a header, then a message. Functions that
decode take the bytes *after* the size; functions that encode return the size with them, ready to send.

A request's header has API key, version, correlation id and client id, and tagged fields in the flexible
versions of an API; a response's header has the correlation id, and tagged fields in flexible versions.
One exception: the response to ApiVersions never has tagged fields in its header, because a client that is
told "unsupported version" (code 35) must be able to read it before it knows what the broker speaks.

Called by the server's connections and the client's. Messages come from `kio`, except produce and fetch,
which `hot_produce.py` and `hot_fetch.py` write by hand. Pure.
"""

from __future__ import annotations

import enum
import struct
from io import BytesIO
from typing import Any, NamedTuple, TypeVar

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError

from millrace.broker.errors import ProtocolError
from millrace.broker.protocol.entity_shape import NO_LIMIT, checked
from millrace.broker.protocol.gradual_reader import gradual_reader
from millrace.broker.protocol.wire import read_bytes, skip_tagged_fields

Entity = TypeVar("Entity")

SIZE_PREFIX = struct.Struct(">i")
_REQUEST_HEAD = struct.Struct(">hhih")
_CORRELATION = struct.Struct(">i")


class Api(enum.IntEnum):
    """API keys of the protocol that a broker or a client of this project may meet."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    CREATE_DELEGATION_TOKEN = 38
    RENEW_DELEGATION_TOKEN = 39
    EXPIRE_DELEGATION_TOKEN = 40
    DESCRIBE_DELEGATION_TOKEN = 41
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    ALTER_PARTITION = 56
    UPDATE_FEATURES = 57
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    GET_TELEMETRY_SUBSCRIPTIONS = 71
    PUSH_TELEMETRY = 72
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75


_NEVER = 1 << 15

# First version of each API with compact types and tagged fields. A table, so that deciding how to read a
# header loads no schema; a test compares it with the schemas.
FIRST_FLEXIBLE_VERSION: dict[int, int] = {
    Api.PRODUCE: 9,
    Api.FETCH: 12,
    Api.LIST_OFFSETS: 6,
    Api.METADATA: 9,
    Api.OFFSET_COMMIT: 8,
    Api.OFFSET_FETCH: 6,
    Api.FIND_COORDINATOR: 3,
    Api.JOIN_GROUP: 6,
    Api.HEARTBEAT: 4,
    Api.LEAVE_GROUP: 4,
    Api.SYNC_GROUP: 4,
    Api.DESCRIBE_GROUPS: 5,
    Api.LIST_GROUPS: 3,
    Api.SASL_HANDSHAKE: _NEVER,
    Api.API_VERSIONS: 3,
    Api.CREATE_TOPICS: 5,
    Api.DELETE_TOPICS: 4,
    Api.DELETE_RECORDS: 2,
    Api.INIT_PRODUCER_ID: 2,
    Api.OFFSET_FOR_LEADER_EPOCH: 4,
    Api.ADD_PARTITIONS_TO_TXN: 3,
    Api.ADD_OFFSETS_TO_TXN: 3,
    Api.END_TXN: 3,
    Api.WRITE_TXN_MARKERS: 1,
    Api.TXN_OFFSET_COMMIT: 3,
    Api.DESCRIBE_ACLS: 2,
    Api.CREATE_ACLS: 2,
    Api.DELETE_ACLS: 2,
    Api.DESCRIBE_CONFIGS: 4,
    Api.ALTER_CONFIGS: 2,
    Api.ALTER_REPLICA_LOG_DIRS: 2,
    Api.DESCRIBE_LOG_DIRS: 2,
    Api.SASL_AUTHENTICATE: 2,
    Api.CREATE_PARTITIONS: 2,
    Api.CREATE_DELEGATION_TOKEN: 2,
    Api.RENEW_DELEGATION_TOKEN: 2,
    Api.EXPIRE_DELEGATION_TOKEN: 2,
    Api.DESCRIBE_DELEGATION_TOKEN: 2,
    Api.DELETE_GROUPS: 2,
    Api.ELECT_LEADERS: 2,
    Api.INCREMENTAL_ALTER_CONFIGS: 1,
    Api.ALTER_PARTITION_REASSIGNMENTS: 0,
    Api.LIST_PARTITION_REASSIGNMENTS: 0,
    Api.OFFSET_DELETE: _NEVER,
    Api.DESCRIBE_CLIENT_QUOTAS: 1,
    Api.ALTER_CLIENT_QUOTAS: 1,
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: 0,
    Api.ALTER_USER_SCRAM_CREDENTIALS: 0,
    Api.ALTER_PARTITION: 0,
    Api.UPDATE_FEATURES: 0,
    Api.DESCRIBE_CLUSTER: 0,
    Api.DESCRIBE_PRODUCERS: 0,
    Api.DESCRIBE_TRANSACTIONS: 0,
    Api.LIST_TRANSACTIONS: 0,
    Api.CONSUMER_GROUP_HEARTBEAT: 0,
    Api.CONSUMER_GROUP_DESCRIBE: 0,
    Api.GET_TELEMETRY_SUBSCRIPTIONS: 0,
    Api.PUSH_TELEMETRY: 0,
    Api.LIST_CONFIG_RESOURCES: 0,
    Api.DESCRIBE_TOPIC_PARTITIONS: 0,
}
# Plain ints: the lookup is on the path of every request.
_FIRST_FLEXIBLE = {int(api): version for api, version in FIRST_FLEXIBLE_VERSION.items()}


def is_flexible(api_key: int, version: int) -> bool:
    """Whether this version of the API uses compact types and tagged fields. False for unknown keys."""
    return version >= _FIRST_FLEXIBLE.get(api_key, _NEVER)


class RequestHead(NamedTuple):
    """A request's header. `api_key` may be any number a peer sends."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None


def decode_request(frame: memoryview) -> tuple[RequestHead, int]:
    """The header of a request and the position of its body. Raises ProtocolError."""
    try:
        api_key, version, correlation_id, client_id_size = _REQUEST_HEAD.unpack_from(frame)
    except struct.error:
        raise ProtocolError(f"request of {len(frame)} bytes is too short for a header") from None
    position = 10
    client_id: str | None = None
    if client_id_size >= 0:
        view, position = read_bytes(frame, position, client_id_size)
        client_id = str(view, "utf-8", "replace")  # as Apache Kafka; it is a name for people
    elif client_id_size != -1:
        raise ProtocolError(f"client id announces {client_id_size} bytes")
    if version >= _FIRST_FLEXIBLE.get(api_key, _NEVER):
        position = skip_tagged_fields(frame, position)
    return RequestHead(api_key, version, correlation_id, client_id), position


def decode_entity(
    entity_type: type[Entity],
    buffer: memoryview | bytes,
    position: int,
    *,
    most_items: int = NO_LIMIT,
    gradually: bool = False,
) -> Entity:
    """One `kio` entity at `position`; `gradually`: on a thread, beside which others go on. Raises
    ProtocolError when the bytes are not such an entity, or when it holds more than `most_items` array items
    and tagged fields."""
    # The native reader insists on a read-only buffer; what it keeps of the bytes it copies. It must not see
    # a count before that has been checked: it takes the memory that is announced, or ends the process.
    view = memoryview(buffer).toreadonly()
    reader = gradual_reader(entity_type) if gradually else _reader(entity_type)
    try:
        entity, _ = reader(*checked(entity_type, view, position, most_items))
    except _UNREADABLE:
        try:
            entity, _ = reader(*checked(entity_type, view, position, most_items, mends=True))
        except _UNREADABLE as error:
            raise ProtocolError(f"{entity_type.__name__} cannot be read: {error}") from None
    return entity


def encode_response(head: RequestHead, response: Any) -> bytes:
    """The frame, size included, that answers the request of `head` with a `kio` response."""
    return _encode(_CORRELATION.pack(head.correlation_id), response)


def encode_request(request: Any, correlation_id: int, client_id: str | None) -> bytes:
    """The frame, size included, of a `kio` request."""
    cls = type(request)
    encoded = b"" if client_id is None else client_id.encode()
    size = -1 if client_id is None else len(encoded)
    head = _REQUEST_HEAD.pack(cls.__api_key__, cls.__version__, correlation_id, size)
    return _encode(head + encoded, request)


def decode_response(entity_type: type[Entity], frame: memoryview) -> Entity:
    """The `kio` response in a frame whose type is known from its correlation id. Raises ProtocolError."""
    position = response_body_position(frame, entity_type.__header_schema__.__version__ > 0)  # type: ignore[attr-defined]
    return decode_entity(entity_type, frame, position)


def response_body_position(frame: memoryview, tagged_header: bool) -> int:
    """Position of a response's body; `tagged_header` where the response is flexible (not ApiVersions)."""
    return skip_tagged_fields(frame, 4) if tagged_header else 4


def _encode(head: bytes, entity: Any) -> bytes:
    cls = type(entity)
    out = BytesIO()
    out.write(b"\x00\x00\x00\x00")
    out.write(head)
    header_version = cls.__header_schema__.__version__
    # Header versions with tagged fields: 2 of a request's, 1 of a response's. Ours are always empty.
    if header_version == 2 or (header_version == 1 and cls.__type__.name == "response"):
        out.write(b"\x00")
    _writer(cls)(out, entity)
    size = out.tell() - SIZE_PREFIX.size
    out.seek(0)
    out.write(SIZE_PREFIX.pack(size))
    return out.getvalue()


_UNREADABLE = (SerialError, ValueError, LookupError, OverflowError)

# What `kio` makes of an entity's type, made once.
_readers: dict[type[Any], Any] = {}
_writers: dict[type[Any], Any] = {}


def _reader(entity_type: type[Any]) -> Any:
    reader = _readers.get(entity_type)
    if reader is None:
        reader = _readers[entity_type] = entity_reader(entity_type)
    return reader


def _writer(entity_type: type[Any]) -> Any:
    writer = _writers.get(entity_type)
    if writer is None:
        writer = _writers[entity_type] = entity_writer(entity_type)
    return writer
