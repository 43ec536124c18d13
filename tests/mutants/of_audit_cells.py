"""The audit's rules by which records are counted, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/audit"
JOB = "tests/unit/audit_job"

OF_AUDIT_CELLS = (
    Mutant(
        name="cells-believed-uncounted",
        promise="Cells are believed only when the driver finds as many rows as executors wrote.",
        file="audit/spark/shared_state.py",
        rule="    if found != written:\n",
        instead="    if found > written:\n",
        red=(
            f"{JOB}/test_spark_failures.py::test_cells_that_the_driver_does_not_find_are_not_taken_for_a_loss",
        ),
    ),
    Mutant(
        name="cells-of-a-cluster-uncounted",
        promise="On a cluster, rows written and rows found are compared before cells are used.",
        file="audit/spark/spark_cells.py",
        rule='require_shared(self._state.where, seen.get["rows"], self._count_rows(files), what)',
        instead="pass",
        red=(
            f"{JOB}/test_run_cells.py::test_cells_that_executors_wrote_to_a_disk_of_their_own_stop_the_run",
        ),
    ),
    Mutant(
        name="worker-with-another-clock",
        promise="No audit runs with a worker whose clock is off.",
        file="audit/spark/workers.py",
        rule="        if max(behind_s, ahead_s) > MOST_SKEW_S:\n",
        instead="        if ahead_s > MOST_SKEW_S:\n",
        red=(f"{JOB}/test_workers.py::test_a_clock_that_is_off_is_named_and_nothing_is_read",),
    ),
    Mutant(
        name="copies-of-two-cells-unseen",
        promise="A record that two cells of a window hold is there twice.",
        file="audit/scanning/stream_cells.py",
        rule="        _add_copies(copies_of(united.again), of_sets, sums)\n",
        instead="",
        red=(f"{JOB}/test_stream_cells.py::test_columns_add_up_to_what_the_cells_do_one_by_one",),
    ),
    Mutant(
        name="copies-tell-how-far-a-mirror-is",
        promise="What stands at several offsets says of none of them that the mirror has passed it.",
        file="audit/scanning/furthest_arrivals.py",
        rule="decode_bitmap(int(bases[row]), sets[row].as_py()) - copied",
        instead="decode_bitmap(int(bases[row]), sets[row].as_py())",
        red=(f"{JOB}/test_arrivals.py::test_columns_say_what_looking_at_each_cell_says",),
    ),
    Mutant(
        name="half-arrived-is-passed",
        promise="A cell of which a part arrived says only that its first offset was passed.",
        file="audit/scanning/furthest_arrivals.py",
        rule="int(lasts[row]) + 1 if is_whole else int(firsts[row])",
        instead="int(lasts[row]) + 1",
        red=(f"{JOB}/test_arrivals.py::test_columns_say_what_looking_at_each_cell_says",),
    ),
    Mutant(
        name="damaged-pages-believed",
        promise="What is damaged in a file of the state is an error, and no other state.",
        file="audit/keeping/state.py",
        rule="                return pq.ParquetFile(source, page_checksum_verification=True).read()\n",
        instead="                return pq.ParquetFile(source).read()\n",
        red=(f"{JOB}/test_state.py::test_a_file_that_is_damaged_inside_is_told_with_the_way_back",),
    ),
    Mutant(
        name="carry-of-copies-lost",
        promise="Copies of copies add up: a record that came three times has two extra copies, not none.",
        file="audit/scanning/repeats.py",
        rule="            carry, added = held & carry, carry\n",
        instead="            carry, added = BitMap64(), carry\n",
        red=(f"{UNIT}/test_repeats.py::test_adding_is_the_sum_of_the_copies_of_each",),
    ),
    Mutant(
        name="fewer-copies-below-are-more",
        promise="A tier that has fewer copies than the one above it has none of its own.",
        file="audit/scanning/repeats.py",
        rule="        return Repeats(digit - borrow for digit in left)",
        instead="        return Repeats(left)",
        red=(
            f"{UNIT}/test_repeats.py::test_beyond_another_is_what_is_more_of_each_and_never_less_than_none",
        ),
    ),
    Mutant(
        name="old-repeats-unseen",
        promise="What came more than once in cells that an older program kept is known to a newer one.",
        file="audit/scanning/old_repeats.py",
        rule="    if not pc.any(is_old).as_py():\n",
        instead="    if is_old is not None:\n",
        red=(f"{JOB}/test_stream_cells.py::test_cells_that_an_older_program_kept_add_up_to_the_same",),
    ),
    Mutant(
        name="copies-of-two-folds-unseen",
        promise="A record that is counted again long after the first time is there twice.",
        file="audit/scanning/counting.py",
        rule="summed(np.concatenate((self._repeats, copies_of(again[:found]))))",
        instead="summed(copies_of(again[:found]))",
        red=(f"{JOB}/test_counting.py::test_repeats_across_folds_are_found",),
    ),
    Mutant(
        name="united-though-copies",
        promise="Cells that hold one record twice are not united: the copy would be forgotten.",
        file="audit/scanning/cell_union.py",
        rule="    good = (sizes == counts) & (ends - starts > 1)\n",
        instead="    good = ends - starts > 1\n",
        red=(f"{JOB}/test_cell_union.py::test_what_is_in_any_doubt_stays_as_it_is",),
    ),
    Mutant(
        name="united-though-read-again",
        promise="A window whose records are partly read again by the next run keeps its cells as they are.",
        file="audit/scanning/cell_union.py",
        rule="    stays[at[(at >= 0) & (held_back < ends[at])]] = False\n",
        instead="",
        red=(f"{JOB}/test_cell_union.py::test_a_window_with_cells_that_are_read_again_keeps_its_places",),
    ),
    Mutant(
        name="united-under-a-foreign-mirror",
        promise="Where arrivals tell how far a mirror is, every cell keeps its offsets.",
        file="audit/keeping/uniting.py",
        rule='each.mirror == "millrace" and told.get(name)',
        instead="told.get(name)",
        red=(f"{JOB}/test_cell_union.py::test_nothing_is_united_while_arrivals_tell_how_far_a_mirror_is",),
    ),
    Mutant(
        name="line-found-among-counts",
        promise="A row that only counts late or copied records opens no window of its stream.",
        file="audit/spark/spark_cells.py",
        rule="number_rows(rows.filter(pc.invert(is_counting)), lines",
        instead="number_rows(rows, lines",
        red=(f"{JOB}/test_settled.py::test_rows_that_only_count_open_nothing_and_have_no_number",),
    ),
    Mutant(
        name="notes-of-shortened-logs-united",
        promise="Notes on logs that were shortened or made anew stay in their places and their order.",
        file="audit/scanning/cell_notes.py",
        rule='        if note.cause in ("truncated", "recreated"):\n',
        instead="        if False:\n",
        red=(
            f"{JOB}/test_state_stays_small.py"
            "::test_notes_on_logs_that_were_another_stay_in_their_places_and_their_order",
        ),
    ),
    Mutant(
        name="count-not-held-to-the-plan",
        promise="No run commits behind offsets that its count left out, or took twice.",
        file="audit/spark/spark_cells.py",
        rule="        if missing or too_many:\n",
        instead="        if too_many < 0:\n",
        red=(f"{JOB}/test_uncounted.py::test_a_run_without_its_cells_ends_before_it_commits",),
    ),
    Mutant(
        name="connectors-holes-believed",
        promise="What no task of the connector went through is a hole only where our reader finds no record.",
        file="audit/spark/connector_reader.py",
        rule="        if gone or counter.totals().records:\n",
        instead="        if gone:\n",
        red=(
            "tests/unit/audit_job/test_uncounted.py"
            "::test_stretch_without_rows_is_a_hole_where_we_read_no_record",
        ),
    ),
    Mutant(
        name="connectors-plan-uncompared",
        promise="What the connector counted is compared with the plan, too.",
        file="audit/spark/spark_cells.py",
        rule="        if missing or too_many:\n",
        instead="        if not through_connector and (missing or too_many):\n",
        red=("tests/unit/audit_job/test_uncounted.py::test_connectors_cells_are_compared_with_the_plan_too",),
    ),
    Mutant(
        name="connectors-rows-unnoted",
        promise="A task of the connector says what lies between its rows.",
        file="audit/spark/connector_reader.py",
        rule="            if low < high:\n",
        instead="            if low > high:\n",
        red=(
            "tests/unit/audit_job/test_uncounted.py"
            "::test_task_of_the_connector_went_through_what_lies_between_its_rows",
        ),
    ),
    Mutant(
        name="kept-uncut-before-any-position",
        promise="Cells are cut at gap bounds also where the audit looked before the mirror told anything.",
        file="audit/runs/reading_plan.py",
        rule="        mirrored |= config.sources().keys()\n",
        instead="        pass\n",
        red=(
            "tests/unit/audit/test_doubts_that_end.py"
            "::test_a_loss_beside_a_gap_is_one_also_where_the_audit_read_before_the_mirror_told_anything",
        ),
    ),
    Mutant(
        name="foreign-mirrors-positions-awaited",
        promise="A source whose mirror tells no positions is kept whole.",
        file="audit/runs/reading_plan.py",
        rule=' and all(each.mirror == "millrace" for each in aggregates.values()):\n',
        instead=":\n",
        red=(
            "tests/unit/audit_job/test_task_plan.py"
            "::test_source_whose_mirror_may_tell_no_position_is_kept_whole",
        ),
    ),
)
