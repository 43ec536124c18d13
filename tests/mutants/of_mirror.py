"""The mirror's rules that protect data, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"

OF_MIRROR = (
    Mutant(
        name="large-batch-unchecked",
        promise="A large batch's CRC is checked before the mirror gives it a new one.",
        file="mirror/batches/intake.py",
        rule="            if unchecked_crc >= 0 and crc32c(",
        instead="            if unchecked_crc < -1 and crc32c(",
        red=(f"{UNIT}/test_unreadable_batches.py::test_a_wrong_checksum_stops_at_its_batch",),
    ),
    Mutant(
        name="small-batch-unchecked",
        promise="A small batch's CRC is checked in the walk over a fetch answer.",
        file="mirror/batches/coalesce_kernels.py",
        rule="        if not is_crc_unchecked and not has",
        instead="        if size < 0 and not has",
        red=(f"{UNIT}/test_unreadable_batches.py::test_a_wrong_checksum_stops_at_its_batch",),
    ),
    Mutant(
        name="wrong-offset-believed",
        promise="A batch whose offset contradicts its neighbours is not carried under it.",
        file="mirror/batches/coalesce_kernels.py",
        rule="        if base_offset < behind:",
        instead="        if base_offset < 0:",
        red=(
            f"{UNIT}/test_misplaced_batches.py::test_wrong_bit_in_an_offset_costs_that_batch_at_most_and_is_told",
        ),
    ),
    Mutant(
        name="offset-beyond-the-end-believed",
        promise="No position passes the end of the source's log.",
        file="mirror/batches/coalesce_kernels.py",
        rule="        if base_offset >= limits[L_LOG_END] - last_delta:",
        instead="        if last_offset < base_offset:",
        red=(
            f"{UNIT}/test_misplaced_batches.py"
            "::test_batch_beyond_the_end_is_found_behind_good_ones_of_the_same_step",
        ),
    ),
    Mutant(
        name="offset-beyond-64-bits-believed",
        promise="A batch whose last offset does not fit 64 bits is not taken for one of before.",
        file="mirror/batches/coalesce_kernels.py",
        rule="        if base_offset >= limits[L_LOG_END] - last_delta:",
        instead="        if last_offset >= limits[L_LOG_END]:",
        red=(
            f"{UNIT}/test_misplaced_batches.py"
            "::test_offsets_that_do_not_fit_64_bits_cost_that_batch_at_most_and_are_told",
        ),
    ),
    Mutant(
        name="old-offset-beyond-the-end-believed",
        promise="No position passes the end of the source's log, for messages of old formats too.",
        file="mirror/batches/old_messages.py",
        rule="        if not behind <= offset < log_end:\n",
        instead="        if offset < behind:\n",
        red=(f"{UNIT}/test_misplaced_batches.py::test_message_of_an_old_format_beyond_the_end_is_told",),
    ),
    Mutant(
        name="old-offset-believed-against-its-neighbour",
        promise="A message of an old format whose offset contradicts its neighbours is not carried under it.",
        file="mirror/batches/old_messages.py",
        rule="_OFFSET.size and claimed_offset(data, following) <= offset:\n",
        instead="_OFFSET.size and claimed_offset(data, following) < 0:\n",
        red=(
            f"{UNIT}/test_misplaced_batches.py"
            "::test_wrong_bit_in_an_offset_of_an_old_format_costs_that_entry_at_most_and_is_told",
        ),
    ),
    Mutant(
        name="hole-before-a-lone-batch-believed",
        promise="A batch that comes alone behind a hole is carried only with what follows it.",
        file="mirror/batches/coalesce_kernels.py",
        rule="            if is_first and limits[L_TRUST] < TRUSTS_ALL:\n",
        instead="            if is_first and limits[L_TRUST] < TRUSTS_NOTHING:\n",
        red=(
            f"{UNIT}/test_misplaced_batches.py"
            "::test_batch_that_comes_alone_is_believed_behind_a_hole_only_with_what_follows_it",
        ),
    ),
    Mutant(
        name="wanted-batch-cut-off-and-another-taken",
        promise="Where the wanted batch is cut off, no other that claims its offset is taken for it.",
        file="mirror/batches/placement.py",
        rule="            return Start(None, batch.end + HEADER_SIZE)\n",
        instead="            return Start(0)\n",
        red=(
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_wanted_batch_that_the_answer_cuts_off_is_not_the_one_that_claims_its_offset",
        ),
    ),
    Mutant(
        name="wanted-batch-passed-over-as-misplaced",
        promise="A batch out of its place is passed over only where it cannot be the wanted one itself.",
        file="mirror/batches/placement.py",
        rule="        if batch.base_offset > offset and batch.place > following_place:\n",
        instead="        if batch.base_offset < 0:\n",
        red=(
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_nothing_is_passed_over_that_may_be_the_wanted_batch_itself",
        ),
    ),
    Mutant(
        name="lone-batch-vouches-for-itself",
        promise="A look at damage is large enough to hold what stands beside a batch, however large that is.",
        file="mirror/sources/survey.py",
        rule="        while (found is None or not found.is_vouched_for) and not is_all:\n",
        instead="        while found is None and not is_all:\n",
        red=(
            f"{UNIT}/test_misplaced_batches.py"
            "::test_wrong_bit_in_an_offset_costs_that_batch_at_most_and_is_told",
        ),
    ),
    Mutant(
        name="neighbours-not-given-and-hole-believed",
        promise="A batch behind a hole that never comes with what follows it is taken only after a look.",
        file="mirror/sources/trust.py",
        rule="doubt.trusts(data)\n",
        instead="True\n",
        red=(
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_batch_alone_behind_a_hole_is_told_where_the_source_never_gives_what_follows",
        ),
    ),
    Mutant(
        name="lone-batch-of-a-healthy-log-called-corrupt",
        promise="A batch that comes alone behind a hole is damage only where the source contradicts it.",
        file="mirror/sources/survey.py",
        rule="            if not await self._is_contradicted(suspect, offset):\n",
        instead="            if offset < 0:\n",
        red=(
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_healthy_log_with_holes_is_carried_whole_by_a_source_that_gives_one_batch_an_answer",
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_healthy_log_with_holes_is_carried_whole_wherever_its_files_end",
        ),
    ),
    Mutant(
        name="compaction-taken-for-a-contradiction",
        promise="A batch that compaction rewrites between two looks is no damage.",
        file="mirror/sources/survey.py",
        rule="        return holds(answer.records, suspect.mark)\n",
        instead="        return len(answer.records) > 0\n",
        red=(
            f"{UNIT}/test_errors_at_looks.py"
            "::test_error_at_a_look_makes_no_gap_of_a_batch_that_was_compacted",
        ),
    ),
    Mutant(
        name="others-found-where-a-lone-batch-claims-to-lie",
        promise="A batch alone behind a hole is not taken where the source has another at its last offset.",
        file="mirror/sources/survey.py",
        rule="            return True  # another one, or itself where its neighbours speak against it\n",
        instead="            return False\n",
        red=(
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_batch_alone_behind_a_hole_is_told_where_the_source_never_gives_what_follows",
        ),
    ),
    Mutant(
        name="next-batch-begins-within-a-lone-one",
        promise="A batch alone behind a hole is not taken where the next one begins before its end.",
        file="mirror/sources/survey.py",
        rule="        return following is not None and following.base_offset < end\n",
        instead="        return following is not None and following.base_offset < 0\n",
        red=(
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_batch_alone_behind_a_hole_is_told_where_the_source_never_gives_what_follows",
        ),
    ),
    Mutant(
        name="error-at-a-look-is-agreement",
        promise="No error that a source answers a look with speaks for a batch.",
        file="mirror/sources/survey.py",
        rule="            return Found(why_not=str(error), is_unreadable_behind=is_unreadable_behind)\n",
        instead="            return Found(is_in_order=True, mark=getattr(question.suspect, 'mark', b''))\n",
        red=(f"{UNIT}/test_errors_at_looks.py::test_error_at_a_look_does_not_speak_for_a_batch",),
    ),
    Mutant(
        name="unreadable-behind-a-batch-is-agreement",
        promise="A source that cannot give anything behind a batch has not spoken for that batch.",
        file="mirror/sources/survey.py",
        rule="            is_unreadable |= bool(answer.error_code)\n",
        instead="            is_unreadable = False\n",
        red=(
            f"{UNIT}/test_errors_at_looks.py"
            "::test_errors_behind_a_lone_batch_are_no_word_of_it_however_often_they_come",
        ),
    ),
    Mutant(
        name="error-at-a-look-is-damage",
        promise="What a source cannot give in one moment, and can in the next, is no gap.",
        file="mirror/sources/survey.py",
        rule="            found = await self._readable_at(offset, size)\n",
        instead="            found = None\n",
        red=(
            f"{UNIT}/test_errors_at_looks.py::test_error_at_a_look_makes_no_gap_of_what_the_wire_has_damaged",
        ),
    ),
    Mutant(
        name="absent-store-is-damage",
        promise="An error that is no word of the log, as of a remote store that is away, widens no gap.",
        file="mirror/sources/survey.py",
        rule="        if code not in (0, KafkaStorageError.code):\n",
        instead="        if code > KafkaStorageError.code:\n",
        red=(
            f"{UNIT}/test_store_away.py::test_look_at_damage_tells_nothing_while_the_store_behind_it_is_away",
        ),
    ),
    Mutant(
        name="silent-store-is-damage",
        promise="That a source gives nothing of its remote store speaks neither of damage nor for a batch.",
        file="mirror/sources/survey.py",
        rule="        if offset < self._local_start:\n",
        instead="        if offset < 0:\n",
        red=(
            f"{UNIT}/test_store_away.py::test_look_at_damage_tells_nothing_while_the_store_behind_it_is_away",
            f"{UNIT}/test_store_away.py"
            "::test_lone_batch_waits_for_what_lies_behind_it_while_the_store_is_away",
        ),
    ),
    Mutant(
        name="claim-asked-for-at-its-begin-alone",
        promise="A batch that claims to begin before another's end is held against both ends of its claim.",
        file="mirror/sources/survey.py",
        rule="(offset - 1, end - 1) if base_offset < offset else (end - 1,):\n",
        instead="(offset - 1,) if base_offset < offset else (end - 1,):\n",
        red=(
            f"{UNIT}/test_looks_at_lone_batches.py"
            "::test_batch_that_claims_to_end_where_the_next_one_does_is_told_and_not_taken_for_that_one",
            f"{UNIT}/test_looks_at_lone_batches.py"
            "::test_batch_that_claims_to_begin_before_the_last_one_ended_is_asked_for_at_both_ends_of_its_claim",
        ),
    ),
    Mutant(
        name="claim-asked-for-at-its-end-alone",
        promise="A batch that claims to begin before another's end is held against both ends of its claim.",
        file="mirror/sources/survey.py",
        rule="(offset - 1, end - 1) if base_offset < offset else (end - 1,):\n",
        instead="(end - 1,) if base_offset < offset else (end - 1,):\n",
        red=(
            f"{UNIT}/test_looks_at_lone_batches.py"
            "::test_batch_that_claims_to_begin_before_the_last_one_ended_is_asked_for_at_both_ends_of_its_claim",
        ),
    ),
    Mutant(
        name="unreadable-behind-a-batch-asked-for-once",
        promise="What lies behind a batch is passed over only where it cannot be read at that moment, too.",
        file="mirror/sources/survey.py",
        rule="            if following is not None and at > offset and len(",
        instead="            if following is not None and at < offset and len(",
        red=(
            f"{UNIT}/test_errors_at_looks.py"
            "::test_what_was_unreadable_behind_a_lone_batch_is_asked_for_again_before_it_is_passed_over",
        ),
    ),
    Mutant(
        name="unreadable-behind-a-batch-for-a-moment",
        promise="What lies behind a batch is passed over only when it could not be read for a while.",
        file="mirror/sources/doubt.py",
        rule="            _has_lasted(self.unreadable_count, self.unreadable_since_ms, steady_ms),\n",
        instead="            self.unreadable_count >= MAX_REFUSALS,\n",
        red=(
            f"{UNIT}/test_errors_at_looks.py"
            "::test_what_cannot_be_read_behind_a_lone_batch_is_passed_over_only_after_a_while",
        ),
    ),
    Mutant(
        name="silence-of-a-source-untold",
        promise="A partition that is given nothing though its log goes on does not stand still in silence.",
        file="mirror/sources/source.py",
        rule="        elif silence is not None:\n",
        instead="        elif silence is not None and reason:\n",
        red=(
            f"{UNIT}/test_silence.py::test_partition_that_others_leave_no_room_is_not_told_and_the_first_in_its_turn_is",
        ),
    ),
    Mutant(
        name="open-transaction-told-as-silence",
        promise="What an open transaction holds back is no silence of the source.",
        file="mirror/sources/silence.py",
        rule="answer.last_stable_offset <= offset:",
        instead="answer.high_watermark <= offset:",
        red=(f"{UNIT}/test_silence.py::test_what_an_open_transaction_holds_back_is_not_told",),
    ),
    Mutant(
        name="crowded-answer-told-as-silence",
        promise="Who gets nothing because others took the room of the answer is not met with silence.",
        file="mirror/sources/source.py",
        rule="                had_room = not size or key == first\n",
        instead="                had_room = not size or first in positions\n",
        red=(
            f"{UNIT}/test_silence.py::test_partition_that_others_leave_no_room_is_not_told_and_the_first_in_its_turn_is",
        ),
    ),
    Mutant(
        name="batch-that-a-source-passes-over-untold",
        promise="A batch that claims to lie farther back, and that the source passes over, is told.",
        file="mirror/sources/trust.py",
        rule="            is_unseen = not self._shows_following\n",
        instead="            is_unseen = False\n",
        red=(
            f"{UNIT}/test_batches_passed_over.py"
            "::test_batch_that_claims_to_lie_farther_back_where_an_answer_begins_is_told",
        ),
    ),
    Mutant(
        name="what-stands-before-a-hole-asked-for-once",
        promise="What speaks of a batch that the source passes over is asked for twice.",
        file="mirror/sources/survey.py",
        rule="            raise _two_words(offset - 1)\n        return True\n",
        instead="            pass\n        return True\n",
        red=(
            f"{UNIT}/test_batches_passed_over.py"
            "::test_wire_fault_at_a_look_at_what_stands_before_a_hole_makes_no_gap",
        ),
    ),
    Mutant(
        name="error-before-a-hole-speaks-for-it",
        promise="An error at a look at what stands before a hole does not speak for the hole.",
        file="mirror/sources/survey.py",
        rule="what follows for ever.\n            if not self._question.may_pass_over:\n",
        instead="what follows for ever.\n            if False:\n",
        red=(
            f"{UNIT}/test_batches_passed_over.py"
            "::test_failed_look_at_what_stands_before_a_hole_does_not_speak_for_it",
        ),
    ),
    Mutant(
        name="refused-look-before-a-hole-taken-for-expired",
        promise="What a source says to be out of range has expired only where its log begins behind it.",
        file="mirror/sources/survey.py",
        rule="OffsetOutOfRange.code and before < await self._offset_of(EARLIEST):\n",
        instead="OffsetOutOfRange.code:\n",
        red=(
            f"{UNIT}/test_batches_passed_over.py"
            "::test_failed_look_at_what_stands_before_a_hole_does_not_speak_for_it",
        ),
    ),
    Mutant(
        name="what-stands-before-a-hole-asked-for-by-its-end",
        promise="The batch before a hole is asked for by its base offset, where every source gives it.",
        file="mirror/sources/survey.py",
        rule="self._question.taken_from if self._question.taken_from >= 0 else offset - 1\n",
        instead="offset - 1\n",
        red=(
            f"{UNIT}/test_batches_passed_over.py"
            "::test_batch_that_claims_to_lie_farther_back_where_an_answer_begins_is_told",
        ),
    ),
    Mutant(
        name="end-of-what-was-taken-forgotten-at-a-refusal",
        promise="A batch refused behind others is held against where they ended when it comes again.",
        file="mirror/sources/trust.py",
        rule="self._batch_start, self._batch_end, self._shows_following = began, reached, False\n",
        instead="self._shows_following = False\n",
        red=(
            f"{UNIT}/test_batches_passed_over.py"
            "::test_batch_refused_behind_others_is_not_taken_from_the_middle_when_it_comes_again",
        ),
    ),
    Mutant(
        name="error-at-a-look-widens-the-gap",
        promise="What could not be read behind damage for a moment, and can be again, is in no gap.",
        file="mirror/sources/survey.py",
        rule="        if bad > self._question.offset and await",
        instead="        if bad < self._question.offset and await",
        red=(f"{UNIT}/test_errors_at_looks.py::test_error_at_a_look_widens_no_gap",),
    ),
    Mutant(
        name="word-of-damage-believed-at-once",
        promise="What a source only says to be damaged is looked at only when it has said so for a while.",
        file="mirror/sources/doubt.py",
        rule="            is_enough = _has_lasted(self.refusal_count, self.refused_since_ms, steady_ms)\n",
        instead="            is_enough = self.refusal_count >= MAX_REFUSALS\n",
        red=(
            f"{UNIT}/test_store_away.py"
            "::test_what_a_source_says_to_be_damaged_is_a_gap_only_when_it_says_so_for_a_while",
        ),
    ),
    Mutant(
        name="offset-not-found-is-another-history",
        promise="A source that does not find an offset, and knows what was fetched, has no other history.",
        file="mirror/sources/source_logs.py",
        rule="        if parted is not None and parted[0] >= offset:\n",
        instead="        if parted is not None and parted[0] > offset:\n",
        red=(
            f"{UNIT}/test_store_away.py::test_offset_within_its_log_that_a_source_does_not_find_makes_no_gap",
        ),
    ),
    Mutant(
        name="claim-into-an-open-transaction-believed",
        promise="A batch that claims to lie in an open transaction is held against that one's own batches.",
        file="mirror/sources/survey.py",
        rule="            read_committed=False,\n",
        instead="            read_committed=True,\n",
        red=(
            f"{UNIT}/test_looks_at_lone_batches.py"
            "::test_batch_that_claims_to_lie_in_an_open_transaction_is_told",
        ),
    ),
    Mutant(
        name="late-look-believed-elsewhere",
        promise="A look says nothing of another doubt than the one that it was asked for.",
        file="mirror/sources/trust.py",
        rule="        if doubt.question is not question:\n",
        instead="        if doubt.question is None:\n",
        red=(
            f"{UNIT}/test_looks_at_lone_batches.py::test_look_that_ends_late_says_nothing_of_another_batch",
        ),
    ),
    Mutant(
        name="another-batch-taken-for-the-one-looked-at",
        promise="What a look found in order is that one batch, and not whatever comes next at its offset.",
        file="mirror/sources/doubt.py",
        rule="        return bool(self.trusted) and holds(answer, self.trusted)\n",
        instead="        return bool(self.trusted)\n",
        red=(
            f"{UNIT}/test_looks_at_lone_batches.py::test_only_the_batch_that_was_looked_at_is_taken_for_it",
        ),
    ),
    Mutant(
        name="overlap-with-what-was-taken-believed",
        promise="A batch that claims to begin before another ended is not taken from the middle.",
        file="mirror/sources/trust.py",
        rule="        if from_offset == self._batch_end and",
        instead="        if from_offset < 0 and",
        red=(
            f"{UNIT}/test_looks_at_lone_batches.py"
            "::test_batch_that_claims_to_begin_before_another_ends_is_told",
        ),
    ),
    Mutant(
        name="claimed-start-believed-by-a-newcomer",
        promise="A mirror that begins at an offset which a batch of before claims does not take that batch.",
        file="mirror/batches/coalesce.py",
        rule="passes_over or (is_first_contradicted(data) and claimed_offset(data, 0) <= from_offset):\n",
        instead="passes_over:\n",
        red=(
            f"{UNIT}/test_misplaced_batches.py"
            "::test_mirror_that_begins_where_a_batch_of_before_claims_to_stand_does_not_take_that_one",
        ),
    ),
    Mutant(
        name="cut-off-contradiction-forgotten",
        promise="A batch that the answer cuts off, and the source passes over then, is told.",
        file="mirror/batches/coalesce.py",
        rule="        elif _is_cut_off_before(data, position, int(self._state[kernels.STATE_BEHIND])):\n",
        instead="        elif _is_cut_off_before(data, position, 0):\n",
        red=(
            f"{UNIT}/test_misplaced_batches.py"
            "::test_wrong_bit_in_an_offset_costs_that_batch_at_most_and_is_told",
        ),
    ),
    Mutant(
        name="standing-still-untold",
        promise="A partition whose answers are not taken is in trouble until one is.",
        file="mirror/sources/source.py",
        rule="        if reason := pipeline.doubt.reason:\n",
        instead='        if reason := "":\n',
        red=(
            f"{UNIT}/test_batches_without_neighbours.py"
            "::test_partition_whose_answers_are_not_taken_is_in_trouble_until_one_is",
        ),
    ),
    Mutant(
        name="hidden-batch-passed-over",
        promise="A batch is passed over as one of before only when its header can be true.",
        file="mirror/batches/coalesce_kernels.py",
        rule="        if last_delta < 0 or (",
        instead="        if size < 0 and (",
        red=(
            f"{UNIT}/test_unreadable_batches.py::test_a_batch_whose_header_hides_its_records_is_not_passed_over",
        ),
    ),
    Mutant(
        name="topic-made-anew-is-a-shorter-one",
        promise="Where topics have no ids, a log that is shorter in its leader's own epoch is another one.",
        file="mirror/sources/source_logs.py",
        rule="        elif offset > latest and 0 <= leader_epoch <= pipeline",
        instead="        elif offset > latest and 0 <= leader_epoch < 0 <= pipeline",
        red=(
            f"{UNIT}/test_topics_without_ids.py"
            "::test_log_that_became_shorter_without_a_new_leader_epoch_was_made_anew",
        ),
    ),
    Mutant(
        name="unknown-epoch-passes",
        promise="A log that never had the leader epoch of what was fetched is not fetched from as the same.",
        file="mirror/sources/histories.py",
        rule="            if epoch < 0 and key not in keeping:\n",
        instead="            if epoch < 0:\n",
        red=(
            f"{UNIT}/test_topics_without_ids.py"
            "::test_log_that_never_had_the_epoch_of_what_was_fetched_is_another_one",
        ),
    ),
    Mutant(
        name="lost-position-begins-anew",
        promise="A partition that was begun and whose position is gone is a gap, not a new beginning.",
        file="mirror/delivery/beginnings.py",
        rule="            positions.unreadable |= lost\n",
        instead="            pass\n",
        red=(
            f"{UNIT}/test_beginnings.py::test_position_that_is_gone_is_lost_wherever_a_first_run_would_begin",
        ),
    ),
    Mutant(
        name="position-passes-unacknowledged",
        promise="A position never passes a batch that the target has not acknowledged.",
        file="mirror/delivery/progress.py",
        rule="return self.outstanding == 0 and self.unrecorded_gaps == 0",
        instead="return self.unrecorded_gaps == 0",
        red=(
            f"{UNIT}/test_progress.py::test_position_waits_for_the_oldest_piece",
            f"{UNIT}/test_progress.py::test_stretch_of_several_batches_is_not_exact_between_them",
        ),
    ),
    Mutant(
        name="position-passes-unrecorded-gap",
        promise="A position never passes a gap that is not on record.",
        file="mirror/delivery/progress.py",
        rule="return self.outstanding == 0 and self.unrecorded_gaps == 0",
        instead="return self.outstanding == 0",
        red=(
            f"{UNIT}/test_progress.py::test_failed_piece_holds_the_position_until_its_gap_is_recorded",
            f"{UNIT}/test_progress.py::test_each_of_two_gaps_in_a_span_must_be_recorded",
        ),
    ),
    Mutant(
        name="retry-takes-a-new-sequence",
        promise="A batch keeps its sequence number for every retry.",
        file="mirror/delivery/lane.py",
        rule="        if item.base_sequence < 0 or item.identity is not self._identity:\n",
        instead="        if not item.in_flight:\n",
        red=(f"{UNIT}/test_lane.py::test_failed_row_is_sent_again_from_its_first_with_the_same_sequences",),
    ),
    Mutant(
        name="sequence-freed-behind-a-failure",
        promise="A sequence number is given to another batch only when its own is known to be in no log.",
        file="mirror/delivery/lane.py",
        rule="        if outcome is Outcome.REFUSED and is_cause and not item.in_doubt:\n",
        instead="        if outcome is Outcome.REFUSED and not item.in_doubt:\n",
        red=(f"{UNIT}/test_lane.py::test_refusal_behind_a_failure_frees_no_sequence",),
    ),
    Mutant(
        name="sequence-of-a-doubtful-batch-freed",
        promise="A refusal says nothing of an earlier try: what may be in the log keeps its sequence.",
        file="mirror/delivery/lane.py",
        rule="        if outcome is Outcome.REFUSED and is_cause and not item.in_doubt:\n",
        instead="        if outcome is Outcome.REFUSED and is_cause:\n",
        red=(
            f"{UNIT}/test_lane.py::test_refusal_of_a_batch_that_may_be_in_the_log_gives_its_sequence_to_nobody",
        ),
    ),
    Mutant(
        name="new-identity-sends-at-once",
        promise="A new identity has one batch in flight until its first acknowledgement.",
        file="mirror/delivery/lane.py",
        rule="        if self._confirmed_at_ms < 0:\n            return 1\n",
        instead="",
        red=(f"{UNIT}/test_lane.py::test_first_batch_of_an_identity_goes_alone",),
    ),
    Mutant(
        name="replayed-data-goes-in-fives",
        promise="Data so old that its producer may be forgotten goes one batch at a time.",
        file="mirror/delivery/lane.py",
        rule="        if self._recovering or (self._in_flight and self._may_be_forgotten):\n",
        instead="        if self._recovering:\n",
        red=(
            f"{UNIT}/test_lane.py::test_replayed_data_goes_one_by_one",
            "tests/simulation/test_mirror_delivery.py"
            "::test_replayed_data_keeps_its_order_where_producers_are_forgotten_by_timestamps",
        ),
    ),
    Mutant(
        name="last-answer-taken-for-the-last-batch",
        promise="Where a producer may be forgotten, the last batch in the log decides how many go at once.",
        file="mirror/delivery/lane.py",
        rule="            if each.is_acknowledged and each.identity is self._identity:\n",
        instead="            if False:\n",
        red=(f"{UNIT}/test_lane.py::test_the_last_batch_in_the_log_decides_and_not_the_last_answer",),
    ),
    Mutant(
        name="other-identitys-last-batch",
        promise="An identity that takes over again is known to the target by its own last batch.",
        file="mirror/delivery/lane.py",
        rule="            self._last_was_replayed = was_replayed\n",
        instead="            pass\n",
        red=(f"{UNIT}/test_lane.py::test_an_identity_that_takes_over_again_is_known_by_its_own_last_batch",),
    ),
    Mutant(
        name="end-without-fence",
        promise="A transaction ends only after the group's coordinator has let its worker pass.",
        file="mirror/delivery/transaction.py",
        rule="        if self.phase is Phase.WRITING:\n            self.phase = Phase.FENCING\n",
        instead="        if self.phase is Phase.WRITING:\n            self.phase = Phase.READY\n",
        red=(f"{UNIT}/test_transaction.py::test_older_generation_waits_for_the_answer_to_the_join",),
    ),
    Mutant(
        name="failure-of-the-target-skips",
        promise="A batch that the target fails at with an error of its own is sent until it is taken.",
        file="mirror/delivery/sink.py",
        rule="Outcome.REFUSED if code in REFUSALS else Outcome.RETRY",
        instead="Outcome.REFUSED if code in REFUSALS or code == -1 else Outcome.RETRY",
        red=(
            f"{UNIT}/test_troubles.py::"
            "test_batch_that_the_target_fails_at_for_ever_is_told_and_logged_once_and_not_left_out",
        ),
    ),
    Mutant(
        name="sealed-transaction-takes-more",
        promise="What was never sent goes out in no transaction that is full, were it by the batch before.",
        file="mirror/delivery/sink.py",
        rule="only_again = filling is not None and filling.only_again",
        instead="only_again = filling is not None and filling.only_again and not request",
        red=(
            f"{UNIT}/test_lane_shell.py::test_transaction_that_fills_up_within_a_request_takes_nothing_more",
        ),
    ),
    Mutant(
        name="second-transaction-ends-first",
        promise="Of a lane's two transactions the later ends only after the other is known to be committed.",
        file="mirror/delivery/transaction.py",
        rule=(
            "            if ahead is not None:\n"
            "                return Step(Act.WAIT)\n"
            "            self.phase = Phase.ENDING\n"
        ),
        instead="            self.phase = Phase.ENDING\n",
        red=(f"{UNIT}/test_alternation.py::test_second_ends_only_after_the_first",),
    ),
    Mutant(
        name="refused-end-is-guessed",
        promise="What became of a refused EndTxn is read from the positions, never guessed.",
        file="mirror/delivery/transaction.py",
        rule="        self._in_doubt = self._is_lost = True\n",
        instead="        self._is_lost = True\n",
        red=(f"{UNIT}/test_transaction.py::test_refused_end_is_never_guessed",),
    ),
    Mutant(
        name="silence-of-a-leader-blames-nobody",
        promise="A leader that answers no batch holds up its own partitions alone.",
        file="mirror/delivery/transaction.py",
        rule="lane.failing() | lane.holding_up()\n",
        instead="lane.failing()\n",
        red=(
            f"{UNIT}/test_transaction.py"
            "::test_silence_is_blamed_when_the_transaction_is_given_up_and_not_before",
        ),
    ),
    Mutant(
        name="gap-not-on-record-blames-nobody",
        promise="A gap whose event is not taken holds up its own partition alone.",
        file="mirror/delivery/transactional_lane.py",
        rule="        return frozenset(self.sink.unsettled_targets() | inexact)\n",
        instead="        return frozenset(self.sink.unsettled_targets())\n",
        red=(
            f"{UNIT}/test_lane_stands.py"
            "::test_skipped_gap_whose_event_is_not_taken_holds_up_its_own_partition_alone",
        ),
    ),
    Mutant(
        name="lane-that-commits-nothing-untold",
        promise="A lane that goes back again and again is a trouble of the partitions that wait for it.",
        file="mirror/delivery/transactional_lane.py",
        rule='        self._stands(f"{reason} ({_some(blamed)})" if blamed else reason)\n',
        instead="",
        red=(
            f"{UNIT}/test_lane_stands.py"
            "::test_positions_that_are_not_taken_are_told_of_whoever_waits_for_them",
        ),
    ),
    Mutant(
        name="refusal-of-positions-forgotten",
        promise="Positions that are refused until the time is over end with what the target said.",
        file="mirror/delivery/lane_producer.py",
        rule="            if refusals:\n",
        instead="            if not going:\n",
        red=(f"{UNIT}/test_lane_producer.py::test_write_ends_when_nothing_more_is_acknowledged",),
    ),
    Mutant(
        name="who-blocked-a-lane-leaves-it",
        promise="Who blocked a lane does not go on to block the next one, whatever kept the marker away.",
        file="mirror/delivery/transactional_lane.py",
        rule="        blocking = self._blamed | leaderless\n",
        instead="        blocking = frozenset(leaderless)\n",
        red=(
            f"{UNIT}/test_lane_stands.py::test_leader_that_answers_nothing_holds_up_its_own_partitions_alone",
        ),
    ),
    Mutant(
        name="positions-read-below-open-transaction",
        promise="Who takes over reads the positions until every open transaction in them is decided.",
        file="mirror/delivery/positions_keeper.py",
        rule="read_topic_to_end(self._target, topic, until=end)",
        instead="read_topic_to_end(self._target, topic)",
        red=(f"{UNIT}/test_positions_keeper.py::test_positions_of_an_open_transaction_are_waited_for",),
    ),
    Mutant(
        name="end-that-a-replaced-leader-tells",
        promise="Who takes over reads the positions up to a record that it has put there itself.",
        file="mirror/delivery/positions_keeper.py",
        rule="read_topic_to_end(self._target, topic, until=end)",
        instead="read_topic_to_end(self._target, topic, read_committed=False)",
        red=(f"{UNIT}/test_positions_keeper.py::test_end_that_a_replaced_leader_tells_is_not_believed",),
    ),
    Mutant(
        name="position-of-a-beginning-worker-taken-for-lost",
        promise="Lost is only a position that is not there when the map is known to have its partition.",
        file="mirror/delivery/positions_keeper.py",
        rule="positions = await self._on_record()\n                    await self._mark_lost(",
        instead="await self._mark_lost(",
        red=(
            f"{UNIT}/test_own_records.py"
            "::test_worker_that_begins_while_another_does_takes_nothing_of_it_for_lost",
        ),
    ),
    Mutant(
        name="first-look-that-is-older-than-the-positions",
        promise="Where a source has positions its first look is read behind them.",
        file="mirror/delivery/beginnings.py",
        rule="        if (sources & seen) - begun.first_looks.keys():\n",
        instead="        if not sources:\n",
        red=(f"{UNIT}/test_beginnings.py::test_worker_that_begins_while_another_does_begins_as_the_other",),
    ),
    Mutant(
        name="epoch-taken-to-begin-at-the-position",
        promise="The next owner knows where the last epoch of what was carried began.",
        file="mirror/delivery/progress.py",
        rule="EpochHistory(leader_epoch, epoch_from if 0 <= epoch_from <= position else position)",
        instead="EpochHistory(leader_epoch, position)",
        red=(
            f"{UNIT}/test_epochs.py::test_the_next_owner_and_a_rewound_lane_know_where_the_last_epoch_began",
        ),
    ),
    Mutant(
        name="own-record-late-behind-a-newer-one",
        promise="What the mirror writes of itself again goes under the sequence that it had.",
        file="mirror/delivery/system_records.py",
        rule="producer.in_doubt is None or producer.in_doubt is records",
        instead="producer.in_doubt is None",
        red=(
            f"{UNIT}/test_own_sequences.py::test_what_is_late_on_its_way_does_not_come_behind_what_is_newer",
        ),
    ),
    Mutant(
        name="sequence-of-a-cancelled-own-record",
        promise="A sequence that may have been used is no other batch's, not one of the same records.",
        file="mirror/delivery/system_records.py",
        rule="producer.in_doubt is records",
        instead="producer.in_doubt == records",
        red=(f"{UNIT}/test_own_sequences.py::test_cancelled_write_leaves_its_sequence_to_nobody",),
    ),
    Mutant(
        name="sequence-of-a-refused-own-record",
        promise="The sequence of a refused batch that an earlier try may have written is not used again.",
        file="mirror/delivery/system_records.py",
        rule="                del self._producers[topic, partition]\n",
        instead="                pass\n",
        red=(
            f"{UNIT}/test_own_sequences.py"
            "::test_refused_after_an_unknown_outcome_its_sequence_is_never_used_again",
        ),
    ),
    Mutant(
        name="position-before-its-offset-map",
        promise="Below a position on record the offset map is whole: the map is written first.",
        file="mirror/delivery/at_least_once.py",
        rule=(
            "            # The map first: below a position that is on record it is whole.\n"
            "            for target, records in writing.records.items():\n"
        ),
        instead=(
            "            if writing.moved:\n"
            "                await self._write_positions(writing.records[self._keeper.positions])\n"
            "            for target, records in writing.records.items():\n"
        ),
        red=(
            f"{UNIT}/test_positions_keeper.py"
            "::test_at_least_once_the_offset_map_is_on_record_before_the_position",
        ),
    ),
    Mutant(
        name="new-source-topic-inherits-position",
        promise="The position in a topic that was re-created means nothing in the new one.",
        file="mirror/sources/source_logs.py",
        rule="return NO_TOPIC_ID not in (before.topic_id, now.topic_id) and before.topic_id != now.topic_id",
        instead="return False",
        red=(
            f"{UNIT}/test_source_answers.py::test_another_topic_of_the_name_is_found_at_once",
            f"{UNIT}/test_source_bounds.py"
            "::test_position_of_another_topic_is_a_gap_up_to_the_end_that_was_known",
        ),
    ),
    Mutant(
        name="cut-of-the-map-forgotten-before-what-it-cut",
        promise="The offset map keeps a cut for as long as what the cut makes void.",
        file="mirror/offsets/map_upkeep.py",
        rule="    return _without_cuts_in_force(chunks, gone)\n",
        instead="    return gone\n",
        red=(f"{UNIT}/test_offset_map.py::test_upkeep_changes_no_translation",),
    ),
    Mutant(
        name="records-of-a-source-that-left-forgotten",
        promise="A group is not moved past records of a source that the config lacks by now.",
        file="mirror/offsets/feeds.py",
        rule="                went_to = [*told, now] if now is not None else told\n",
        instead="                went_to = [now] if now is not None else ()\n",
        red=(f"{UNIT}/test_feeds.py::test_records_of_a_source_that_has_left_still_lie_between",),
    ),
    Mutant(
        name="unknown-way-of-a-source-that-left-taken-for-another",
        promise="A source of which nobody knows where its records went may have gone to every target.",
        file="mirror/offsets/feeds.py",
        rule="                went_to: Collection[TopicPartition] = list(found)\n",
        instead="                went_to: Collection[TopicPartition] = ()\n",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_source_that_has_left_and_does_not_say_where_it_went_may_have_gone_anywhere",
        ),
    ),
    Mutant(
        name="offsets-of-another-target-translated",
        promise="What a group has not read before a rename lies elsewhere, so it is not moved past that.",
        file="mirror/offsets/translation.py",
        rule="        if offset < index.elsewhere_until:\n",
        instead="        if offset < 0:\n",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_topic_that_is_renamed_translates_from_where_it_is_carried_under_the_new_name",
        ),
    ),
    Mutant(
        name="target-of-an-idle-partition-not-put-on-record",
        promise="Where a partition's records went is on record, also of one that stands still.",
        file="mirror/sources/source_logs.py",
        rule="(now != recorded or pipeline.target not in known.targets)",
        instead="now != recorded",
        red=(
            f"{UNIT}/test_source_bounds.py"
            "::test_position_tells_where_the_records_went_and_idle_partitions_say_it_too",
        ),
    ),
    Mutant(
        name="map-forgotten-by-another-targets-log",
        promise="A chunk of the offset map is forgotten only when its own target's log begins behind it.",
        file="mirror/offsets/map_upkeep.py",
        rule="_expired_at(starts.get(target, -1), of_target, last)",
        instead="_expired_at(max(starts.values(), default=-1), of_target, last)",
        red=(f"{UNIT}/test_offset_map.py::test_what_one_target_no_longer_has_another_may",),
    ),
    Mutant(
        name="map-kept-by-the-names-of-the-start",
        promise="Upkeep of the offset map goes by the sources and offsets of the config in force.",
        file="mirror/worker.py",
        rule="MapKeeper(target, self._system.write, self._leads, self._settings)",
        instead="MapKeeper(target, self._system.write, self._leads, lambda: (config, {}))",
        red=(f"{UNIT}/test_map_keeper.py::test_source_that_a_reload_has_brought_keeps_its_map",),
    ),
    Mutant(
        name="chunks-of-two-targets-joined",
        promise="A chunk of the offset map speaks of one target partition.",
        file="mirror/offsets/map_upkeep.py",
        rule="            and chunk.key.target == row[-1].key.target\n",
        instead="",
        red=(f"{UNIT}/test_offset_map.py::test_chunks_of_two_targets_are_never_one",),
    ),
    Mutant(
        name="second-name-of-a-cluster-let-in",
        promise="Of two sources that are one cluster one is carried, or every record would be there twice.",
        file="mirror/topics/route_guard.py",
        rule="        if self.second_names.refuses(cluster.name, topics, names, told):\n",
        instead="        if not names and self.second_names.refuses(cluster.name, topics, names, told):\n",
        red=(
            f"{UNIT}/test_second_names.py::test_nothing_of_a_second_name_is_let_in_while_the_first_is_there",
        ),
    ),
    Mutant(
        name="second-name-of-a-cluster-preferred",
        promise="Of two sources that are one cluster the one that is carried already stays.",
        file="mirror/topics/second_names.py",
        rule="                since.get(name, sys.maxsize),\n",
        instead="",
        red=(
            f"{UNIT}/test_second_names.py"
            "::test_source_that_is_carried_stays_and_otherwise_the_one_that_was_seen_first",
        ),
    ),
    Mutant(
        name="second-name-of-a-cluster-reloaded",
        promise="A reload takes no source that is a cluster which the mirror has under another name.",
        file="mirror/control/operators.py",
        rule="            if finding.where in added:\n",
        instead="            if finding.where not in clusters:\n",
        red=(f"{UNIT}/test_second_names.py::test_reload_takes_no_second_name_for_a_cluster_that_is_there",),
    ),
    Mutant(
        name="topics-of-two-sources-mixed-by-a-dot",
        promise="Topics of two sources are not mixed where their names are to tell them apart.",
        file="mirror/topics/name_clashes.py",
        rule="        given_up = {**yielding(names, since), **(taken or {})}\n",
        instead="        given_up = yielding(names, since)\n",
        red=(f"{UNIT}/test_name_clashes.py::test_names_that_are_to_say_the_source_are_not_shared_by_two",),
    ),
    Mutant(
        name="translated-beyond-the-positions",
        promise="A group is not moved past records of a source that began while the map was read.",
        file="mirror/offsets/translate.py",
        rule="        elif committed.offset > position.next_offset:\n",
        instead="        elif committed.offset < 0:\n",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_what_was_carried_since_the_positions_were_read_is_not_translated_yet",
        ),
    ),
    Mutant(
        name="records-without-a-map-left-out-of-re-reads",
        promise="What a group reads again leaves out no records of which the map does not speak.",
        file="mirror/offsets/translate.py",
        rule="                if place is None and not map_of.chunks and not self._has_only_begun(feeder):\n",
        instead="                if place is None and map_of.chunks and not self._has_only_begun(feeder):\n",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_records_of_which_no_map_speaks_are_not_left_out_of_what_is_read_again",
        ),
    ),
    Mutant(
        name="map-ordered-by-clocks-alone",
        promise="The offset map's chunks are in the order of their assignments, not of two workers' clocks.",
        file="mirror/pipeline.py",
        rule="            began_ms = max(self._now_ms(), start.at_ms + 1)\n",
        instead="            began_ms = self._now_ms()\n",
        red=(
            f"{UNIT}/test_map_order.py::test_a_chunk_that_its_owner_writes_again_is_joined_with_no_other",
            f"{UNIT}/test_map_order.py::test_a_cut_makes_nothing_void_of_what_a_later_owner_carries",
        ),
    ),
    Mutant(
        name="position-dated-by-the-clock-alone",
        promise="A position is never dated before the one that its owner began with.",
        file="mirror/pipeline.py",
        rule="            max(now_ms, self.runs.began_ms),\n",
        instead="            now_ms,\n",
        red=(f"{UNIT}/test_map_order.py::test_a_cut_makes_nothing_void_of_what_a_later_owner_carries",),
    ),
    Mutant(
        name="closed-lane-aborts-under-its-epoch",
        promise="A batch that arrives after its lane was closed is refused, and opens no transaction.",
        file="mirror/delivery/lane_producer.py",
        rule="            await init_producer_id(\n"
        "                self._cluster,\n"
        "                self.transactional_id,\n"
        "                timeout_ms=TRANSACTION_TIMEOUT_MS,\n"
        "                retry_ms=ABORT_TIMEOUT_MS,\n"
        "                holder=(self._producer.producer_id, self._producer.producer_epoch),\n"
        "            )\n",
        instead="            await end_transaction(\n"
        "                self._cluster, self._producer, commit=False, timeout_ms=ABORT_TIMEOUT_MS\n"
        "            )\n",
        red=(
            f"{UNIT}/test_lane_closes.py"
            "::test_a_batch_that_arrives_after_the_lane_was_closed_opens_no_transaction",
        ),
    ),
)
