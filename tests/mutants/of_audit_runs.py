"""The audit's rules by which a run says what it found, and to whom, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

JOB = "tests/unit/audit_job"
BACKFILL = f"{JOB}/test_backfill.py"
STORE = f"{JOB}/test_remote_store.py"

OF_AUDIT_RUNS = (
    Mutant(
        name="backfill-asks-nothing-again",
        promise="A backfill names the loss in a window that was pruned, whatever else of the stream was.",
        file="audit/runs/backfill.py",
        rule="            left.sequences -= told\n",
        instead="",
        red=(f"{BACKFILL}::test_a_backfill_of_part_of_what_was_pruned_proves_it_or_names_the_loss",),
    ),
    Mutant(
        name="backfill-blind-beside-its-range",
        promise="A backfill calls no record lost that lies in a window beside its range.",
        file="audit/runs/backfill.py",
        rule="(only, *((start_ms, start_ms + 1) for start_ms in reports))",
        instead="(only,)",
        red=(
            f"{BACKFILL}::test_a_record_of_a_backfill_that_lies_in_another_pruned_window_is_not_called_lost",
        ),
    ),
    Mutant(
        name="explained-by-the-window-that-begins-then",
        promise="A time is never explained as proven while a longer window around it has a loss.",
        file="audit/explain.py",
        rule='(start + pc.field("window_ms") > at_ms)',
        instead="(start == at_ms)",
        red=(f"{JOB}/test_explain.py::test_a_time_is_told_with_all_windows_that_it_lies_in",),
    ),
    Mutant(
        name="verdict-hangs-on-its-reader",
        promise="The exit status is the verdict's, whether its lines can be printed or not.",
        file="deploy/commands/output.py",
        rule="    try:\n        typer.echo(line, err=err)\n    except OSError:\n",
        instead="    try:\n        typer.echo(line, err=err)\n    except ZeroDivisionError:\n",
        red=(
            "tests/unit/deploy/test_audit_commands.py::"
            "test_a_verdict_is_the_exit_status_whether_it_can_be_printed_or_not",
        ),
    ),
    Mutant(
        name="promise-under-another-name",
        promise="A watermark waits for the producers of a single cluster, whatever its tier is called.",
        file="audit/runs/reconciling.py",
        rule="    sources = config.sources() or config.clusters\n",
        instead="    sources = config.sources()\n",
        red=(f"{JOB}/test_telling.py::test_a_promise_counts_for_the_topic_of_the_rows[aggregate]",),
    ),
    Mutant(
        name="older-look-told-last",
        promise="A run never writes its report and watermarks over those of a run that looked later.",
        file="audit/job.py",
        rule="    if latest > known:\n",
        instead="    if latest > known + 1:\n",
        red=(f"{JOB}/test_telling.py::test_a_run_that_another_has_overtaken_tells_nothing",),
    ),
    Mutant(
        name="waived-loss-keeps-the-alert",
        promise="A loss that a person has waived hides no new one beside it from whoever is alerted.",
        file="audit/report/metrics.py",
        rule='0 if loss.get("waived") else loss["count"]',
        instead='loss["count"]',
        red=(
            "tests/unit/dashboards/test_audit_dashboard.py::"
            "test_what_a_person_has_waived_is_apart_so_that_a_new_finding_beside_it_shows",
        ),
    ),
    Mutant(
        name="content-loss-unnamed",
        promise="A loss by contents is named as any other, with what to do.",
        file="audit/report/tally.py",
        rule='    if row["content"] == DIFFERS:\n',
        instead='    if row["content"] == "":\n',
        red=(f"{JOB}/test_summary_document.py::test_a_loss_by_contents_is_named_and_told",),
    ),
    Mutant(
        name="remote-store-that-is-away-read-as-a-hole",
        promise="Of what lies in a remote store nothing is taken for compacted, only since it is not given.",
        file="audit/scanning/range_reader.py",
        rule="                    if not await self._is_remote(range_, offset):\n",
        instead="                    if True:\n",
        red=(
            f"{STORE}::test_what_a_remote_store_gives_late_is_read",
            f"{STORE}::test_remote_store_that_stays_away_ends_the_read_and_nothing_is_noted_as_gone",
        ),
    ),
    Mutant(
        name="remote-store-without-a-word-read-as-a-shorter-log",
        promise="An offset out of range that the log holds is not noted as truncated.",
        file="audit/scanning/range_reader.py",
        rule="if offset < fetched.log_start_offset or await self._listed(range_, LATEST) < offset:",
        instead="if True:",
        red=(
            f"{STORE}::test_what_a_remote_store_gives_late_is_read",
            f"{STORE}::test_remote_store_that_stays_away_ends_the_read_and_nothing_is_noted_as_gone",
            f"{STORE}::test_leader_that_does_not_find_what_its_own_disk_has_is_told_as_that",
        ),
    ),
)
