"""What the port answers when things are not as they should be. The worker is whole; it carries nothing.

That control calls do what they say is tests/cluster/test_mirror_control.py's part.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.broker.client.cluster import Cluster
from millrace.broker.client.groups import Group, Member
from millrace.broker.errors import ClusterUnreachable
from millrace.deploy.commands import mirror_view as view
from millrace.mirror import worker as worker_module
from millrace.mirror.config import parse_config
from millrace.mirror.control import control as control_module
from millrace.mirror.control.control import Control
from millrace.mirror.control.http.messages import Request, Response
from millrace.mirror.control.http.routes import ROUTES
from millrace.mirror.control.wishes import Scope
from millrace.mirror.delivery.delivery import TransactionCounts
from millrace.mirror.delivery.exactly_once import ExactlyOnce
from millrace.mirror.delivery.sink import Sink
from millrace.mirror.sharing.assignment import decode_claim
from millrace.mirror.sharing.peers import Crew, Peer
from millrace.mirror.sharing.rates import SAMPLE_INTERVAL_S, level_of
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.worker import Worker
from tests.openapi import undescribed
from tests.waiting import patience, until_async


def with_control(story: Callable[[Control, Worker], Awaitable[None]], **control: Any) -> None:
    """Runs a story with the control of a worker whose clusters are all away."""
    config = parse_config(
        {
            "name": "aggregate",
            "target": {"cluster": "agg", "bootstrap": ["127.0.0.1:1"]},
            "sources": [{"cluster": "ewr", "bootstrap": ["127.0.0.1:2"], "topics": {"include": ["flights"]}}],
            "control": {"listen": "127.0.0.1:0", **control},
        }
    )

    async def whole() -> None:
        clusters = {name: Cluster(name, ["127.0.0.1:1"], request_timeout_ms=500) for name in ("agg", "ewr")}
        worker = Worker(config, clusters["agg"], {"ewr": clusters["ewr"]}, lambda: 1_000)
        serving = Control(worker, lambda source: clusters["ewr"])
        await serving.start()
        try:
            async with asyncio.timeout(patience(120)):
                await story(serving, worker)
        finally:
            await serving.stop()
            for cluster in clusters.values():
                await cluster.close()

    asyncio.run(whole())


async def post(control: Control, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    named = {"host": "127.0.0.1", "content-type": "application/json", **headers}
    answer = await control.respond(Request("POST", path, named, json.dumps(body).encode()))
    return answer.status, json.loads(answer.body)


async def get(control: Control, path: str) -> Response:
    return await control.respond(Request("GET", path, {"host": "127.0.0.1"}))


def test_a_wish_waits_for_what_is_wished_already(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(control: Control, worker: Worker) -> None:
        status, answer = await post(control, "/pause", {"all": True})
        assert (status, "have not been read yet" in answer["error"]) == (503, True)

    with_control(story)


def test_a_target_that_is_away_is_said_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "WISH_TIMEOUT_S", 0.2)

    async def story(control: Control, worker: Worker) -> None:
        worker.operators.reader._ready.set()
        status, answer = await post(control, "/pause", {"source": "ewr"})
        assert status == 503
        assert "target agg does not take the record now: it is not certain" in answer["error"]

    with_control(story)


def test_what_a_worker_waits_for_is_told_where_it_is_not_ready() -> None:
    async def story(control: Control, worker: Worker) -> None:
        async def told() -> tuple[str, list[str]]:
            answer = await get(control, "/readyz")
            assert answer.status == 503
            status = json.loads((await get(control, "/status")).body)
            return answer.body.decode().strip(), status["waits_for"]

        wishes = "the wishes of operators have not been read yet"
        assert await told() == (f"not ready; {wishes}", [wishes])
        worker.operators.reader._ready.set()
        worker.member._trouble = "cluster agg: no coordinator of group millrace-mirror.aggregate"
        worker.keeper._trouble[worker] = "an open transaction"
        seat = worker.member._trouble
        assert await told() == (f"not ready; {seat}; an open transaction", [seat, "an open transaction"])

    with_control(story)


def test_a_worker_that_was_drained_says_so_where_it_is_not_ready() -> None:
    async def story(control: Control, worker: Worker) -> None:
        drained = asyncio.Event()
        worker.drain = drained.wait  # type: ignore[assignment]
        worker.member._trouble = "cluster agg: no coordinator of group millrace-mirror.aggregate"
        draining = asyncio.create_task(post(control, "/drain", {}))
        await until_async(lambda: worker.operators.is_draining, "the drain begins")
        answer = await get(control, "/readyz")
        assert (answer.status, answer.body) == (503, b"not ready; it is being drained\n")
        drained.set()
        assert (await draining)[0] == 200
        answer = await get(control, "/readyz")
        assert (answer.status, answer.body) == (
            503,
            b"not ready; drained: it carries nothing and can be ended\n",
        )

    with_control(story)


@pytest.mark.parametrize(
    ("left", "is_warned"),
    [(["own"], True), ([], True), (["other"], False), (["own", "other"], False), (None, False)],
)
def test_drain_of_the_last_worker_says_that_nothing_is_carried(
    left: list[str] | None, is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`left`: who is in the mirror's group afterwards; None: the target does not say."""

    async def described(cluster: Cluster, group_id: str) -> Group:
        assert (cluster.name, group_id) == ("agg", "millrace-mirror.aggregate")
        if left is None:
            raise ClusterUnreachable("away")
        members = tuple(Member(each, None, "", "", ()) for each in left)
        return Group(group_id, "Stable", "classic", "millrace-mirror", "", members, 1)

    monkeypatch.setattr(control_module, "describe_group", described)

    async def story(control: Control, worker: Worker) -> None:
        worker.member.member_id = "own"
        worker.drain = _nothing  # type: ignore[assignment]
        status, answer = await post(control, "/drain", {})
        warned = "no other worker is in the mirror's group: nothing is carried until one is started; "
        assert (status, answer["done"]) == (
            200,
            f"drained: 0 partitions given up; {warned if is_warned else ''}the process can be ended",
        )

    with_control(story)


async def _nothing() -> None:
    pass


def test_a_mirror_without_a_file_cannot_be_reloaded() -> None:
    async def story(control: Control, worker: Worker) -> None:
        status, answer = await post(control, "/reload", {})
        assert (status, answer["error"]) == (409, "this mirror was not started with a config file")

    with_control(story)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause", {"source": "ewr", "partition": 0}, "expected a topic beside a partition"),
        ("/pause", {}, 'a source, a topic, or {"all": true}'),
        ("/pause", [], "expected a mapping"),
        (
            "/throttle",
            {"source": "ewr", "bytes_per_second": "1"},
            "bytes_per_second: expected a whole number",
        ),
        (
            "/throttle",
            {"source": "ewr", "bytes_per_second": 10**400},
            "bytes_per_second: expected at most 9007199254740992",
        ),
        ("/skip", {"source": "ewr", "topic": "flights"}, "partition"),
        ("/drain", {"now": True}, "now: expected no such key"),
    ],
)
def test_a_wrong_body_is_told_by_its_field(path: str, body: Any, words: str) -> None:
    async def story(control: Control, worker: Worker) -> None:
        status, answer = await post(control, path, body)
        assert (status, words in answer["error"]) == (400, True), answer

    with_control(story)


def test_a_defect_of_a_handler_is_an_answer_and_no_end() -> None:
    async def story(control: Control, worker: Worker) -> None:
        def broken() -> dict[str, Any]:
            raise KeyError("a secret of the inside")

        worker.status.document = broken  # type: ignore[method-assign]
        answer = await get(control, "/status")
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert (await get(control, "/healthz")).status == 200

    with_control(story)


def test_a_token_that_cannot_be_read_closes_the_control_calls(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("words-that-open")

    async def story(control: Control, worker: Worker) -> None:
        opened = {"authorization": "Bearer words-that-open"}
        assert (await post(control, "/reload", {}, **opened))[0] == 409
        token.unlink()
        status, answer = await post(control, "/reload", {}, **opened)
        assert (status, "control.token cannot be read" in answer["error"]) == (503, True)
        assert (await get(control, "/metrics")).status == 200

    with_control(story, token={"file": str(token)})


def test_workers_that_do_not_answer_are_named_with_the_reason() -> None:
    async def story(control: Control, worker: Worker) -> None:
        # Its own port under another id: as where every machine's worker says 127.0.0.1.
        own = f"http://127.0.0.1:{control.port}"
        worker.operators.crew = Crew(
            (Peer("", own), Peer("twin", own), Peer("gone", "http://127.0.0.1:1"), Peer("old", None))
        )
        document = json.loads((await get(control, "/mirror")).body)
        found = {each["id"]: each for each in document["workers"]}
        assert (found[""]["status"]["url"], found[""]["error"]) == (own, None)
        assert "another worker answers there" in found["twin"]["error"]
        assert "refused" in found["gone"]["error"].lower()
        assert "has not said where it answers" in found["old"]["error"]

    with_control(story)


def test_a_drained_worker_does_not_take_its_former_place_for_another_worker() -> None:
    async def story(control: Control, worker: Worker) -> None:
        worker.operators.crew = Crew((Peer("before", f"http://127.0.0.1:{control.port}"),))
        worker.operators.is_draining = True
        document = json.loads((await get(control, "/mirror")).body)
        assert [each["error"] for each in document["workers"]] == [None]

    with_control(story)


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_worker_is_known_by_its_address_where_it_has_another_id_since(
    is_draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was drained, or has joined again; the crew is that of the last rebalance."""
    urls = [f"http://10.0.0.{number}:8090" for number in range(5)]
    answers = {
        urls[0]: {"mirror": "aggregate", "url": urls[0], "member": "", "draining": True},
        urls[1]: {"mirror": "aggregate", "url": urls[1], "member": "joined-again"},
        urls[2]: {"mirror": "other", "url": urls[2], "member": "joined-again"},
        urls[3]: {"mirror": "aggregate", "url": urls[0], "member": "joined-again"},
        # Two machines whose workers say the same address.
        urls[4]: {"mirror": "aggregate", "url": urls[4], "member": "c"},
    }

    async def answer(url: str) -> Any:
        return answers[url.removesuffix("/status")]

    monkeypatch.setattr(control_module, "get_json", answer)

    async def story(control: Control, worker: Worker) -> None:
        own = f"http://127.0.0.1:{control.port}"
        worker.member.member_id = "" if is_draining else "now"
        worker.operators.is_draining = is_draining
        peers = [Peer("before", own), Peer("a", urls[0]), Peer("b", urls[1]), Peer("x", urls[2])]
        peers += [Peer("y", urls[3]), Peer("c", urls[4]), Peer("twin", urls[4])]
        worker.operators.crew = Crew(tuple(peers))
        document = json.loads((await get(control, "/mirror")).body)
        assert document["crew_is_old"] is is_draining
        refused = {each["id"] for each in document["workers"] if each["error"]}
        assert refused == {"x", "y", "twin"}
        assert [each["url"] for each in document["workers"]].count(own) == 1

    with_control(story)


def test_the_whole_mirror_is_asked_once_a_second_however_many_look() -> None:
    async def story(control: Control, worker: Worker) -> None:
        asked = 0
        ask = control._ask_workers

        async def counting() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return await ask()

        control._ask_workers = counting  # type: ignore[method-assign]
        await asyncio.gather(*(get(control, "/mirror") for _ in range(20)))
        assert asked == 1

    with_control(story)


def test_status_has_nothing_that_is_not_described() -> None:
    async def story(control: Control, worker: Worker) -> None:
        description = json.loads((await get(control, "/openapi.json")).body)
        worker.operators.crew = Crew((Peer("gone", "http://127.0.0.1:1"),))
        worker.discovery.guard.refused["ewr", "flights"] = "it would go round"
        group = {
            "source": "ewr",
            "group": "g",
            "state": "failing",
            "partitions": 1,
            "committed": 0,
            "at_ms": 1,
        }
        worker.group_sync.status = lambda: [group | {"reason": "away"}]  # type: ignore[method-assign]
        status = json.loads((await get(control, "/status")).body)
        assert status["refused_topics"] and status["groups"]
        assert undescribed(description, "StatusAnswer", status) == []
        mirror = json.loads((await get(control, "/mirror")).body)
        assert undescribed(description, "MirrorAnswer", mirror) == []
        status["sources"][0]["more"] = status["new"] = 1
        assert undescribed(description, "StatusAnswer", status) == ["new", "sources[].more"]

    with_control(story)


def test_nothing_is_down_before_it_was_asked_for() -> None:
    async def story(control: Control, worker: Worker) -> None:
        document = json.loads((await get(control, "/mirror")).body)
        text = view.lines(document, None, lambda line, colour: f"<{colour}>{line}")
        assert text[0] == "aggregate → agg   <yellow>starting · 1 worker · 0 B/s · exactly once"
        assert not any("cannot reach" in line for line in text)
        # What has failed is down, with the reason.
        for cluster in (worker.target, worker.readers["ewr"].cluster):
            with pytest.raises(ClusterUnreachable):
                await cluster.metadata()
        text = view.lines({**document, "workers": [await own(control, document)]}, None, lambda line, _: line)
        assert "target down" in text[0]
        assert any("cannot reach target agg: " in line and "127.0.0.1:1" in line for line in text), text
        assert any("cannot reach source ewr: " in line and "127.0.0.1:1" in line for line in text), text
        answer = await get(control, "/readyz")
        assert answer.status == 503
        assert b"not ready; target agg does not answer: 127.0.0.1:1" in answer.body

    with_control(story)


async def own(control: Control, document: dict[str, Any]) -> dict[str, Any]:
    return {**document["workers"][0], "status": json.loads((await get(control, "/status")).body)}


def test_throttle_times_are_told() -> None:
    """By quotas of a cluster; what an operator asks for is told elsewhere."""

    async def story(control: Control, worker: Worker) -> None:
        source = worker.readers["ewr"].cluster
        source._pool._throttled(3_600_000)
        worker.target._pool._throttled(1_500)
        status = json.loads((await get(control, "/status")).body)
        (told,) = (each for each in status["sources"] if each["cluster"] == "ewr")
        assert (told["over_quota"], told["throttled_ms"]) == (True, 3_600_000)
        assert status["target"]["throttled_ms"] == 1_500
        metrics = (await get(control, "/metrics")).body.decode()
        assert 'millrace_mirror_source_throttled_seconds_total{source="ewr"} 3600.0' in metrics
        assert 'millrace_mirror_target_throttled_seconds_total{target="agg"} 1.5' in metrics

    with_control(story)


def test_what_has_answered_once_is_down_when_it_does_not() -> None:
    async def story(control: Control, worker: Worker) -> None:
        reader = worker.readers["ewr"]
        sink = Sink(worker.target, lambda: 0)
        worker.delivery = SimpleNamespace(  # type: ignore[assignment]
            sinks=[sink], transactions=TransactionCounts, standing=tuple
        )

        async def words() -> tuple[bool, ...]:
            status = json.loads((await get(control, "/status")).body)
            return tuple(
                each[word]
                for each in (status["target"], status["sources"][0])
                for word in ("connected", "starting")
            )

        assert await words() == (False, True, False, True)
        sink.is_connected = reader.is_connected = reader.was_connected = True
        assert await words() == (True, False, True, False)
        sink.is_connected = reader.is_connected = False
        assert await words() == (False, False, False, False)

    with_control(story)


def test_a_worker_that_asks_the_target_for_nothing_does_not_call_it_down() -> None:
    async def story(control: Control, worker: Worker) -> None:
        async def target_up() -> list[float]:
            text = (await get(control, "/metrics")).body.decode()
            return [
                sample.value
                for family in text_string_to_metric_families(text)
                if family.name == "millrace_mirror_target_up"
                for sample in family.samples
            ]

        assert await target_up() == []
        sink = Sink(worker.target, lambda: 0)
        worker.delivery = SimpleNamespace(  # type: ignore[assignment]
            sinks=[sink], transactions=TransactionCounts, standing=tuple
        )
        sink.is_connected = True
        assert await target_up() == [1.0]
        sink.is_connected = False
        assert await target_up() == [0.0]
        worker.operators.is_draining = True
        assert await target_up() == []

    with_control(story)


def test_paused_partitions_are_told_one_by_one() -> None:
    async def story(control: Control, worker: Worker) -> None:
        for number in range(2):
            worker.owned[SourcePartition("ewr", "flights", number)] = None  # type: ignore[assignment]
        for scope, paused in ((Scope("ewr", "flights"), True), (Scope("ewr", "flights", 0), False)):
            for record in worker.operators.wishes.pause_records(scope, paused=paused, at_ms=1):
                worker.operators.wishes.apply(*record)
        paused_rows = [
            (labels["partition"], value)
            for name, _, labels, value in worker.status._wish_gauges()
            if name == "millrace_mirror_paused_partitions"
        ]
        assert paused_rows == [("0", 0.0), ("1", 1.0)]
        worker.owned.clear()
        status = json.loads((await get(control, "/status")).body)
        assert (status["paused"], status["resumed"]) == (
            ["ewr/flights"],
            {"ewr/flights": ["ewr/flights:0"]},
        )

    with_control(story)


def test_gap_of_a_partition_that_is_not_carried_here_is_not_laid_at_anothers_door() -> None:
    where = {"source": "ewr", "topic": "flights", "partition": 0}

    async def story(control: Control, worker: Worker) -> None:
        status, answer = await post(control, "/skip", where)
        assert (status, answer["error"]) == (
            503,
            "this worker has no share yet and does not know who carries ewr/flights:0: ask again, or say "
            "which gap with from and class",
        )
        worker.is_assigned = True
        status, answer = await post(control, "/skip", where)
        assert (status, answer["error"]) == (
            409,
            "this worker does not carry ewr/flights:0: say which gap with from and class, or ask the worker "
            "that does (see /mirror)",
        )
        worker.operators.is_draining = True
        status, answer = await post(control, "/skip", where)
        assert status == 409 and answer["error"].startswith("this worker is drained and carries nothing: ")

    with_control(story)


def test_every_transaction_is_counted_once_and_alike_on_both_surfaces() -> None:
    async def story(control: Control, worker: Worker) -> None:
        assert isinstance(worker.delivery, ExactlyOnce)
        for seconds, committed in ((0.25, True), (0.5, True), (4.0, False)):
            worker.delivery._transaction_ended(seconds, committed)
        status = json.loads((await get(control, "/status")).body)["transactions"]
        metrics = (await get(control, "/metrics")).body.decode()
        found = {
            (
                sample.name.removeprefix("millrace_mirror_transaction_seconds_"),
                sample.labels["outcome"],
            ): sample.value
            for family in text_string_to_metric_families(metrics)
            if family.name == "millrace_mirror_transaction_seconds"
            for sample in family.samples
            if "le" not in sample.labels
        }
        assert found["count", "committed"] == status["committed"] == 2
        assert found["sum", "committed"] == status["open_seconds"] == 0.75
        assert found["count", "aborted"] == status["aborted"] == 1

    with_control(story)


def test_a_drained_worker_tells_of_no_route() -> None:
    """It has no share, as one that has just come; but it will carry nothing."""

    async def story(control: Control, worker: Worker) -> None:
        assert worker._leads_if_known() is None
        worker.is_stopping = True
        assert worker._leads_if_known() is False
        worker.is_stopping = False

    with_control(story)


def test_what_is_delivered_weighs_in_the_claim_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, idle = (SourcePartition("ewr", "flights", number) for number in range(2))
    rate, now_ms = 1 << 20, 0
    pauses: list[float] = []

    async def story(control: Control, worker: Worker) -> None:
        asked_again = asyncio.Event()
        monkeypatch.setattr(worker_module, "steady_ms", lambda: now_ms)
        worker.is_assigned = True
        worker.owned = dict.fromkeys((busy, idle))  # type: ignore[arg-type]
        monkeypatch.setattr(worker.member, "rejoin", asked_again.set)
        sleep = asyncio.sleep

        async def pass_time(seconds: float) -> None:
            nonlocal now_ms
            await sleep(0)
            if worker._workload._meters:  # what is delivered before a partition is watched is not counted
                worker._workload.add(busy, int(rate * seconds))
            now_ms += int(seconds * 1000)
            pauses.append(seconds)

        monkeypatch.setattr(worker_module.asyncio, "sleep", pass_time)
        measuring = asyncio.get_running_loop().create_task(worker._measure())
        await asyncio.wait_for(asked_again.wait(), patience())
        measuring.cancel()
        monkeypatch.undo()
        await asyncio.wait([measuring])
        ((_, data),) = worker._claim()
        levels = decode_claim(data).levels
        assert levels[busy] == level_of(rate) and levels[idle] == 0
        assert set(pauses) == {SAMPLE_INTERVAL_S}

    with_control(story)


def test_every_route_answers() -> None:
    async def story(control: Control, worker: Worker) -> None:
        for route in ROUTES:
            if not route.is_control:
                answer = await get(control, route.path)
                assert answer.status == (503 if route.name == "readiness" else 200), route.path
                assert answer.content_type == route.content_type

    with_control(story)


@pytest.mark.parametrize(
    ("control", "url"),
    [
        ({"listen": "127.0.0.1:0"}, "http://127.0.0.1:{port}"),
        ({"listen": "[::1]:0"}, "http://[::1]:{port}"),
        ({"listen": "127.0.0.1:0", "advertised": "mirror.example:80"}, "http://mirror.example:80"),
    ],
)
def test_a_worker_says_where_it_answers(control: dict[str, str], url: str) -> None:
    async def story(serving: Control, worker: Worker) -> None:
        assert worker.operators.url == url.format(port=serving.port)

    with_control(story, **control)
