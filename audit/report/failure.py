"""That the last run failed, told where people and programs look: the page, `last_failure.json`. Pure.

The verdict on the page, `summary.json` and the watermarks stay those of the last good run, with their time: a
failure says nothing of the records. Called by `folder`; read by `status`. Its words for what the operating
system refused are those of `job` and the command line. The file:

    {"version": 1, "at": "2013-01-02T00:00:00Z", "sentence": "..."}        gone after the next good run
"""

from __future__ import annotations

import errno
import json
import re

from markupsafe import Markup

from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.audit.report.text import instant, sentence_text

FILE_NAME = "last_failure.json"
BEGIN, END = "<!--last run-->", "<!--/last run-->"
_PLACE = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
_STYLE = "font: 16px/1.5 system-ui, sans-serif; max-width: 62ch; margin: 48px auto; padding: 0 16px"


def system_sentence(problem: OSError) -> str:
    """What the operating system refused, and what to do where the disk is full."""
    where = f" {problem.filename}" if problem.filename else ""
    told = problem.strerror or str(problem)
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        told = f"{told}; make room and run it again, the last good state is as it was"
    return f"audit:{where} {told}"


def document(sentence: str, at_ms: int) -> str:
    """The text of `last_failure.json`."""
    body = {"version": 1, "at": iso_time(at_ms), "sentence": " ".join(sentence.split())}
    return json.dumps(body, indent=2) + "\n"


def banner(sentence: str, at_ms: int, *, has_verdict: bool = True) -> Markup:
    """What the page says on top. The sentence may name what a stranger chose."""
    rest = (
        "What stands below is the last good run's, and may be out of date."
        if has_verdict
        else "No run has ended well yet: nothing is known of the records."
    )
    told = sentence_text(_ended(" ".join(sentence.split())))
    return Markup(
        '<p class="failed" id="failed" role="alert"><b>The last run failed</b> ({}): {} {}</p>'
    ).format(instant(iso_time(at_ms)), told, rest)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def page_with(page: str, sentence: str, at_ms: int) -> str:
    """The page with the banner on top; "" is that of an audit of which no run has ended well."""
    if page and BEGIN in page:
        told = f"{BEGIN}{banner(sentence, at_ms)}{END}"
        return _PLACE.sub(lambda _: told, page, count=1)
    if page and 'id="verdict"' in page:  # of an older version, without the place for it
        return page.replace("<main", f"{banner(sentence, at_ms)}<main", 1)
    told = f"{BEGIN}{banner(sentence, at_ms, has_verdict=False)}{END}"
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>The run failed · Millrace audit</title></head>\n"
        f'<body style="{_STYLE}">\n{told}\n</body>\n</html>\n'
    )
