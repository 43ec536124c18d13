"""The audit's rules about windows at rest, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RESTING = "tests/unit/audit_job/test_resting.py"
RULES = "audit/runs/resting.py"

OF_AUDIT_RESTING = (
    Mutant(
        name="other-report-of-a-window-at-rest",
        promise="A report that says something else of a window at rest has it judged again.",
        file=RULES,
        rule="if start_ms in known and says(known[start_ms]) == says(reports[start_ms]):",
        instead="if start_ms in known:",
        red=(f"{RESTING}::test_an_event_that_says_something_else_wakes[more records]",),
    ),
    Mutant(
        name="less-promised-than-rests",
        promise="A stream that may still write into a window at rest has it judged again.",
        file=RULES,
        rule="        if windows.end_ms > until_ms:\n",
        instead="        if windows.end_ms < 0:\n",
        red=(f"{RESTING}::test_a_stream_that_promises_less_than_its_windows_end_wakes_them",),
    ),
    Mutant(
        name="contradiction-beside-rest",
        promise="Nothing of a stream that contradicts itself is proven, at rest or not.",
        file=RULES,
        rule="if until_ms is None or facts is None or facts.conflicts:",
        instead="if until_ms is None or facts is None:",
        red=(f"{RESTING}::test_an_event_that_says_something_else_wakes[another producer]",),
    ),
    Mutant(
        name="rest-through-another-configuration",
        promise="What was judged by another configuration is judged again.",
        file=RULES,
        rule="if by != judged_by(config) or not may_rest(config, captured):",
        instead="if not may_rest(config, captured):",
        red=(f"{RESTING}::test_another_configuration_wakes_all",),
    ),
    Mutant(
        name="rest-in-a-topic-made-anew",
        promise="A topic that was deleted and made again has its windows judged again.",
        file=RULES,
        rule='or pc.any(pc.is_in(each.spans["topic"], anew)).as_py()',
        instead="or False",
        red=(f"{RESTING}::test_a_topic_that_was_made_anew_wakes_what_is_of_it",),
    ),
    Mutant(
        name="record-for-a-window-at-rest",
        promise="A record that comes for a window at rest has it judged again.",
        file="audit/runs/waking.py",
        rule="    if not named and not may_be_any:\n",
        instead="    if not may_be_any:\n",
        red=(f"{RESTING}::test_a_stream_tells_of_its_records_for_windows_at_rest",),
    ),
    Mutant(
        name="number-at-rest-in-another-window",
        promise="A number of a window at rest that is in another one, too, has both judged.",
        file="audit/runs/waking.py",
        rule="    may_be_any = may_be_any or _has_a_number(known, resting, living, rows)\n",
        instead="",
        red=(f"{RESTING}::test_a_stream_tells_of_its_records_for_windows_at_rest",),
    ),
    Mutant(
        name="row-of-a-window-at-rest",
        promise="A window at rest of which another stream has a row, or one is owed, is judged again.",
        file=RULES,
        rule="        hit.append(with_window.filter(are_in(with_window, spans)))\n",
        instead="        hit.append(with_window.slice(0, 0))\n",
        red=(f"{RESTING}::test_rows_say_what_came_and_what_is_owed",),
    ),
    Mutant(
        name="part-of-a-window-at-rest",
        promise="A window rests when all that is said of it is proven, of whatever stream.",
        file=RULES,
        rule="stays = pa.concat_tables([stay, rows.filter(pc.invert(rests)).select(WINDOW)])",
        instead="stays = stay",
        red=(f"{RESTING}::test_what_is_proven_of_a_whole_topic_comes_to_rest",),
    ),
    Mutant(
        name="report-of-more-than-was-acknowledged-at-rest",
        promise="A window of which a report tells of more than acknowledged records does not rest.",
        file=RULES,
        rule="loose = keys_of([*restless.held_back(), *_told_otherwise(ledger, config.window_ms)], _PLACE)",
        instead="loose = keys_of(restless.held_back(), _PLACE)",
        red=(f"{RESTING}::test_what_else_may_be_asked_of_a_window_keeps_it_awake",),
    ),
)
