"""The APIs of topics, settings and the cluster in every version that is advertised, asked over a socket."""

from __future__ import annotations

import uuid

import pytest

from millrace.broker.errors import (
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicationFactor,
    InvalidRequest,
    InvalidTopic,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from millrace.broker.protocol.frames import Api
from millrace.broker.protocol.hot_fetch import PartitionFetch
from millrace.broker.server.handlers import (
    alter_configs,
    create_partitions,
    create_topics,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_log_dirs,
    incremental_alter_configs,
    metadata,
)
from tests.cluster.one_broker import TIMEOUT_MS, create, topic_id_of
from tests.raw_client import RawClient, batch_of
from tests.servers import BrokerProcess

pytestmark = pytest.mark.java


# -- topics ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", metadata.VERSIONS)
def test_metadata_shows_brokers_leaders_and_ids(
    shared_broker: BrokerProcess, client: RawClient, topic: str, version: int
) -> None:
    answer = client.ask(Api.METADATA, version, topics=[{"name": topic}], allow_auto_topic_creation=False)
    assert [(known.node_id, known.host, known.port) for known in answer.brokers] == [
        (shared_broker.id, "127.0.0.1", shared_broker.port)
    ]
    shown = answer.topics[0]
    assert (shown.error_code, shown.name) == (0, topic)
    assert [(part.partition_index, part.leader_id) for part in shown.partitions] == [(0, shared_broker.id)]
    if version >= 1:
        assert answer.controller_id == shared_broker.id
    if version >= 10:
        assert shown.topic_id not in (None, uuid.UUID(int=0))


def test_metadata_without_topics_lists_all_or_none_by_version(client: RawClient, topic: str) -> None:
    assert topic in [known.name for known in client.ask(Api.METADATA, 0, topics=[]).topics]
    assert topic in [known.name for known in client.ask(Api.METADATA, 12, topics=None).topics]
    assert client.ask(Api.METADATA, 12, topics=[]).topics == ()


def test_metadata_creates_a_missing_topic_only_when_allowed(client: RawClient) -> None:
    name = f"auto-{uuid.uuid4().hex[:8]}"
    refused = client.ask(Api.METADATA, 12, topics=[{"name": name}], allow_auto_topic_creation=False)
    assert refused.topics[0].error_code == UnknownTopicOrPartition.code
    made = client.ask(Api.METADATA, 12, topics=[{"name": name}], allow_auto_topic_creation=True)
    assert made.topics[0].error_code == 0
    assert len(made.topics[0].partitions) == 1


def test_metadata_finds_topics_by_id(client: RawClient, topic: str) -> None:
    topic_id = topic_id_of(client, topic)
    found, missing = client.ask(
        Api.METADATA, 12, topics=[{"name": None, "topic_id": topic_id}, {"topic_id": uuid.uuid4()}]
    ).topics
    assert (found.name, found.error_code) == (topic, 0)
    assert missing.error_code == UnknownTopicId.code


@pytest.mark.parametrize("name", ["", "..", "with space", "x" * 250, "ümlaut"])
def test_metadata_refuses_impossible_topic_names(client: RawClient, name: str) -> None:
    answer = client.ask(Api.METADATA, 9, topics=[{"name": name}], allow_auto_topic_creation=True)
    assert answer.topics[0].error_code == InvalidTopic.code


@pytest.mark.parametrize("version", create_topics.VERSIONS)
@pytest.mark.parametrize("validate_only", [False, True])
def test_create_topics_makes_or_only_checks(client: RawClient, version: int, validate_only: bool) -> None:
    name = f"made-{uuid.uuid4().hex[:8]}"
    wanted = {"name": name, "num_partitions": 3, "replication_factor": 1}
    answer = client.ask(
        Api.CREATE_TOPICS, version, topics=[wanted], timeout=TIMEOUT_MS, validate_only=validate_only
    )
    assert answer.topics[0].error_code == 0
    shown = client.ask(Api.METADATA, 9, topics=[{"name": name}], allow_auto_topic_creation=False).topics[0]
    assert len(shown.partitions) == (0 if validate_only else 3)


def test_create_topics_names_what_is_wrong(client: RawClient, topic: str) -> None:
    def refused(**wanted: object) -> int:
        fields = {"name": f"t-{uuid.uuid4().hex[:8]}", "num_partitions": 1, "replication_factor": 1} | wanted
        answer = client.ask(Api.CREATE_TOPICS, 7, topics=[fields], timeout=TIMEOUT_MS)
        assert answer.topics[0].error_message
        return int(answer.topics[0].error_code)

    assert refused(name=topic) == TopicAlreadyExists.code
    assert refused(num_partitions=0) == InvalidPartitions.code
    assert refused(replication_factor=2) == InvalidReplicationFactor.code
    assert refused(name="a/b") == InvalidTopic.code
    assert refused(configs=[{"name": "retention.ms", "value": "soon"}]) == InvalidConfig.code
    assert refused(configs=[{"name": "no.such", "value": "1"}]) == InvalidConfig.code


@pytest.mark.parametrize("version", delete_topics.VERSIONS)
def test_delete_topics_removes_the_topic_and_a_new_one_is_empty(client: RawClient, version: int) -> None:
    topic = create(client)
    assert client.produce({(topic, 0): batch_of(b"old")})[0].error_code == 0
    by_id = {"topics": [{"topic_id": topic_id_of(client, topic)}]} if version >= 6 else {}
    answer = client.ask(Api.DELETE_TOPICS, version, topic_names=[topic], timeout=TIMEOUT_MS, **by_id)
    assert answer.responses[0].error_code == 0
    shown = client.ask(Api.METADATA, 9, topics=[{"name": topic}], allow_auto_topic_creation=False)
    assert shown.topics[0].error_code == UnknownTopicOrPartition.code
    client.ask(
        Api.CREATE_TOPICS,
        7,
        topics=[{"name": topic, "num_partitions": 1, "replication_factor": 1}],
        timeout=TIMEOUT_MS,
    )
    answered = client.fetch(PartitionFetch(topic, 0, 0, 1 << 20)).partitions[0]
    assert (answered.error_code, answered.high_watermark) == (0, 0)


def test_delete_topics_of_an_unknown_topic_is_refused(client: RawClient) -> None:
    by_name = client.ask(Api.DELETE_TOPICS, 6, topics=[{"name": "none"}], timeout=1_000)
    by_id = client.ask(Api.DELETE_TOPICS, 6, topics=[{"topic_id": uuid.uuid4()}], timeout=1_000)
    assert by_name.responses[0].error_code == UnknownTopicOrPartition.code
    assert by_id.responses[0].error_code == UnknownTopicId.code


@pytest.mark.parametrize("version", create_partitions.VERSIONS)
def test_create_partitions_widens_and_never_narrows(client: RawClient, version: int) -> None:
    topic = create(client)
    asked = [{"name": topic, "count": 3, "assignments": None}]
    checked = client.ask(Api.CREATE_PARTITIONS, version, topics=asked, timeout=TIMEOUT_MS, validate_only=True)
    widened = client.ask(Api.CREATE_PARTITIONS, version, topics=asked, timeout=TIMEOUT_MS)
    again = client.ask(Api.CREATE_PARTITIONS, version, topics=asked, timeout=TIMEOUT_MS)
    codes = [answer.results[0].error_code for answer in (checked, widened, again)]
    assert codes == [0, 0, InvalidPartitions.code]
    assert client.produce({(topic, 2): batch_of(b"x")})[0].error_code == 0


# -- settings and the cluster ----------------------------------------------------------------------


def describe(client: RawClient, topic: str, version: int = 4) -> dict[str, tuple[str, int]]:
    answer = client.ask(
        Api.DESCRIBE_CONFIGS,
        version,
        resources=[{"resource_type": 2, "resource_name": topic, "configuration_keys": None}],
        include_synonyms=True,
    )
    assert answer.results[0].error_code == 0
    return {entry.name: (entry.value, entry.config_source) for entry in answer.results[0].configs}


@pytest.mark.parametrize("version", describe_configs.VERSIONS)
def test_describe_configs_shows_values_and_where_they_come_from(client: RawClient, version: int) -> None:
    topic = create(client, retention_ms="1234")
    shown = describe(client, topic, version)
    assert shown["retention.ms"] == ("1234", 1)
    assert shown["segment.bytes"] == (str(1 << 30), 5)
    one = client.ask(
        Api.DESCRIBE_CONFIGS,
        version,
        resources=[
            {"resource_type": 2, "resource_name": topic, "configuration_keys": ["retention.ms"]},
            {"resource_type": 4, "resource_name": "1", "configuration_keys": ["num.partitions"]},
            {"resource_type": 4, "resource_name": "77", "configuration_keys": None},
            {"resource_type": 2, "resource_name": "none", "configuration_keys": None},
        ],
    ).results
    assert [entry.name for entry in one[0].configs] == ["retention.ms"]
    assert [(entry.name, entry.value) for entry in one[1].configs] == [("num.partitions", "1")]
    assert one[2].error_code != 0
    assert one[3].error_code == UnknownTopicOrPartition.code


@pytest.mark.parametrize("version", incremental_alter_configs.VERSIONS)
def test_incremental_alter_configs_takes_effect_on_the_running_log(client: RawClient, version: int) -> None:
    topic = create(client)

    def alter(name: str, operation: int, value: str | None) -> int:
        answer = client.ask(
            Api.INCREMENTAL_ALTER_CONFIGS,
            version,
            resources=[
                {
                    "resource_type": 2,
                    "resource_name": topic,
                    "configs": [{"name": name, "config_operation": operation, "value": value}],
                }
            ],
        )
        return int(answer.responses[0].error_code)

    assert alter("max.message.bytes", 0, "100") == 0
    assert client.produce({(topic, 0): batch_of(b"x" * 200)})[0].error_code != 0
    assert alter("max.message.bytes", 1, None) == 0
    assert client.produce({(topic, 0): batch_of(b"x" * 200)})[0].error_code == 0
    assert alter("cleanup.policy", 2, "compact") == 0
    assert set(describe(client, topic)["cleanup.policy"][0].split(",")) == {"compact", "delete"}
    assert alter("cleanup.policy", 3, "delete") == 0
    assert describe(client, topic)["cleanup.policy"][0] == "compact"
    assert alter("retention.ms", 0, "soon") == InvalidConfig.code
    assert alter("retention.ms", 2, "5") == InvalidConfig.code


@pytest.mark.parametrize("version", alter_configs.VERSIONS)
def test_alter_configs_replaces_all_settings(client: RawClient, version: int) -> None:
    topic = create(client, retention_ms="1234", segment_bytes="1000000")
    answer = client.ask(
        Api.ALTER_CONFIGS,
        version,
        resources=[
            {
                "resource_type": 2,
                "resource_name": topic,
                "configs": [{"name": "retention.ms", "value": "99"}],
            },
            {
                "resource_type": 4,
                "resource_name": "1",
                "configs": [{"name": "num.partitions", "value": "9"}],
            },
        ],
    )
    assert [int(response.error_code) for response in answer.responses] == [0, InvalidRequest.code]
    shown = describe(client, topic)
    assert shown["retention.ms"] == ("99", 1)
    assert shown["segment.bytes"] == (str(1 << 30), 5)


@pytest.mark.parametrize("version", describe_cluster.VERSIONS)
def test_describe_cluster_names_brokers_and_controller(
    shared_broker: BrokerProcess, client: RawClient, version: int
) -> None:
    answer = client.ask(Api.DESCRIBE_CLUSTER, version, **({"endpoint_type": 1} if version else {}))
    assert [(known.broker_id, known.port) for known in answer.brokers] == [
        (shared_broker.id, shared_broker.port)
    ]
    assert (answer.controller_id, bool(answer.cluster_id)) == (shared_broker.id, True)


@pytest.mark.parametrize("version", describe_log_dirs.VERSIONS)
def test_describe_log_dirs_shows_sizes_and_room(
    shared_broker: BrokerProcess, client: RawClient, topic: str, version: int
) -> None:
    batch = batch_of(b"x" * 1_000)
    client.produce({(topic, 0): batch})
    answer = client.ask(Api.DESCRIBE_LOG_DIRS, version, topics=[{"topic": topic, "partitions": [0]}])
    (folder,) = answer.results
    assert (folder.error_code, folder.log_dir) == (0, str(shared_broker.data))
    assert [(t.name, t.partitions[0].partition_size) for t in folder.topics] == [(topic, len(batch))]
    if version >= 4:
        assert folder.total_bytes >= folder.usable_bytes > 0
