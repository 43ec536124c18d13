"""The audit's rules about what is pruned and what stays, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

JOB = "tests/unit/audit_job"
SPANS = f"{JOB}/test_spans.py"

OF_AUDIT_UPKEEP = (
    Mutant(
        name="roster-owes-a-pruned-window-twice",
        promise="What is left of a pruned window is one line, with what the roster owed of it.",
        file="audit/runs/next_commit.py",
        rule="but(run.pruned_lines, pruned), but(run.owed, pruned)",
        instead="but(run.pruned_lines, pruned), run.owed",
        red=(
            f"{JOB}/test_upkeep.py"
            "::test_what_the_roster_owes_of_a_pruned_window_is_in_its_line_and_nowhere_else",
        ),
    ),
    Mutant(
        name="span-over-a-gap",
        promise="Proven windows are summed up as far as they follow one another, never over a hole.",
        file="audit/reconciliation/spans.py",
        rule="(starts[1:] == ends[:-1]) & (starts[1:] // day_ms == starts[:-1] // day_ms)",
        instead="starts[1:] // day_ms == starts[:-1] // day_ms",
        red=(
            f"{SPANS}::test_a_gap_another_verdict_length_or_topic_ends_a_span_and_what_was_waived_stays_a_line",
        ),
    ),
    Mutant(
        name="waived-window-summed-up",
        promise="What was waived keeps a line of its own: a waiver is for one window.",
        file="audit/reconciliation/spans.py",
        rule='pc.and_not(pc.is_in(lines["verdict"], value_set=pa.array(GOOD)), lines["open"])',
        instead='pc.invert(lines["open"])',
        red=(
            f"{SPANS}::test_a_gap_another_verdict_length_or_topic_ends_a_span_and_what_was_waived_stays_a_line",
        ),
    ),
    Mutant(
        name="line-of-a-window-in-a-span",
        promise="A stream's line of a window that was pruned and summed up is in its topic's.",
        file="audit/reconciliation/settled.py",
        rule="pc.or_(is_among(windows, folded.select(WINDOW)), are_in(windows, spans))",
        instead="is_among(windows, folded.select(WINDOW))",
        red=(f"{SPANS}::test_a_line_of_a_window_in_a_span_is_that_of_a_pruned_one",),
    ),
    Mutant(
        name="watermark-beyond-a-doubt-within-a-span",
        promise="A watermark stops within a span of proven windows where a doubt or a promise stops it.",
        file="audit/reconciliation/watermark.py",
        rule="within_ms = start_ms + max(0, limit_ms - start_ms) // step_ms * step_ms",
        instead="within_ms = end_ms",
        red=(f"{SPANS}::test_a_watermark_stops_within_a_span_where_it_would_among_its_windows",),
    ),
    Mutant(
        name="doubted-stream-forgotten",
        promise="A stream in doubt that nobody waived is not forgotten when its windows are pruned.",
        file="audit/keeping/upkeep.py",
        rule="            or stream in needed\n",
        instead="",
        red=(f"{JOB}/test_streams_forgotten.py::test_a_stream_in_doubt_that_nobody_waived_is_not_forgotten",),
    ),
    Mutant(
        name="pruned-stream-without-a-topic",
        promise="A stream that no event tells of keeps its doubt when its windows are pruned.",
        file="audit/keeping/upkeep.py",
        rule="        left.topic = topic\n",
        instead="",
        red=(
            f"{JOB}/test_streams_forgotten.py"
            "::test_a_stream_that_no_event_tells_of_keeps_its_doubt_when_its_windows_are_pruned",
        ),
    ),
    Mutant(
        name="late-records-under-every-name",
        promise="A late record of a merged topic is counted once, whatever names its cluster is read by.",
        file="audit/keeping/upkeep.py",
        rule="[each for each in places if audited_topic(each) == own] or places",
        instead="places",
        red=(
            f"{JOB}/test_late_records.py"
            "::test_late_records_where_topics_are_merged_are_counted_once_and_under_the_audited_topics_name",
        ),
    ),
    Mutant(
        name="late-records-of-no-audited-topic",
        promise="Late records hold the audited topic's watermark, whatever their producer calls it.",
        file="audit/spark/spark_cells.py",
        rule='reconciler.told_topic([known]) or "", [], resting_of(known)',
        instead='known["topic"] or "", [], resting_of(known)',
        red=(
            f"{JOB}/test_late_records.py"
            "::test_late_records_where_topics_are_merged_are_counted_once_and_under_the_audited_topics_name",
        ),
    ),
    Mutant(
        name="late-reports-of-no-audited-topic",
        promise="A late report holds the audited topic's watermark, whatever its producer calls it.",
        file="audit/keeping/upkeep.py",
        rule='_of_topic(LATE_REPORT, (topic_of or {}).get(stream, ""))',
        instead="_of_topic(LATE_REPORT, facts.topic)",
        red=(
            f"{JOB}/test_late_records.py"
            "::test_events_that_tell_a_pruned_window_again_are_dropped_and_a_longer_report_is_told",
        ),
    ),
    Mutant(
        name="late-records-counted-again",
        promise="A late record that the next run reads again is not in what a fold keeps of this one.",
        file="audit/keeping/upkeep.py",
        rule="{what: count - again.get(what, 0) for what",
        instead="{what: count for what",
        red=(
            f"{JOB}/test_late_records.py::test_a_late_record_that_is_read_again_is_not_added_to_what_is_kept",
        ),
    ),
    Mutant(
        name="late-records-untold-once-folded",
        promise="Late records whose cells a fold takes stay counted, also where it prunes nothing.",
        file="audit/runs/next_commit.py",
        rule="upkeep.late_to_keep(run.late, run.late_again).items()",
        instead="upkeep.late_to_keep(run.late if lines.num_rows else {}, run.late_again).items()",
        red=(
            f"{JOB}/test_upkeep.py"
            "::test_what_came_late_is_kept_as_a_count_when_a_fold_takes_its_cells[laid to rest]",
        ),
    ),
    Mutant(
        name="pruned-though-nobody-waived",
        promise="What is neither proven nor waived keeps its evidence, and its row.",
        file="audit/keeping/upkeep.py",
        rule="may_go = pc.and_not(pc.and_(good, is_old), ",
        instead="may_go = pc.and_not(is_old, ",
        red=(f"{JOB}/test_windows_let_go.py::test_only_what_is_proven_or_waived_for_long_enough_may_go",),
    ),
    Mutant(
        name="pruned-without-what-it-hangs-on",
        promise="Windows in which a stream has numbers in common go together or not at all.",
        file="audit/keeping/upkeep.py",
        rule="if len(each - stay) not in (0, count)]",
        instead="if not count]",
        red=(
            f"{JOB}/test_windows_let_go.py::test_windows_that_have_numbers_in_common_go_together_or_not_at_all",
        ),
    ),
    Mutant(
        name="pruned-report-forgets-who-was-unsure",
        promise="A record that a pruned window's report called ambiguous may lie in another window.",
        file="audit/runs/fact_rows.py",
        rule="self.ambiguous |= unsure & report.ambiguous",
        instead="self.ambiguous |= BitMap64()",
        red=(
            f"{JOB}/test_pruned_reports.py"
            "::test_how_a_number_was_reported_in_a_pruned_window_still_counts_for_another_one",
        ),
    ),
    Mutant(
        name="two-producers-forgotten",
        promise="Two producers of one stream id stay in doubt when the reports that showed it are pruned.",
        file="audit/keeping/upkeep.py",
        rule="                facts.conflict(TOLD_TWICE)  #",
        instead="                pass  #",
        red=(
            f"{JOB}/test_pruned_reports.py"
            "::test_that_two_producers_used_one_stream_id_is_not_forgotten_with_the_reports_that_showed_it",
        ),
    ),
    Mutant(
        name="pruned-by-an-older-program-may-be-there",
        promise="Of numbers that an older program pruned none is taken for one that may be there.",
        file="audit/runs/fact_rows.py",
        rule='body.get("failed", body["sequences"])',
        instead='body.get("failed", [])',
        red=(
            f"{JOB}/test_pruned_reports.py"
            "::test_of_numbers_that_an_older_program_pruned_none_is_taken_for_one_that_may_be_there",
        ),
    ),
    Mutant(
        name="pruned-though-it-tells-of-a-loss",
        promise="Where a mirror keeps no positions, a topic with a loss keeps what arrived after it.",
        file="audit/keeping/upkeep.py",
        rule="whole = undecided_topics(numbered, waived) if places_decide else set()",
        instead="whole: set[str] = set()",
        red=(
            f"{JOB}/test_windows_let_go.py"
            "::test_where_a_mirror_keeps_no_positions_a_topic_with_a_loss_keeps_what_arrived_later",
        ),
    ),
    Mutant(
        name="pruned-though-a-row-is-open",
        promise="A window of which one stream's row is open keeps the evidence of all of them.",
        file="audit/keeping/upkeep.py",
        rule="lines.filter(pc.invert(may_go)).select(WINDOW), unsettled.select(WINDOW)",
        instead="lines.filter(pc.invert(may_go)).select(WINDOW)",
        red=(f"{JOB}/test_windows_let_go.py::test_one_stream_that_is_not_done_keeps_the_whole_window",),
    ),
)
