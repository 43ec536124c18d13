"""`audit explain` and the end of `audit run`, in words: every verdict, from files that a job has left."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from millrace.audit.config import AuditConfig, parse_config
from millrace.audit.explain import MOST_PROVEN, explain, lines
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.keeping.waivers import give_waiver
from millrace.audit.reconciliation.neighbours import MOST_OF_STREAM, Neighbourhood
from millrace.audit.reconciliation.settled import SETTLED_SCHEMA, without
from millrace.audit.reconciliation.spans import SPAN_SCHEMA
from millrace.audit.reconciliation.verdict_rows import Evidence, evident_rows, iso_time, verdict_rows
from millrace.audit.reconciliation.verdicts import PRODUCED, Verdict, WindowState
from millrace.audit.report.console import console_lines
from millrace.audit.report.folder import write_report
from millrace.audit.report.summary import summarise
from millrace.audit.scanning.cell_rows import CELL_SCHEMA
from millrace.audit.scanning.cells import Cell
from millrace.broker.errors import ConfigError
from millrace.deploy.commands.audit import app
from tests.browser.report_data import CONTROL, HOUR_MS, START_MS, TIERS, rich, row
from tests.cells import encode_bitmaps
from tests.settling import settle

HOP = ("ewr", "agg")


def run(config: AuditConfig, topic: str, window: str) -> list[str]:
    return list(lines(explain(config, topic, window)))


def cell(tier: str, sequences: range | list[int], first: int, last: int, **more: Any) -> Cell:
    ((base, bitmap),) = encode_bitmaps(np.array(list(sequences), np.uint64))
    settings: dict[str, Any] = {
        "tier": tier,
        "cluster": tier,
        "topic": "orders",
        "partition": 3,
        "stream": "00000000000000aa",
        "producer": "a@ewr",
        "window_start_ms": START_MS,
        "chunk_start": 0,
        "count": len(sequences),
        "byte_count": 0,
        "first_offset": first,
        "last_offset": last,
        "base": base,
        "bitmap": bitmap,
    }
    return Cell(**{**settings, **more})


def written(tmp_path: Path, *rows: Any, cells: Any = (), waivers: Any = (), folded: Any = ()) -> AuditConfig:
    """A report and a state as a job leaves them."""
    config = parse_config(
        {
            "clusters": {
                "ewr": {"bootstrap": ["127.0.0.1:1"], "tier": "source"},
                "agg": {"bootstrap": ["127.0.0.1:2"], "tier": "aggregate"},
            },
            "topics": ["orders", "flights"],
            "window": "1h",
        }
    ).model_copy(update={"state": tmp_path / "state", "report": tmp_path / "report"})
    pairs = [each if isinstance(each, tuple) else (each, Evidence()) for each in rows]
    table = evident_rows(pairs)
    summary = summarise(
        table,
        tiers=TIERS,
        at_ms=START_MS + 9 * HOUR_MS,
        window_ms=HOUR_MS,
        untrusted={},
        unaudited={},
        waivers=waivers,
    )
    config.report.mkdir(parents=True)
    write_report(config.report, summary, table)
    state = StateFolder.open(config.state)
    (tmp_path / "state" / "cells" / "1").mkdir()
    names = dict.fromkeys(CELL_SCHEMA.names)
    content = [
        {
            **names,
            **{name: getattr(each, name) for name in CELL_SCHEMA.names if hasattr(each, name)},
            "tail": False,
        }
        for each in cells
    ]
    for each in content:
        each["repeats"] = []
    state.write_table("cells/1/part.parquet", pa.Table.from_pylist(content, CELL_SCHEMA))
    state.write_table("verdicts/1.parquet", pa.Table.from_pylist(list(folded), SETTLED_SCHEMA))
    state.commit(Commit(1, 0, HOUR_MS, ["cells/1/part.parquet"], verdicts=["verdicts/1.parquet"]))
    return config


def mine(**more: Any) -> Any:
    return row("a@ewr", 0, count=10, stream="00000000000000aa", **more)


def test_a_loss_tells_the_hop_the_offsets_and_the_neighbours(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        mine(verdict=Verdict.LOSS, missing={HOP: ((4, 5),)}),
        cells=[
            cell("ewr", range(1, 11), 100, 140),
            cell("agg", [1, 2, 3], 7, 9),
            cell("agg", range(6, 11), 10, 20),
        ],
    )
    told = "\n".join(run(config, "orders", iso_time(START_MS) or ""))
    for words in (
        "orders, window 2026-03-02T00:00:00Z of 1 hour: LOSS",
        "producer a@ewr, stream 00000000000000aa: LOSS (SETTLED)",
        "2 records lost",
        "acknowledged  10 records",
        "partition 3, offsets 100-140: 1-10",
        "LOST between ewr and agg: 4-5",
        "4-5: ewr has it in partition 3, offsets 100-140",
        "in agg, before it 3 was seen (partition 3, offsets 7-9); "
        "after it 6 was seen (partition 3, offsets 10-20)",
    ):
        assert words in told, told


def test_a_topic_with_several_names_in_a_cluster_is_told_with_the_cells_of_all(
    tmp_path: Path,
) -> None:
    """Also of the ranges whose places the run did not keep: they are found in the cells."""
    lost = tuple((n, n) for n in range(2, 13, 2))
    there = {"topic": "orders@ewr.orders"}
    config = written(
        tmp_path,
        mine(verdict=Verdict.LOSS, missing={HOP: lost}),
        cells=[
            cell("ewr", range(1, 14), 100, 140),
            cell("agg", range(1, 14, 2), 7, 9, **there),
            cell("agg", lost[-1], 90, 91, topic="orders-of-another@ewr.orders"),
        ],
    )
    told = "\n".join(run(config, "orders", iso_time(START_MS) or ""))
    before = "before it 11 was seen (partition 3, offsets 7-9)"
    assert before in told and told.count("was seen") >= 2 * len(lost) and "offsets 90-91" not in told, told


def test_a_united_cell_is_told_without_a_place(tmp_path: Path) -> None:
    nowhere = replace(cell("ewr", range(1, 10), -1, -1), partition=-1)
    config = written(tmp_path, mine(), cells=[nowhere, cell("ewr", [10], 7, 7)])
    told = "\n".join(run(config, "orders", iso_time(START_MS) or ""))
    assert "    several partitions together: 1-9\n    partition 3, offsets 7-7: 10" in told


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "all 10 records acknowledged and seen in every tier, each once"),
        ({"verdict": Verdict.COUNT_MATCH}, "without numbers a loss and a copy would cancel"),
        (
            {"verdict": Verdict.LOSS, "missing_count": {HOP: 3}},
            "LOST 3 between ewr and agg (not numbered: cannot be named)",
        ),
        (
            {"verdict": Verdict.LOSS, "missing": {(PRODUCED, "ewr"): ((9, 9),)}},
            "LOST between producers and ewr: 9",
        ),
        (
            {
                "verdict": Verdict.LOSS,
                "content_checked": "differs",
                "reasons": ("content differs between a and b",),
            },
            "all records are there, with other content than was sent",
        ),
        (
            {"verdict": Verdict.DUPLICATE, "duplicates": {"agg": ((2, 3),)}, "extra_copies": {"agg": 5}},
            "TWICE in agg, and not before: 2-3 (5 extra copies)",
        ),
        (
            {"verdict": Verdict.UNKNOWN, "in_flight": {HOP: ((8, 10),)}},
            "ON THE WAY from ewr to agg: 8-10 (the mirror has not passed them yet)",
        ),
        ({"verdict": Verdict.UNKNOWN, "explained": {"too_large": ((1, 1),)}}, "EXPLAINED by too_large: 1"),
        (
            {"verdict": Verdict.UNKNOWN, "unreported": ((7, 9),)},
            "not proven: 3 records seen that no report tells of",
        ),
        (
            {
                "verdict": Verdict.UNKNOWN,
                "unknown": ((1, 2),),
                "reasons": ("part of tier agg could not be read: expired",),
            },
            "run it more often, or keep data longer",
        ),
        ({"verdict": Verdict.UNKNOWN, "state": WindowState.OPEN}, "the window is still open, more may come"),
        ({"content_checked": "not compared"}, "content not compared"),
        ({"revision": 3}, "revision 3: late data changed an earlier verdict"),
        ({"ambiguous": 2}, "2 more may have been sent"),
    ],
)
def test_every_verdict_has_its_words(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    told = "\n".join(run(written(tmp_path, mine(**more)), "orders", iso_time(START_MS) or ""))
    assert words in told, told


def test_a_group_is_said_to_have_counted_itself(tmp_path: Path) -> None:
    told = "\n".join(run(written(tmp_path, mine()), "orders", "2026-03-02T00:00"))
    assert "group:billing 10 records, 10 distinct" in told
    assert "counted by the consumers of the group themselves" in told


def test_append_times_are_told_where_brokers_kept_them(tmp_path: Path) -> None:
    times = Evidence({"ewr": [START_MS, START_MS + 5_000]})
    told = "\n".join(run(written(tmp_path, (mine(), times)), "orders", "2026-03-02"))
    assert "appended 2026-03-02T00:00:00Z to 2026-03-02T00:00:05Z" in told


def test_any_time_in_the_window_finds_it(tmp_path: Path) -> None:
    config = written(tmp_path, mine())
    for asked in ("2026-03-02T00:59:59Z", str(START_MS + 1), "2026-03-02T01:30:00+01:00"):
        assert explain(config, "orders", asked)["window_start"] == "2026-03-02T00:00:00Z"


def test_a_stream_asks_for_what_no_window_can_be_named_for(tmp_path: Path) -> None:
    lost_tail = mine(
        window_start_ms=None,
        verdict=Verdict.UNKNOWN,
        unknown=((11, 12),),
        reasons=("no report covers these sequences",),
    )
    config = written(tmp_path, mine(), lost_tail)
    told = run(config, "orders", "00000000000000aa")
    assert told[0] == "orders, what no window can be named for: UNKNOWN"
    assert any("UNKNOWN: 11-12" in line for line in told)
    with pytest.raises(ConfigError, match="no window can be named for"):
        run(config, "orders", "00000000000000bb")


def test_waivers_are_told_standing_and_lapsed(tmp_path: Path) -> None:
    waiver = {
        "topic": "orders",
        "window_start": iso_time(START_MS),
        "who": "dana",
        "why": "replayed\x1b[2J",
        "at": "x",
    }
    config = written(tmp_path, mine(), waivers=[waiver, {**waiver, "stands": False, "who": "ann"}])
    told = "\n".join(run(config, "orders", "2026-03-02"))
    assert "WAIVED by dana at x: replayed\\x1b[2J" in told
    assert "WAIVED (lapsed: it has got worse since) by ann" in told


def test_a_waiver_that_was_given_after_the_run_is_told_with_what_it_was_given_for(tmp_path: Path) -> None:
    lost = mine(verdict=Verdict.LOSS, missing={HOP: ((4, 5),)})
    config = written(tmp_path, lost)
    assert "WAIVED" not in "\n".join(run(config, "orders", "2026-03-02"))
    state = StateFolder.open(config.state)
    settled = settle(verdict_rows([lost]), None, ["orders"], 1).table
    state.write_table("verdicts/2.parquet", settled)
    state.commit(Commit(2, 0, HOUR_MS, ["cells/1/part.parquet"], verdicts=["verdicts/2.parquet"]))
    give_waiver(state, "orders", START_MS, "ann", "too early", 1_000)
    give_waiver(state, "orders", START_MS, "dana", "replayed by hand", 2_000)
    told = "\n".join(run(config, "orders", "2026-03-02"))
    assert "WAIVED by dana at 1970-01-01T00:00:02Z, when it was LOSS: replayed by hand" in told
    assert "ann" not in told, "a later waiver replaces an earlier one"


def test_a_waiver_is_judged_with_what_is_left_of_pruned_streams_as_the_run_judges_it(tmp_path: Path) -> None:
    """Two were lost and waived, and their evidence was pruned; then another stream of the window lost two."""
    first = row("b@ewr", 0, count=10, stream="b" * 16, verdict=Verdict.LOSS, missing={HOP: ((1, 2),)})
    later = mine(verdict=Verdict.LOSS, missing={HOP: ((4, 5),)})
    config = written(tmp_path, later)
    state = StateFolder.open(config.state)
    settled = settle(verdict_rows([first]), None, ["orders"], 1).table
    state.write_table("verdicts/2.parquet", settled)
    state.commit(Commit(2, 0, HOUR_MS, ["cells/1/part.parquet"], verdicts=["verdicts/2.parquet"]))
    give_waiver(state, "orders", START_MS, "dana", "replayed by hand", 2_000)
    assert "WAIVED by dana" in "\n".join(run(config, "orders", "2026-03-02"))
    state.write_table("verdicts/3.parquet", without(settled, [("orders", START_MS)]))
    state.commit(Commit(3, 0, HOUR_MS, ["cells/1/part.parquet"], verdicts=["verdicts/3.parquet"]))
    assert "WAIVED (lapsed: it has got worse since) by dana" in "\n".join(run(config, "orders", "2026-03-02"))


def test_what_is_not_proven_comes_first_and_the_proven_are_summed_up_beside_it(tmp_path: Path) -> None:
    many = [row(f"a{number:02d}@ewr", 0, count=10, stream=f"{number:016x}") for number in range(20)]
    lost = row("z@ewr", 0, count=10, verdict=Verdict.LOSS, missing={HOP: ((4, 5),)}, stream="f" * 16)
    config = written(tmp_path, *many, lost)
    told = run(config, "orders", "2026-03-02")
    assert [line for line in told if line.startswith("producer ")] == [
        "producer z@ewr, stream ffffffffffffffff: LOSS (SETTLED)"
    ]
    assert told[-1] == "20 more streams are proven, with 200 records (--all shows them)"
    found = explain(config, "orders", "2026-03-02")
    assert len(found["streams"]) == 21, "machines get all"
    assert sum(line.startswith("producer ") for line in lines(found, True)) == 21
    clean = written(tmp_path / "clean", *many)
    told = run(clean, "orders", "2026-03-02")
    assert sum(line.startswith("producer ") for line in told) == MOST_PROVEN
    assert told[-1].startswith("8 more streams are proven, with 80 records")


def test_a_pruned_window_is_told_by_the_line_that_is_left(tmp_path: Path) -> None:
    line = dict.fromkeys(SETTLED_SCHEMA.names) | {
        "topic": "orders",
        "producer": "",
        "stream": "",
        "window_start_ms": START_MS - 100 * HOUR_MS,
        "window_ms": HOUR_MS,
        "verdict": "PROVEN",
        "published": 77,
        "missing": 0,
        "duplicates": 0,
        "in_flight": 0,
        "unreported": 0,
        "unknown": 0,
        "explained": 0,
        "settled_ms": START_MS - 90 * HOUR_MS,
        "folded": True,
    }
    config = written(tmp_path, mine(), folded=[line])
    asked = str(START_MS - 100 * HOUR_MS + 60_000)
    told = run(config, "orders", asked)
    assert told[0].endswith("of 1 hour: PROVEN")
    assert any("PRUNED: settled as PROVEN at" in line and "published 77" in line for line in told)
    assert explain(config, "orders", asked)["pruned"]["counts"]["published"] == 77


def test_a_window_that_was_summed_up_is_told_with_those_beside_it(tmp_path: Path) -> None:
    config = written(tmp_path, mine())
    state = StateFolder.open(config.state)
    latest = state.latest()
    first_ms = START_MS - 100 * HOUR_MS
    span = dict.fromkeys(SPAN_SCHEMA.names, 0) | {"topic": "orders", "window_ms": HOUR_MS, "published": 77}
    span |= {"verdict": "PROVEN", "start_ms": first_ms, "end_ms": first_ms + 20 * HOUR_MS}
    state.write_table("verdicts/9/spans.parquet", pa.Table.from_pylist([span], SPAN_SCHEMA))
    state.commit(replace(latest, number=latest.number + 1, verdicts=["verdicts/9/spans.parquet"]))
    found = explain(config, "orders", str(first_ms + 3 * HOUR_MS + 60_000))
    assert (found["verdict"], found["window_ms"]) == ("PROVEN", HOUR_MS)
    assert found["window_start"] == iso_time(first_ms + 3 * HOUR_MS)
    told = list(lines(found))
    assert told[0].endswith("of 1 hour: PROVEN")
    (line,) = (each for each in told if each.startswith("PRUNED"))
    assert f"all windows from {iso_time(first_ms)} to {iso_time(first_ms + 20 * HOUR_MS)}" in line
    assert "counts together are kept (published 77)" in line
    with pytest.raises(ConfigError):
        explain(config, "orders", str(first_ms + 20 * HOUR_MS))


def test_what_is_not_there_is_answered_by_what_is(tmp_path: Path) -> None:
    config = written(tmp_path, *(row("a@ewr", window) for window in (0, 5, 6, 9)))
    with pytest.raises(ConfigError) as wrong:
        run(config, "orders", "2026-03-02T07:00:00Z")
    for words in ("2026-03-02T05:00:00Z", "2026-03-02T06:00:00Z", "2026-03-02T09:00:00Z", "nearest"):
        assert words in str(wrong.value)
    with pytest.raises(ConfigError, match="did you mean orders"):
        run(config, "order", "2026-03-02")
    with pytest.raises(ConfigError, match="of which the last report has none"):
        run(config, "flights", "2026-03-02")
    with pytest.raises(ConfigError, match="a time such as"):
        run(config, "orders", "yesterday")
    (config.report / "reconciliation.parquet").unlink()
    with pytest.raises(ConfigError, match="run the audit first"):
        run(config, "orders", "2026-03-02")


def test_without_its_state_the_report_is_still_explained(tmp_path: Path) -> None:
    config = written(tmp_path, mine(verdict=Verdict.LOSS, missing={HOP: ((4, 5),)}))
    (tmp_path / "state" / "commits" / "00000001.json").write_text("{}")
    told = "\n".join(run(config, "orders", "2026-03-02"))
    assert "the state's cells could not be read" in told and "LOST between ewr and agg: 4-5" in told
    gone = config.model_copy(update={"state": tmp_path / "nowhere"})
    assert "LOST between ewr and agg: 4-5" in "\n".join(run(gone, "orders", "2026-03-02"))
    assert not (tmp_path / "nowhere").exists()


def test_names_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    config = written(tmp_path, row(CONTROL, 0))
    text = "\n".join(run(config, "orders", "2026-03-02"))
    assert "\x1b" not in text and "\u202e" not in text and "cash\\x1b[31m" in text


def test_the_command_prints_json_too(tmp_path: Path) -> None:
    written(tmp_path, mine(verdict=Verdict.LOSS, missing={HOP: ((4, 5),)}))
    config = tmp_path / "audit.yaml"
    config.write_text(
        "clusters:\n  ewr: {bootstrap: ['127.0.0.1:1'], tier: source}\n"
        "  agg: {bootstrap: ['127.0.0.1:2'], tier: aggregate}\n"
        "topics: [orders]\nwindow: 1h\nstate: state\nreport: report\n"
    )
    done = CliRunner().invoke(app, ["explain", "orders", "2026-03-02", "--config", str(config), "--json"])
    assert done.exit_code == 0, done.output
    (stream,) = json.loads(done.output)["streams"]
    assert stream["missing"][0]["between"] == ["ewr", "agg"] and stream["missing"][0]["count"] == 2
    text = CliRunner().invoke(app, ["explain", "orders", "2026-03-02", "--config", str(config)])
    assert "LOST between ewr and agg: 4-5" in text.output


def test_neighbours_are_the_nearest_of_the_whole_stream() -> None:
    around = Neighbourhood(
        [
            cell("ewr", range(1, 100), 0, 99),
            cell("agg", [2, 3, 90], 50, 60),
            cell("agg", [40, 80], 10, 20, partition=1, window_start_ms=START_MS + HOUR_MS),
        ]
    )
    told = around.around(HOP, 41, 79)
    assert (told["before"]["sequence"], told["before"]["partition"]) == (40, 1)
    assert (told["after"]["sequence"], told["after"]["offsets"]) == (80, [10, 20])
    assert told["held"] == [{"tier": "ewr", "partition": 3, "offsets": [0, 99]}]
    assert "before" not in around.around(HOP, 1, 1) and "after" not in around.around(HOP, 91, 99)
    lost = tuple((number, number) for number in range(1, 9))
    looked = sum(len(places) for _ in range(50) for _, places in around.places({HOP: lost}))
    assert looked == MOST_OF_STREAM


def test_the_end_of_a_run_is_what_a_tired_operator_needs() -> None:
    summary, _ = rich(1)
    told = list(console_lines(summary, "/r/index.html", "audit.yaml", 1))
    assert told[0] == f"LOSS   {summary['sentence']}"
    text = "\n".join(told)
    for words in (
        "lost         5 of orders 2026-03-06T05:00:00Z, ledger-01@ewr #132–135, 900, between ewr and agg",
        "between producers and jfk",
        "first in agg",
        "and 3 more, all named in summary.json",
        "not trusted  header cut short, in ewr (3)",
        "safe to use  nothing of sensor-readings.celsius.v2 yet",
        "next         millrace audit explain orders 2026-03-06T05:00:00Z --config audit.yaml",
        "report       /r/index.html",
        "exit status  1, a loss or a duplicate",
    ):
        assert words in text, words
    assert "\x1b" not in text and "\x07" not in text
    assert max(map(len, told[1:])) < 400 and len(told) < 40
    assert "nothing is unproven but what" in "\n".join(console_lines(summary, "", "", 0))


def test_a_time_is_told_with_all_windows_that_it_lies_in(tmp_path: Path) -> None:
    """Who counts in windows of two hours has lost a record in one that began before the hour that is asked
    for; its cells are those of both hours, and nobody else's are."""
    long = row(
        "b@ewr", 0, count=10, stream="00000000000000bb", verdict=Verdict.LOSS, missing={HOP: ((4, 4),)}
    )
    in_second_hour = {"stream": "00000000000000bb", "window_start_ms": START_MS + HOUR_MS}
    config = written(
        tmp_path,
        mine(),
        row("a@ewr", 1, count=10, stream="00000000000000aa"),
        replace(long, window_ms=2 * HOUR_MS),
        row("b@ewr", 2, stream="00000000000000bb"),
        cells=[
            cell("ewr", [1], 0, 9),
            cell("ewr", [2], 10, 19, window_start_ms=START_MS + HOUR_MS),
            cell("ewr", [1, 2], 20, 29, stream="00000000000000bb"),
            cell("ewr", [3, 4], 30, 39, **in_second_hour),
        ],
    )
    for asked, own_start in ((0, 0), (1, 1), (1.5, 1)):
        told = explain(config, "orders", iso_time(int(START_MS + asked * HOUR_MS)) or "")
        assert (told["verdict"], told["window_start"], told["window_ms"]) == (
            "LOSS", iso_time(START_MS), 2 * HOUR_MS,
        )  # fmt: skip
        (loser, other) = told["streams"]
        assert [(each["producer"], each["verdict"]) for each in (loser, other)] == [
            ("b@ewr", "LOSS"), ("a@ewr", "PROVEN"),
        ]  # fmt: skip
        ranges = [tier["cells"] for tier in loser["tiers"] if tier["tier"] == "ewr"]
        assert [each["sequences"] for each in ranges[0]] == [[[1, 2]], [[3, 4]]]
        assert other["window_start"] == iso_time(START_MS + own_start * HOUR_MS)
        (seen,) = (tier["cells"] for tier in other["tiers"] if tier["tier"] == "ewr")
        assert [each["sequences"] for each in seen] == [[[own_start + 1, own_start + 1]]]
    text = "\n".join(lines(told, everything=True))
    assert "LOSS (SETTLED)" in text and f"in its window {other['window_start']} of 1 hour)" in text
