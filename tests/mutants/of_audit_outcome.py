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
        rule="return speaking_streams(roster, ledger.streams.values(), _oldest_ms(rows), grace_ms, now_ms)",
        instead="return set()",
        red=(f"{UNIT}/test_roster.py::test_the_roster_says_the_same_when_what_may_be_forgotten_is",),
    ),
)
