"""The audit's rules for what is told onward, each taken out: watermark, roster, horizon and waivers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/audit"
JOB = "tests/unit/audit_job"

OF_AUDIT_OUTCOME = (
    Mutant(
        name="watermark-ahead-of-now",
        promise="The watermark reaches no window that is not over, though all in it is settled and proven.",
        file="audit/reconciliation/watermark.py",
        rule="if row.state is WindowState.SETTLED and start_ms + row.window_ms > over_ms:",
        instead="if False:",
        red=(
            f"{UNIT}/test_watermark.py::test_it_reaches_no_window_that_is_not_over_however_settled_it_is",
            f"{UNIT}/test_watermark.py"
            "::test_the_watermark_of_a_batch_job_that_closed_within_its_window_is_not_ahead_of_now",
        ),
    ),
    Mutant(
        name="roster-hears-the-dead",
        promise="A producer of the roster that was killed, and has not come back, is missed.",
        file="audit/reconciliation/roster.py",
        rule="return facts.at_ms + facts.lease_ms if facts.lapsed(now_ms, grace_ms) else inf",
        instead="return inf",
        red=(
            f"{UNIT}/test_roster.py::test_a_member_that_was_killed_speaks_for_no_more_than_its_lease",
            f"{UNIT}/test_roster.py"
            "::test_a_member_that_was_killed_long_ago_is_missed_though_its_silence_decides_no_more",
        ),
    ),
    Mutant(
        name="silence-as-old-as-a-hole",
        promise="Who fell silent today decides today's verdict, whatever of its stream is history.",
        file="audit/reconciliation/horizon.py",
        rule='for name in ("not_before_ms", "silent_from_ms"))',
        instead='for name in ("not_before_ms",))',
        red=(
            f"{UNIT}/test_horizon.py"
            "::test_a_silence_of_today_decides_though_a_hole_of_its_producer_is_history",
        ),
    ),
    Mutant(
        name="waiver-for-any-reason",
        promise="A waiver of a stream's row covers no doubt of another reason.",
        file="audit/keeping/waivers.py",
        rule="if waiver.reasons is not None and not set(reasons).issubset(waiver.reasons):",
        instead="if False:",
        red=(
            f"{JOB}/test_waivers.py::test_a_waiver_of_a_streams_row_is_for_its_reasons_and_for_one_silence",
            f"{JOB}/test_waivers.py::test_a_hole_that_is_waived_covers_no_silence_that_comes_after_it",
        ),
    ),
    Mutant(
        name="waiver-for-every-silence",
        promise="A producer that came back, and falls silent again, is not waived again by itself.",
        file="audit/keeping/waivers.py",
        rule='return not silent or (now["silent_from_ms"] or 0) <= (waiver.silence_ms or -1)',
        instead="return True",
        red=(
            f"{JOB}/test_waivers.py::test_a_second_silence_is_not_waived_with_the_first",
            f"{JOB}/test_waivers.py::test_a_waiver_of_an_older_program_covers_no_silence_that_began_after_it",
        ),
    ),
    Mutant(
        name="promise-waived-with-a-hole",
        promise="The watermark waits for the promise of a silent stream of which only a hole was waived.",
        file="audit/reconciliation/watermark.py",
        rule="if not self.stream or (self.reasons is not None and FELL_SILENT not in self.reasons):",
        instead="if not self.stream:",
        red=(f"{UNIT}/test_watermark.py::test_who_waives_a_hole_waives_no_promise",),
    ),
    Mutant(
        name="waiver-blind-to-contents",
        promise="A waiver for lost records covers no contents that differ.",
        file="audit/keeping/waivers.py",
        rule='else now["differing"] <= _differing(waiver)',
        instead="else True",
        red=(f"{JOB}/test_waivers.py::test_a_lost_record_that_is_waived_covers_no_contents_that_differ",),
    ),
    Mutant(
        name="roster-member-forgotten",
        promise="A producer of the roster that closed is still told as that when its evidence is pruned.",
        file="audit/keeping/upkeep.py",
        rule="return speaking_streams(roster, ledger.streams.values(), min(known, default=None), "
        "grace_ms, now_ms)",
        instead="return set()",
        red=(f"{UNIT}/test_roster.py::test_the_roster_says_the_same_when_what_may_be_forgotten_is",),
    ),
    Mutant(
        name="unproven-window-open-for-ever",
        promise="A window that is over and not proven counts, whether its producer promises anything or not.",
        file="audit/reconciliation/stream_case.py",
        rule=" or (is_over and verdict > Verdict.COUNT_MATCH):",
        instead=" or (is_over and verdict < Verdict.PROVEN):",
        red=(f"{UNIT}/test_unpromised_windows.py::test_a_partition_that_stands_still_for_days_is_no_proof",),
    ),
    Mutant(
        name="open-windows-told-as-arrived",
        promise="What is said to have arrived is said of settled windows, beside what is still open.",
        file="audit/report/sentences.py",
        rule='    count = summary["counts"]["acknowledged"] - still_open["acknowledged"]\n',
        instead='    count = summary["counts"]["acknowledged"]\n',
        red=(f"{UNIT}/test_unpromised_windows.py::test_all_arrived_is_said_of_settled_windows_alone",),
    ),
    Mutant(
        name="misspelt-topic-unsaid",
        promise="A topic of the config that is nowhere is named, and the verdict is no proof.",
        file="audit/runs/untrusted.py",
        rule="        if topic not in known:\n",
        instead="        if topic not in config.topics:\n",
        red=(f"{JOB}/test_unseen_topics.py::test_a_misspelt_topic_is_named_and_ends_in_unknown",),
    ),
    Mutant(
        name="denied-topic-is-a-loss",
        promise="What a cluster does not let the audit look at is not lost.",
        file="audit/runs/reconciling.py",
        rule=", *_withheld(captured)]\n",
        instead="]\n",
        red=(
            f"{JOB}/test_unseen_topics.py"
            "::test_a_topic_that_a_cluster_does_not_tell_of_is_not_a_loss_of_everything",
        ),
    ),
    Mutant(
        name="old-loss-never-told",
        promise="A loss decides for as long as the horizon, however old it was when it was found.",
        file="audit/reconciliation/horizon.py",
        rule='    told_long = pc.fill_null(pc.less(rows["settled_ms"], since_ms), False)\n',
        instead='    told_long = pc.is_valid(rows["verdict"])\n',
        red=(
            f"{UNIT}/test_horizon.py"
            "::test_what_was_lost_long_before_the_first_look_decides_until_it_was_told_for_long",
        ),
    ),
    Mutant(
        name="roster-of-names-alone",
        promise="A producer of the roster is missed in each window that it told nothing of.",
        file="audit/reconciliation/roster.py",
        rule="            if not _touches(told, start_ms, end_ms):\n",
        instead="            if False:\n",
        red=(f"{UNIT}/test_roster.py::test_a_member_that_was_silent_for_a_year_is_no_proof_of_that_year",),
    ),
    Mutant(
        name="pruned-records-speak-for-the-roster",
        promise="Of what was pruned, reports speak for a producer of the roster, and records do not.",
        file="audit/runs/reconciling.py",
        rule="left.first_report_ms for stream, left in pruned.items() if left.first_report_ms is not None",
        instead="left.windows.min() * left.window_ms for stream, left in pruned.items() if left.windows",
        red=(
            "tests/simulation/test_audit_mutations.py"
            "::test_what_is_pruned_changes_nothing_else_that_is_said[30131304]",
        ),
    ),
    Mutant(
        name="watermark-over-an-open-row",
        promise="One open row of a window holds the watermark, however many others are proven.",
        file="audit/runs/watermarks.py",
        rule='WindowState.OPEN if window["open"] else WindowState.SETTLED',
        instead="WindowState.SETTLED",
        red=(
            f"{UNIT}/test_watermark.py::test_what_the_rows_of_a_window_come_to_holds_the_watermark_as_the_rows_do",
        ),
    ),
    Mutant(
        name="waived-window-over-another-doubt",
        promise="A waived window does not carry the watermark past a stream's own doubt or promise.",
        file="audit/reconciliation/watermark.py",
        rule="        min(limits, default=None),\n",
        instead="        None if waived else min(limits, default=None),\n",
        red=(
            f"{UNIT}/test_watermark.py"
            "::test_a_waiver_of_a_window_waives_neither_a_streams_own_doubt_nor_a_promise_nor_an_open_row",
        ),
    ),
    Mutant(
        name="waived-window-over-an-open-row",
        promise="A row of a waived window that is still open holds the watermark.",
        file="audit/reconciliation/watermark.py",
        rule="held = still_open | {start_ms: row for start_ms, row in doubtful.items() if",
        instead="held = {start_ms: row for start_ms, row in (still_open | doubtful).items() if",
        red=(
            f"{UNIT}/test_watermark.py"
            "::test_a_waiver_of_a_window_waives_neither_a_streams_own_doubt_nor_a_promise_nor_an_open_row",
        ),
    ),
    Mutant(
        name="waiver-deaf-to-what-is-open",
        promise="A loss in a waived window that is open again ends the waiver.",
        file="audit/reconciliation/window_totals.py",
        rule='telling = pc.or_(settled, pc.is_in(rows["verdict"], value_set=_FINDINGS))',
        instead="telling = settled",
        red=(f"{JOB}/test_waivers.py::test_a_loss_in_a_waived_window_that_is_open_again_ends_the_waiver",),
    ),
    Mutant(
        name="roster-forgets-pruned-reports",
        promise="A member of the roster has spoken for a window since its first report, pruned or not.",
        file="audit/reconciliation/roster.py",
        rule="opened_ms = min([facts.at_ms, first_ms, *facts.windows])",
        instead="opened_ms = min([facts.at_ms, *facts.windows])",
        red=(
            "tests/unit/audit/test_roster.py"
            "::test_an_opening_that_is_gone_is_not_later_than_a_report_that_was_pruned",
        ),
    ),
    Mutant(
        name="status-deaf-to-findings",
        promise="Only what a standing waiver covers does not decide the exit status.",
        file="audit/report/tally.py",
        rule="Fold(settled=fold.settled) if target in waived else fold",
        instead="Fold(settled=fold.settled)",
        red=(
            f"{JOB}/test_overall_verdict.py::test_what_is_waived_keeps_its_word_and_does_not_decide_the_status",
        ),
    ),
    Mutant(
        name="earlier-runs-watermark-told-last",
        promise="What a later run told of a watermark is never overwritten by an earlier one.",
        file="audit/runs/watermark_znode.py",
        rule="        if _is_later(known, body):\n",
        instead="        if False:\n",
        red=(
            f"{JOB}/test_watermark_znode.py::test_only_a_run_that_is_later_by_number_and_time_has_the_last_word",
        ),
    ),
)
