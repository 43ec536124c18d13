"""Every znode the brokers read or write: its path and its JSON payload, both ways.

The layout is that of Kafka 0.8 to 3.x, so tools that read ZooKeeper keep working. Pure: bytes and values
only. Paths are below the cluster's chroot.

    /cluster/id                                   persistent  {"version":"1","id":...}
    /brokers/ids/<id>                             ephemeral   host, port, endpoints, rack, leaving, ...
    /brokers/offline/<id>                         ephemeral   {"version":1,"partitions":{"t":[0,3]}}
    /brokers/topics/<topic>                       persistent  topic_id, partitions {"0":[1]}, version 3,
                                                              adding_replicas, removing_replicas
    /brokers/topics/<topic>/partitions/<n>/state  persistent  controller_epoch, leader, leader_epoch, isr
    /controller                                   ephemeral   {"version":1,"brokerid":..,"timestamp":".."}
    /controller_epoch                             persistent  a decimal number, +1 on every election
    /config/topics/<topic>, /config/brokers/<id>  persistent  {"version":1,"config":{...}}
    /admin/delete_topics                          persistent  (empty; each removal of a topic writes it)
    /admin/delete_topics/<topic>                  persistent  {"version":1,"topic_id":...}
    /admin/preferred_replica_election             persistent  {"version":1,"partitions":[{"topic":..}]}
    /admin/unclean_leader_election                persistent  the same
    /latest_producer_id_block                     persistent  broker, block_start and block_end as text

`leaving`, `/brokers/offline`, `/admin/unclean_leader_election` and what `/admin/delete_topics` holds are
additions of this project: a broker in its controlled shutdown, replicas whose disk has failed under a live
broker, the second election type of KIP-460, which Apache Kafka asked of its controller directly, and which
topic of a name is to be deleted. A topic that is made again has the versions of the one before it, so none of
them says which of the two it is; that of `/admin/delete_topics` says that none was removed in between.

A payload that cannot be understood raises ValueError: the reader names the path and goes on without it. A
topic's settings alone have a value for that (`decode_topic_config`), because the topic must not go with them.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.broker.protocol.address import Address
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.replication.partition import PartitionState
from millrace.broker.storage.log_config import UNREADABLE

BROKER_IDS = "/brokers/ids"
TOPICS = "/brokers/topics"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
TOPIC_CONFIGS = "/config/topics"
BROKER_CONFIGS = "/config/brokers"
DELETE_TOPICS = "/admin/delete_topics"
OFFLINE_REPLICAS = "/brokers/offline"
PREFERRED_ELECTION = "/admin/preferred_replica_election"
UNCLEAN_ELECTION = "/admin/unclean_leader_election"
CLUSTER_ID = "/cluster/id"
PRODUCER_ID_BLOCK = "/latest_producer_id_block"

PERSISTENT_ROOTS = (
    BROKER_IDS,
    TOPICS,
    TOPIC_CONFIGS,
    BROKER_CONFIGS,
    DELETE_TOPICS,
    OFFLINE_REPLICAS,
    "/cluster",
    "/consumers",
)
"""Folders every cluster has; made by the first broker."""

DEFAULT_BROKER = "<default>"
"""Kafka's name for the settings that every broker has unless its own say otherwise."""


def broker_path(broker_id: int) -> str:
    return f"{BROKER_IDS}/{broker_id}"


def topic_path(topic: str) -> str:
    return f"{TOPICS}/{topic}"


def partitions_path(topic: str) -> str:
    return f"{TOPICS}/{topic}/partitions"


def partition_path(topic: str, partition: int) -> str:
    return f"{TOPICS}/{topic}/partitions/{partition}"


def state_path(topic: str, partition: int) -> str:
    return f"{TOPICS}/{topic}/partitions/{partition}/state"


def topic_config_path(topic: str) -> str:
    return f"{TOPIC_CONFIGS}/{topic}"


def broker_config_path(name: str) -> str:
    """`name` is a broker's id, or `DEFAULT_BROKER` for what holds on all of them."""
    return f"{BROKER_CONFIGS}/{name}"


def offline_path(broker_id: int) -> str:
    return f"{OFFLINE_REPLICAS}/{broker_id}"


def delete_topic_path(topic: str) -> str:
    return f"{DELETE_TOPICS}/{topic}"


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """A live broker as the others see it. `leaving`: it is in its controlled shutdown and wants to lead and
    to be in sync nowhere any more. `epoch` grows from one registration to the next (the zxid that made the
    znode, as in Apache Kafka): by it a leader tells a fetch of an earlier run (KIP-903)."""

    broker_id: int
    host: str
    port: int
    rack: str | None = None
    leaving: bool = False
    epoch: int = -1


@dataclass(frozen=True, slots=True)
class TopicAssignment:
    """Which brokers keep which partition of a topic; the first of each is the preferred leader.

    While a partition moves (KIP-455) its replicas are the target and the old ones together; `adding` and
    `removing` name those that come and go. Partitions that do not move are in neither.
    """

    topic_id: uuid.UUID
    partitions: Mapping[int, tuple[int, ...]]
    adding: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    removing: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProducerIdBlock:
    """A run of producer ids handed to one broker; both ends belong to it."""

    broker_id: int
    first: int
    last: int


def _dump(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, separators=(",", ":")).encode()


def _load(data: bytes) -> dict[str, Any]:
    payload = json.loads(data)
    if not isinstance(payload, dict):
        raise ValueError("expected a JSON object")
    return payload


def encode_broker(registration: BrokerRegistration, now_ms: int) -> bytes:
    payload: dict[str, Any] = {
        "listener_security_protocol_map": {"PLAINTEXT": "PLAINTEXT"},
        "endpoints": [f"PLAINTEXT://{Address(registration.host, registration.port)}"],
        "jmx_port": -1,
        "features": {},
        "host": registration.host,
        "timestamp": str(now_ms),
        "port": registration.port,
        "version": 5,
    }
    if registration.rack is not None:
        payload["rack"] = registration.rack
    if registration.leaving:
        payload["leaving"] = True
    return _dump(payload)


def decode_broker(broker_id: int, data: bytes) -> BrokerRegistration:
    payload = _load(data)
    host, port = payload.get("host"), payload.get("port")
    if not isinstance(host, str) or not isinstance(port, int):
        raise ValueError("expected host and port")
    rack = payload.get("rack")
    return BrokerRegistration(
        broker_id, host, port, rack if isinstance(rack, str) else None, payload.get("leaving") is True
    )


def encode_topic(assignment: TopicAssignment) -> bytes:
    return _dump(
        {
            "removing_replicas": _replica_lists(assignment.removing),
            "partitions": _replica_lists(assignment.partitions),
            "topic_id": encode_uuid(assignment.topic_id),
            "adding_replicas": _replica_lists(assignment.adding),
            "version": 3,
        }
    )


def decode_topic(data: bytes) -> TopicAssignment:
    payload = _load(data)
    if not isinstance(payload.get("partitions"), dict):
        raise ValueError("expected partitions")
    topic_id = payload.get("topic_id")
    return TopicAssignment(
        decode_uuid(topic_id) if isinstance(topic_id, str) else uuid.UUID(int=0),
        _replicas(payload["partitions"]),
        _replicas(payload.get("adding_replicas")),
        _replicas(payload.get("removing_replicas")),
    )


def _replica_lists(partitions: Mapping[int, tuple[int, ...]]) -> dict[str, list[int]]:
    return {str(number): list(ids) for number, ids in sorted(partitions.items())}


def _replicas(payload: Any) -> dict[int, tuple[int, ...]]:
    try:
        return {int(number): tuple(int(broker) for broker in ids) for number, ids in (payload or {}).items()}
    except (TypeError, AttributeError) as error:
        raise ValueError(f"expected lists of broker ids: {error}") from None


def encode_uuid(value: uuid.UUID) -> str:
    """Kafka writes ids as unpadded URL-safe base64 of the 16 bytes."""
    return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


def decode_uuid(text: str) -> uuid.UUID:
    return uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


def encode_state(state: PartitionState) -> bytes:
    return _dump(
        {
            "controller_epoch": state.controller_epoch,
            "leader": state.leader,
            "version": 1,
            "leader_epoch": state.leader_epoch,
            "isr": list(state.isr),
        }
    )


def decode_state(data: bytes) -> PartitionState:
    payload = _load(data)
    try:
        return PartitionState(
            leader=int(payload["leader"]),
            leader_epoch=int(payload["leader_epoch"]),
            isr=tuple(int(broker) for broker in payload["isr"]),
            controller_epoch=int(payload["controller_epoch"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"a partition state lacks {error}") from None


def encode_controller(broker_id: int, now_ms: int) -> bytes:
    return _dump({"version": 1, "brokerid": broker_id, "timestamp": str(now_ms)})


def decode_controller(data: bytes) -> int:
    broker_id = _load(data).get("brokerid")
    if not isinstance(broker_id, int):
        raise ValueError("expected brokerid")
    return broker_id


def encode_config(config: Mapping[str, str]) -> bytes:
    return _dump({"version": 1, "config": dict(config)})


def decode_config(data: bytes) -> dict[str, str]:
    config = _load(data).get("config", {})
    if not isinstance(config, dict):
        raise ValueError("expected config")
    return {str(key): str(value) for key, value in config.items()}


def decode_topic_config(topic: str, data: bytes) -> dict[str, str]:
    """A topic's settings; where they cannot be read, the one that says so and is refused by who uses them."""
    return _config_or_mark(topic_config_path(topic), data)


def decode_broker_config(name: str, data: bytes) -> dict[str, str]:
    """Settings of one broker, or of all, as those of a topic."""
    return _config_or_mark(broker_config_path(name), data)


def _config_or_mark(path: str, data: bytes) -> dict[str, str]:
    try:
        return decode_config(data)
    except ValueError as error:
        return {UNREADABLE: f"{path} in ZooKeeper: {error}"}


def encode_deletion(topic_id: uuid.UUID) -> bytes:
    """A request to delete this very topic."""
    return _dump({"version": 1, "topic_id": encode_uuid(topic_id)})


def decode_deletion(data: bytes) -> uuid.UUID | None:
    """The topic that is to be deleted; None for whichever has the name. That is how other tools ask it: to
    Apache Kafka the znode's presence says all, and people leave any bytes in it. Raises ValueError only where
    a topic is named that nobody can tell."""
    try:
        named = _load(data).get("topic_id")
    except ValueError:
        named = None
    if named is None:
        return None
    if not isinstance(named, str):
        raise ValueError("expected topic_id to be a string")
    return decode_uuid(named)


def encode_cluster_id(cluster_id: str) -> bytes:
    return _dump({"version": "1", "id": cluster_id})


def decode_cluster_id(data: bytes) -> str:
    cluster_id = _load(data).get("id")
    if not isinstance(cluster_id, str):
        raise ValueError("expected id")
    return cluster_id


def encode_producer_id_block(block: ProducerIdBlock) -> bytes:
    return _dump(
        {
            "version": 1,
            "broker": block.broker_id,
            "block_start": str(block.first),
            "block_end": str(block.last),
        }
    )


def decode_producer_id_block(data: bytes) -> ProducerIdBlock:
    payload = _load(data)
    try:
        return ProducerIdBlock(int(payload["broker"]), int(payload["block_start"]), int(payload["block_end"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"a producer id block lacks {error}") from None


def encode_partitions(partitions: Iterable[TopicPartition]) -> bytes:
    """A request for elections: which partitions."""
    listed = [{"topic": topic, "partition": number} for topic, number in sorted(partitions)]
    return _dump({"version": 1, "partitions": listed})


def decode_partitions(data: bytes) -> frozenset[TopicPartition]:
    try:
        return frozenset((str(one["topic"]), int(one["partition"])) for one in _load(data)["partitions"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"a list of partitions lacks {error}") from None


def encode_offline(partitions: Mapping[str, Iterable[int]]) -> bytes:
    """The replicas that a live broker cannot open or write."""
    listed = {topic: sorted(numbers) for topic, numbers in sorted(partitions.items())}
    return _dump({"version": 1, "partitions": listed})


def decode_offline(data: bytes) -> frozenset[TopicPartition]:
    partitions = _load(data).get("partitions")
    if not isinstance(partitions, dict):
        raise ValueError("expected partitions")
    try:
        return frozenset((topic, int(number)) for topic, numbers in partitions.items() for number in numbers)
    except TypeError as error:
        raise ValueError(f"expected lists of partitions: {error}") from None
