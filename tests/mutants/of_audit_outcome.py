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
)
