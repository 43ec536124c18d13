"""Addresses of servers, as config files, options and listeners have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from millrace.audit.config import parse_addresses
from millrace.audit.config import parse_config as audit_config
from millrace.broker.client.cluster import Cluster
from millrace.broker.config import load_config as broker_config
from millrace.broker.errors import ConfigError
from millrace.broker.protocol.address import ADDRESS_EXPECTED, CONNECT_EXPECTED, Address, parse_servers
from millrace.deploy.commands.values import addresses
from millrace.deploy.local.spec import parse_spec
from millrace.mirror.config import parse_config as mirror_config

SERVERS = [
    ("a:1", "a", 1),
    (" k_1.ewr:9092 ", "k_1.ewr", 9092),
    ("[::1]:65535", "::1", 65535),
    ("[fe80::1%eth0]:9092", "fe80::1%eth0", 9092),
]

NO_ADDRESSES = [
    *("", "a", "a:", "a:65536", "a:x", "a:-1", "a:१", "a:123456", "::1:9092", "[::1]9092", "[a]:1"),
    *("[::1:9092", "::1]:9092", "a b:1", "a:1,b:2", "a:1/dc1", "http://a:1", "PLAINTEXT://a:1"),
]


@pytest.mark.parametrize(("text", "host", "port"), SERVERS)
def test_an_address_is_read_and_written_the_same(text: str, host: str, port: int) -> None:
    for read in (Address.parse, Address.parse_listener):
        assert read(text) == Address(host, port)
        assert str(read(text)) == text.strip()


@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_is_no_address_is_refused(text: str) -> None:
    for read in (Address.parse, Address.parse_listener, parse_servers):
        if not (read is parse_servers and text == "a:1,b:2"):
            with pytest.raises(ValueError, match=r"^host:port, such as 127\.0"):
                read(text)


@pytest.mark.parametrize("text", ["a:0", ":1", ":0", "[::1]:0"])
def test_what_only_a_listener_may_leave_open_is_no_server_to_connect_to(text: str) -> None:
    with pytest.raises(ValueError, match=r"^host:port, such as 127\.0"):
        Address.parse(text)


def test_a_listener_without_a_host_is_on_all_interfaces() -> None:
    assert Address.parse_listener(":9092") == Address("0.0.0.0", 9092)
    assert Address.parse_listener("[::1]:0") == Address("::1", 0)
    everywhere = ("0.0.0.0:1", ":1", "[::]:1")
    assert all(Address.parse_listener(text).is_everywhere for text in everywhere)
    assert not Address.parse("127.0.0.1:1").is_everywhere


def test_several_servers_are_read_in_their_order() -> None:
    assert parse_servers("a:1, [::1]:2") == [Address("a", 1), Address("::1", 2)]


def broker(text: str) -> object:
    return broker_config(None, {"id": 1, "listen": text, "zookeeper": "zk:2181", "data": ["/d"]}).listen


def brokers_metrics(text: str) -> object:
    values = {"id": 1, "listen": "a:1", "zookeeper": "zk:2181", "data": ["/d"], "metrics.listen": text}
    return Address.parse(broker_config(None, values).settings.metrics_listen)


def mirror(text: str) -> object:
    sources = [{"cluster": "ewr", "bootstrap": ["ewr:1"], "topics": {"include": [".*"]}}]
    target, control = {"cluster": "agg", "bootstrap": [text]}, {"listen": text}
    config = mirror_config({"name": "m", "target": target, "sources": sources, "control": control})
    assert config.target.bootstrap == (text,)
    return config.control.listen


def audit(text: str) -> object:
    config = audit_config({"clusters": {"a": {"bootstrap": [text], "tier": "source"}}, "topics": ["t"]})
    return Address.parse(config.clusters["a"].bootstrap[0])


def audits_zookeeper(text: str) -> object:
    clusters = {"a": {"bootstrap": ["a:1"], "tier": "source"}}
    config = audit_config(
        {"clusters": clusters, "topics": ["t"], "zookeeper": {"connect": f"{text}, zk:1/audit"}}
    )
    assert config.zookeeper is not None and config.zookeeper.connect == f"{text},zk:1/audit"
    return Address.parse(text)


def brokers_zookeeper(text: str) -> object:
    config = broker_config(
        None, {"id": 1, "listen": "a:1", "zookeeper": f"{text}, zk:1/dc1", "data": [Path("/d")]}
    )
    assert config.zookeeper == f"{text},zk:1/dc1"
    return Address.parse(text)


def sandbox(text: str) -> object:
    spec = {"name": "s", "data": "d", "zookeeper": {"listen": "zk:1"}, "clusters": {"a": {"listen": text}}}
    return Address.parse(parse_spec(spec, where="test").clusters["a"].listen)


def option(text: str) -> object:
    (found,) = addresses(text, option="--bootstrap")
    return Address.parse(found)


def option_of_the_audit(text: str) -> object:
    (found,) = parse_addresses("--bootstrap", text)
    return Address.parse(found)


def client(text: str) -> object:
    (found,) = Cluster("c", [text])._bootstrap
    return found


WHO_READS = [
    *(broker, brokers_metrics, brokers_zookeeper, mirror, audit, audits_zookeeper),
    *(sandbox, option, option_of_the_audit, client),
]


@pytest.mark.parametrize("read", WHO_READS)
def test_whoever_names_a_server_may_name_it_by_its_ipv6_address(read) -> None:
    assert read("[::1]:9092") == Address("::1", 9092)


@pytest.mark.parametrize("read", WHO_READS)
@pytest.mark.parametrize("text", ["::1:9092", "a:65536", "localhost"])
def test_all_say_the_same_of_what_is_no_address(read, text: str) -> None:
    expected = CONNECT_EXPECTED if read in (brokers_zookeeper, audits_zookeeper) else ADDRESS_EXPECTED
    with pytest.raises((ConfigError, ValueError, typer.BadParameter)) as caught:
        read(text)
    assert f"expected {expected}" in str(caught.value)
