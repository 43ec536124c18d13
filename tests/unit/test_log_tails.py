"""A failed test's report has the ends of the logs that grew while it ran, and of no others."""

from __future__ import annotations

import os
from pathlib import Path

from tests import log_tails

BEGAN_S = 1_000.0


def written(path: Path, text: str, at_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at_s, at_s))
    return path


def test_logs_that_grew_meanwhile_are_shown_the_latest_first(tmp_path: Path) -> None:
    written(tmp_path / "a" / "broker.log", "one\ntwo\n", BEGAN_S + 1)
    written(tmp_path / "b" / "mirror.log", "\n".join(map(str, range(100))), BEGAN_S + 2)
    written(tmp_path / "c" / "zookeeper.log", "long ago", BEGAN_S - 1)
    written(tmp_path / "d" / "empty.log", "", BEGAN_S + 1)
    written(tmp_path / "a" / "data" / "t-0" / "00000000000000000000.log", "records", BEGAN_S + 1)
    shown = list(log_tails.sections(tmp_path, BEGAN_S))
    assert [title for title, _ in shown] == ["the end of b/mirror.log", "the end of a/broker.log"]
    assert shown[0][1].splitlines() == [str(number) for number in range(100 - log_tails.LINES, 100)]
    assert shown[1][1] == "one\ntwo"


def test_a_log_that_is_no_text_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "broker.log"
    path.write_bytes(b"\xff" * 10 + b"\nthe end")
    assert log_tails.tail(path).endswith("the end")
