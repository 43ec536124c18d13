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
    Mutant(
        name="missing-state-files-unnoticed",
        promise="A state that lacks a file that its commit names is refused before anything is counted.",
        file="audit/keeping/state.py",
        rule="            if file not in listed[folder]:\n",
        instead="            if False:\n",
        red=(
            f"{JOB}/test_state.py::test_a_file_that_the_commit_names_and_that_is_gone_is_named_with_the_way_back",
        ),
    ),
    Mutant(
        name="lost-commits-begin-anew",
        promise="A state whose commits are gone is not taken for an empty one.",
        file="audit/keeping/state.py",
        rule="            self._require_unused()\n",
        instead="",
        red=(f"{JOB}/test_state.py::test_a_state_whose_commits_are_gone_is_no_empty_one",),
    ),
    Mutant(
        name="second-job-overwrites-commit",
        promise="Of two audits that commit the same run one is refused, and the other's state stays.",
        file="audit/keeping/state_files.py",
        rule="        os.link(path, second)\n",
        instead="        os.replace(path, second)\n",
        red=(f"{JOB}/test_state.py::test_second_job_with_the_same_number_stops_and_changes_nothing",),
    ),
    Mutant(
        name="commit-names-unsynced-cells",
        promise="The cells that a commit of the audit names are durable before it.",
        file="audit/keeping/state_files.py",
        rule="os.fsync(handle)\n            finally:\n                os.close(handle)\n        folders",
        instead="pass\n            finally:\n                os.close(handle)\n        folders",
        red=(f"{JOB}/test_run_cells.py::test_cells_are_durable_before_anything_names_them",),
    ),
    Mutant(
        name="way-back-swept",
        promise="What the commit before the newest names stays: it is the way back from a damaged one.",
        file="audit/keeping/state.py",
        rule="if each not in old and _number(each.name) != commit.number:",
        instead="if False:",
        red=(f"{JOB}/test_state.py::test_the_way_back_one_run_is_open_however_old_that_run_is",),
    ),
    Mutant(
        name="state-of-another-cluster",
        promise="A state goes on only with the clusters that it was counted with.",
        file="audit/runs/state_checks.py",
        rule="        if known and id_ and known != id_:\n",
        instead="        if False:\n",
        red=(f"{JOB}/test_doubtful_captures.py::test_a_state_of_other_clusters_is_refused",),
    ),
    Mutant(
        name="local-state-of-remote-workers",
        promise="A folder of the driver's machine is no state for workers of other machines.",
        file="audit/runs/state_checks.py",
        rule="    if is_elsewhere(master) and not is_remote(config.state):\n",
        instead="    if False:\n",
        red=(f"{JOB}/test_workers.py::test_a_folder_of_this_machine_is_refused_before_anything_starts",),
    ),
    Mutant(
        name="window-cut-in-two",
        promise="Rows are read in parts of whole windows: what is asked of windows is asked part by part.",
        file="audit/keeping/verdict_files.py",
        rule="yield starts[first], starts[number - 1]",
        instead="yield starts[first], starts[number]",
        red=(
            f"{JOB}/test_verdict_files.py::test_rows_are_read_in_parts_of_whole_windows_and_all_of_them_once",
        ),
    ),
    Mutant(
        name="rows-without-a-window-unread",
        promise="What is said of a stream as a whole is read as what is said of its windows.",
        file="audit/keeping/verdict_files.py",
        rule="[each for each in self._groups if each.nulls]",
        instead="[]",
        red=(
            f"{JOB}/test_verdict_files.py::test_rows_are_read_in_parts_of_whole_windows_and_all_of_them_once",
        ),
    ),
    Mutant(
        name="pruned-rows-counted-again",
        promise="Rows of windows that a run pruned are in its files, and count no more.",
        file="audit/keeping/verdict_files.py",
        rule="settled_now(lines_but(part, pruned))",
        instead="settled_now(lines_but(part, pruned.slice(0, 0)))",
        red=(f"{JOB}/test_verdict_files.py::test_rows_of_windows_that_the_run_pruned_count_no_more",),
    ),
    Mutant(
        name="straggler-taken-for-a-file-of-the-run",
        promise="What a task that never committed has written is no file of a run.",
        file="audit/keeping/state.py",
        rule='            if entry.name.startswith(("_", ".")):\n',
        instead="            if False:\n",
        red=(f"{JOB}/test_verdict_files.py::test_files_of_days_are_counted_swept_and_durable_as_one_run",),
    ),
    Mutant(
        name="verdicts-of-a-day-unsynced",
        promise="The folders of days, too, are durable before a commit names what is in them.",
        file="audit/keeping/state_files.py",
        rule="for folder in list(Path(name).parents)[:-1]",
        instead="for folder in list(Path(name).parents)[:-2]",
        red=(f"{JOB}/test_verdict_files.py::test_files_of_days_are_counted_swept_and_durable_as_one_run",),
    ),
)
