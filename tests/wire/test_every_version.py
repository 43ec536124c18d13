"""Every API in every version that the broker advertises, asked of both servers: the same error codes.

The hand-written messages of produce and fetch have their own tests. The requests here are about what is not
there (a topic, a group, a transactional id) or change nothing, so that they can be asked in every version,
of a server that others use too; what each API does is tested elsewhere, in the versions that clients choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from millrace.broker.protocol.frames import Api
from millrace.broker.server.registry import MODULES
from tests.raw_client import RawClient
from tests.wire.foreign_clients import error_name, wait_until

NO_COORDINATOR = {"COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "NOT_COORDINATOR"}
BY_FRAMES = {Api.PRODUCE, Api.FETCH}
FIRST_WITH_SCHEMA = {Api.LIST_OFFSETS: 1, Api.METADATA: 4}
"""ListOffsets 0 is written by hand; before Metadata 4 whoever asks for a topic makes it."""
NOBODY, NOTHING, NO_ID = "nobody", "nothing", "no-transactional-id"
PARTITIONS = [{"partition_index": 0}]
TOPIC, BROKER = 2, 4
PRODUCER = {"producer_id": 7, "producer_epoch": 0}
OLD_TRANSACTION = {
    "v3_and_below_transactional_id": NO_ID,
    "v3_and_below_producer_id": 7,
    "v3_and_below_producer_epoch": 0,
    "v3_and_below_topics": [{"name": NOTHING, "partitions": [0]}],
}
NEW_TRANSACTION = {
    "transactional_id": NO_ID,
    **PRODUCER,
    "verify_only": True,
    "topics": [{"name": NOTHING, "partitions": [0]}],
}
OFFSET = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": ""}
SETTING = {"name": "retention.ms", "value": "1"}

REQUESTS: dict[Api, dict[str, Any]] = {
    Api.LIST_OFFSETS: {
        "replica_id": -1,
        "topics": [{"name": NOTHING, "partitions": [{"partition_index": 0, "timestamp": -1}]}],
    },
    Api.METADATA: {"topics": [{"name": NOTHING}], "allow_auto_topic_creation": False},
    Api.OFFSET_COMMIT: {
        "group_id": NOBODY,
        "generation_id_or_member_epoch": -1,
        "topics": [{"name": NOTHING, "partitions": [OFFSET]}],
    },
    Api.OFFSET_FETCH: {
        "group_id": NOBODY,
        "topics": [{"name": NOTHING, "partition_indexes": [0]}],
        "groups": [{"group_id": NOBODY, "topics": [{"name": NOTHING, "partition_indexes": [0]}]}],
    },
    Api.FIND_COORDINATOR: {"key": NOBODY, "coordinator_keys": [NOBODY]},
    Api.JOIN_GROUP: {
        "group_id": NOBODY,
        "member_id": "stranger",
        "session_timeout": 10_000,
        "rebalance_timeout": 10_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"m"}],
    },
    Api.HEARTBEAT: {"group_id": NOBODY, "generation_id": 1, "member_id": "stranger"},
    Api.LEAVE_GROUP: {
        "group_id": NOBODY,
        "member_id": "stranger",
        "members": [{"member_id": "stranger"}],
    },
    Api.SYNC_GROUP: {
        "group_id": NOBODY,
        "generation_id": 1,
        "member_id": "stranger",
        "protocol_type": "consumer",
        "protocol_name": "range",
    },
    Api.DESCRIBE_GROUPS: {"groups": [NOBODY]},
    Api.LIST_GROUPS: {},
    Api.API_VERSIONS: {"client_software_name": "wire", "client_software_version": "1"},
    Api.CREATE_TOPICS: {
        "topics": [{"name": NOTHING, "num_partitions": 1, "replication_factor": 5}],
        "timeout": 5_000,
        "validate_only": True,
    },
    Api.DELETE_TOPICS: {
        "topic_names": [NOTHING],
        "topics": [{"name": NOTHING}],
        "timeout": 5_000,
    },
    Api.DELETE_RECORDS: {
        "topics": [{"name": NOTHING, "partitions": [{"partition_index": 0, "offset": 1}]}],
        "timeout": 5_000,
    },
    Api.INIT_PRODUCER_ID: {"transactional_id": None, "transaction_timeout": 5_000},
    Api.OFFSET_FOR_LEADER_EPOCH: {
        "replica_id": -1,
        "topics": [{"topic": NOTHING, "partitions": [{"partition": 0, "leader_epoch": 0}]}],
    },
    Api.ADD_PARTITIONS_TO_TXN: {**OLD_TRANSACTION, "transactions": [NEW_TRANSACTION]},
    Api.ADD_OFFSETS_TO_TXN: {"transactional_id": NO_ID, **PRODUCER, "group_id": NOBODY},
    Api.END_TXN: {"transactional_id": NO_ID, **PRODUCER, "committed": True},
    Api.WRITE_TXN_MARKERS: {
        "markers": [
            {
                **PRODUCER,
                "transaction_result": True,
                "coordinator_epoch": 0,
                "topics": [{"name": NOTHING, "partition_indexes": [0]}],
            }
        ]
    },
    Api.TXN_OFFSET_COMMIT: {
        "transactional_id": NO_ID,
        "group_id": NOBODY,
        **PRODUCER,
        "topics": [{"name": NOTHING, "partitions": [OFFSET]}],
    },
    Api.DESCRIBE_CONFIGS: {
        "resources": [
            {"resource_type": TOPIC, "resource_name": NOTHING, "configuration_keys": None},
            {"resource_type": BROKER, "resource_name": "1", "configuration_keys": ["num.partitions"]},
        ]
    },
    Api.ALTER_CONFIGS: {
        "resources": [{"resource_type": TOPIC, "resource_name": NOTHING, "configs": [SETTING]}]
    },
    Api.DESCRIBE_LOG_DIRS: {"topics": [{"topic": NOTHING, "partitions": [0]}]},
    Api.CREATE_PARTITIONS: {"topics": [{"name": NOTHING, "count": 3}], "timeout": 5_000},
    Api.DELETE_GROUPS: {"groups_names": [NOBODY]},
    Api.ELECT_LEADERS: {
        "election_type": 0,
        "topic_partitions": [{"topic": NOTHING, "partitions": [0]}],
        "timeout": 5_000,
    },
    Api.INCREMENTAL_ALTER_CONFIGS: {
        "resources": [
            {
                "resource_type": TOPIC,
                "resource_name": NOTHING,
                "configs": [{**SETTING, "config_operation": 0}],
            }
        ]
    },
    Api.ALTER_PARTITION_REASSIGNMENTS: {
        "topics": [{"name": NOTHING, "partitions": [{"partition_index": 0, "replicas": [1]}]}],
        "timeout": 5_000,
    },
    Api.LIST_PARTITION_REASSIGNMENTS: {"topics": None, "timeout": 5_000},
    Api.OFFSET_DELETE: {"group_id": NOBODY, "topics": [{"name": NOTHING, "partitions": PARTITIONS}]},
    Api.DESCRIBE_CLIENT_QUOTAS: {
        "components": [{"entity_type": "client-id", "match_type": 0, "match": NOBODY}],
        "strict": False,
    },
    Api.ALTER_CLIENT_QUOTAS: {
        "entries": [
            {
                "entity": [{"entity_type": "client-id", "entity_name": NOBODY}],
                "ops": [{"key": "producer_byte_rate", "value": 1e9, "remove": False}],
            }
        ],
        "validate_only": True,
    },
    Api.DESCRIBE_CLUSTER: {"endpoint_type": 1},
    Api.DESCRIBE_PRODUCERS: {"topics": [{"name": NOTHING, "partition_indexes": [0]}]},
    Api.DESCRIBE_TRANSACTIONS: {"transactional_ids": [NO_ID]},
    Api.LIST_TRANSACTIONS: {"producer_id_filters": [987_654_321]},
    Api.DESCRIBE_TOPIC_PARTITIONS: {"topics": [{"name": NOTHING}], "response_partition_limit": 10},
}


def codes_in(entity: Any) -> Iterator[tuple[str, str]]:
    """(field, name of the error) of every error code in an answer, from the outside in."""
    for field in fields(entity):
        value = getattr(entity, field.name)
        if field.name.endswith("error_code"):
            yield field.name, error_name(value)
        elif isinstance(value, tuple):
            for each in value:
                if is_dataclass(each):
                    yield from codes_in(each)


def codes_of(raw: RawClient, api: Api, version: int) -> list[tuple[str, str]]:
    """What a server answers, once its coordinators are awake."""
    found: list[tuple[str, str]] = []

    def settled() -> bool:
        found[:] = codes_in(raw.ask(api, version, **REQUESTS[api]))
        return not {name for _, name in found} & NO_COORDINATOR

    wait_until(settled, f"{api.name} version {version}")
    return found


def answers_of(bootstrap: str) -> dict[str, list[tuple[str, str]]]:
    """By API and version: the error codes of this server's answer."""
    found: dict[str, list[tuple[str, str]]] = {}
    with RawClient(int(bootstrap.rpartition(":")[2])) as raw:
        for key_type in (0, 1):  # who looks for coordinators first makes their topics
            raw.ask(Api.FIND_COORDINATOR, 4, key_type=key_type, coordinator_keys=[NOBODY])
        for module in MODULES:
            api = Api(module.API)
            for version in module.VERSIONS if api not in BY_FRAMES else ():
                if version >= FIRST_WITH_SCHEMA.get(api, 0):
                    found[f"{api.name} {version}"] = codes_of(raw, api, version)
    return found


@pytest.mark.java
@pytest.mark.kafka
def test_every_version_is_answered_as_apache_kafka_does(millrace_broker, kafka_peer):
    ours, theirs = answers_of(millrace_broker.bootstrap), answers_of(kafka_peer.bootstrap)
    assert len(ours) > 150
    assert {key: (ours[key], theirs[key]) for key in ours if ours[key] != theirs[key]} == {}
    said = {name for codes in ours.values() for _, name in codes}
    assert not said & {"UNKNOWN_SERVER_ERROR", "UNSUPPORTED_VERSION"}
