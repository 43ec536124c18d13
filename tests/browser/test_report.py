"""The report in a real browser, headless: it renders, says the verdict, and asks nothing of any network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from millrace.audit.report.html import render
from millrace.audit.report.summary import summarise
from millrace.audit.verdict_rows import verdict_rows
from millrace.audit.verdicts import Verdict, WindowState, WindowVerdict

pytestmark = pytest.mark.browser
DAY_MS = 86_400_000
START_MS = 1_356_998_400_000
HOSTILE = "<script>document.title='owned'</script>"


def rows(days: int = 365, producer: str = "UA@ewr", window_ms: int = DAY_MS) -> pa.Table:
    """A year of one producer: one window with a loss, one with a duplicate, one unknown."""
    verdicts = []
    for day in range(days):
        more = {
            3: {"verdict": Verdict.LOSS, "missing": {("ewr", "agg"): ((31, 32),)}},
            10: {
                "verdict": Verdict.DUPLICATE,
                "duplicates": {"agg": ((101, 101),)},
                "extra_copies": {"agg": 1},
            },
            20: {
                "verdict": Verdict.UNKNOWN,
                "unknown": ((205, 205),),
                "reasons": ("retention passed the auditor",),
            },
        }.get(day, {"verdict": Verdict.PROVEN})
        verdicts.append(
            WindowVerdict(
                topic="flights",
                producer=producer,
                stream="00000000000000aa",
                window_start_ms=START_MS + day * window_ms,
                window_ms=window_ms,
                state=WindowState.SETTLED,
                published=10,
                consumed={"ewr": 10, "agg": 10},
                seen={"ewr": 10, "agg": 10},
                **more,
            )
        )
    return verdict_rows(verdicts)


def page(tmp_path: Path, table: pa.Table, window_ms: int = DAY_MS) -> Path:
    summary = summarise(
        table, tiers=["ewr", "agg"], at_ms=START_MS, window_ms=window_ms, untrusted={}, unaudited={"agg": 7}
    )
    path = tmp_path / "index.html"
    path.write_text(render(summary, table), "utf-8")
    return path


def chromium(tmp_path: Path, *arguments: str) -> str:
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert binary, "Chromium is needed: apt-get install chromium"
    done = subprocess.run(
        [
            binary,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,2000",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def test_report_of_a_year_shows_verdict_losses_and_hop(tmp_path):
    path = page(tmp_path, rows())
    dom = chromium(tmp_path, "--dump-dom", path.as_uri())
    assert '<p class="badge" id="verdict">LOSS</p>' in dom
    assert "2 of 3,650 acknowledged records were lost between ewr and agg" in dom
    assert "31–32" in dom and "2013-01-04" in dom
    assert "retention passed the auditor" in dom and "7 records in agg carry no identity" in dom
    assert dom.count('<g class="PROVEN"') == 2 * 365 - 4


def test_screenshot_of_the_page_is_not_empty(tmp_path):
    path = page(tmp_path, rows())
    shot = tmp_path / "report.png"
    chromium(tmp_path, f"--screenshot={shot}", path.as_uri())
    assert shot.stat().st_size > 50_000


def test_hostile_names_stay_text(tmp_path):
    path = page(tmp_path, rows(5, HOSTILE))
    assert HOSTILE not in path.read_text()
    dom = chromium(tmp_path, "--dump-dom", path.as_uri())
    assert "<title>Records were lost" in dom and "owned'&lt;/script&gt;" in dom


def test_page_asks_nothing_of_any_network(tmp_path):
    text = page(tmp_path, rows(5)).read_text()
    assert "src=" not in text and "@import" not in text and "url(" not in text and "https:" not in text


def test_thousands_of_windows_stay_one_readable_page(tmp_path):
    path = page(tmp_path, rows(20_000, window_ms=60_000), window_ms=60_000)
    text = path.read_text()
    assert text.count("<rect") < 5_000 and len(text) < 2_000_000
    assert "a square is" in text and '<g class="LOSS"' in text
