"""The audit's rules that keep a verdict true, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/audit"
JOB = "tests/unit/audit_job"
READ_ON = f"{JOB}/test_events_read_on.py"
READER = f"{JOB}/test_range_reader.py"
ORDER = f"{JOB}/test_doubtful_captures.py::test_what_is_read_when_makes_a_missing_record_a_loss_and_not_lag"

EVENTS = "        await read_events(captured, config, clusters, known or EventsRead(), before or Commit())\n"
SOURCES = "        await _pin(captured, config, clusters, config.sources())\n"
POSITIONS = "        await _read_positions(captured, config, clusters, metadata)\n"
NEW_GAPS = "        await asyncio.gather(*(read_new_gaps(captured, clusters[name]) for name in clusters))\n"
AGGREGATES = "        await _pin(captured, config, clusters, config.aggregates())\n"

OF_AUDIT = (
    Mutant(
        name="sources-pinned-before-events",
        promise="Sources are pinned after the events are read: what they acknowledge lies below the pins.",
        file="audit/runs/capture.py",
        rule=EVENTS + SOURCES,
        instead=SOURCES + EVENTS,
        red=(ORDER,),
    ),
    Mutant(
        name="events-of-new-groups-skipped",
        promise="A group that is audited from now on is heard from the beginning: nothing of it was kept.",
        file="audit/runs/event_reading.py",
        rule="    if not set(ways_of(config)) <= set(before.events_ways):\n",
        instead="    if not before.events_ways:\n",
        red=(f"{READ_ON}::test_a_group_that_is_audited_from_now_on_is_heard_from_the_beginning",),
    ),
    Mutant(
        name="session-doubted-unread",
        promise="Before a session of a group is in doubt, all events are read: its own may have been pruned.",
        file="audit/runs/event_reading.py",
        rule="    if reading.has_skipped and _speak_of_more(",
        instead="    if not reading.has_skipped and _speak_of_more(",
        red=(f"{READ_ON}::test_before_a_session_is_in_doubt_all_events_are_read_again",),
    ),
    Mutant(
        name="expired-events-passed-over",
        promise="Events that were gone before they were read are in doubt.",
        file="audit/runs/event_reading.py",
        rule="        self._captured.events_lost.extend(lost)\n",
        instead="",
        red=(
            f"{READ_ON}::test_events_that_expired_before_they_were_read_are_in_doubt",
            f"{READ_ON}::test_a_log_that_was_shortened_is_read_again_from_where_it_differs",
        ),
    ),
    Mutant(
        name="doubted-event-forgotten",
        promise="An event that could not be believed is in doubt as long as it is there, though read once.",
        file="audit/runs/event_reading.py",
        rule="                self._captured.ledger.recall(what)\n",
        instead="",
        red=(f"{READ_ON}::test_what_could_not_be_believed_is_told_as_long_as_it_is_there",),
    ),
    Mutant(
        name="aggregates-pinned-before-positions",
        promise="Aggregates are pinned after the positions are read: what was carried lies below the pins.",
        file="audit/runs/capture.py",
        rule=POSITIONS + NEW_GAPS + AGGREGATES,
        instead=AGGREGATES + POSITIONS + NEW_GAPS,
        red=(ORDER,),
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
        name="renamed-events-unread",
        promise="What the source told is known from the mirror's copy of its events topic, too.",
        file="audit/runs/event_reading.py",
        rule="(self._config.audit_topic, GAPS_TOPIC, *elsewhere)",
        instead="(self._config.audit_topic, GAPS_TOPIC)",
        red=(
            f"{JOB}/test_renamed_events.py"
            "::test_events_that_the_source_lost_are_read_where_the_mirror_brought_them",
        ),
    ),
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
        rule='require_shared(self._state.where, seen.get["rows"], found, what)',
        instead="pass",
        red=(
            f"{JOB}/test_run_cells.py::test_cells_that_executors_wrote_to_a_disk_of_their_own_stop_the_run",
        ),
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
        name="passage-of-a-deleted-topic",
        promise="A mirror's position in a deleted topic has passed nothing of the new one.",
        file="audit/runs/reading_plan.py",
        rule="            carried = _Carried(0, 0, topic_id)\n",
        instead="            carried = _Carried(0, next_offset, topic_id)\n",
        red=(
            f"{JOB}/test_doubtful_captures.py"
            "::test_the_position_of_a_deleted_topic_has_passed_nothing_of_the_new_one",
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
        name="gap-of-another-target",
        promise="A gap explains nothing of a cluster that another mirror fills.",
        file="audit/runs/reading_plan.py",
        rule="    if gap.target and here and gap.target != here:\n",
        instead="    if False:\n",
        red=(f"{JOB}/test_gone_and_given_again.py::test_a_gap_explains_what_its_own_target_lacks",),
    ),
    Mutant(
        name="audited-checksum-unchecked",
        promise="A batch whose checksum is wrong is not counted, however small it is.",
        file="broker/protocol/batch_kernels.py",
        rule="        elif magic == 2 and not has_right_crc(buffer, position, end):",
        instead="        elif magic == 2 and end < position:",
        red=(f"{JOB}/test_range_reader.py::test_batch_with_a_wrong_crc_is_skipped_and_counted",),
    ),
    Mutant(
        name="damage-taken-for-a-hole",
        promise="Records behind bytes that a broker does not send are read, and the bytes told as damaged.",
        file="audit/scanning/range_reader.py",
        rule="                    resume = self._submit(self._first_readable(range_, offset)).result()\n"
        "                    if resume < range_.end_offset:\n",
        instead="                    resume = range_.end_offset\n"
        "                    if resume < range_.end_offset:\n",
        red=(
            f"{JOB}/test_range_reader.py"
            "::test_what_a_broker_does_not_send_is_damaged_where_it_has_records_behind_it",
        ),
    ),
    Mutant(
        name="number-taken-after-the-end",
        promise="No number of a stream is given out after its last report, whichever window was looked up.",
        file="audit/clients/session.py",
        rule="len(list(self.current.numbers))",
        instead="length_hint(self.current.numbers)",
        red=(
            f"{UNIT}/test_session.py::test_a_number_that_the_end_of_a_stream_took_back_is_nobodys",
            f"{UNIT}/test_session.py"
            "::test_numbers_taken_without_the_lock_have_no_holes_and_are_counted_in_their_windows",
        ),
    ),
    Mutant(
        name="journal-held-by-a-child",
        promise="A journal whose owner was killed is free, whatever children the owner has forked.",
        file="audit/clients/journal.py",
        rule="fcntl.lockf(file",
        instead="fcntl.flock(file",
        red=(f"{UNIT}/test_journal.py::test_the_child_of_a_killed_owner_does_not_hold_its_lock",),
    ),
    Mutant(
        name="journal-unlocked-by-growing",
        promise="A journal that grows stays its owner's alone.",
        file="audit/clients/journal.py",
        rule="        self._map.resize(self._size)",
        instead="        self._map.close()\n"
        "        os.truncate(self._file.fileno(), self._size)\n"
        "        self._map = mmap.mmap(self._file.fileno(), self._size)",
        red=(
            f"{UNIT}/test_journal.py"
            "::test_a_journal_that_this_process_has_stays_locked_when_it_is_asked_for_again",
        ),
    ),
    Mutant(
        name="promise-broken-by-a-clock",
        promise="No record of a stream is older than what the stream has promised, whatever the clock does.",
        file="audit/clients/open_streams.py",
        rule="            if promise_ms is not None and created_ms < promise_ms:\n",
        instead="            if False:\n",
        red=(
            "tests/cluster/test_audited_producer.py"
            "::test_a_clock_that_jumped_ahead_and_was_set_right_changes_no_time_of_a_record",
        ),
    ),
    Mutant(
        name="promise-broken-by-a-moment",
        promise="No record takes the time of an earlier one that its stream has promised to be over.",
        file="audit/clients/session.py",
        rule="            self._end_run()  # The clock",
        instead="            pass  # The clock",
        red=(f"{UNIT}/test_session.py::test_a_moment_that_a_promise_has_passed_gives_no_number_to_anyone",),
    ),
    Mutant(
        name="old-loss-never-told",
        promise="A loss decides for as long as the horizon, however old it was when it was found.",
        file="audit/reconciliation/horizon.py",
        rule='    told_long = pc.fill_null(pc.less(rows["settled_ms"], since_ms), False)\n',
        instead='    told_long = pc.is_valid(rows["verdict"])\n',
        red=(
            f"{UNIT}/test_horizon.py"
            "::test_what_was_lost_long_before_the_first_look_decides_until_it_was_told_for_long",
        ),
    ),
    Mutant(
        name="roster-of-names-alone",
        promise="A producer of the roster is missed in each window that it told nothing of.",
        file="audit/reconciliation/roster.py",
        rule="            if not _touches(told, start_ms, end_ms):\n",
        instead="            if False:\n",
        red=(f"{UNIT}/test_roster.py::test_a_member_that_was_silent_for_a_year_is_no_proof_of_that_year",),
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
        name="passage-from-the-logs-start",
        promise="A mirror has passed nothing of what lies before the offset at which it began.",
        file="audit/runs/reading_plan.py",
        rule="_Carried(min(position.began, next_offset), next_offset, position.topic_id)",
        instead="_Carried(0, next_offset, position.topic_id)",
        red=(
            f"{JOB}/test_where_mirrors_began.py"
            "::test_what_was_there_before_a_mirror_that_began_at_the_end_is_not_lost",
        ),
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
        name="worker-with-another-clock",
        promise="No audit runs with a worker whose clock is off.",
        file="audit/spark/workers.py",
        rule="        if max(behind_s, ahead_s) > MOST_SKEW_S:\n",
        instead="        if ahead_s > MOST_SKEW_S:\n",
        red=(f"{JOB}/test_workers.py::test_a_clock_that_is_off_is_named_and_nothing_is_read",),
    ),
    Mutant(
        name="lost-offsets-passed-over",
        promise="A read of offsets that are gone fails, unless failOnDataLoss is false.",
        file="audit/spark/offset_limits.py",
        rule="    if fail_on_loss and not log_start <= offset <= log_end:\n",
        instead="    if False:\n",
        red=(f"{JOB}/test_offset_limits.py::test_offsets_that_are_not_there_fail_in_one_line",),
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
        name="united-under-a-foreign-mirror",
        promise="Where arrivals tell how far a mirror is, every cell keeps its offsets.",
        file="audit/keeping/uniting.py",
        rule='each.mirror == "millrace" and told.get(name)',
        instead="told.get(name)",
        red=(f"{JOB}/test_cell_union.py::test_nothing_is_united_while_arrivals_tell_how_far_a_mirror_is",),
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
        name="line-found-among-counts",
        promise="A row that only counts late or copied records opens no window of its stream.",
        file="audit/spark/spark_cells.py",
        rule="number_rows(rows.filter(pc.invert(is_counting)), lines",
        instead="number_rows(rows, lines",
        red=(f"{JOB}/test_settled.py::test_rows_that_only_count_open_nothing_and_have_no_number",),
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
    Mutant(
        name="watermark-over-an-open-row",
        promise="One open row of a window holds the watermark, however many others are proven.",
        file="audit/runs/watermarks.py",
        rule='WindowState.OPEN if window["open"] else WindowState.SETTLED',
        instead="WindowState.SETTLED",
        red=(
            f"{UNIT}/test_watermark.py::test_what_the_rows_of_a_window_come_to_holds_the_watermark_as_the_rows_do",
        ),
    ),
    Mutant(
        name="waived-window-over-another-doubt",
        promise="A waived window does not carry the watermark past a stream's own doubt or promise.",
        file="audit/reconciliation/watermark.py",
        rule="if start_ms in held or in_doubt or beyond:",
        instead="if start_ms in held or (start_ms not in waived and (in_doubt or beyond)):",
        red=(
            f"{UNIT}/test_watermark.py"
            "::test_a_waiver_of_a_window_waives_neither_a_streams_own_doubt_nor_a_promise_nor_an_open_row",
        ),
    ),
    Mutant(
        name="waived-window-over-an-open-row",
        promise="A row of a waived window that is still open holds the watermark.",
        file="audit/reconciliation/watermark.py",
        rule="held = still_open | {start_ms: row for start_ms, row in doubtful.items() if",
        instead="held = {start_ms: row for start_ms, row in (still_open | doubtful).items() if",
        red=(
            f"{UNIT}/test_watermark.py"
            "::test_a_waiver_of_a_window_waives_neither_a_streams_own_doubt_nor_a_promise_nor_an_open_row",
        ),
    ),
    Mutant(
        name="waiver-deaf-to-what-is-open",
        promise="A loss in a waived window that is open again ends the waiver.",
        file="audit/reconciliation/window_totals.py",
        rule='telling = pc.or_(settled, pc.is_in(rows["verdict"], value_set=_FINDINGS))',
        instead="telling = settled",
        red=(f"{JOB}/test_waivers.py::test_a_loss_in_a_waived_window_that_is_open_again_ends_the_waiver",),
    ),
    Mutant(
        name="doubted-stream-forgotten",
        promise="A stream in doubt that nobody waived is not forgotten when its windows are pruned.",
        file="audit/keeping/upkeep.py",
        rule="            or stream in needed\n",
        instead="",
        red=(f"{JOB}/test_upkeep.py::test_a_stream_in_doubt_that_nobody_waived_is_not_forgotten",),
    ),
    Mutant(
        name="pruned-stream-without-a-topic",
        promise="A stream that no event tells of keeps its doubt when its windows are pruned.",
        file="audit/keeping/upkeep.py",
        rule="        left.topic = topic\n",
        instead="",
        red=(
            f"{JOB}/test_upkeep.py"
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
            f"{JOB}/test_upkeep.py"
            "::test_late_records_where_topics_are_merged_are_counted_once_and_under_the_audited_topics_name",
        ),
    ),
    Mutant(
        name="late-records-of-no-audited-topic",
        promise="Late records hold the audited topic's watermark, whatever their producer calls it.",
        file="audit/spark/spark_cells.py",
        rule='late_row(reconciler.told_topic(known) or "", ',
        instead='late_row(known[0]["topic"] or "", ',
        red=(
            f"{JOB}/test_upkeep.py"
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
            f"{JOB}/test_upkeep.py"
            "::test_events_that_tell_a_pruned_window_again_are_dropped_and_a_longer_report_is_told",
        ),
    ),
    Mutant(
        name="late-records-counted-again",
        promise="A late record that the next run reads again is not in what a fold keeps of this one.",
        file="audit/keeping/upkeep.py",
        rule="{what: count - again.get(what, 0) for what",
        instead="{what: count for what",
        red=(f"{JOB}/test_upkeep.py::test_a_late_record_that_is_read_again_is_not_added_to_what_is_kept",),
    ),
    Mutant(
        name="pruned-though-nobody-waived",
        promise="What is neither proven nor waived keeps its evidence, and its row.",
        file="audit/keeping/upkeep.py",
        rule="may_go = pc.and_not(pc.and_(good, is_old), ",
        instead="may_go = pc.and_not(is_old, ",
        red=(f"{JOB}/test_upkeep.py::test_only_what_is_proven_or_waived_for_long_enough_may_go",),
    ),
    Mutant(
        name="pruned-without-what-it-hangs-on",
        promise="Windows in which a stream has numbers in common go together or not at all.",
        file="audit/keeping/upkeep.py",
        rule="if len(each - stay) not in (0, count)]",
        instead="if not count]",
        red=(f"{JOB}/test_upkeep.py::test_windows_that_have_numbers_in_common_go_together_or_not_at_all",),
    ),
    Mutant(
        name="pruned-report-forgets-who-was-unsure",
        promise="A record that a pruned window's report called ambiguous may lie in another window.",
        file="audit/runs/fact_rows.py",
        rule="self.ambiguous |= unsure & report.ambiguous",
        instead="self.ambiguous |= BitMap64()",
        red=(
            f"{JOB}/test_upkeep.py"
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
            f"{JOB}/test_upkeep.py"
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
            f"{JOB}/test_upkeep.py"
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
            f"{JOB}/test_upkeep.py"
            "::test_where_a_mirror_keeps_no_positions_a_topic_with_a_loss_keeps_what_arrived_later",
        ),
    ),
    Mutant(
        name="roster-forgets-pruned-reports",
        promise="A member of the roster has spoken for a window since its first report, pruned or not.",
        file="audit/reconciliation/roster.py",
        rule="opened_ms = min([facts.at_ms, first_ms, *facts.windows])",
        instead="opened_ms = min([facts.at_ms, *facts.windows])",
        red=(
            "tests/unit/audit/test_roster.py"
            "::test_an_opening_that_is_gone_is_not_later_than_a_report_that_was_pruned",
        ),
    ),
    Mutant(
        name="pruned-though-a-row-is-open",
        promise="A window of which one stream's row is open keeps the evidence of all of them.",
        file="audit/keeping/upkeep.py",
        rule="lines.filter(pc.invert(may_go)).select(WINDOW), unsettled.select(WINDOW)",
        instead="lines.filter(pc.invert(may_go)).select(WINDOW)",
        red=(f"{JOB}/test_upkeep.py::test_one_stream_that_is_not_done_keeps_the_whole_window",),
    ),
    Mutant(
        name="status-deaf-to-findings",
        promise="Only what a standing waiver covers does not decide the exit status.",
        file="audit/report/tally.py",
        rule="Fold(settled=fold.settled) if target in waived else fold",
        instead="Fold(settled=fold.settled)",
        red=(
            f"{JOB}/test_overall_verdict.py::test_what_is_waived_keeps_its_word_and_does_not_decide_the_status",
        ),
    ),
    Mutant(
        name="damaged-header-says-where-to-read-on",
        promise="A batch with a wrong CRC reaches to the one that follows, whatever it says itself.",
        file="audit/scanning/range_reader.py",
        rule="    lasts[doubted] = np.maximum(bases, nexts - 1)[doubted]\n",
        instead="",
        red=(f"{READER}::test_a_batch_with_a_wrong_crc_is_read_past_up_to_the_next_one",),
    ),
    Mutant(
        name="old-message-says-where-to-read-on",
        promise="An entry of an old format at an answer's end ends with its own offset.",
        file="audit/scanning/range_reader.py",
        rule="        lasts[count - 1] = bases[count - 1]\n",
        instead="        lasts[count - 1] = bases[count - 1] + (1 << 30)\n",
        red=(f"{READER}::test_a_header_that_cannot_be_believed_does_not_say_where_to_read_on",),
    ),
    Mutant(
        name="damaged-batch-ends-an-answer",
        promise="Reading goes on behind a damaged batch only where one is seen that follows.",
        file="audit/scanning/range_reader.py",
        rule="    while count and index[count - 1, B_CHECK] == CRC_WRONG:\n",
        instead="    while False:\n",
        red=(f"{READER}::test_a_header_that_cannot_be_believed_does_not_say_where_to_read_on",),
    ),
    Mutant(
        name="aborted-across-damage",
        promise="A damaged abort marker hides nothing that its producer committed behind it.",
        file="audit/scanning/range_reader.py",
        rule="                if is_damaged_at_end:\n",
        instead="                if False:\n",
        red=(f"{READER}::test_a_damaged_abort_marker_hides_nothing_that_was_committed_behind_it",),
    ),
    Mutant(
        name="topic-made-anew-read-for-the-pinned",
        promise="Records of a topic that was made anew since are not counted as the pinned one's.",
        file="audit/scanning/range_reader.py",
        rule="if topic is not None and NO_TOPIC_ID != topic.topic_id != pinned_id != NO_TOPIC_ID:",
        instead="if False:",
        red=(f"{READER}::test_a_topic_that_was_made_anew_since_it_was_pinned_is_not_read_for_the_old_one",),
    ),
    Mutant(
        name="earlier-runs-watermark-told-last",
        promise="What a later run told of a watermark is never overwritten by an earlier one.",
        file="audit/runs/watermark_znode.py",
        rule="        if _is_later(known, body):\n",
        instead="        if False:\n",
        red=(
            f"{JOB}/test_watermark_znode.py::test_only_a_run_that_is_later_by_number_and_time_has_the_last_word",
        ),
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
)
