"""The report in a real browser: what it says, that it can be read and used by anybody, and that no name does
harm. The data is made up so that everything that can be said is said (`report_data`).

Set MILLRACE_SCREENSHOTS to a folder to look at it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millrace.audit.reconciliation.verdict_rows import Evidence, evident_rows, verdict_rows
from millrace.audit.reconciliation.verdicts import Verdict
from millrace.audit.report.html import render
from millrace.audit.report.summary import summarise
from tests.browser.devtools import Page, browser
from tests.browser.report_data import (
    CONTROL,
    ENDING,
    HOUR_MS,
    IMAGE,
    LONG,
    SCRIPT,
    START_MS,
    TIERS,
    many,
    rich,
    row,
)
from tests.browser.test_mirror_page import CONTRAST

pytestmark = pytest.mark.browser
DAY_MS = 86_400_000
HOP = ("ewr", "agg")
PRESS = "document.querySelector('.overview svg').dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], pa.Table, Path]:
    summary, rows = rich(4)
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(render(summary, rows), "utf-8")
    return summary, rows, path


Report = tuple[dict[str, Any], pa.Table, Path]


def show(page: Page, path: Path, **how: Any) -> str:
    """The text of the page once its script has run."""
    page.messages.clear()
    page.requests.clear()
    page.show(path.as_uri(), **how)
    page.until(f"location.href === {path.as_uri()!r} && document.readyState === 'complete'")
    if folder := os.environ.get("MILLRACE_SCREENSHOTS"):
        page.screenshot(
            Path(folder) / f"{'-'.join(['report', path.parent.name, *map(str, how.values())])}.png"
        )
    return str(page.value("document.body.innerText"))


def written(tmp_path: Path, rows: pa.Table, window_ms: int = HOUR_MS, **more: Any) -> Path:
    summary = summarise(
        rows, tiers=TIERS, at_ms=START_MS, window_ms=window_ms, untrusted={}, unaudited={}, **more
    )
    path = tmp_path / "index.html"
    path.write_text(render(summary, rows), "utf-8")
    return path


def test_the_verdict_comes_first_with_one_sentence_and_what_to_do(page: Page, report: Report) -> None:
    summary, _, path = report
    text = show(page, path)
    assert page.value("document.querySelector('h1').innerText") == "Records were lost"
    assert page.value("document.getElementById('verdict').textContent") == "LOSS"
    assert page.value("document.getElementById('sentence').textContent") == summary["sentence"]
    assert "28 of" in summary["sentence"] and "between ewr and agg" in summary["sentence"]
    assert "millrace audit explain orders 2026-03-06T05:00:00Z" in text
    order = page.value("[...document.querySelectorAll('main > *')].map(each => each.id || each.className)")
    assert order.index("losses") < order.index("windows") < order.index("reconciliation")
    assert page.messages == []


def test_everything_that_was_found_is_told(page: Page, report: Report) -> None:
    text = show(page, report[2])
    for words in (
        "27 records in 4 windows of 2 producers",
        "132–135, 900",
        "last had in ewr partition 3, offsets 88120–89119",
        "Before it 131 arrived (agg partition 7, offsets 410001–410700)",
        "After it 136 arrived",
        "not named",
        "41",
        "101–140",
        "is complete up to 2026-03-04 12:00 UTC",
        "has nothing proven yet",
        "Replayed by hand after the switch failed",
        "Part of tier agg could not be read: expired",
        "run it more often, or keep data longer",
        "unknown version 9, in agg",
        "7,204 records in agg carry no identity",
        "its report: the window is not complete yet",
        "records, after the window's end",
        "Estimates: of each window only the first and the last append",
        "19 compared and equal, 1 differ, 1 could not be compared",
        "content differs between produced and agg",
        "A producer of the roster has never reported",
        "reconciliation.parquet",
    ):
        assert words in text, words
    hops = page.value("[...document.querySelectorAll('#losses h3 span')].map(each => each.innerText)")
    assert [hop for hop in hops if len(hop) > 1] == ["ewr → agg", "producers → jfk"]
    assert page.value("[...document.querySelectorAll('#revisions .chip')].map(e => e.innerText)") == [
        "unknown",
        "proven",
    ]
    flow = page.value("[...document.querySelectorAll('.flow li')].map(each => each.innerText)")
    assert [words.split("\n")[0] for words in flow] == ["producers", "ewr", "jfk", "agg", "group:billing"]
    assert (
        "27 missing" in flow[3]
        and "88 extra" in flow[3]
        and "1 missing" in flow[2]
        and "missing" not in flow[1]
    )


def test_what_can_be_typed_is_set_apart_and_notes_are_told(page: Page, tmp_path: Path) -> None:
    hop = ("agg", "group:<b>till</b>`x`")
    gone = row(
        "a@ewr", 0, verdict=Verdict.UNKNOWN, unknown=((1, 2),),
        reasons=("part of tier agg could not be read: expired",),
    )  # fmt: skip
    waiting = row("a@ewr", 1, verdict=Verdict.UNKNOWN, in_flight={hop: ((3, 4),)})
    text = show(page, written(tmp_path, verdict_rows([gone, waiting]), notes=["Something <i>else</i>."]))
    for words in (
        "Part of tier agg could not be read: expired",
        "In flight to tier group:<b>till</b>`x`",
        "when group <b>till</b>x has committed them.",
        "Also worth knowing",
        "Something <i>else</i>.",
    ):
        assert words in text, words
    code = "[...document.querySelectorAll('#unknown code')].map(each => each.textContent)"
    assert page.value(code) == ["millrace audit waive"]
    assert page.value("document.querySelectorAll('#unknown :is(b, i), #untrusted i').length") == 0
    assert page.messages == []


def test_names_stay_text_whatever_is_in_them(page: Page, report: Report) -> None:
    _, _, path = report
    source = path.read_text("utf-8")
    assert SCRIPT not in source and IMAGE not in source and LONG not in source
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", source)
    assert source.count("</script>") == 2
    text = show(page, path)
    page.value("document.querySelectorAll('details').forEach(each => { each.open = true })")
    text = str(page.value("document.body.innerText"))
    assert page.value("document.title") == "Records were lost · Millrace audit"
    assert page.value("document.images.length") == 0
    for words in (
        SCRIPT,
        IMAGE,
        ENDING,
        r"cash\x1b[31m\x00\u202edesk@till",
        "(10,010 characters)",
        "(no name)",
    ):
        assert words in text, words
    assert CONTROL not in text
    assert page.messages == []


def test_it_asks_nothing_of_any_network_and_runs_nothing_else(page: Page, report: Report) -> None:
    show(page, report[2])
    assert 'content="default-src &#39;none&#39;; script-src' in report[2].read_text("utf-8")
    assert {address for address in page.requests if not address.startswith("data:")} == {report[2].as_uri()}
    page.value(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran=1'}))"
    )
    assert page.value("window.ran === undefined")
    assert any("Content Security Policy" in message for message in page.messages)


def test_a_square_has_a_mark_beside_its_colour_and_says_what_it_stands_for(
    page: Page, report: Report
) -> None:
    show(page, report[2])
    drawn = page.value(
        "[...new Set([...document.querySelectorAll('.overview path.marks')].map(e => e.classList[1]))].sort()"
    )
    assert drawn == ["COUNT_MATCH", "DUPLICATE", "LOSS", "UNKNOWN"]
    label = page.value("document.querySelector('.overview svg').getAttribute('aria-label')")
    assert "with losses" in label and "the first loss 2026-03-04 06:00 UTC" in label
    # The keyboard: the worst square first, then along the line; Enter shows its rows.
    page.value(PRESS % "ArrowRight")
    first = page.value("document.getElementById('told').textContent")
    page.value(PRESS % "ArrowRight")
    second = page.value("document.getElementById('told').textContent")
    assert first != second and "published" in second and " in " in second
    page.value(PRESS % "Enter")
    assert page.value("!document.getElementById('range').hidden")
    assert page.value("document.activeElement.id") == "range"
    shown = page.value("document.getElementById('status').textContent")
    assert not shown.startswith(f"{report[0]['counts']}") and "windows in" in shown
    page.value("document.getElementById('range').click()")
    assert page.value("document.getElementById('range').hidden")


def test_a_pointed_and_clicked_square_is_the_one_under_the_pointer(page: Page, tmp_path: Path) -> None:
    rows = [row("a@ewr", window) for window in range(10)]
    rows[7] = row("a@ewr", 7, verdict=Verdict.LOSS, missing={("ewr", "agg"): ((3, 4),)})
    show(page, written(tmp_path, verdict_rows(rows)))
    page.value(
        """(() => {
          const map = document.querySelector('.overview svg'), box = map.getBoundingClientRect();
          const marks = map.querySelector('path.marks.LOSS').getBBox();
          const at = {clientX: box.left + marks.x + 3, clientY: box.top + marks.y + 3, bubbles: true};
          map.dispatchEvent(new PointerEvent('pointermove', at));
          map.dispatchEvent(new MouseEvent('click', at));
        })()"""
    )
    told = page.value("document.getElementById('told').textContent")
    assert told == "orders in agg, 2026-03-02 07:00: lost · published 1,000, seen 1,000, missing 2"
    assert page.value("document.querySelectorAll('#plain tbody tr').length") == 1
    assert "2026-03-02 07:00" in page.value("document.querySelector('#plain tbody tr').innerText")


def test_the_table_shows_the_worst_first_and_folds_what_is_proven(page: Page, report: Report) -> None:
    summary, rows, path = report
    show(page, path)
    total = f"{rows.num_rows:,}"
    assert page.value("document.getElementById('status').textContent").startswith(
        f"{total} of {total} windows in "
    )
    chips = page.value("[...document.querySelectorAll('#plain tbody .chip')].map(each => each.innerText)")
    order = ["lost", "twice", "unknown", "still open", "counts agree", "proven"]
    worst = [order.index(word) for word in chips if word in order]
    assert worst == sorted(worst) and worst[0] == 0 and worst[-1] == 5
    assert page.value("document.querySelectorAll('#plain tbody tr').length") <= 100
    run = "[...document.querySelectorAll('#plain tr.run')].find(e => e.innerText.includes('till-00@ewr'))"
    assert "336 windows" in page.value(f"{run}.innerText")
    page.value(f"{run}.querySelector('button').click()")
    page.value("document.getElementById('search').value = 'till-00@ewr'")
    page.value("document.getElementById('search').dispatchEvent(new Event('input'))")
    assert page.value("document.getElementById('page').textContent").endswith("of 4")
    before = page.value("document.querySelector('#plain tbody tr').innerText")
    page.value("document.getElementById('on').click()")
    assert page.value("document.querySelector('#plain tbody tr').innerText") != before
    lost = summary["windows"]["LOSS"]
    page.value("document.getElementById('search').value = ''")
    page.value("document.getElementById('search').dispatchEvent(new Event('input'))")
    page.value("document.getElementById('show').value = '0'")
    page.value("document.getElementById('show').dispatchEvent(new Event('change'))")
    assert (
        page.value("document.getElementById('status').textContent")
        == f"{lost} of {total} windows in {lost} rows"
    )
    published = "[...document.querySelectorAll('#plain tbody tr')].map(e => e.cells[3].innerText)"
    page.value("document.querySelectorAll('#plain th button')[3].click()")
    descending = [int(text.replace(",", "")) for text in page.value(published)]
    assert descending == sorted(descending, reverse=True)
    assert page.value("document.querySelectorAll('#plain th')[3].getAttribute('aria-sort')") == "descending"


def test_streams_of_one_producer_are_one_row_whose_sums_are_theirs(page: Page, tmp_path: Path) -> None:
    twice = [
        row("a@ewr", 0, count=100, stream="00000000000000aa"),
        row(
            "a@ewr",
            0,
            count=50,
            stream="00000000000000bb",
            verdict=Verdict.LOSS,
            missing={("ewr", "agg"): ((1, 2),)},
        ),
    ]
    show(page, written(tmp_path, verdict_rows(twice)))
    cells = page.value("[...document.querySelector('#plain tbody tr').cells].map(each => each.innerText)")
    assert cells[3:5] == ["150", "150"] and cells[-3] == "2"
    assert cells[-1].split("\n") == ["lost", "2 streams"]


def test_a_hundred_thousand_rows_stay_below_two_megabytes_and_the_page_is_quick(
    page: Page, tmp_path: Path
) -> None:
    summary, rows = many(100)
    text = render(summary, rows)
    assert len(text.encode()) < 2_000_000
    path = tmp_path / "index.html"
    path.write_text(text, "utf-8")
    shown = show(page, path)
    assert "worst of 100,000 rows" in shown and "more are named in summary.json" in shown
    assert page.value("document.getElementById('status').textContent").startswith(
        "100,000 of 100,000 windows"
    )
    assert page.value("document.querySelectorAll('#plain tbody tr').length") <= 100
    found = page.value(
        """(() => {
          const search = document.getElementById('search');
          search.value = 'till-01';
          search.dispatchEvent(new Event('input'));
          return document.querySelectorAll('#plain tbody tr').length;
        })()"""
    )
    assert 0 < found <= 100
    assert page.messages == []


def test_a_crowd_of_long_names_that_all_lost_something_stays_below_two_megabytes_too(tmp_path: Path) -> None:
    place = {"tier": "e" * 200, "partition": 1, "offsets": [1, 10**12]}
    near = {**place, "sequence": 10**12}
    rows = evident_rows(
        (
            row(
                f"{number:05d}" + "\u202e" * 244,
                number % 3,
                topic=f"{number % 700:05d}" + "t" * 240,
                verdict=Verdict.LOSS,
                missing={HOP: tuple((each, each) for each in range(1, 40, 2))},
                reasons=(f"reason {number} " + "r" * 400,),
            ),
            Evidence(
                places={HOP: [{"sequences": [1, 1], "held": [place] * 8, "before": near, "after": near}] * 4}
            ),
        )
        for number in range(2_000)
    )
    topics = {f"{number:05d}" + "t" * 240: None for number in range(700)}
    path = written(tmp_path, rows, watermarks=topics)
    assert path.stat().st_size < 2_000_000


def test_a_year_of_days_is_a_calendar_with_a_square_a_day(page: Page, tmp_path: Path) -> None:
    day = {"window_ms": DAY_MS}
    rows = [row("UA@ewr", 24 * number, **day) for number in range(365)]
    rows[3] = row("UA@ewr", 72, verdict=Verdict.LOSS, missing={("ewr", "agg"): ((31, 32),)}, **day)
    text = show(page, written(tmp_path, verdict_rows(rows), DAY_MS))
    assert "Every window of orders a square is 1 day" in " ".join(text.split())
    assert page.value("document.querySelector('details.maps').open")
    days = page.value(
        "document.querySelector('.maps svg path.squares.PROVEN').getAttribute('d').split('M').length - 1"
    )
    assert days == 365
    assert "window 2026-03-05 " in text and "00:00" not in page.value(
        "document.getElementById('losses').innerText"
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 1440])
def test_it_fits_and_can_be_read(page: Page, report: Report, width: int, dark: bool) -> None:
    """No sideways scrolling of the page, nothing cut off, contrast of at least 4.5 to 1 (WCAG 2.1, AA)."""
    show(page, report[2], width=width, dark=dark)
    page.value("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert page.value("document.documentElement.scrollWidth") <= width
    wide = page.value(
        """(width => [...document.querySelectorAll('main *')]
            .filter(each => each.children.length === 0 && each.getClientRects().length)
            .filter(each => !each.closest('svg.map, nav, thead'))
            .filter(each => each.getBoundingClientRect().right > width + 1)
            .map(each => each.textContent))(document.documentElement.clientWidth)"""
    )
    assert wide == []
    assert page.value(CONTRAST) == []


def test_everything_has_a_name_and_can_be_reached_by_keyboard(page: Page, report: Report) -> None:
    show(page, report[2])
    nameless = page.value(
        """[...document.querySelectorAll('input, select, button, svg[role=img], [role=region]')]
          .filter(each => !(each.labels && each.labels.length) && !each.getAttribute('aria-label')
            && !each.textContent.trim() && !each.hidden)
          .map(each => each.outerHTML.slice(0, 100))"""
    )
    assert nameless == []
    assert page.value("[...document.querySelectorAll('th')].every(each => each.scope === 'col')")
    assert page.value("document.documentElement.lang") == "en"
    levels = page.value("[...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    unreachable = page.value(
        """[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth + 1)
          .filter(each => each.tabIndex < 0 && !each.querySelector('[tabindex="0"]')).length"""
    )
    assert unreachable == 0
    targets = page.value(
        "[...document.querySelectorAll('nav a')].every(each => document.querySelector(each.hash))"
    )
    assert targets


def test_without_its_script_the_page_is_complete(page: Page, report: Report) -> None:
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.show(report[2].as_uri())
        page.until("document.readyState === 'complete' && document.getElementById('plain') !== null")
        assert page.value("document.querySelectorAll('#plain tbody tr').length") == 40
        assert page.value("getComputedStyle(document.getElementById('controls')).display") == "none"
        assert page.value("document.querySelectorAll('.overview path.squares').length") > 3
    finally:
        page.call("Emulation.setScriptExecutionDisabled", value=False)


def test_printed_it_opens_everything_and_leaves_the_controls_away(page: Page, report: Report) -> None:
    show(page, report[2])
    page.value("dispatchEvent(new Event('beforeprint'))")
    assert page.value("[...document.querySelectorAll('details')].every(each => each.open)")
    page.call("Emulation.setEmulatedMedia", media="print")
    try:
        for kind in ("nav", "#controls", ".pager"):
            assert page.value(f"getComputedStyle(document.querySelector({kind!r})).display") == "none", kind
    finally:
        page.call("Emulation.setEmulatedMedia", media="")


@pytest.mark.parametrize(
    ("verdict", "title"),
    [
        (Verdict.PROVEN, "Proven"),
        (Verdict.COUNT_MATCH, "The counts agree"),
        (Verdict.UNKNOWN, "Not proven yet"),
    ],
)
def test_each_verdict_has_its_title_and_nothing_red(
    page: Page, tmp_path: Path, verdict: Verdict, title: str
) -> None:
    text = show(page, written(tmp_path, evident_rows([(row("a@ewr", 0, verdict=verdict), Evidence())])))
    assert page.value("document.querySelector('h1').innerText") == title
    assert (
        page.value("document.querySelectorAll('main .LOSS:not(.key *):not(.squares):not(.marks)').length")
        == 0
    )
    assert "Lost records" not in text and "Not measurable here" in text


def test_nothing_at_all_is_a_page_too(page: Page, tmp_path: Path) -> None:
    text = show(page, written(tmp_path, verdict_rows([])))
    assert "Nothing is proven: no producer reported and no audited record was seen." in text
    assert page.messages == []
