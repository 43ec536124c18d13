"""`millrace mirror status` as lines: worst first, never wider than the terminal, and it says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter

from millrace.deploy import cli
from millrace.deploy.commands.mirror_control import _selections, size_of
from millrace.deploy.commands.mirror_view import (
    as_json,
    duration,
    lines,
    overall,
    quantity,
    shorten,
    topic_rows,
)
from millrace.deploy.commands.mirror_worker import WorkerPort
from millrace.mirror.topics.internal_topics import INTERNAL_TOPICS

LONG = "orders.europe.invoices.corrected.v2.partitioned-by-customer"


def partition(
    source: str, topic: str, number: int, state: str = "running", lag: float = 0.0
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "source": source,
        "topic": topic,
        "partition": number,
        "state": state,
        "lag_records": int(lag * 10),
        "lag_seconds": lag,
    }
    if state == "stopped":
        found["gap"] = {
            "from": 7,
            "to": 114,
            "class": "too_large",
            "reason": "the target says: message too large",
            "todo": "The target takes no record of this size: raise max.message.bytes and retry, or skip.",
        }
    return found


def rate(source: str, topic: str, per_second: float) -> dict[str, Any]:
    return {
        "source": source,
        "topic": topic,
        "records_per_second": per_second,
        "bytes_per_second": per_second * 250,
    }


def worker(number: int = 1, **more: Any) -> dict[str, Any]:
    status = {
        "mirror": "aggregate",
        "url": f"http://10.0.0.{number}:8090",
        "ready": True,
        "draining": False,
        "delivery": "exactly_once",
        "paused": [],
        "target": {"cluster": "agg", "connected": True},
        "sources": [
            {"cluster": cluster, "connected": True, "throttle_bytes_per_second": None}
            for cluster in ("ewr", "lhr")
        ],
        "topics": [],
        "partitions": [],
        **more,
    }
    return {"id": f"member-{number}", "url": status["url"], "status": status, "error": None}


def silent(number: int = 9) -> dict[str, Any]:
    return {
        "id": "m9",
        "url": f"http://10.0.0.{number}:8090",
        "status": None,
        "error": "no answer within 2 s",
    }


# A source of which nothing is known yet.
ASKED_NEXT = {"cluster": "ewr", "connected": False, "starting": True, "throttle_bytes_per_second": None}


def document(*workers: dict[str, Any]) -> dict[str, Any]:
    return {"mirror": "aggregate", "workers": list(workers)}


def plain(text: str, colour: str) -> str:
    return text


def shown(whole: dict[str, Any], width: int | None = 80) -> list[str]:
    return lines(whole, width, plain)


TROUBLE = document(
    worker(
        1,
        paused=["ewr/flights:2"],
        sources=[
            {"cluster": "ewr", "connected": True, "throttle_bytes_per_second": 10_000_000},
            {
                "cluster": "lhr",
                "connected": False,
                "error": "connection refused",
                "throttle_bytes_per_second": None,
            },
        ],
        partitions=[
            partition("ewr", "flights", 0),
            partition("ewr", "flights", 1, "stopped", 7_300),
            partition("ewr", "flights", 2, "paused", 95),
            partition("lhr", LONG, 0, lag=14),
        ],
        topics=[rate("ewr", "flights", 12_400)],
    ),
    worker(2, partitions=[partition("ewr", "flights", 3, lag=3)], topics=[rate("ewr", "flights", 600)]),
    silent(),
)


def test_the_whole_mirror_is_one_table_worst_first() -> None:
    rows = topic_rows(TROUBLE)
    assert [(row.source, row.topic) for row in rows] == [("ewr", "flights"), ("lhr", LONG)]
    flights, lhr = rows
    assert (flights.partitions, flights.state) == (4, "1 stopped")
    assert (flights.lag_records, flights.lag_seconds) == (73_000 + 950 + 30, 7_300)
    assert flights.records_per_second == 13_000
    assert lhr.state == "source down"


def test_order_by_stopped_then_down_then_lag() -> None:
    parts = [
        partition("ewr", "a", 0, lag=1),
        partition("ewr", "b", 0, lag=100),
        partition("ewr", "c", 0, "stopped"),
        partition("lhr", "d", 0),
        partition("ewr", "e", 0),
    ]
    sources = [
        {"cluster": "ewr", "connected": True, "throttle_bytes_per_second": None},
        {"cluster": "lhr", "connected": False, "throttle_bytes_per_second": None},
    ]
    rows = topic_rows(document(worker(partitions=parts, sources=sources)))
    assert [row.topic for row in rows] == ["c", "d", "b", "a", "e"]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_nothing_but_what_is_to_be_copied_is_wider_than_the_terminal(width: int) -> None:
    text = [line for line in shown(TROUBLE, width) if not line.startswith("  millrace mirror")]
    assert max(len(line) for line in text) <= width, text


def test_a_pipe_gets_whole_names() -> None:
    assert any(LONG in line for line in shown(TROUBLE, None))
    assert not any("…" in line for line in shown(TROUBLE, None))


def test_what_is_wrong_is_said_with_what_to_do() -> None:
    text = "\n".join(shown(TROUBLE))
    for words in (
        "aggregate → agg   1 stopped · 3 workers",
        "! http://10.0.0.9:8090 does not answer: no answer within 2 s",
        "! http://10.0.0.1:8090 cannot reach source lhr: connection refused",
        "paused: ewr/flights:2",
        "throttled: ewr 10 MB/s",
        "ewr/flights:1 is stopped: too large, 107 offsets from 7",
        "raise max.message.bytes",
        "  millrace mirror retry ewr/flights:1",
        "  millrace mirror skip ewr/flights:1",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("ready", "draining", "is_told"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_what_is_waited_for_is_said_while_it_is(ready: bool, draining: bool, is_told: bool) -> None:
    waiting = worker(ready=ready, draining=draining, waits_for=["an open transaction"])
    said = "! http://10.0.0.1:8090 waits: an open transaction" in "\n".join(shown(document(waiting)))
    assert said is is_told


def test_colour_is_never_the_only_sign() -> None:
    seen: set[str] = set()

    def style(text: str, colour: str) -> str:
        seen.add(colour)
        return f"<{colour}>{text}</>"

    coloured = "\n".join(lines(TROUBLE, 80, style))
    assert re.sub(r"</?[a-z]*>", "", coloured) == "\n".join(shown(TROUBLE))
    assert {"red", "bold"} <= seen


def test_cluster_that_holds_a_worker_back_by_its_quota_is_named() -> None:
    agg = {"cluster": "agg", "connected": True, "over_quota": True}
    text = "\n".join(shown(document(worker(target=agg)), None))
    assert "http://10.0.0.1:8090 is over its quota at target agg: it waits as told" in text


@pytest.mark.parametrize(
    ("whole", "word"),
    [
        (document(worker()), "running"),
        (document(worker(ready=False)), "starting"),
        (document(worker(ready=False, draining=True)), "drained"),
        (document(worker(ready=False, draining=True), worker(2)), "running"),
        (document(worker(ready=False, draining=True), silent()), "drained"),
        (document(worker(ready=False, draining=True), worker(2, ready=False)), "starting"),
        (document(worker(), silent()), "incomplete"),
        (document(silent()), "no worker answers"),
        (document(worker(target={"cluster": "agg", "connected": False})), "target down"),
        (document(worker(target={"cluster": "agg", "connected": False, "starting": False})), "target down"),
        (document(worker(target={"cluster": "agg", "connected": False, "starting": True})), "starting"),
        (document(worker(sources=[ASKED_NEXT])), "starting"),
        (document(worker(sources=[ASKED_NEXT | {"starting": False}])), "source down"),
        (document(worker(draining=True, sources=[ASKED_NEXT]), worker(2)), "running"),
        (document(worker(partitions=[partition("ewr", "t", 0, "stopped")])), "1 stopped"),
    ],
)
def test_the_mirror_in_a_word(whole: dict[str, Any], word: str) -> None:
    assert overall(whole)[0] == word
    assert word in shown(whole)[0]


def test_a_mirror_whose_workers_are_all_drained_carries_nothing_and_is_not_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drained = worker(ready=False, draining=True)
    assert overall(document(drained)) == ("drained", "red")
    ends: list[tuple[int, bool]] = []
    for whole in (document(drained), document(drained, worker(2))):
        monkeypatch.setattr(WorkerPort, "get", lambda port, path, whole=whole: whole)
        ends.append(
            (
                cli.run(["mirror", "status", "--url", "http://127.0.0.1:1"]),
                "nothing is carried" in capsys.readouterr().out,
            )
        )
    assert ends == [(2, True), (0, False)]


def test_workers_that_a_drained_one_names_are_said_to_be_those_of_before() -> None:
    whole = document(worker(ready=False, draining=True), worker(2))
    said = "! the worker that was asked is drained: it names the workers of when it left"
    assert said not in "\n".join(shown(whole, None))
    assert said in "\n".join(shown({**whole, "crew_is_old": True}, None))


def test_what_goes_on_of_what_is_paused_is_named() -> None:
    whole = document(
        worker(paused=["ewr", "lhr/flights"], resumed={"ewr": ["ewr/flights:0", "ewr/orders"]}),
        worker(2, paused=["ewr", "lhr/flights"]),
    )
    assert "paused: ewr (but not ewr/flights:0, ewr/orders), lhr/flights" in shown(whole, None)


def test_what_was_not_asked_yet_is_not_called_down() -> None:
    parts = [partition("ewr", "t", 0)]
    text = "\n".join(shown(document(worker(ready=False, sources=[ASKED_NEXT], partitions=parts))))
    assert "down" not in text and "cannot reach" not in text
    text = "\n".join(shown(document(worker(sources=[ASKED_NEXT | {"starting": False}], partitions=parts))))
    assert "source down" in text and "cannot reach source ewr" in text


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        (document(worker(ready=False)), "no worker has ewr/t:0 yet: the mirror is starting; ask again"),
        (document(worker()), "no worker carries ewr/t:0: see mirror status"),
        (document(worker(), silent()), "not all answer: see mirror status"),
        (
            document(worker(partitions=[partition("ewr", "t", 0, "paused")])),
            "ewr/t:0 is not stopped at a gap: it is paused",
        ),
    ],
)
def test_skip_of_what_is_not_stopped_says_what_it_is(
    whole: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WorkerPort, "get", lambda port, path: whole)
    assert cli.run(["mirror", "skip", "ewr/t:0", "--url", "http://127.0.0.1:1"]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["run"], ["check"], ["translate", "--group", "g"], ["status"], ["skip", "ewr/t:0"]]
)
def test_every_command_takes_the_file_that_lies_here(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["mirror", *words]) == cli.USAGE_ERROR_STATUS
    assert "say which mirror: --config its file (there is no mirror.yaml here)" in capsys.readouterr().err
    assert cli.run(["mirror", *words, "--config", "there.yaml"]) == 2
    assert capsys.readouterr().err.endswith("--config there.yaml: there is no such file\n")
    (tmp_path / "mirror.yaml").write_text("name: 7\n")
    assert cli.run(["mirror", *words]) == 2
    assert "mirror.yaml:1: name" in capsys.readouterr().err


def test_a_mirror_without_partitions_says_so() -> None:
    assert shown(document(worker()))[-1] == "no partition is carried yet"


def test_json_has_the_rows_and_everything_else() -> None:
    found = as_json(TROUBLE)
    assert found["workers"] == TROUBLE["workers"]
    assert found["topics"][0]["state"] == "1 stopped"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.4, "0.4"),
        (7, "7"),
        (999, "999"),
        (999.6, "1.0k"),
        (12_400, "12k"),
        (1_500, "1.5k"),
        (9_960, "10k"),
        (3_400_000, "3.4M"),
    ],
)
def test_quantities(value: float | None, text: str) -> None:
    assert quantity(value) == text


def test_quantities_with_a_unit() -> None:
    assert quantity(3_400_000, "B/s") == "3.4 MB/s"
    assert quantity(0, "B/s") == "0 B/s"
    assert quantity(12, "B/s") == "12 B/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.9, "0s"),
        (119, "119s"),
        (120, "2m"),
        (7_199, "119m"),
        (7_500, "2h 05m"),
        (200_000, "2d"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_names_lose_their_middle() -> None:
    assert shorten("flights", 7) == "flights"
    assert shorten("abcdefghij", 5) == "ab…ij"
    assert len(shorten(LONG, 20)) == 20


@pytest.mark.parametrize(
    ("text", "selections"),
    [
        ("ewr", [{"source": "ewr"}]),
        ("ewr/flights", [{"source": "ewr", "topic": "flights"}]),
        (
            "ewr/a.b-0:0,3",
            [
                {"source": "ewr", "topic": "a.b-0", "partition": 0},
                {"source": "ewr", "topic": "a.b-0", "partition": 3},
            ],
        ),
        ("*/flights", [{"topic": "flights"}]),
    ],
)
def test_what_is_typed(text: str, selections: list[dict[str, Any]]) -> None:
    assert _selections(text) == selections


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "ewr/",
        "/flights",
        "ewr:0",
        "ewr/flights:",
        "ewr/flights:a",
        "ewr/flights:2147483648",
        "a/b/c",
    ],
)
def test_what_cannot_be_meant(text: str) -> None:
    with pytest.raises(BadParameter):
        _selections(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500", 500),
        ("500k", 500_000),
        ("10MB", 10**7),
        ("10 MB/s", 10**7),
        ("64MiB", 64 << 20),
        ("1.5g", 15 * 10**8),
        ("2.3KB", 2_300),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_rates_as_people_write_them(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "fast", "10X", "1e6", "0.1", "9223372036854775808", "9" * 320]
)
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(BadParameter):
        size_of(text)


def test_topics_that_are_never_carried_are_named_once_with_the_reason() -> None:
    rows = [
        {"source": "ewr", "topic": "__consumer_offsets", "reason": INTERNAL_TOPICS[0][1]},
        {"source": "ewr", "topic": "payments.heartbeats", "reason": "as another version says it"},
        {"source": "lhr", "topic": "_schemas", "reason": "a registry's"},
    ]
    text = shown(document(worker(1, internal_topics=rows), worker(2, internal_topics=rows[:2])), None)
    assert [line for line in text if "never carried" in line] == [
        "never carried from ewr: payments.heartbeats (as another version says it); "
        f"__consumer_offsets ({INTERNAL_TOPICS[0][1]})",
        "never carried from lhr: _schemas (a registry's)",
    ]
    assert not [line for line in shown(document(worker(1))) if "never carried" in line]


def test_groups_that_are_kept_in_step_are_counted_and_those_that_are_not_are_named() -> None:
    def group(name: str, state: str, **more: Any) -> dict[str, Any]:
        return {"source": "ewr", "group": name, "state": state, "partitions": 3, "committed": 3, **more}

    groups = [
        group("billing", "synced"),
        group("search", "synced"),
        group("alerts", "active_on_target"),
        group("report", "failing", reason="sources merge into agg/flights"),
        group("orders", "ahead_on_target", reason="flights-0: the target stands at 9000"),
    ]
    text = shown(document(worker(1, groups=groups), worker(2, groups=[])), None)
    assert (
        "groups: 2 in step, 1 not in step, 1 read on the target already, 1 further on at the target" in text
    )
    assert "group report of ewr: not in step: sources merge into agg/flights" in text
    assert "group orders of ewr: further on at the target: flights-0: the target stands at 9000" in text
    assert not any("billing" in line for line in text)
    assert not any(line.startswith("group") for line in shown(document(worker(1))))
