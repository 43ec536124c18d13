"""The settings of audited clients, before any client is made."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.audit import consumer, producer
from millrace.audit.clients import consumer_config, producer_config
from millrace.audit.clients.adapter_config import open_reporter
from millrace.audit.clients.consumer_config import read_consumer_config
from millrace.audit.clients.producer_config import read_config
from millrace.audit.consumer import AuditedConsumer
from millrace.audit.producer import AuditedProducer
from millrace.broker.errors import ConfigError

PRODUCERS_VALUES: dict[str, Any] = {
    "millrace.producer": "orders@web-1",
    "millrace.application": "orders",
    "millrace.datacenter": "ewr",
    "millrace.window.ms": 1_000,
    "millrace.report.interval.ms": 7,
    "millrace.lease.ms": 70_000,
    "millrace.audit.topic": "other",
    "millrace.journal": "/tmp/journal",
    "millrace.identity": "compact",
    "millrace.content.digest": True,
}
CONSUMERS_VALUES: dict[str, Any] = {
    "millrace.window.ms": 1_000,
    "millrace.report.interval.ms": 7,
    "millrace.report.timeout.ms": 8,
    "millrace.audit.topic": "other",
    "millrace.content.digest": True,
}


def test_unknown_setting_of_a_producer_lists_those_there_are_and_names_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        AuditedProducer({"bootstrap.servers": "127.0.0.1:1", "millrace.windows.ms": 1_000})
    said = str(caught.value)
    assert said.startswith("millrace.windows.ms: got 1000, expected one of millrace.producer, ")
    assert all(key in said for key in PRODUCERS_VALUES)
    assert said.endswith("(did you mean millrace.window.ms?)")


@pytest.mark.parametrize(
    "given",
    [{"acks": 0}, {"acks": "00"}, {"request.required.acks": "0"}, {"default.topic.config": {"acks": 0}}],
)
def test_no_acknowledgements_at_all_are_refused(given: dict[str, Any]) -> None:
    """Nobody would say what had arrived: what a broker drops would be told as acknowledged."""
    with pytest.raises(ConfigError, match=r"acks: got 0, .* with 0 nobody says that a record arrived"):
        AuditedProducer({"bootstrap.servers": "127.0.0.1:1", **given})


def test_unknown_setting_of_a_consumer_lists_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        AuditedConsumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "millrace.lease.ms": 1})
    said = str(caught.value)
    assert said.startswith(f"millrace.lease.ms: got 1, expected one of {', '.join(CONSUMERS_VALUES)}")
    assert "millrace.journal" not in said


def test_unknown_keyword_of_an_adapter_is_told_as_a_keyword() -> None:
    with pytest.raises(
        ConfigError, match=r"^millrace_produser: .*did you mean millrace_producer\?"
    ) as caught:
        open_reporter({"millrace_produser": "x", "client_id": "mine"})
    assert "millrace_sequenced" in str(caught.value)
    assert "millrace." not in str(caught.value)


@pytest.mark.parametrize("key", producer_config.KEYS)
def test_each_setting_of_a_producer_changes_something_and_is_described(key: str) -> None:
    value = PRODUCERS_VALUES[key]
    assert read_config({key: value}) != read_config({})
    assert f"    {key} " in str(producer.__doc__)


@pytest.mark.parametrize("key", consumer_config.KEYS)
def test_each_setting_of_a_consumer_changes_something_and_is_described(key: str) -> None:
    value = CONSUMERS_VALUES[key]
    assert read_consumer_config({"group.id": "g", key: value}) != read_consumer_config({"group.id": "g"})
    assert f"    {key} " in str(consumer.__doc__)
