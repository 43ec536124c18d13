"""Requests with very many items, and answers: nobody else waits for them."""

from __future__ import annotations

import asyncio
import gc
import threading
import uuid
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from kio.schema.errors import ErrorCode

from millrace.broker.config import BrokerSettings
from millrace.broker.coordination.metadata_cache import MetadataCache
from millrace.broker.coordination.paths import BrokerRegistration, TopicAssignment
from millrace.broker.errors import ElectionNotNeeded, ProtocolError, UnknownTopicOrPartition
from millrace.broker.groups.offsets import CommittedOffset
from millrace.broker.protocol.frames import Api, decode_response, encode_request
from millrace.broker.replication import off_loop
from millrace.broker.replication.off_loop import SLICE_LENGTH
from millrace.broker.server import answers, dispatch
from millrace.broker.server.answers import build_entity, request_type, response_type
from millrace.broker.server.dispatch import Dispatcher
from millrace.broker.server.handlers import alter_client_quotas
from millrace.broker.server.registry import handlers
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.producer_state import ProducerEntry
from millrace.broker.telemetry.metrics import BrokerMetrics
from millrace.broker.transactions.values import TransactionListing

TOPICS = [f"t{number}" for number in range(5)]


class Turns:
    """How often others had their turn."""

    count = 0
    until_answered = 0

    def next(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self.next)


def ask(api: Api, version: int, turns: Turns | None = None, services: Any = None, **fields: Any) -> Any:
    metrics = BrokerMetrics()
    services = services or SimpleNamespace(
        metrics=metrics,
        config=SimpleNamespace(settings=BrokerSettings(), id=1),
        metadata_cache=SimpleNamespace(
            topic=lambda name: SimpleNamespace(config={"retention.ms": "1"}) if name in TOPICS else None,
            broker_configs={},
        ),
        replica_manager=SimpleNamespace(log_defaults=LogConfig()),
    )
    frame = bytearray(encode_request(build_entity(request_type(api, version), fields), 5, "x"))
    dispatcher = Dispatcher(handlers(), services, metrics)

    async def asked() -> Any:
        if turns is not None:
            turns.next()
        answering: Any = dispatcher.dispatch(memoryview(frame)[4:], "x")
        frame[:] = bytes(len(frame))  # others' bytes are received there by now
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
    monkeypatch.setattr(off_loop, "TURN_SECONDS", -1)
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


def cluster_of(**partition_counts: int) -> Any:
    """The services of the only broker of a cluster with these topics; a group has read all of them, and each
    partition and the coordinator know as many producers as the topic has partitions."""
    cache = MetadataCache()
    cache.set_broker(BrokerRegistration(1, "host", 9092))
    for topic, count in partition_counts.items():
        cache.set_assignment(topic, TopicAssignment(uuid.uuid4(), dict.fromkeys(range(count), (1,))))
    offsets = {
        (topic, number): CommittedOffset(7, -1, "", 1)
        for topic, count in partition_counts.items()
        for number in range(count)
    }
    entry = ProducerEntry(0)

    def leader_of(topic: str, _number: int) -> Any:
        producers = dict.fromkeys(range(partition_counts[topic]), entry)
        return SimpleNamespace(log=SimpleNamespace(producers=SimpleNamespace(entries=producers)))

    async def list_transactions(*_: Any) -> Any:
        listings = [TransactionListing(f"id-{number}", 1, "Empty") for number in range(len(offsets))]
        return ErrorCode.none, [], listings

    return SimpleNamespace(
        config=SimpleNamespace(settings=BrokerSettings(), id=1),
        metadata_cache=cache,
        groups=SimpleNamespace(fetch_offsets=lambda *_, **__: (ErrorCode.none, offsets)),
        transactions=SimpleNamespace(list_transactions=list_transactions),
        replica_manager=SimpleNamespace(leader_of=leader_of),
    )


def where_it_is_written(monkeypatch: pytest.MonkeyPatch, api: Api, version: int) -> list[bool]:
    """For each answer of this kind, once it is there: whether it was made on the event loop."""
    on_loop: list[bool] = []
    build = answers._builder

    def building(entity_type: type[Any]) -> Any:
        if entity_type is response_type(api, version):
            on_loop.append(threading.current_thread() is threading.main_thread())
        return build(entity_type)

    monkeypatch.setattr(answers, "_builder", building)
    return on_loop


@pytest.mark.parametrize(
    ("api", "version", "fields"),
    [
        (Api.METADATA, 12, {"topics": None}),
        (Api.METADATA, 12, {"topics": [{"name": "t"}]}),
        (Api.OFFSET_FETCH, 7, {"group_id": "g", "topics": None}),
        (Api.OFFSET_FETCH, 8, {"groups": [{"group_id": "g", "topics": None}]}),
        (Api.LIST_TRANSACTIONS, 1, {}),
        (Api.DESCRIBE_PRODUCERS, 0, {"topics": [{"name": "t", "partition_indexes": [0]}]}),
    ],
)
def test_answer_about_very_many_is_written_on_a_thread_and_a_small_one_at_once(
    monkeypatch: pytest.MonkeyPatch, api: Api, version: int, fields: dict[str, Any]
) -> None:
    on_loop = where_it_is_written(monkeypatch, api, version)
    monkeypatch.setattr(answers, "MOST_ITEMS_AT_ONCE", 20)
    few = ask(api, version, services=cluster_of(t=10), **fields)
    many = ask(api, version, services=cluster_of(t=30), **fields)
    assert on_loop == [True, False]
    assert str(many).count("error_code") >= str(few).count("error_code") and len(str(many)) > len(str(few))


ASKED_BY_PARTITION = [
    (Api.OFFSET_FOR_LEADER_EPOCH, 3, "topic", "partition", {}),
    (Api.LIST_OFFSETS, 7, "name", "partition_index", {"timestamp": -1}),
    (Api.DELETE_RECORDS, 2, "name", "partition_index", {"offset": 0}),
    (Api.OFFSET_COMMIT, 8, "name", "partition_index", {"committed_offset": 0}),
    (Api.OFFSET_DELETE, 0, "name", "partition_index", {}),
    (Api.TXN_OFFSET_COMMIT, 3, "name", "partition_index", {"committed_offset": 0}),
]


@pytest.mark.parametrize("width", [1_300, 100, 1], ids=["one topic", "some", "many"])
@pytest.mark.parametrize(("api", "version", "topic", "partition", "fields"), ASKED_BY_PARTITION)
def test_what_asks_about_very_many_partitions_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
    api: Api,
    version: int,
    topic: str,
    partition: str,
    fields: dict[str, Any],
    width: int,
) -> None:
    """The answer is written on a thread; what is looked up on the loop has others' turns in between."""

    turns, in_turn = Turns(), Counter[int]()

    def unknown(*_: Any) -> Any:
        in_turn[turns.count] += 1
        raise UnknownTopicOrPartition("no")

    async def deleted(*_: Any) -> Any:
        unknown()

    async def committed(*_: Any, **__: Any) -> Any:
        return {}

    async def offsets_deleted(*_: Any) -> Any:
        return ErrorCode.none, {}

    on_loop = where_it_is_written(monkeypatch, api, version)
    count = 1_300
    services = SimpleNamespace(
        metrics=BrokerMetrics(),
        metadata_cache=SimpleNamespace(partition=lambda *_: None),
        replica_manager=SimpleNamespace(epoch_end=unknown, leader_of=unknown, delete_records=deleted),
        groups=SimpleNamespace(commit=committed, delete_offsets=offsets_deleted),
        clock=SimpleNamespace(now_ms=lambda: 1),
    )
    numbers = [range(number, number + width) for number in range(0, count, width)]
    asked = [
        {topic: f"t{each[0]}", "partitions": [{partition: number, **fields} for number in each]}
        for each in numbers
    ]
    told = ask(api, version, turns, services, topics=asked)
    assert [
        [(getattr(each, partition), each.error_code) for each in topic.partitions] for topic in told.topics
    ] == [[(number, ErrorCode.unknown_topic_or_partition) for number in each] for each in numbers]
    assert on_loop == [False]
    looked_up = api in (Api.OFFSET_FOR_LEADER_EPOCH, Api.LIST_OFFSETS, Api.DELETE_RECORDS)
    assert in_turn.total() == (count if looked_up else 0)
    assert max(in_turn.values(), default=0) <= SLICE_LENGTH


@pytest.mark.parametrize("asked_for", ["all", "each"])
def test_elections_of_very_many_partitions_are_answered_from_a_thread(
    monkeypatch: pytest.MonkeyPatch, asked_for: str
) -> None:
    on_loop = where_it_is_written(monkeypatch, Api.ELECT_LEADERS, 2)
    count = 1_300

    async def elect(_kind: str, keys: list[Any], _timeout_ms: float) -> Any:
        return {key: ElectionNotNeeded("no") if key[1] % 2 else None for key in keys}

    services = cluster_of(t=count, u=2)
    services.elections = SimpleNamespace(elect=elect)
    asked = [{"topic": "t", "partitions": range(count)}, {"topic": "u", "partitions": range(2)}]
    told = ask(
        Api.ELECT_LEADERS,
        2,
        services=services,
        election_type=0,
        topic_partitions=None if asked_for == "all" else asked,
    ).replica_election_results
    step = 2 if asked_for == "all" else 1
    assert {topic.topic: [each.partition_id for each in topic.partition_result] for topic in told} == {
        "t": list(range(0, count, step)),
        "u": list(range(0, 2, step)),
    }
    assert on_loop == [asked_for == "all"]


class Decoding(NamedTuple):
    """Of a request. The collector would look through all that is made again and again, and keep the
    interpreter for that."""

    on_loop: bool
    gradually: bool
    with_collector: bool


AT_ONCE, ON_A_THREAD = Decoding(True, False, True), Decoding(False, True, False)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Decoding]:
    """How each request was decoded that was."""
    seen: list[Decoding] = []
    decode = dispatch.decode_entity

    def decoding(*arguments: Any, gradually: bool, **options: Any) -> Any:
        on_loop = threading.current_thread() is threading.main_thread()
        seen.append(Decoding(on_loop, gradually, gc.isenabled()))
        return decode(*arguments, gradually=gradually, **options)

    monkeypatch.setattr(dispatch, "decode_entity", decoding)
    monkeypatch.setattr(dispatch, "DECODED_AT_ONCE", 1_000)
    return seen


@pytest.mark.parametrize(("count", "how"), [(50, AT_ONCE), (500, ON_A_THREAD)], ids=["small", "large"])
def test_large_request_is_decoded_on_a_thread_and_a_small_one_at_once(
    decoded: list[Decoding], count: int, how: Decoding
) -> None:
    def unknown(*_: Any) -> Any:
        raise UnknownTopicOrPartition("no")

    services = SimpleNamespace(replica_manager=SimpleNamespace(epoch_end=unknown))
    services.metrics = BrokerMetrics()
    asked = [{"topic": "t", "partitions": [{"partition": number} for number in range(count)]}]
    told = ask(Api.OFFSET_FOR_LEADER_EPOCH, 3, services=services, topics=asked).topics
    assert [[each.partition for each in topic.partitions] for topic in told] == [list(range(count))]
    assert decoded == [how]
    assert gc.isenabled()


def test_large_request_of_a_version_that_is_not_spoken_is_read_on_a_thread(decoded: list[Decoding]) -> None:
    topics = [{"name": f"t{number}" * 10, "partitions": [{}]} for number in range(100)]
    told = ask(Api.LIST_OFFSETS, 10, services=SimpleNamespace(), topics=topics)
    assert len(told.topics) == 100
    assert decoded == [ON_A_THREAD]


def test_large_request_that_cannot_be_read_closes_its_connection(decoded: list[Decoding]) -> None:
    request = build_entity(request_type(Api.OFFSET_DELETE, 0), {"group_id": "g" * 2_000})
    frame = encode_request(request, 5, "x")
    dispatcher = Dispatcher(handlers(), SimpleNamespace(), BrokerMetrics())

    async def asked() -> Any:
        answering: Any = dispatcher.dispatch(memoryview(frame)[4:-1], "x")
        return await answering

    with pytest.raises(ProtocolError, match="cannot be read"):
        asyncio.run(asked())
    assert decoded == [ON_A_THREAD]


def test_topic_that_is_asked_for_a_thousand_times_is_told_once() -> None:
    (topic,) = ask(
        Api.METADATA, 12, services=cluster_of(t=10), topics=[{"name": "t", "topic_id": None}] * 1_000
    ).topics
    assert len(topic.partitions) == 10


def test_producers_of_a_partition_that_is_named_a_thousand_times_are_told_once() -> None:
    asked = [{"name": "t", "partition_indexes": [0, 1, 0]}, {"name": "t", "partition_indexes": [1] * 1_000}]
    (topic,) = ask(Api.DESCRIBE_PRODUCERS, 0, services=cluster_of(t=10), topics=asked).topics
    assert [(each.partition_index, len(each.active_producers)) for each in topic.partitions] == [
        (0, 10),
        (1, 10),
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
