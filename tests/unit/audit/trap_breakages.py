"""What takes the rules of the traps out, one function each; `test_traps` puts them in the rules' places.

A rule that is a line of a function goes by `rewriting` (the product's own function runs without it, whoever
calls it and by whatever name) or, in the compiled kernel, by `scanning`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from millrace.audit.reconciliation import stream_case
from millrace.audit.reconciliation.reconcile import Passage
from millrace.audit.scanning import cells as cells_module
from millrace.audit.scanning import counting, scan

decode_bitmap = cells_module.decode_bitmap


def changed(source: str, rule: str, instead: str) -> str:
    assert source.count(rule) == 1, f"the rule is not there, or more than once: {rule!r}"
    return source.replace(rule, instead)


def rewriting(function: Any, rule: str, instead: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The function with other words in the rule's place."""

    def breakage(patch: pytest.MonkeyPatch) -> None:
        source = changed(textwrap.dedent(inspect.getsource(function)), rule, instead)
        made: dict[str, Any] = {}
        exec(compile(source, f"<{function.__name__} without a rule>", "exec"), function.__globals__, made)
        patch.setattr(function, "__code__", made[function.__name__].__code__)

    return breakage


def scanning(rule: str, instead: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The kernel that counts records with other words in the rule's place, interpreted and not compiled."""

    def breakage(patch: pytest.MonkeyPatch) -> None:
        source = changed(inspect.getsource(scan), rule, instead)
        source = changed(source, "from numba import njit, types", "from numba import types")
        made: dict[str, Any] = {"njit": lambda *_, **__: lambda function: function, "__name__": scan.__name__}
        exec(compile(source, "<scan without a rule>", "exec"), made)

        def count_records(*given: Any) -> Any:
            with np.errstate(over="ignore"):
                return made["count_records"](*given)

        patch.setattr(counting, "count_records", count_records)

    return breakage


def nothing(*_: Any, **__: Any) -> None:
    """A rule taken out."""


def no_doubts(*_: Any, **__: Any) -> list[str]:
    return []


def no_extra_copies(windows: Any) -> dict[int, dict[int, int]]:
    return {}


def only_seen(case: Any) -> set[int]:
    return set().union(*case.seen.values())


def resume_anywhere(pin: Any, known: Any, now_ms: int) -> tuple[int, list[Any]]:
    first = pin.start_offset if known is None else max(pin.start_offset, known.next_offset)
    return min(first, pin.end_offset), []


def never_resume(pin: Any, known: Any, now_ms: int) -> tuple[int, list[Any]]:
    return pin.start_offset, []


def passages_of_any_topic(captured: Any) -> dict[str, dict[Any, Passage]]:
    found: dict[str, dict[Any, Passage]] = {}
    for each in captured.positions:
        place = (each.source, each.topic, each.partition)
        found.setdefault(each.aggregate, {})[place] = Passage(each.next_offset)
    return found


def passed_anywhere(tier: Any, cell: Any) -> bool:
    return any(cell.last_offset < passage.next_offset for passage in tier.passed.values())


def missing_the_ambiguous(patch: pytest.MonkeyPatch) -> None:
    members = stream_case.StreamCase.members

    def expected(case: Any, tier: Any) -> BitMap64:
        return case.reportable if tier.upstream == "produced" else case.arrived[tier.upstream]

    def all_members(case: Any, start_ms: int) -> BitMap64:
        return members(case, start_ms) | case.reportable

    patch.setattr(stream_case.StreamCase, "expected", expected)
    patch.setattr(stream_case.StreamCase, "members", all_members)


def expected_of_acknowledged(case: Any, tier: Any) -> BitMap64:
    return case.acknowledged


def settled_by_time(case: Any, start_ms: int) -> bool:
    return bool(case.now_ms >= start_ms + case.window_ms)


def settled_by_promise(case: Any, start_ms: int) -> bool:
    return bool(case.stream.no_earlier_than_ms >= start_ms + case.window_ms)


def accountable_to_the_last_seen(case: Any) -> int:
    known = case.reported | case.anywhere
    return int(known.max()) if known else 0


def low_half_only(base: int, bitmap: bytes) -> BitMap64:
    return decode_bitmap(0, bitmap)


def overwrite(files: Any, name: str, content: bytes) -> bool:
    (files.root / name).write_bytes(content)
    return True


def never_hidden(aborted: Any, producer_id: int, base_offset: int) -> bool:
    return False
