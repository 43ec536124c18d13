"""The mirror's rules about what a source gives and what of it is believed, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"
LOOKS = "tests/simulation/test_mirror_looks.py"

OF_MIRROR_BATCHES = (
    Mutant(
        name="large-batch-unchecked",
        promise="A large batch's CRC is checked before the mirror gives it a new one.",
        file="mirror/batches/intake.py",
        rule="            if unchecked_crc >= 0 and crc32c(",
        instead="            if unchecked_crc < -1 and crc32c(",
        red=(f"{UNIT}/test_unreadable_batches.py::test_a_wrong_checksum_stops_at_its_batch",),
    ),
    Mutant(
        name="compressed-records-hidden-by-their-header",
        promise="A batch that claims no records and has some, compressed, is named and never passed over.",
        file="mirror/batches/coalesce_kernels.py",
        rule="        if has_lost_records and state[STATE_EMPTIED] != position:\n",
        instead="        if size < 0 and state[STATE_EMPTIED] != position:\n",
        red=(
            f"{UNIT}/test_unreadable_batches.py"
            "::test_a_batch_whose_header_hides_its_records_is_not_passed_over",
        ),
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
        name="other-where-it-begins-unasked",
        promise="A batch that comes alone behind another's claim is asked for where it claims to begin, too.",
        file="mirror/sources/survey.py",
        rule="base_offset < offset and await self._has_another_where_it_begins(suspect):\n",
        instead="False:\n",
        red=(f"{LOOKS}::test_neighbours_speak_for_no_batch_that_begins_within_another",),
    ),
    Mutant(
        name="neighbour-speaks-against-what-was-taken",
        promise="No neighbour speaks for a batch that claims to begin within what was taken.",
        file="mirror/sources/survey.py",
        rule="        return self._question.taken_from >= 0 and found.base_offset < self._question.offset\n",
        instead="        return False\n",
        red=(f"{LOOKS}::test_neighbours_speak_for_no_batch_that_begins_within_another",),
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
        rule="            return Found(why_not=str(error), is_neighbour_unreadable=is_unreadable)\n",
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
        name="malformed-batch-sent-for-ever",
        promise="Records that nobody can read, at which the target fails for ever, are a gap of damage.",
        file="mirror/delivery/sink.py",
        rule=(
            "    if code in UNEXPLAINED and outgoing.fault is not None:\n"
            "        return Outcome.REFUSED, outgoing.fault\n"
        ),
        instead="",
        red=(
            "tests/unit/mirror/test_malformed_batches.py"
            "::test_malformed_batch_that_the_target_fails_at_is_a_gap_of_damage_as_a_whole[-1-False]",
        ),
    ),
    Mutant(
        name="whole-batch-given-up",
        promise="A batch that is whole is sent until the target fails no more.",
        file="mirror/delivery/sink.py",
        rule=(
            "    if code in UNEXPLAINED and outgoing.fault is not None:\n"
            "        return Outcome.REFUSED, outgoing.fault\n"
        ),
        instead="    if code in UNEXPLAINED:\n        return Outcome.REFUSED, outgoing.fault or error\n",
        red=(
            "tests/unit/mirror/test_malformed_batches.py"
            "::test_batch_that_is_whole_is_sent_until_the_target_fails_no_more",
        ),
    ),
    Mutant(
        name="records-unread-under-a-right-checksum",
        promise="Records are gone through when it is asked whether anybody can read them.",
        file="mirror/batches/rebatch.py",
        rule=(
            "        rewrite(records, section_rows([section_of(header, 0, len(records))]), 0)\n"
            "    except (Corr"
        ),
        instead="    except (Corr",
        red=("tests/unit/mirror/test_malformed_batches.py::test_records_that_nobody_can_read_are_found",),
    ),
    Mutant(
        name="records-of-other-readers-given-up",
        promise="What only Java's readers cannot read is written anew, not given up.",
        file="mirror/batches/rebatch.py",
        rule=(
            "    try:\n"
            "        check_framing(header.compression, section)\n"
            "    except InvalidRecord as error:\n"
            "        return error\n"
            "    return None\n"
        ),
        instead="    return None\n",
        red=(
            "tests/unit/mirror/test_malformed_batches.py"
            "::test_records_that_java_cannot_read_are_written_anew",
        ),
    ),
)
