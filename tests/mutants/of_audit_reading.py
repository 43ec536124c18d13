"""The audit's rules about what is read, when, and from where on, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/audit"
JOB = "tests/unit/audit_job"
READ_ON = f"{JOB}/test_events_read_on.py"
READER = f"{JOB}/test_range_reader.py"
ORDER = f"{JOB}/test_doubtful_captures.py::test_what_is_read_when_makes_a_missing_record_a_loss_and_not_lag"
SHORTENED = f"{UNIT}/test_shortened_logs.py"
EVENTS = "        await read_events(captured, config, clusters, known or EventsRead(), before or Commit())\n"
SOURCES = "        await _pin(captured, config, clusters, config.sources())\n"
POSITIONS = "        await _read_positions(captured, config, clusters, metadata)\n"
NEW_GAPS = "        await asyncio.gather(*(read_new_gaps(captured, clusters[name]) for name in clusters))\n"
AGGREGATES = "        await _pin(captured, config, clusters, config.aggregates())\n"

OF_AUDIT_READING = (
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
        name="made-anew-told-by-no-gap",
        promise="What a topic held that was made anew before the first look is no loss, however late.",
        file="audit/runs/reading_plan.py",
        rule='        if gap.topic_id and gap.cause == "recreated":\n',
        instead="        if False:\n",
        red=(
            f"{JOB}/test_doubtful_captures.py"
            "::test_nor_is_what_it_held_a_loss_once_the_mirror_has_gone_on_in_the_new_one",
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
        name="lost-offsets-passed-over",
        promise="A read of offsets that are gone fails, unless failOnDataLoss is false.",
        file="audit/spark/offset_limits.py",
        rule="    if fail_on_loss and not log_start <= offset <= log_end:\n",
        instead="    if False:\n",
        red=(f"{JOB}/test_offset_limits.py::test_offsets_that_are_not_there_fail_in_one_line",),
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
        name="epochs-of-what-was-read-forgotten",
        promise="The state keeps the leader epochs of what was read: a log that was cut and grew is known.",
        file="audit/runs/resuming.py",
        rule="    return ReadPosition(end_offset, topic_id, epochs)\n",
        instead="    return ReadPosition(end_offset, topic_id)\n",
        red=(
            f"{SHORTENED}::test_the_state_keeps_the_epochs_of_what_was_read",
            f"{SHORTENED}::test_what_was_written_at_offsets_that_had_been_read_is_read",
        ),
    ),
    Mutant(
        name="cut-log-read-on-where-it-was",
        promise="What was written anew at offsets that had been read is read.",
        file="audit/runs/resuming.py",
        rule="        return goes_on, lost\n",
        instead="        return known.next_offset, lost\n",
        red=(
            f"{SHORTENED}::test_reading_goes_on_where_the_histories_part",
            f"{SHORTENED}::test_what_was_written_at_offsets_that_had_been_read_is_read",
        ),
    ),
    Mutant(
        name="gaps-told-meanwhile-unread",
        promise="Gaps are read again behind the positions: what a mirror gave up meanwhile is no loss.",
        file="audit/runs/capture.py",
        rule=NEW_GAPS,
        instead="",
        red=(
            f"{JOB}/test_gaps_told_meanwhile.py"
            "::test_a_gap_that_is_told_after_the_events_were_read_is_no_loss",
        ),
    ),
    Mutant(
        name="only-the-newest-epochs-asked-for",
        promise="A log that was cut is read again from there, however many elections came since.",
        file="audit/runs/partition_pins.py",
        rule="older = await older_ends(cluster, histories, kept)",
        instead="older = await older_ends(cluster, histories, {})",
        red=(
            "tests/unit/audit/test_shortened_logs.py"
            "::test_a_log_that_was_cut_is_read_again_however_many_leaders_came_since",
        ),
    ),
    Mutant(
        name="histories-without-a-common-epoch-agree",
        promise="Where no epoch is common, all is read again.",
        file="audit/runs/log_history.py",
        rule="if not is_partial(theirs):",
        instead="if theirs:",
        red=("tests/unit/audit/test_shortened_logs.py::test_where_no_epoch_is_common_all_is_read_again",),
    ),
    Mutant(
        name="untold-epochs-forgotten",
        promise="What is known of a log is kept behind more elections than were asked for.",
        file="audit/runs/resuming.py",
        rule="until(known.epochs, first_offset)",
        instead="known.epochs",
        red=(
            "tests/unit/audit/test_shortened_logs.py"
            "::test_what_is_known_of_a_log_is_kept_behind_more_elections_than_were_asked_for",
        ),
    ),
)
