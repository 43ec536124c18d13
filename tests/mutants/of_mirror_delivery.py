"""The mirror's rules by which what it carries gets to the target once, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"

OF_MIRROR_DELIVERY = (
    Mutant(
        name="position-passes-unacknowledged",
        promise="A position never passes a batch that the target has not acknowledged.",
        file="mirror/delivery/progress.py",
        rule="while spans and not (spans[0].outstanding or spans[0].unrecorded_gaps):",
        instead="while spans and not spans[0].unrecorded_gaps:",
        red=(
            f"{UNIT}/test_progress.py::test_position_waits_for_the_oldest_piece",
            f"{UNIT}/test_progress.py::test_stretch_of_several_batches_is_not_exact_between_them",
        ),
    ),
    Mutant(
        name="position-passes-unrecorded-gap",
        promise="A position never passes a gap that is not on record.",
        file="mirror/delivery/progress.py",
        rule="while spans and not (spans[0].outstanding or spans[0].unrecorded_gaps):",
        instead="while spans and not spans[0].outstanding:",
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
        rule="            elif is_behind and each.is_acknowledged and each.identity is self._identity:\n",
        instead="            elif False:\n",
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
            "                records = writing.records[self._keeper.positions]\n"
            "                await self._write_positions(records, (), tuple)\n"
            "            for target, records in writing.records.items():\n"
        ),
        red=(
            f"{UNIT}/test_positions_keeper.py"
            "::test_at_least_once_the_offset_map_is_on_record_before_the_position",
        ),
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
    Mutant(
        name="refused-after-its-end-and-the-rest-goes-on",
        promise="Behind a batch that is refused when its partition was given up, nothing goes out.",
        file="mirror/pipeline.py",
        rule="            self._sink.withdraw(self.target, self, outgoing.offsets[-1] + 1)\n",
        instead="",
        red=(
            f"{UNIT}/test_sink.py"
            "::test_nothing_goes_out_behind_a_batch_that_was_refused_when_its_partition_was_given_up",
        ),
    ),
    Mutant(
        name="acknowledged-head-holds-up-the-row",
        promise="A batch that was acknowledged ahead of one that has left holds up nobody behind it.",
        file="mirror/delivery/lane.py",
        rule="            self._row.remove(item)\n        self._shed_acknowledged()\n",
        instead="            self._row.remove(item)\n",
        red=(
            f"{UNIT}/test_lane.py::test_batch_acknowledged_ahead_of_a_refused_one_holds_up_nobody",
            f"{UNIT}/test_lane.py::test_batch_acknowledged_ahead_of_withdrawn_ones_holds_up_nobody",
        ),
    ),
    Mutant(
        name="own-records-uncut",
        promise="The mirror's own records go in batches that its target takes, however many they are.",
        file="mirror/delivery/system_records.py",
        rule="        if not batches or room < 0:\n",
        instead="        if not batches:\n",
        red=(f"{UNIT}/test_own_records.py::test_cut_keeps_the_order_and_a_large_record_stands_alone",),
    ),
    Mutant(
        name="final-refusal-tried-without-end",
        promise="An answer to the mirror's own records that cannot change ends the process with its reason.",
        file="mirror/delivery/system_records.py",
        rule="            if isinstance(error, LASTING):\n",
        instead="            if isinstance(error, TOO_LARGE):\n",
        red=(f"{UNIT}/test_own_records.py::test_answer_that_cannot_change_ends_the_process_with_its_reason",),
    ),
    Mutant(
        name="positions-compacted-by-the-defaults",
        promise="Topics that are read as tables are compacted early: no gigabyte is read in vain.",
        file="mirror/topics/own_topics.py",
        rule='    "min.cleanable.dirty.ratio": "0.1",\n',
        instead='    "min.cleanable.dirty.ratio": "0.5",\n',
        red=(f"{UNIT}/test_positions_keeper.py::test_topics_that_are_read_as_tables_are_compacted_early",),
    ),
    Mutant(
        name="positions-in-segments-of-a-gigabyte",
        promise="Nor is what no compaction touches, the segment that is written to, a gigabyte.",
        file="mirror/topics/own_topics.py",
        rule="SEGMENT_BYTES = 8 << 20\n",
        instead="SEGMENT_BYTES = 1 << 30\n",
        red=(f"{UNIT}/test_positions_keeper.py::test_topics_that_are_read_as_tables_are_compacted_early",),
    ),
    Mutant(
        name="refused-records-of-its-own-untold",
        promise="What the target does not take of the mirror's own records is a trouble of who waits for it.",
        file="mirror/worker.py",
        rule="        yield from self._system.standing()\n",
        instead="",
        red=(
            "tests/unit/mirror/test_troubles.py"
            "::test_record_of_the_mirrors_own_that_is_not_taken_shows_until_it_is",
        ),
    ),
    Mutant(
        name="refused-positions-untold",
        promise="At least once, positions that are not taken are told of their partitions.",
        file="mirror/delivery/at_least_once.py",
        rule="self._write_positions(records, moved, self._unwritten)",
        instead="self._write_positions(records, moved, tuple)",
        red=(
            "tests/unit/mirror/test_troubles.py"
            "::test_record_of_the_mirrors_own_that_is_not_taken_shows_until_it_is",
        ),
    ),
    Mutant(
        name="positions-behind-a-refused-one-untold",
        promise="Who waits behind a position that is not taken shows too.",
        file="mirror/delivery/at_least_once.py",
        rule="        for pipeline in self._pipelines:\n            if pipeline.has_begun and",
        instead="        for pipeline in list(self._pipelines)[:1]:\n            if pipeline.has_begun and",
        red=(
            "tests/unit/mirror/test_troubles.py"
            "::test_position_that_waits_behind_one_that_is_not_taken_shows_too",
        ),
    ),
    Mutant(
        name="old-data-judged-by-its-first-try",
        promise="What has become old since its first try goes one by one.",
        file="mirror/delivery/lane.py",
        rule=(
            "        item.in_flight = item.was_sent = True\n"
            "        item.is_replayed = item.newest_ms < replayed_before_ms\n"
        ),
        instead=(
            "        if not item.was_sent:\n"
            "            item.is_replayed = item.newest_ms < replayed_before_ms\n"
            "        item.in_flight = item.was_sent = True\n"
        ),
        red=(
            "tests/unit/mirror/test_lane.py"
            "::test_what_has_become_old_since_it_came_or_was_tried_goes_one_by_one",
        ),
    ),
    Mutant(
        name="request-outlives-its-producer",
        promise="A request has its time before the target forgets its producer.",
        file="mirror/delivery/lane.py",
        rule="min(expiration_ms // 2, expiration_ms - REST_AFTER_MS, EXPIRATION_MS // 2)",
        instead="min(expiration_ms // 2, EXPIRATION_MS // 2)",
        red=("tests/unit/mirror/test_lane.py::test_what_is_old_follows_from_when_the_target_forgets",),
    ),
    Mutant(
        name="targets-expiration-unasked",
        promise="What is old follows from what the target says of when it forgets producers.",
        file="mirror/delivery/at_least_once.py",
        rule="replayed_after_ms(min(found, default=EXPIRATION_MS))",
        instead="replayed_after_ms(EXPIRATION_MS)",
        red=("tests/unit/mirror/test_at_least_once.py::test_target_is_asked_when_it_forgets_producers",),
    ),
    Mutant(
        name="told-limit-kept-for-ever",
        promise="A limit that may not be asked any more is none.",
        file="mirror/topics/topics.py",
        rule="                self._max_batch_size.pop(name, None)  # it may have been raised since\n",
        instead="",
        red=(
            "tests/unit/mirror/test_target_limits.py"
            "::test_limit_that_was_told_once_is_none_when_it_is_told_no_more",
        ),
    ),
)
