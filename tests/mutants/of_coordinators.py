"""The broker's rules about groups and transactions, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_COORDINATORS = (
    Mutant(
        name="admitted-before-the-transaction-ended",
        promise="A batch that was let in before the coordinator was asked is looked at again after it.",
        file="broker/transactions/verification.py",
        rule="self._still(producer, errors) | self._settle(",
        instead="errors | self._settle(",
        red=(
            "tests/unit/transactions/test_verification.py"
            "::test_what_was_open_before_the_question_is_looked_at_again_after_it",
        ),
    ),
    Mutant(
        name="removed-offset-comes-back-with-its-transaction",
        promise="A removal takes what is pending from before it, also when the log is read anew.",
        file="broker/groups/offsets_replay.py",
        rule="            pending.pop(key, None)\n",
        instead="            pass\n",
        red=(
            "tests/unit/groups/test_offsets_replay.py"
            "::test_memory_is_what_decoding_every_record_in_order_gives",
        ),
    ),
    Mutant(
        name="replayed-marker-overtakes-a-later-commit",
        promise="A commit of a transaction counts where it stands in the log, not where its marker does.",
        file="broker/groups/offsets_replay.py",
        rule="                if commit[0] >= self._latest.get(key, (-1, None))[0]:\n",
        instead="                if commit:\n",
        red=(
            "tests/unit/groups/test_offsets_replay.py"
            "::test_memory_is_what_decoding_every_record_in_order_gives",
        ),
    ),
    Mutant(
        name="transaction-without-epoch-fence",
        promise="Of all producers of a transactional id only the last may add to its transaction or end it.",
        file="broker/transactions/state.py",
        rule="        if producer.epoch != self.record.epoch:\n",
        instead="        if producer.epoch > self.record.epoch:\n",
        red=("tests/unit/transactions/test_state.py::test_an_older_producer_is_fenced_by_a_newer_one",),
    ),
    Mutant(
        name="final-answer-from-memory",
        promise="A coordinator says nothing final that the log has not confirmed: it may be replaced.",
        file="broker/transactions/state.py",
        rule="            return self._confirmed(Answer(ticket, ErrorCode.none, self.producer))\n",
        instead="            return [Answer(ticket, ErrorCode.none, self.producer)]\n",
        red=(
            "tests/unit/transactions/test_coordinator_confirming.py"
            "::test_a_coordinator_that_has_been_replaced_and_does_not_know_it_says_nothing_final",
        ),
    ),
    Mutant(
        name="added-already-from-memory",
        promise="Also that partitions are in the transaction already is said only when the log confirms it.",
        file="broker/transactions/state.py",
        rule="            return self._confirmed(Answer(ticket, error))\n        if record.state",
        instead="            return [Answer(ticket, error)]\n        if record.state",
        red=(
            "tests/unit/transactions/test_confirmed_answers.py"
            "::test_an_answer_that_the_log_does_not_confirm_is_not_given",
        ),
    ),
    Mutant(
        name="confirmation-over-a-transition",
        promise="What confirms an answer is not written behind a transition, which it would undo in the log.",
        file="broker/transactions/state.py",
        rule=(
            '        """EndTxn. Answered as soon as the outcome is in the log; the markers follow."""\n'
            "        if self._pending is not None:\n"
        ),
        instead=(
            '        """EndTxn. Answered as soon as the outcome is in the log; the markers follow."""\n'
            "        if self._pending is not None and producer == self.producer:\n"
        ),
        red=(
            "tests/unit/transactions/test_confirmed_answers.py"
            "::test_nobody_is_told_anything_final_while_a_transition_is_being_written",
        ),
    ),
    Mutant(
        name="confirmation-of-a-failed-fence",
        promise="What confirms an answer changes nothing in the log: no fence that could not be written.",
        file="broker/transactions/state.py",
        rule="        return replace(record, epoch=record.epoch - 1) if self._fence_failed else record\n",
        instead="        return record\n",
        red=(
            "tests/unit/transactions/test_state.py"
            "::test_a_fence_that_fails_shuts_the_old_producer_out_and_is_tried_again_with_the_same_epoch",
        ),
    ),
    Mutant(
        name="refusal-to-a-leader-from-memory",
        promise="A leader refuses a batch for good only when its coordinator's log confirms the refusal.",
        file="broker/transactions/coordinator.py",
        rule="        return errors if _FROM_MEMORY.issuperset(errors.values()) else None\n",
        instead="        return errors\n",
        red=(
            "tests/unit/transactions/test_coordinator_confirming.py"
            "::test_a_leader_hears_from_memory_that_it_may_append_and_only_from_the_log_that_it_may_not",
        ),
    ),
    Mutant(
        name="markers-before-the-outcome-is-safe",
        promise="No marker goes out before a transaction's outcome is on enough replicas.",
        file="broker/transactions/state.py",
        rule="if error is not ErrorCode.none and self._must_be_written(pending, too_few):",
        instead="if error is not ErrorCode.none and self._must_be_written(pending, False):",
        red=(
            "tests/unit/transactions/test_state.py"
            "::test_a_decision_on_too_few_replicas_sends_no_markers_until_it_is_safe",
        ),
    ),
    Mutant(
        name="commit-under-way-is-swept-away",
        promise="Offsets that are being written keep their group, however long nobody has used it.",
        file="broker/groups/offset_commits.py",
        rule=(
            "            appended=lambda _: store.begin_write(accepted),\n"
            "            ended=lambda: store.end_write(accepted),\n"
        ),
        instead="            appended=lambda _: None,\n            ended=lambda: None,\n",
        red=(
            "tests/unit/groups/test_group_removal.py::test_commit_under_way_is_not_swept_away_with_its_group",
        ),
    ),
    Mutant(
        name="deleted-topics-unknown-to-the-next-try",
        promise="What was deleted while a load failed is taken out by the try that does not.",
        file="broker/groups/owned_partition.py",
        rule="            self._forgotten_while_loading |= before._forgotten_while_loading\n",
        instead="            pass\n",
        red=(
            "tests/unit/groups/test_group_removal.py"
            "::test_a_topic_that_is_deleted_while_a_load_fails_is_forgotten_by_the_next_try",
        ),
    ),
    Mutant(
        name="topics-forgotten-at-every-load",
        promise="A topic that was deleted once is taken out once, and not its successor's offsets later.",
        file="broker/groups/owned_partition.py",
        rule="        if not before.loaded:\n",
        instead="        if True:\n",
        red=(
            "tests/unit/groups/test_group_removal.py"
            "::test_a_topic_that_is_deleted_while_a_load_fails_is_forgotten_by_the_next_try",
        ),
    ),
    Mutant(
        name="deleted-topic-leaves-offsets-that-are-loaded",
        promise="Offsets of a topic that is deleted while they are loaded do not count for one made anew.",
        file="broker/groups/owned_partition.py",
        rule="            self._forgotten_while_loading.update(topics)\n",
        instead="",
        red=(
            "tests/unit/groups/test_group_removal.py"
            "::test_a_topic_that_is_deleted_while_its_offsets_are_loaded_is_forgotten",
        ),
    ),
    Mutant(
        name="overdue-commit-outlives-its-removal",
        promise="A removal takes a commit whose client was told that it takes too long, too.",
        file="broker/groups/coordinator.py",
        rule="(store.get(each) or store.may_change(each))",
        instead="(store.get(each) or store.is_unstable(each))",
        red=(
            "tests/unit/groups/test_group_removal.py"
            "::test_deletion_takes_a_first_commit_with_it_whose_client_was_told_that_it_takes_too_long",
        ),
    ),
    Mutant(
        name="commit-under-way-outlives-its-removal",
        promise="A removal takes a commit that is not in memory yet, too.",
        file="broker/groups/offsets.py",
        rule="*self._pending.values(), self._being_written)",
        instead="*self._pending.values())",
        red=(
            "tests/unit/groups/test_group_removal.py"
            "::test_removal_takes_a_first_commit_that_is_under_way_with_it",
        ),
    ),
    Mutant(
        name="removal-undone-by-an-earlier-commit",
        promise="A removal wins over the commits before it, also over one that is acknowledged after it.",
        file="broker/groups/offsets.py",
        rule="        if committed.log_offset < self._removed_at.get(partition, -1):\n            return\n",
        instead="",
        red=(
            "tests/unit/groups/test_offsets.py"
            "::test_later_removal_in_the_log_wins_over_a_commit_that_is_acknowledged_after_it",
        ),
    ),
    Mutant(
        name="late-marker-ends-next-transaction",
        promise="A marker that is told late decides on no offsets of the producer's next transaction.",
        file="broker/groups/offsets.py",
        rule="if offset.log_offset > marker_offset}",
        instead="if offset.log_offset < 0}",
        red=(
            "tests/unit/groups/test_late_markers.py"
            "::test_a_marker_that_is_told_late_decides_on_no_offsets_of_the_next_transaction",
            "tests/unit/groups/test_offsets.py::test_marker_decides_on_what_stands_before_it_alone",
        ),
    ),
    Mutant(
        name="commit-of-an-older-generation",
        promise="A group takes no offsets from a member of an older generation.",
        file="broker/groups/membership.py",
        rule=(
            "        if request.generation != self.generation:\n"
            "            return ErrorCode.illegal_generation\n"
            "        if transactional:\n"
        ),
        instead="        if transactional:\n",
        red=(
            "tests/unit/groups/test_membership.py"
            "::test_commit_while_rebalancing_is_taken_from_the_old_generation_only_until_it_ends",
            "tests/unit/groups/test_coordinator.py"
            "::test_commit_with_the_old_generation_is_refused_by_the_next_coordinator",
        ),
    ),
    Mutant(
        name="sessions-end-by-the-time-of-day",
        promise="A clock that is set ends no session of a group's members, and prolongs none.",
        file="broker/groups/membership.py",
        rule="self.roster.expired(now.steady_ms):",
        instead="self.roster.expired(now.now_ms):",
        red=(
            "tests/unit/groups/test_membership.py::test_no_timer_of_a_group_follows_the_time_of_day[3600000]",
        ),
    ),
    Mutant(
        name="protocol-of-who-left-asked-for",
        promise="Who joins a group without members brings any protocol.",
        file="broker/groups/membership.py",
        rule="        if not len(self.roster):\n            return True\n        return request",
        instead="        return request",
        red=(
            "tests/unit/groups/test_membership.py"
            "::test_who_comes_after_the_only_member_left_brings_any_protocol",
        ),
    ),
    Mutant(
        name="offsets-decoded-on-the-event-loop",
        promise="A coordinator that loads very many offsets holds up nobody.",
        file="broker/groups/coordinator.py",
        rule="await self._journal.compute(partial(owned.restored, memory, self._moment()))",
        instead="owned.restored(memory, self._moment())",
        red=("tests/unit/groups/test_offsets_replay.py::test_a_load_decodes_nothing_on_the_event_loop",),
    ),
)
