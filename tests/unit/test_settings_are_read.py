"""A setting that changes nothing is refused, or listed among those that are ignored: each that is accepted is
read by the part that it is for."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from millrace.audit import config as audit_config
from millrace.audit.clients.consumer_config import ConsumerConfig
from millrace.audit.clients.producer_config import ProducerConfig
from millrace.broker.client import security
from millrace.broker.config import BrokerConfig, BrokerSettings
from millrace.broker.coordination.zookeeper_consumer.options import ConsumerOptions
from millrace.broker.errors import ConfigError, InvalidConfig
from millrace.broker.storage.log_config import IGNORED_SETTINGS, SETTINGS, LogConfig
from millrace.deploy.local import spec
from millrace.mirror import config as mirror_config
from millrace.mirror.gaps.gaps import GapClass

ROOT = Path(__file__).resolve().parents[2]


def models_in(module: Any) -> list[type[BaseModel]]:
    named = [each for each in vars(module).values() if isinstance(each, type)]
    return [each for each in named if issubclass(each, BaseModel) and each.__module__ == module.__name__]


READ_BY = {
    "broker": [BrokerConfig, BrokerSettings, LogConfig, ConsumerOptions, *models_in(security)],
    "mirror": models_in(mirror_config),
    "audit": [*models_in(audit_config), ProducerConfig, ConsumerConfig],
    "deploy": models_in(spec),
}

READ_OTHERWISE = {
    "BrokerSettings": {setting.broker_name.replace(".", "_") for setting in SETTINGS.values()} | {"given"},
    "GapsConfig": {each.value for each in GapClass},
}
"""By a name that is put together: defaults of topics' settings, the policy for a class of gaps."""


@cache
def attributes_read(part: str) -> dict[str, set[Path]]:
    """{attribute: modules of the part that read it}"""
    found: dict[str, set[Path]] = {}
    for path in (ROOT / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, set()).add(path)
    return found


def fields_of(model: type[Any]) -> list[str]:
    if issubclass(model, BaseModel):
        return list(model.model_fields)
    return [field.name for field in dataclasses.fields(model)]


@pytest.mark.parametrize(
    ("part", "model"),
    [(part, model) for part, models in READ_BY.items() for model in models],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_every_setting_is_read(part: str, model: type[Any]) -> None:
    read = attributes_read(part)
    names = set(fields_of(model)) - READ_OTHERWISE.get(model.__name__, set())
    assert [name for name in sorted(names) if name not in read] == []


@pytest.mark.parametrize("name", sorted(IGNORED_SETTINGS))
def test_ignored_setting_of_a_topic_is_no_setting_of_a_broker(name: str) -> None:
    assert name not in SETTINGS
    for key in (name, f"log.{name}"):
        with pytest.raises(ConfigError, match="a known setting"):
            BrokerConfig.model_validate(
                {"id": 1, "listen": "h:1", "zookeeper": "h:2", "data": ["d"], "settings": {key: "1"}}
            )


@pytest.mark.parametrize("policy", ["compress", "compact,keep", "tiered"])
def test_cleanup_policy_that_nothing_carries_out_is_refused(policy: str) -> None:
    with pytest.raises(InvalidConfig, match="delete, compact or both"):
        LogConfig.from_topic_config({"cleanup.policy": policy})
