"""The audit's rules that keep a verdict true, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/audit"
JOB = "tests/unit/audit_job"

OF_AUDIT_VERDICTS = (
    Mutant(
        name="contents-unseen-proven",
        promise="With `content: true` nothing is proven whose contents were not compared.",
        file="audit/reconciliation/content_check.py",
        rule="row.undecided or case.stream.sequenced",
        instead="row.undecided",
        red=(f"{UNIT}/test_content_check.py::test_a_digest_that_is_missing_is_named_and_proves_nothing",),
    ),
    Mutant(
        name="one-copy-speaks-for-all",
        promise="Copies are held to be alike only where each of them was looked at.",
        file="audit/reconciliation/content_check.py",
        rule="len(known) != 1 + self.repeats.of_sequence(sequence) or len(set(known)) != 1",
        instead="len(set(known)) != 1",
        red=(
            f"{UNIT}/test_content_check.py::test_a_digest_of_one_of_two_copies_does_not_speak_for_the_other",
        ),
    ),
    Mutant(
        name="open-gap-over-the-new-topic",
        promise="A gap with an open end explains what was in its own topic, never what a topic made anew has "
        "at those offsets.",
        file="audit/reconciliation/tier_reading.py",
        rule='self.has_open_end and self.topic_id != "" and cell.topic_id == self.topic_id',
        instead="self.has_open_end and self._is_of(cell)",
        red=(
            f"{UNIT}/test_reconcile.py"
            "::test_an_open_gap_explains_what_came_behind_it_in_its_own_topic_and_in_no_other",
        ),
    ),
    Mutant(
        name="repeats-across-topics",
        promise="A record that is once in a deleted topic and once in the one made anew is no repeat.",
        file="audit/reconciliation/reconcile.py",
        rule="setdefault((cell.cluster, cell.topic_id), SeenSet())",
        instead='setdefault((cell.cluster, ""), SeenSet())',
        red=(
            f"{UNIT}/test_false_losses.py"
            "::test_an_aggregate_that_was_made_anew_and_filled_again_holds_every_record_once",
        ),
    ),
    Mutant(
        name="moved-below-what-expired",
        promise="A number in another window than its report is in proves neither, whatever lies between.",
        file="audit/reconciliation/reconcile.py",
        rule="filed = {start_ms: case.members(start_ms) for",
        instead="filed = {start_ms: case.members(start_ms) - case.acknowledged for",
        red=(
            f"{UNIT}/test_false_proofs.py"
            "::test_a_number_in_another_window_than_its_report_proves_neither_though_the_source_expired",
        ),
    ),
    Mutant(
        name="late-number-of-a-pruned-window-proven",
        promise="A window with a late record that has the number of one in a pruned window is not proven.",
        file="audit/reconciliation/reconcile.py",
        rule="                rows[start_ms].doubt(PRUNED_BEFORE)\n",
        instead="",
        red=(
            f"{UNIT}/test_false_proofs.py"
            "::test_a_late_record_with_the_number_of_a_pruned_window_proves_nothing_and_is_missing_nowhere",
        ),
    ),
    Mutant(
        name="late-number-of-a-pruned-window-lost",
        promise="Nobody misses a late record that has the number of one in a pruned window.",
        file="audit/reconciliation/missing.py",
        rule="case.arrived[tier.name] - case.accounted",
        instead="case.arrived[tier.name]",
        red=(
            f"{UNIT}/test_false_proofs.py"
            "::test_a_late_record_with_the_number_of_a_pruned_window_proves_nothing_and_is_missing_nowhere",
        ),
    ),
    Mutant(
        name="old-retention-excuses-for-ever",
        promise="What was gone at the audit's first look excuses no loss of records that came long after.",
        file="audit/runs/reconciling.py",
        rule="                by_window=True,\n",
        instead="                by_window=False,\n",
        red=(
            f"{UNIT}/test_doubts_that_end.py"
            "::test_a_running_producer_that_loses_a_record_long_after_the_first_look_has_lost_it",
        ),
    ),
    Mutant(
        name="stream-judged-by-its-copies",
        promise="Copies of a topic that is not audited are judged nowhere.",
        file="audit/reconciliation/verdict_rows.py",
        rule="        if own:\n            return None\n",
        instead="        if own:\n            return min(self.topics)\n",
        red=(
            f"{JOB}/test_copied_headers.py"
            "::test_copies_of_a_topic_that_is_not_audited_are_counted_and_never_judged",
        ),
    ),
    Mutant(
        name="united-cell-has-passed",
        promise="What a tier that was added later lacks of a united window is unknown: no offset tells.",
        file="audit/reconciliation/missing.py",
        rule="            if not cell.has_place:",
        instead="            if False:",
        red=(
            f"{JOB}/test_cell_union.py::test_what_a_tier_that_was_added_later_lacks_of_a_united_window_is_unknown"
            "_and_neither_lost_nor_proven",
        ),
    ),
    Mutant(
        name="revision-not-numbered",
        promise="A settled window of which more is known by now has another revision.",
        file="audit/reconciliation/settled.py",
        rule="    changed = pc.and_not(settled, same)\n",
        instead="    changed = pc.and_(settled, pc.is_null(line_of))\n",
        red=(f"{JOB}/test_settled.py::test_late_data_makes_a_numbered_revision_that_names_both_verdicts",),
    ),
    Mutant(
        name="line-of-a-window-forgotten",
        promise="A settled window that no row speaks of any more keeps its line.",
        file="audit/reconciliation/settled.py",
        rule="    left = _without_rows(lines, line_of)\n",
        instead="    left = lines.slice(0, 0)\n",
        red=(
            f"{JOB}/test_settled.py::test_a_window_that_no_row_speaks_of_keeps_its_line_unless_it_was_pruned",
        ),
    ),
    Mutant(
        name="line-of-a-pruned-window-carried-on",
        promise="A stream's line of a pruned window stays only while a row speaks of it.",
        file="audit/reconciliation/settled.py",
        rule='    return left.filter(pc.invert(left["pruned"]))\n',
        instead="    return left\n",
        red=(
            f"{JOB}/test_settled.py::test_a_line_beside_that_of_its_whole_window_stays_while_a_row_speaks_of_it",
        ),
    ),
    Mutant(
        name="losses-beyond-the-named-forgotten",
        promise="Losses that are too many to be named are summed by hop: no figure leaves them out.",
        file="audit/report/tally.py",
        rule='self._others[key] = (findings + 1, None if count is None else count + told["count"])',
        instead="self._others[key] = (findings, count)",
        red=(
            f"{JOB}/test_row_parts.py"
            "::test_of_very_many_findings_the_greatest_are_named_and_the_others_summed",
        ),
    ),
    Mutant(
        name="page-forgets-what-does-not-fit",
        promise="What does not fit the page is summed by producer, so that its sums are the summary's.",
        file="audit/report/plain.py",
        rule="            self.rest = self._sums(pa.concat_tables([self.rest, behind]))\n",
        instead="            self.rest = self._sums(behind)\n",
        red=(f"{JOB}/test_row_parts.py::test_the_page_and_the_reports_files_are_the_same_however_rows_come",),
    ),
    Mutant(
        name="hole-in-columns",
        promise="Windows are proven as columns only where every tier has each number of their report.",
        file="audit/reconciliation/plain_windows.py",
        rule="goes_on[1:] = low[1:] == high[:-1] + 1",
        instead="goes_on[1:] = True",
        red=(f"{JOB}/test_plain_windows.py::test_what_is_found_of_one_window_leaves_the_others_as_they_are",),
    ),
    Mutant(
        name="copies-in-columns",
        promise="Windows are proven as columns only where every tier has each record once.",
        file="audit/reconciliation/plain_windows.py",
        rule='found &= np.add.reduceat(numbers_of(rows["count"]), self._begins) == counts[report]',
        instead="found &= np.ones(count, np.bool_)",
        red=(f"{JOB}/test_plain_windows.py::test_what_is_found_of_one_window_leaves_the_others_as_they_are",),
    ),
    Mutant(
        name="shared-number-in-columns",
        promise="A number that lies in another window, too, proves neither, however windows are judged.",
        file="audit/reconciliation/plain_windows.py",
        rule="<= others[:, LAST])[inside].any()",
        instead="<= others[:, LAST])[inside].all()",
        red=(f"{JOB}/test_plain_windows.py::test_what_reaches_over_windows_is_judged_with_all_of_them",),
    ),
)
