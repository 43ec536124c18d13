"""Requests of administrators with very many items: nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.config import BrokerSettings
from millrace.broker.protocol.frames import Api, decode_response, encode_request
from millrace.broker.server import answers
from millrace.broker.server.answers import build_entity, request_type, response_type
from millrace.broker.server.dispatch import Dispatcher
from millrace.broker.server.handlers import alter_client_quotas, describe_configs
from millrace.broker.server.registry import handlers
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.telemetry.metrics import BrokerMetrics

TOPICS = [f"t{number}" for number in range(5)]


class Turns:
    """How often others had their turn."""

    count = 0
    until_answered = 0

    def next(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self.next)


def ask(api: Api, version: int, turns: Turns | None = None, **fields: Any) -> Any:
    metrics = BrokerMetrics()
    services = SimpleNamespace(
        metrics=metrics,
        config=SimpleNamespace(settings=BrokerSettings(), id=1),
        metadata_cache=SimpleNamespace(
            topic=lambda name: SimpleNamespace(config={"retention.ms": "1"}) if name in TOPICS else None,
            broker_configs={},
        ),
        replica_manager=SimpleNamespace(log_defaults=LogConfig()),
    )
    frame = bytes(encode_request(build_entity(request_type(api, version), fields), 5, "x"))
    dispatcher = Dispatcher(handlers(), services, metrics)

    async def asked() -> Any:
        if turns is not None:
            turns.next()
        answering: Any = dispatcher.dispatch(memoryview(frame)[4:], "x")
        answer = await answering
        if turns is not None:
            turns.until_answered = turns.count
        return answer

    return decode_response(response_type(api, version), memoryview(asyncio.run(asked()))[4:])


def described(names: list[str], keys: list[str] | None = None, turns: Turns | None = None) -> Any:
    resources = [{"resource_type": 2, "resource_name": name, "configuration_keys": keys} for name in names]
    fields = {"resources": resources, "include_synonyms": True, "include_documentation": False}
    return ask(Api.DESCRIBE_CONFIGS, 4, turns, **fields).results


def test_topics_are_described_with_others_turns_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe_configs, "TURN_SECONDS", -1)
    turns = Turns()
    assert [result.resource_name for result in described(TOPICS, ["retention.ms"], turns)] == TOPICS
    assert turns.until_answered == 1 + len(TOPICS)


def test_topic_that_is_named_a_thousand_times_is_described_once() -> None:
    (result,) = described(["t0"] * 1_000)
    assert result.configs == described(["t0"])[0].configs


@pytest.mark.parametrize("most", [0, 1_000])
def test_answer_with_very_many_items_is_made_on_a_thread(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(answers, "MOST_ITEMS_AT_ONCE", most)
    makers: list[bool] = []
    build = answers.build_entity

    def building(*arguments: Any) -> Any:
        makers.append(threading.current_thread() is threading.main_thread())
        return build(*arguments)

    monkeypatch.setattr(answers, "build_entity", building)
    results = described(TOPICS, ["retention.ms"])
    assert makers == [most > 0]
    assert [(result.resource_name, result.configs[0].value) for result in results] == [
        (name, "1") for name in TOPICS
    ]


def test_entities_of_quotas_are_compared_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Kind(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    count = 200
    entries = [
        SimpleNamespace(
            entity=[SimpleNamespace(entity_type=Kind("client-id"), entity_name=f"c{number % (count - 1)}")],
            ops=[],
        )
        for number in range(count)
    ]
    context: Any = SimpleNamespace(
        head=SimpleNamespace(api_key=int(Api.ALTER_CLIENT_QUOTAS), version=1),
        broker=SimpleNamespace(metrics=BrokerMetrics()),
    )
    request = SimpleNamespace(entries=entries, validate_only=True)
    answer = asyncio.run(alter_client_quotas.handle(request, context))
    refused = [entry.entity[0].entity_name for entry in answer.entries if entry.error_code]
    assert refused == ["c0", "c0"]
    assert compared < 10 * count
