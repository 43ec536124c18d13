"""The audit's rules for what is told onward, each taken out: the watermark, the roster, waivers, the horizon."""

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
)
