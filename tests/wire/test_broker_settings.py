"""Settings of brokers as foreign admin clients see them, and change them while the brokers run (KIP-226)."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from tests.waiting import patience
from tests.wire.foreign_clients import CLIENTS, PATIENCE_S, Refused, Sent, wait_until

LIMIT, INHERITED = "message.max.bytes", "max.message.bytes"
BROKER_ID = "1"


def described(admin: AdminClient, kind: ResourceType, name: str) -> dict[str, ConfigEntry]:
    (found,) = admin.describe_configs([ConfigResource(kind, name)]).values()
    entries: dict[str, ConfigEntry] = found.result(patience(PATIENCE_S))
    return entries


def altered(admin: AdminClient, what: AlterConfigOpType, name: str, value: str | None) -> None:
    """Change one setting of the broker. Raises KafkaException."""
    entry = ConfigEntry(name, value, incremental_operation=what)
    resource = ConfigResource(ResourceType.BROKER, BROKER_ID, incremental_configs=[entry])
    (done,) = admin.incremental_alter_configs([resource]).values()
    done.result(patience(PATIENCE_S))


def of_every_broker(java: Any, *change: str) -> None:
    java.run("configs", "--alter", "--entity-type", "brokers", "--entity-default", *change).checked()


def shown(entry: ConfigEntry) -> tuple[str, ConfigSource]:
    return str(entry.value), ConfigSource(entry.source)


def test_broker_tells_under_kafkas_names_what_clients_look_up(server, admin):
    found = described(admin, ResourceType.BROKER, BROKER_ID)
    here = f"PLAINTEXT://{server.bootstrap}"  # Apache Kafka has one for its controller beside it
    assert here in found["advertised.listeners"].value.split(",")
    assert here in found["listeners"].value.split(",")
    assert (found["broker.id"].value, found["node.id"].value) == (BROKER_ID, BROKER_ID)
    assert str(server.data) in (found["log.dirs"].value or found["log.dir"].value)
    assert found["broker.rack"].value in (None, "")
    assert found["log.roll.hours"].value == "168"
    looked_up = {
        "authorizer.class.name",
        "auto.create.topics.enable",
        "compression.type",
        "default.replication.factor",
        "delete.topic.enable",
        "inter.broker.listener.name",
        "listener.security.protocol.map",
        "log.cleanup.policy",
        "log.retention.bytes",
        "message.max.bytes",
        "min.insync.replicas",
        "num.partitions",
        "offsets.topic.replication.factor",
        "security.inter.broker.protocol",
        "transaction.state.log.min.isr",
        "unclean.leader.election.enable",
    }
    assert looked_up <= found.keys()
    assert found["num.partitions"].is_read_only
    assert not found["log.retention.ms"].is_read_only


def test_setting_of_all_brokers_holds_at_once_and_that_of_one_wins(admin, java, readers, new_topic):
    client, topic, large = readers[0], new_topic(), [Sent(bytes(6_000))]
    offsets: list[int] = []

    def is_taken() -> bool:
        """What is told of a setting may come a moment before logs follow it."""
        try:
            offsets.extend(client.produce(topic, large))
        except Refused as refused:
            assert refused.reason == "MESSAGE_TOO_LARGE"
            return False
        return True

    def is_inherited(value: str, source: ConfigSource) -> bool:
        return shown(described(admin, ResourceType.TOPIC, topic)[INHERITED]) == (value, source)

    try:
        of_every_broker(java, "--add-config", f"{LIMIT}=5000")
        wait_until(
            lambda: is_inherited("5000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG), "the topic inherits it"
        )
        wait_until(lambda: not is_taken(), "its log refuses what is larger")

        altered(admin, AlterConfigOpType.SET, LIMIT, "7000")
        wait_until(
            lambda: is_inherited("7000", ConfigSource.DYNAMIC_BROKER_CONFIG), "the broker's own one wins"
        )
        wait_until(is_taken, "its log takes what is no larger than that")
        of_broker = described(admin, ResourceType.BROKER, BROKER_ID)[LIMIT]
        assert shown(of_broker) == ("7000", ConfigSource.DYNAMIC_BROKER_CONFIG)

        altered(admin, AlterConfigOpType.DELETE, LIMIT, None)
        wait_until(
            lambda: is_inherited("5000", ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
            "that of all again",
        )
    finally:
        altered(admin, AlterConfigOpType.DELETE, LIMIT, None)
        of_every_broker(java, "--delete-config", LIMIT)
    wait_until(lambda: is_inherited("1048588", ConfigSource.DEFAULT_CONFIG), "the default holds again")
    wait_until(is_taken, "its log takes it again")
    assert offsets == list(range(len(offsets)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num.partitions", "3"),
        ("default.replication.factor", "2"),
        ("log.retention.ms", "soon"),
        ("log.cleanup.policy", "shred"),
        ("max.connections", "many"),
    ],
)
def test_setting_that_cannot_be_changed_so_is_refused_by_its_name(admin, name, value):
    before = described(admin, ResourceType.BROKER, BROKER_ID)[name].value
    with pytest.raises(KafkaException) as refused:
        altered(admin, AlterConfigOpType.SET, name, value)
    error = refused.value.args[0]
    assert error.name() == "INVALID_REQUEST"
    assert name in error.str()
    assert described(admin, ResourceType.BROKER, BROKER_ID)[name].value == before


def test_setting_that_was_changed_survives_a_restart(mortal_server):
    admin = AdminClient({"bootstrap.servers": mortal_server.bootstrap, "log_level": 2})
    altered(admin, AlterConfigOpType.SET, "log.retention.bytes", "123456789")
    altered(admin, AlterConfigOpType.SET, LIMIT, "5000")
    mortal_server.kill()
    mortal_server.start()
    admin = AdminClient({"bootstrap.servers": mortal_server.bootstrap, "log_level": 2})

    def holds() -> bool:
        found = described(admin, ResourceType.BROKER, BROKER_ID)
        return [shown(found[name]) for name in ("log.retention.bytes", LIMIT)] == [
            ("123456789", ConfigSource.DYNAMIC_BROKER_CONFIG),
            ("5000", ConfigSource.DYNAMIC_BROKER_CONFIG),
        ]

    wait_until(holds, "what was set is shown again")
    (kind,) = (client for client in CLIENTS if client.name == "confluent-kafka")
    client = kind(mortal_server.bootstrap)
    client.produce("small", [Sent(b"x")])
    with pytest.raises(Refused) as refused:
        client.produce("small", [Sent(bytes(6_000))])
    assert refused.value.reason == "MESSAGE_TOO_LARGE"
