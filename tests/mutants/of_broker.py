"""The broker's rules that protect data, each taken out; those of its storage are in `of_storage`."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.of_storage import OF_STORAGE

REPLICATION = "tests/unit/replication"
COMMITTED_READER = (
    f"{REPLICATION}/test_replica_manager.py"
    "::test_reader_of_committed_data_stops_at_an_open_transaction_and_is_told_of_aborted_ones"
)

OF_REPLICATION = (
    Mutant(
        name="read-of-another-topic-of-that-name",
        promise="Who asks for a topic by its id gets no record of another topic of that name.",
        file="broker/replication/replica_manager.py",
        rule="        if topic_id is not None and topic_id != local.topic_id:\n",
        instead="        if topic_id == 0:\n",
        red=(
            f"{REPLICATION}/test_replicated_partitions.py::test_only_the_log_of_the_very_topic_is_read",
            "tests/unit/server/test_fetch_handler.py"
            "::test_a_topic_that_is_known_by_its_new_id_is_not_read_from_the_old_ones_log",
        ),
    ),
    Mutant(
        name="cold-read-of-a-leader-that-was-replaced",
        promise="What a disk had is told by who leads in the same epoch as when it was asked.",
        file="broker/replication/replica_manager.py",
        rule="if not is_same or replica.role is not Role.LEADER or replica.leader_epoch != leader_epoch:",
        instead="if replica is None:",
        red=(
            f"{REPLICATION}/test_replicated_partitions.py"
            "::test_what_a_disk_had_is_no_answer_of_a_leader_that_was_replaced_meanwhile",
        ),
    ),
    Mutant(
        name="batches-of-another-leader-taken",
        promise="A follower takes no batch of a later epoch than that of the leader which it follows.",
        file="broker/storage/log.py",
        rule="                if header.leader_epoch > leader_epoch:\n",
        instead="                if header.leader_epoch < -9:\n",
        red=(
            f"{REPLICATION}/test_catching_up.py"
            "::test_batches_of_a_later_epoch_than_the_leaders_are_another_leaders",
        ),
    ),
    Mutant(
        name="refused-flush-ends-a-coordinators-append",
        promise="What a coordinator does upon its append follows also where a flush between was refused.",
        file="broker/replication/leading.py",
        rule="            local.waiting.dismiss(error)\n",
        instead="            local.waiting.fail(error)\n",
        red=(
            "tests/unit/replication/test_replica_manager.py"
            "::test_refused_flush_is_told_to_clients_and_does_not_end_the_brokers_own_appends",
        ),
    ),
    Mutant(
        name="coordinator-keeps-what-another-leader-may-have-changed",
        promise="Coordinators load anew where another broker may have led since they did.",
        file="broker/replication/partition.py",
        rule="    return epoch <= led_epoch + 1\n",
        instead="    return epoch > led_epoch\n",
        red=(
            f"{REPLICATION}/test_replica_manager.py"
            "::test_leadership_that_was_away_between_two_looks_is_told_as_lost_and_gained",
        ),
    ),
    Mutant(
        name="follower-cuts-at-high-watermark",
        promise="A follower cuts its log where epochs part from its leader's, never by the high watermark.",
        file="broker/replication/follower.py",
        rule="return Truncate(truncation_offset(answer.diverging, epochs, position.end_offset))",
        instead="return Truncate(position.high_watermark)",
        red=(f"{REPLICATION}/test_follower.py::test_cutting_ends_with_a_prefix_of_the_leaders_history",),
    ),
    Mutant(
        name="late-answer-of-another-log-is-taken",
        promise="A follower's log is cut by no answer about the log that it had before it was cut.",
        file="broker/replication/follower.py",
        rule="asked = (answer.leader_epoch, answer.fetch_offset, answer.last_fetched_epoch)",
        instead="asked = (answer.leader_epoch, answer.fetch_offset, epochs.latest_epoch)",
        red=(
            f"{REPLICATION}/test_follower.py"
            "::test_answer_to_a_question_about_the_log_before_it_was_cut_is_not_used",
        ),
    ),
    Mutant(
        name="leader-tells-no-divergence",
        promise="A leader tells a reader of another history where the two part.",
        file="broker/replication/reading.py",
        rule="return (epoch, end_offset) if epoch < last_fetched_epoch or end_offset < offset else None",
        instead="return None",
        red=(
            f"{REPLICATION}/test_replicated_partitions.py"
            "::test_follower_of_another_history_is_told_where_they_part",
        ),
    ),
    Mutant(
        name="unknown-history-is-read-on",
        promise="Who read in a leader epoch that the log does not know is not given what it has there now.",
        file="broker/replication/reading.py",
        rule='        raise OffsetOutOfRange(f"leader epoch {last_fetched_epoch} is not known here")\n',
        instead="        return None\n",
        red=(
            f"{REPLICATION}/test_replica_manager.py"
            "::test_consumer_of_a_leader_epoch_that_is_not_known_here_reads_nothing",
        ),
    ),
    Mutant(
        name="high-watermark-waits-for-nobody",
        promise="The high watermark waits for the whole in-sync set.",
        file="broker/replication/partition.py",
        rule="            reached = self._reached(own_end, steady_ms)\n",
        instead="            reached = own_end\n",
        red=(
            f"{REPLICATION}/test_partition.py"
            "::test_high_watermark_is_the_slowest_in_sync_replicas_end_and_never_falls",
            f"{REPLICATION}/test_replicated_partitions.py"
            "::test_acks_all_is_answered_when_the_whole_in_sync_set_has_it",
        ),
    ),
    Mutant(
        name="high-watermark-passes-joining-member",
        promise="While a new member of the in-sync set is being written, the high watermark waits for it.",
        file="broker/replication/partition.py",
        rule="                or broker in joining\n                or (steady_ms",
        instead="                or (steady_ms",
        red=(
            f"{REPLICATION}/test_partition.py"
            "::test_joining_member_holds_the_high_watermark_before_the_change_stands_and_a_leaving_one_until",
        ),
    ),
    Mutant(
        name="acks-all-with-too-few",
        promise="acks=all is refused, and nothing written, while fewer than min.insync.replicas are in sync.",
        file="broker/replication/replica_manager.py",
        rule="            and len(replica.isr) < replica.min_insync_replicas\n",
        instead="            and len(replica.isr) < 1\n",
        red=(
            f"{REPLICATION}/test_replica_manager.py"
            "::test_too_few_in_sync_replicas_refuse_acks_all_before_anything_is_written",
        ),
    ),
    Mutant(
        name="election-outside-in-sync-set",
        promise="Only a member of the in-sync set is elected, unless the topic allows otherwise.",
        file="broker/coordination/controller.py",
        rule="    in_sync = tuple(broker for broker in state.isr if broker in staying)\n",
        instead="    in_sync = tuple(staying)\n",
        red=(
            "tests/unit/coordination/test_controller.py::test_election_follows_the_table",
            "tests/unit/coordination/test_controller.py"
            "::test_unclean_election_only_where_allowed_and_only_when_no_member_lives",
        ),
    ),
    Mutant(
        name="restarted-broker-stays-in-sync",
        promise="A broker that ended uncleanly leaves each in-sync set that has another member.",
        file="broker/coordination/broker_registry.py",
        rule="    if was_clean or not others:\n",
        instead="    if was_clean or others:\n",
        red=("tests/unit/coordination/test_restarted_broker.py",),
    ),
    Mutant(
        name="restarted-broker-taken-in-for-what-it-had",
        promise="A broker that ended uncleanly is not taken into an in-sync set for what it had before.",
        file="broker/coordination/broker_registry.py",
        rule="        return state if may_be_taken_in and not was_clean else None\n",
        instead="        return None\n",
        red=(
            "tests/unit/coordination/test_late_expansion.py"
            "::test_a_follower_that_lost_power_is_not_taken_into_the_in_sync_set_for_what_it_had_before",
        ),
    ),
    Mutant(
        name="replica-taken-in-after-its-move-was-called-off",
        promise="A replica that a partition loses is not taken into the in-sync set any more.",
        file="broker/coordination/reassignment.py",
        rule="        return None if set(partition.replicas) <= set(replicas) else state\n",
        instead="        return None\n",
        red=(
            "tests/unit/coordination/test_late_expansion.py"
            "::test_a_replica_whose_move_was_called_off_is_not_taken_into_the_in_sync_set",
        ),
    ),
    Mutant(
        name="read-committed-to-high-watermark",
        promise="A reader of committed data stops at the last stable offset.",
        file="broker/replication/replica_manager.py",
        rule="visible = local.last_stable_offset if read_committed else replica.high_watermark",
        instead="visible = replica.high_watermark",
        red=(COMMITTED_READER,),
    ),
    Mutant(
        name="aborted-transactions-untold",
        promise="A reader of committed data is told which transactions were aborted.",
        file="broker/replication/reading.py",
        rule="    aborted = local.log.aborted_transactions(offset, read.next_offset)\n",
        instead="    aborted = ()\n",
        red=(COMMITTED_READER,),
    ),
    Mutant(
        name="aborted-transactions-gone-with-retention",
        promise="Aborted records are not given without their abort where retention overtakes the read.",
        file="broker/replication/reading.py",
        rule="    if offset < local.log.start_offset:\n",
        instead="    if False:\n",
        red=(f"{REPLICATION}/test_replica_manager.py::test_no_aborted_record_comes_without_its_abort",),
    ),
    Mutant(
        name="answer-before-flush",
        promise="Where flush.messages asks for it, a produce request is answered after its flush.",
        file="broker/replication/replica_manager.py",
        rule='            wait = self._leading.with_flush(local, wait, is_internal=origin == "internal")\n',
        instead='            self._leading.with_flush(local, None, is_internal=origin == "internal")\n',
        red=(
            f"{REPLICATION}/test_replica_manager.py"
            "::test_flush_messages_is_awaited_and_never_on_the_event_loop",
        ),
    ),
    Mutant(
        name="log-hosted-with-the-defaults",
        promise="A log that is hosted has its topic's settings: retention looks at it from then on.",
        file="broker/replication/hosting.py",
        rule="            opened.config = log_config\n",
        instead="",
        red=(
            f"{REPLICATION}/test_replicated_partitions.py"
            "::test_a_log_is_hosted_with_its_own_settings_from_the_first_moment",
        ),
    ),
    Mutant(
        name="one-setting-takes-the-others",
        promise="A topic's setting that cannot be used weakens none of the others.",
        file="broker/storage/log_config.py",
        rule="        return cls.from_topic_config(usable, defaults).without_knowing(unknown), unusable\n",
        instead="        return cls.from_topic_config({}, defaults).without_knowing(unknown), unusable\n",
        red=(
            f"{REPLICATION}/test_replicated_partitions.py"
            "::test_a_setting_that_cannot_be_used_leaves_the_others_as_they_are",
        ),
    ),
    Mutant(
        name="unreadable-topic-keeps-its-in-sync-sets",
        promise="A restarted broker leaves in-sync sets of topics that are not in its picture, too.",
        file="broker/coordination/broker_registry.py",
        rule="        changed += await _restart_unread(session, cache, broker_id, name, was_clean)\n",
        instead="        continue\n",
        red=(
            "tests/unit/coordination/test_restarted_broker.py"
            "::test_restarted_broker_leaves_the_in_sync_sets_of_a_topic_that_nobody_can_read",
        ),
    ),
    Mutant(
        name="unreadable-settings-are-none",
        promise="A topic whose settings cannot be read is not served by the defaults, which would delete.",
        file="broker/coordination/paths.py",
        rule="        return {UNREADABLE: ",
        instead="        return {} if error else {UNREADABLE: ",
        red=(
            "tests/unit/coordination/test_cluster_watcher.py"
            "::test_a_topic_whose_settings_cannot_be_read_is_shown_with_a_mark_until_they_can",
        ),
    ),
    Mutant(
        name="failed-log-stays-alone-in-sync",
        promise="A leader whose log has failed takes nobody out of the in-sync set any more.",
        file="broker/replication/partition.py",
        rule="        self.role = Role.NONE\n        self.pending = None\n",
        instead="        self.role = Role.NONE\n",
        red=(
            "tests/unit/replication/test_offline_logs.py"
            "::test_leader_of_a_log_that_failed_takes_nobody_out_of_the_in_sync_set_any_more",
        ),
    ),
)

OF_COORDINATORS = (
    Mutant(
        name="deleted-topic-forgotten-later",
        promise="What groups committed in a deleted topic is forgotten before another of its name is shown.",
        file="broker/coordination/cluster_watcher.py",
        rule="            self._topics_gone(gone)\n",
        instead="            asyncio.get_running_loop().call_later(1, self._topics_gone, gone)\n",
        red=(
            "tests/unit/coordination/test_cluster_watcher.py"
            "::test_a_topic_has_gone_before_another_of_its_name_is_shown",
        ),
    ),
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
        name="half-a-round-told",
        promise="Nobody hears of a reading of the cluster that was interrupted.",
        file="broker/coordination/cluster_watcher.py",
        rule="                raise interrupted\n",
        instead="                self._tell()\n                raise interrupted\n",
        red=(
            "tests/unit/coordination/test_cluster_watcher.py"
            "::test_of_a_round_that_was_interrupted_nothing_is_told",
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
)

ERROR_ANSWERS = "tests/unit/server/test_error_answers.py"

OF_SERVER = (
    Mutant(
        name="empty-answer-to-a-failed-request",
        promise="A request that failed is answered with the error in each item it names, never with none.",
        file="broker/server/error_answers.py",
        rule='    if "error_code" in fields:\n',
        instead="    if True:\n",
        red=(
            f"{ERROR_ANSWERS}::test_failed_request_is_said_in_each_item_or_closes_the_connection",
            f"{ERROR_ANSWERS}::test_version_that_is_not_spoken_is_said_in_each_item_or_closes_the_connection",
        ),
    ),
    Mutant(
        name="answer-that-has-no-place-for-the-error",
        promise="Where an answer would say nothing of a failure, the connection closes.",
        file="broker/server/error_answers.py",
        rule="        if code in _codes_in(response):\n",
        instead="        if True:\n",
        red=(f"{ERROR_ANSWERS}::test_failed_request_that_names_nothing_closes_the_connection",),
    ),
    Mutant(
        name="frame-is-overwritten-under-its-append",
        promise="The bytes of a large frame stay until its batches are in their logs.",
        file="broker/server/connection.py",
        rule="            self.received.is_pinned = len(frame) >= KEPT_FRAME_SIZE\n",
        instead="",
        red=(
            "tests/unit/server/test_connection_frames.py"
            "::test_a_large_frame_stays_as_it_is_until_what_answers_it_has_ended",
        ),
    ),
    Mutant(
        name="requests-go-with-their-peer",
        promise="What a peer has sent before it went is carried out, also what had to wait for its turn.",
        file="broker/server/connection.py",
        rule="        self._parse()  # what had to wait",
        instead="        # what had to wait",
        red=(
            "tests/unit/server/test_connection.py"
            "::test_requests_that_many_others_held_up_are_carried_out_when_their_peer_goes",
        ),
    ),
    Mutant(
        name="transaction-asked-about-too-early",
        promise="Nothing that takes long comes between the answer that a transaction is open and the append.",
        file="broker/server/transactional_produce.py",
        rule="                if prepare is not None:\n                    await prepare()\n"
        "                errors = await self._gate.admit(transactional_id, producer, sequences)\n",
        instead="                errors = await self._gate.admit(transactional_id, producer, sequences)\n"
        "                if prepare is not None:\n                    await prepare()\n",
        red=(
            "tests/unit/server/test_produce_work.py::test_transactions_are_asked_about_after_what_takes_long",
        ),
    ),
    Mutant(
        name="unknown-retention-of-a-broker-replaced",
        promise="While what was set for all topics cannot be known, nothing is removed by what it replaced.",
        file="broker/server/dynamic_settings.py",
        rule="        return defaults.without_knowing(unknown) if unknown else defaults\n",
        instead="        return defaults\n",
        red=(
            "tests/unit/server/test_dynamic_settings.py"
            "::test_while_a_retention_that_was_set_cannot_be_known_nothing_is_removed_by_another",
        ),
    ),
)

OF_CLIENTS = (
    Mutant(
        name="starved-partition-taken-for-a-hole",
        promise="A partition for which an answer had no room is read on, and not taken for a hole.",
        file="broker/client/read_to_end.py",
        rule="                if is_empty or each.records or each.error_code:\n",
        instead="                if each is not None:\n",
        red=(
            "tests/unit/client/test_read_to_end_full_answers.py"
            "::test_partition_for_which_an_answer_has_no_room_is_read_later",
        ),
    ),
    Mutant(
        name="remote-store-that-is-away-taken-for-a-hole",
        promise="What a remote store does not give for a while is read on, and not taken for a hole.",
        file="broker/client/read_to_end.py",
        rule="    if reading.position >= await local_start(cluster, reading.key):\n",
        instead="    if True:\n",
        red=(
            "tests/unit/client/test_read_to_end.py"
            "::test_remote_store_that_gives_nothing_for_a_while_is_no_hole",
        ),
    ),
    Mutant(
        name="pinned-partition-that-is-unknown-taken-for-empty",
        promise="A partition that was pinned and is not known now is no partition that was read.",
        file="broker/client/read_to_end.py",
        rule="        if unknown := until.keys() - {partition for _, partition in partitions}:\n",
        instead="        if unknown := until.keys() - until.keys():\n",
        red=(
            "tests/unit/client/test_read_to_end.py::test_pinned_partition_that_is_not_known_is_no_empty_one",
        ),
    ),
)

OF_BROKER = (*OF_REPLICATION, *OF_STORAGE, *OF_COORDINATORS, *OF_SERVER, *OF_CLIENTS)
