"""What is advertised, held against Apache Kafka: clients choose their versions from this alone."""

from __future__ import annotations

import struct

import pytest
from kafka.protocol.broker_version_data import infer_broker_version_from_api_versions

from millrace.broker.protocol.frames import Api
from tests.raw_client import RawClient
from tests.wire.foreign_clients import error_name

# What Java 4.x clients need at least (KIP-896), and what Apache Kafka 3.9 speaks at most.
NEEDED: dict[Api, tuple[int, int]] = {
    Api.PRODUCE: (3, 11),
    Api.FETCH: (4, 17),
    Api.LIST_OFFSETS: (1, 9),
    Api.METADATA: (0, 12),
    Api.OFFSET_COMMIT: (2, 9),
    Api.OFFSET_FETCH: (1, 9),
    Api.FIND_COORDINATOR: (0, 6),
    Api.JOIN_GROUP: (0, 9),
    Api.HEARTBEAT: (0, 4),
    Api.LEAVE_GROUP: (0, 5),
    Api.SYNC_GROUP: (0, 5),
    Api.DESCRIBE_GROUPS: (0, 5),
    Api.LIST_GROUPS: (0, 5),
    Api.API_VERSIONS: (0, 4),
    Api.CREATE_TOPICS: (2, 7),
    Api.DELETE_TOPICS: (1, 6),
    Api.DELETE_RECORDS: (0, 2),
    Api.INIT_PRODUCER_ID: (0, 5),
    Api.OFFSET_FOR_LEADER_EPOCH: (2, 4),
    Api.ADD_PARTITIONS_TO_TXN: (0, 5),
    Api.ADD_OFFSETS_TO_TXN: (0, 4),
    Api.END_TXN: (0, 4),
    Api.WRITE_TXN_MARKERS: (1, 1),
    Api.TXN_OFFSET_COMMIT: (0, 4),
    Api.DESCRIBE_CONFIGS: (1, 4),
    Api.ALTER_CONFIGS: (0, 2),
    Api.DESCRIBE_LOG_DIRS: (1, 4),
    Api.CREATE_PARTITIONS: (0, 3),
    Api.DELETE_GROUPS: (0, 2),
    Api.ELECT_LEADERS: (0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    Api.ALTER_PARTITION_REASSIGNMENTS: (0, 0),
    Api.LIST_PARTITION_REASSIGNMENTS: (0, 0),
    Api.OFFSET_DELETE: (0, 0),
    Api.DESCRIBE_CLUSTER: (0, 1),
    Api.DESCRIBE_PRODUCERS: (0, 0),
    Api.DESCRIBE_TRANSACTIONS: (0, 0),
    Api.LIST_TRANSACTIONS: (0, 1),
    Api.DESCRIBE_TOPIC_PARTITIONS: (0, 0),
}


def advertised(raw: RawClient, version: int = 3) -> dict[int, tuple[int, int]]:
    answer = raw.ask(Api.API_VERSIONS, version, client_software_name="wire", client_software_version="1")
    assert answer.error_code == 0
    return {int(api.api_key): (int(api.min_version), int(api.max_version)) for api in answer.api_keys}


def test_every_api_of_the_scope_is_spoken_in_the_versions_clients_use(raw):
    ranges = advertised(raw)
    missing = {
        api.name: ranges.get(api)
        for api, (oldest, newest) in NEEDED.items()
        if api not in ranges or ranges[api][0] > oldest or ranges[api][1] < newest
    }
    assert missing == {}


def test_nothing_is_advertised_that_apache_kafka_would_not_know(raw, server, kafka_peer):
    """A client may meet any range that a release of Apache Kafka has, and no other."""
    with RawClient(int(kafka_peer.bootstrap.rpartition(":")[2])) as kafka:
        theirs = advertised(kafka)
    ours = advertised(raw)
    assert set(ours) <= set(theirs)
    beyond = {Api(key).name: (ours[key], theirs[key]) for key in ours if ours[key][1] > theirs[key][1]}
    assert beyond == {}


def test_produce_is_advertised_from_its_beginning(raw):
    """Some releases of librdkafka take a server without for one that lacks newer codecs (KAFKA-18659)."""
    assert advertised(raw)[Api.PRODUCE][0] == 0


def test_kafka_python_takes_the_server_for_one_release(raw, server):
    """It tells what a server can do by the release that its ranges fit."""
    release = infer_broker_version_from_api_versions(advertised(raw))
    assert release == server.outcome("inferred-release", kafka=(4, 1), millrace=(3, 9))


@pytest.mark.parametrize("version", range(4))
def test_old_questions_are_told_of_no_feature_that_begins_at_0(raw, version):
    """A client that asks so reads such a range as a broken one."""
    names = {"client_software_name": "wire", "client_software_version": "1"} if version == 3 else {}
    answer = raw.ask(Api.API_VERSIONS, version, **names)
    assert answer.error_code == 0
    told = getattr(answer, "supported_features", ()) or ()
    assert [feature.name for feature in told if int(feature.min_version) == 0] == []


def test_features_of_newer_protocols(raw, server):
    """KIP-848 groups, KIP-890's second part and share groups are features that a client looks for."""
    answer = raw.ask(Api.API_VERSIONS, 3, client_software_name="wire", client_software_version="1")
    finalized = {feature.name for feature in answer.finalized_features or ()}
    expected = server.outcome("features", kafka={"group.version", "transaction.version"}, millrace=set())
    assert finalized & {"group.version", "transaction.version"} == expected


def test_client_that_does_not_say_properly_who_it_is(raw, server):
    answer = raw.ask(
        Api.API_VERSIONS, 3, client_software_name="no spaces, please", client_software_version="1"
    )
    expected = server.outcome("client-software-name", kafka="INVALID_REQUEST", millrace="NONE")
    assert error_name(answer.error_code) == expected


@pytest.mark.parametrize(("api_key", "version"), [(9_999, 0), (3, 99)], ids=["api", "version"])
def test_what_is_not_spoken_is_said_or_the_connection_closed(raw, server, api_key, version):
    head = struct.pack(">hhihb", api_key, version, 77, -1, 0)
    raw.send(struct.pack(">i", len(head)) + head)
    try:
        frame = bytes(raw.receive())
        # All that can be said in a version without a schema is the code.
        (correlation_id,), (code,) = struct.unpack(">i", frame[:4]), struct.unpack(">h", frame[-2:])
        outcome = f"{correlation_id}: {error_name(code)}"
    except (EOFError, ConnectionError):
        outcome = "closed"
    assert outcome == server.outcome(
        "unsupported-version", kafka="closed", millrace="77: UNSUPPORTED_VERSION"
    )


# Not in the scope of the broker (yet), by the number that clients find them under.
NOT_SPOKEN = {
    17: "SaslHandshake",
    29: "DescribeAcls",
    30: "CreateAcls",
    31: "DeleteAcls",
    34: "AlterReplicaLogDirs",
    36: "SaslAuthenticate",
    38: "CreateDelegationToken",
    39: "RenewDelegationToken",
    40: "ExpireDelegationToken",
    41: "DescribeDelegationToken",
    50: "DescribeUserScramCredentials",
    51: "AlterUserScramCredentials",
    55: "DescribeQuorum",
    57: "UpdateFeatures",
    64: "UnregisterBroker",
    68: "ConsumerGroupHeartbeat",
    69: "ConsumerGroupDescribe",
    74: "ListConfigResources",
    76: "ShareGroupHeartbeat",
    77: "ShareGroupDescribe",
    78: "ShareFetch",
    79: "ShareAcknowledge",
    80: "AddRaftVoter",
    81: "RemoveRaftVoter",
    83: "InitializeShareGroupState",
    84: "ReadShareGroupState",
    85: "WriteShareGroupState",
    86: "DeleteShareGroupState",
    87: "ReadShareGroupStateSummary",
    90: "DescribeShareGroupOffsets",
    91: "AlterShareGroupOffsets",
    92: "DeleteShareGroupOffsets",
}


def test_every_other_api_is_on_the_list_of_what_is_not_spoken(raw, server, kafka_peer):
    with RawClient(int(kafka_peer.bootstrap.rpartition(":")[2])) as kafka:
        theirs = advertised(kafka)
    missing = set(theirs) - set(advertised(raw))
    assert missing == server.outcome("apis", kafka=set(), millrace=set(NOT_SPOKEN))
