"""What the audit keeps between runs: the rules of its files, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

JOB = "tests/unit/audit_job"
LAST = "test_the_waiver_that_was_given_last_counts_whatever_its_givers_clock"
LIVES = "test_the_work_folder_of_a_run_that_lives_stays_however_long_nothing_changed_in_it"

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
    Mutant(
        name="lost-answer-taken-for-another-job",
        promise="A commit whose answer the file system lost is told as made, and a waiver is kept once.",
        file="audit/keeping/state_files.py",
        rule="        if _is_one_file(path, second):\n",
        instead="        if False:\n",
        red=(
            f"{JOB}/test_state.py::test_a_commit_whose_answer_was_lost_is_ours_and_no_other_jobs",
            f"{JOB}/test_state.py::test_a_waiver_whose_answer_was_lost_is_kept_once",
        ),
    ),
    Mutant(
        name="place-without-links-unseen",
        promise="A place where no commit can be made is refused before the run reads anything.",
        file="audit/keeping/state_files.py",
        rule="            _link(path, second)\n",
        instead="            pass\n",
        red=(f"{JOB}/test_state.py::test_a_place_without_hard_links_is_refused_before_the_run",),
    ),
    Mutant(
        name="commit-failed-by-what-comes-after-it",
        promise="A commit that is visible is told as made where a folder has nothing to be synced.",
        file="audit/keeping/state_files.py",
        rule="if problem.errno not in _NO_SYNC:",
        instead="if True:",
        red=(f"{JOB}/test_state.py::test_an_error_after_the_name_was_given_makes_no_failure_of_the_commit",),
    ),
    Mutant(
        name="facts-of-a-living-run-swept",
        promise="Nothing of a run that still writes is removed, however long ago it began.",
        file="audit/keeping/state.py",
        rule="if changed_s[_run_of(entry.name)] <= horizon_s",
        instead="if entry.modified_s <= horizon_s",
        red=(f"{JOB}/test_state.py::test_nothing_of_a_run_that_still_writes_is_swept",),
    ),
    Mutant(
        name="work-folder-of-a-living-run-swept",
        promise="The folder that a run works in stays while it lives, though it changes nothing there.",
        file="audit/keeping/state.py",
        rule="if self.local_root is not None and is_in_use(self.local_root / name):",
        instead="if False:",
        red=(f"{JOB}/test_state.py::{LIVES}",),
    ),
)
