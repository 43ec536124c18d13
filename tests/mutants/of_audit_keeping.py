"""What the audit keeps between runs: the rules of its files, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

JOB = "tests/unit/audit_job"
LAST = "test_the_waiver_that_was_given_last_counts_whatever_its_givers_clock"

OF_AUDIT_KEEPING = (
    Mutant(
        name="newest-waiver-by-its-givers-clock",
        promise="Of a window's waivers the one that was given last counts, and what it was given for.",
        file="audit/keeping/waivers.py",
        rule="key=lambda each: each[:-1]",
        instead="key=lambda each: each[1:-1]",
        red=(f"{JOB}/test_waivers.py::{LAST}",),
    ),
    Mutant(
        name="newest-untrusted-waiver-by-its-givers-clock",
        promise="Of the waivers of some words the one that was given last counts.",
        file="audit/keeping/untrusted_waivers.py",
        rule="key=lambda one: (one[0], one[1].at_ms, one[1].named)",
        instead="key=lambda one: (one[1].at_ms, one[1].named)",
        red=(f"{JOB}/test_untrusted.py::{LAST}",),
    ),
    Mutant(
        name="waiver-in-the-place-of-one-that-is-gone",
        promise="A new waiver counts also where an earlier one of its row was taken away.",
        file="audit/keeping/waiver_files.py",
        rule="number = max(numbers, default=0) + 1",
        instead="number = 1",
        red=(f"{JOB}/test_waivers.py::{LAST}", f"{JOB}/test_untrusted.py::{LAST}"),
    ),
)
