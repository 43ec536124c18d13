"""One table of verdicts: whatever shows or returns one has it from there."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from millrace.audit.reconciliation.verdicts import GOOD, OPEN, OPEN_TOLD, STATES, VERDICTS, Verdict, status_of
from millrace.audit.report import document, drawing, html, metrics
from tests.browser.report_data import rich

RANKING = ("PROVEN", "COUNT_MATCH", "UNKNOWN", "DUPLICATE", "LOSS")


def test_words_rank_from_proven_to_loss_and_an_open_window_is_before_the_good_ones():
    assert RANKING == VERDICTS and [Verdict[word] for word in RANKING] == [0, 1, 2, 3, 4]
    assert STATES == ("LOSS", "DUPLICATE", "UNKNOWN", "OPEN", "COUNT_MATCH", "PROVEN")
    assert GOOD == ("PROVEN", "COUNT_MATCH")


@pytest.mark.parametrize(("word", "status"), list(zip(RANKING, (0, 0, 2, 1, 1), strict=True)))
def test_each_row_has_its_exit_status(word, status):
    assert status_of(Verdict[word]) == status


def test_what_is_written_down_elsewhere_has_the_same_words():
    assert get_args(document.VerdictWord) == VERDICTS
    assert set(get_args(document.StateWord)) == set(STATES) == set(metrics.WINDOW_STATES)
    assert set(html.STATE_WORDS) == set(html.TONES) == set(STATES)


def test_the_pages_legend_and_its_script_have_every_state():
    page = html.render(*rich(3))
    legend = page[page.index('<p class="legend">') :].partition("</p>")[0]
    for state in STATES:
        told = OPEN_TOLD if state == OPEN else Verdict[state].told_of_many
        (key,) = (
            each
            for each in legend.split("<span>")
            if f'class="squares {state}"' in each and "waived" not in each
        )
        assert f"{told}</span>" in key
        assert (f'class="marks {state}"' in key) is (state in drawing.MARKS)
    # Colours alone tell nothing to whoever sees none: but for what needs no look, each has a mark of its own.
    assert set(STATES) - {"PROVEN", OPEN} == set(drawing.MARKS)
    data = json.loads(page[page.index('id="data"') :].partition(">")[2].partition("</script>")[0])
    assert data["states"] == list(STATES) and data["words"] == list(html.STATE_WORDS.values())
    assert STATES[data["calm"] :] == tuple(reversed(GOOD))


def test_every_tone_is_a_colour_of_the_page():
    page = html.render(*rich(3))
    for state, tone in html.TONES.items():
        assert f".{state} {{ --tone: var(--{tone}); }}" in page
        assert page.count(f"--{tone}: #") == 2, "one for light, one for dark"
