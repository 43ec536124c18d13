"""The broker's rules that protect data, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REPLICATION = "tests/unit/replication"
STORAGE = "tests/unit/storage"
COMMITTED_READER = (
    f"{REPLICATION}/test_replica_manager.py"
    "::test_reader_of_committed_data_stops_at_an_open_transaction_and_is_told_of_aborted_ones"
)

OF_REPLICATION = (
    Mutant(
        name="follower-cuts-at-high-watermark",
        promise="A follower cuts its log where epochs part from its leader's, never by the high watermark.",
        file="broker/replication/follower.py",
        rule="return Truncate(truncation_offset(answer.diverging, epochs, position.end_offset))",
        instead="return Truncate(position.high_watermark)",
        red=(f"{REPLICATION}/test_follower.py::test_cutting_ends_with_a_prefix_of_the_leaders_history",),
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
        name="answer-before-flush",
        promise="Where flush.messages asks for it, a produce request is answered after its flush.",
        file="broker/replication/replica_manager.py",
        rule="            wait = flush if wait is None else _both(wait, flush)\n",
        instead="            flush.add_done_callback(retrieve)\n",
        red=(
            f"{REPLICATION}/test_replica_manager.py"
            "::test_flush_messages_is_awaited_and_never_on_the_event_loop",
        ),
    ),
)

OF_STORAGE = (
    Mutant(
        name="append-without-crc",
        promise="A batch whose CRC does not fit is refused by the log.",
        file="broker/storage/batch_validation.py",
        rule="    if crc32c(view[ATTRIBUTES_POSITION:]) != header.crc:\n",
        instead="    if crc32c(view[ATTRIBUTES_POSITION:]) < 0:\n",
        red=(f"{STORAGE}/test_log_append.py::test_bad_batch_is_refused_and_leaves_no_trace",),
    ),
    Mutant(
        name="flush-without-sync",
        promise="A flush syncs every batch that it calls flushed.",
        file="broker/storage/log_durability.py",
        rule="        segment.file.sync()\n",
        instead="        continue\n",
        red=(f"{STORAGE}/test_new_partitions.py::test_first_flush_makes_the_directory_durable",),
    ),
    Mutant(
        name="recovery-point-before-sync",
        promise="The recovery point, which checkpoints name, moves only after everything below it is synced.",
        file="broker/storage/log_durability.py",
        rule="        snapshot: bytes | None = None\n",
        instead="        snapshot: bytes | None = None\n        log.recovery_point = end_offset\n",
        red=(f"{STORAGE}/test_failed_logs.py", f"{STORAGE}/test_new_partitions.py"),
    ),
    Mutant(
        name="checkpoint-without-sync",
        promise="A checkpoint takes the old one's place only when it is on the disk itself.",
        file="broker/storage/checkpoints.py",
        rule="        if sync:\n            os.fsync(fd)\n",
        instead="",
        red=(f"{STORAGE}/test_new_partitions.py::test_disk_is_waited_for_once_for_many_logs",),
    ),
    Mutant(
        name="leader-epochs-unsynced",
        promise="Leader epochs are on the disk before the recovery point passes the batches that carry them.",
        file="broker/storage/log_durability.py",
        rule="        log.leader_epochs.sync()\n",
        instead="",
        red=(f"{STORAGE}/test_synced.py::test_flush_syncs_all_that_the_recovery_point_vouches_for",),
    ),
    Mutant(
        name="misplaced-batch-is-a-hole",
        promise="An offset that may be in a batch whose base offset is damaged is an error, never a hole.",
        file="broker/storage/log_reader.py",
        rule="            if is_behind:\n",
        instead="            if True:\n",
        red=(
            f"{STORAGE}/test_misplaced_batches.py"
            "::test_offset_that_may_be_in_the_damaged_batch_is_never_taken_for_a_hole",
        ),
    ),
    Mutant(
        name="aborted-transactions-unsynced",
        promise="Aborted transactions are on the disk before the recovery point passes their markers.",
        file="broker/storage/segment.py",
        rule="        self.aborted.sync()\n",
        instead="",
        red=(f"{STORAGE}/test_synced.py::test_flush_syncs_all_that_the_recovery_point_vouches_for",),
    ),
    Mutant(
        name="new-segment-unlisted",
        promise="A new segment's name is on the disk before the recovery point passes its batches.",
        file="broker/storage/log_durability.py",
        rule="        if has_new_files:\n            sync_directory(log.directory)\n",
        instead="",
        red=(f"{STORAGE}/test_synced.py::test_flush_syncs_all_that_the_recovery_point_vouches_for",),
    ),
    Mutant(
        name="compacted-segment-unsynced",
        promise="A compacted segment is on the disk before it takes the place of those that it replaces.",
        file="broker/storage/segment_swap.py",
        rule="    cleaned.sync(with_indexes=True)\n",
        instead="",
        red=(
            f"{STORAGE}/test_synced.py"
            "::test_compacted_segment_is_durable_before_it_counts_and_counts_before_the_old_ones_go",
        ),
    ),
    Mutant(
        name="mark-of-a-clean-end-comes-back",
        promise="The mark of a clean end is gone for good before anything is written behind it.",
        file="broker/storage/data_folder.py",
        rule="            marker.unlink()\n            sync_directory(self.path)\n",
        instead="            marker.unlink()\n",
        red=(
            f"{STORAGE}/test_synced.py::test_mark_of_a_clean_end_is_gone_for_good_before_anything_is_written",
        ),
    ),
    Mutant(
        name="frame-is-overwritten-under-its-append",
        promise="The bytes of a large frame stay until its batches are in their logs.",
        file="broker/server/connection.py",
        rule="            self._is_pinned = len(frame) >= KEPT_FRAME_SIZE\n",
        instead="",
        red=(
            "tests/unit/server/test_connection_frames.py"
            "::test_a_large_frame_stays_as_it_is_until_what_answers_it_has_ended",
        ),
    ),
    Mutant(
        name="duplicate-batch-is-appended",
        promise="A batch that a producer sends again is answered with its first offset and not stored twice.",
        file="broker/storage/producer_state.py",
        rule="batch.first_sequence == header.base_sequence:\n                return batch\n",
        instead="batch.first_sequence == header.base_sequence:\n                return None\n",
        red=(
            f"{STORAGE}/test_producer_state.py"
            "::test_each_of_the_last_five_batches_is_a_duplicate_and_the_sixth_is_not",
        ),
    ),
    Mutant(
        name="sequence-gap-is-appended",
        promise="A producer's batch behind one that is missing is refused.",
        file="broker/storage/producer_state.py",
        rule="        if in_order:\n",
        instead="        if in_order or header.base_sequence > last_sequence:\n",
        red=(f"{STORAGE}/test_producer_state.py::test_other_sequences_are_refused",),
    ),
    Mutant(
        name="older-producer-epoch-is-appended",
        promise="A batch of an older producer epoch is refused by the log.",
        file="broker/storage/producer_state.py",
        rule=(
            "        if header.producer_epoch < entry.epoch:\n"
            "            raise _fenced(header.producer_id, header.producer_epoch, entry.epoch)\n"
            "        stored = "
        ),
        instead="        stored = ",
        red=(f"{STORAGE}/test_producer_state.py::test_newer_epoch_begins_at_zero_and_fences_the_older",),
    ),
    Mutant(
        name="stable-offset-trusts-unreplicated-marker",
        promise="A transaction holds readers of committed data back until its marker is committed itself.",
        file="broker/storage/producer_state.py",
        rule="        if self._unreplicated:\n            with",
        instead="        if not self.entries:\n            with",
        red=(f"{STORAGE}/test_transactions.py::test_last_stable_offset_waits_for_the_marker_s_replication",),
    ),
    Mutant(
        name="compaction-keeps-the-oldest",
        promise="Compaction keeps the newest record of a key.",
        file="broker/protocol/compaction_kernels.py",
        rule="            stays = np.uint64(offset + 1) >= table[_slot(table, hash0, hash1) + 2]\n",
        instead="            stays = np.uint64(offset + 1) < table[_slot(table, hash0, hash1) + 2]\n",
        red=(f"{STORAGE}/test_cleaner.py::test_last_record_of_each_key_stays_as_it_was",),
    ),
    Mutant(
        name="tombstone-goes-at-once",
        promise="A tombstone stays for delete.retention.ms, so that every reader hears of the deletion.",
        file="broker/storage/cleaner.py",
        rule="keeps_tombstones = not header.has_delete_horizon or self._now_ms < header.base_timestamp",
        instead="keeps_tombstones = False",
        red=(f"{STORAGE}/test_cleaner.py::test_tombstone_stays_its_time_and_then_goes",),
    ),
    Mutant(
        name="compaction-passes-stable-offset",
        promise="Nothing at or above the last stable offset is compacted.",
        file="broker/storage/compaction_plan.py",
        rule="        if is_young or segment.next_base > stable_offset:\n",
        instead="        if is_young:\n",
        red=(f"{STORAGE}/test_cleaner.py::test_plan_ends_before_the_active_segment_and_the_stable_offset",),
    ),
    Mutant(
        name="deleted-log-touches-the-next-ones-files",
        promise="Work that comes late to a deleted log changes no file of the next topic of its name.",
        file="broker/storage/log_reshaping.py",
        rule="            log._check_usable()\n            with log._lock:\n                removed, files",
        instead="            with log._lock:\n                removed, files",
        red=(f"{STORAGE}/test_deleted_logs.py",),
    ),
    Mutant(
        name="flush-goes-on-in-the-next-log",
        promise="A flush that a deletion overtook writes nothing to the next log of its name.",
        file="broker/storage/log_durability.py",
        rule="    with log._name_lock:\n        log._check_usable()\n",
        instead="    with log._name_lock:\n",
        red=(
            f"{STORAGE}/test_deleted_logs.py"
            "::test_a_slow_flush_holds_up_no_deletion_and_touches_nothing_of_the_next_of_its_name",
        ),
    ),
    Mutant(
        name="flushed-end-is-missed-by-nobody",
        promise="Flushed batches that are missing at the end are damage, and their offsets not given again.",
        file="broker/storage/recovery.py",
        rule="    if first_missing < flushed_offset:\n",
        instead="    if first_missing < 0:\n",
        red=(f"{STORAGE}/test_missing_ends.py::test_flushed_batches_that_are_missing_close_the_partition",),
    ),
    Mutant(
        name="failed-sync-is-forgotten",
        promise="After a failed sync nothing is called flushed that a later sync alone has said of it.",
        file="broker/storage/recovery.py",
        rule="            if write_again:\n",
        instead="            if False:\n",
        red=(
            f"{STORAGE}/test_failed_syncs.py"
            "::test_what_is_recovered_after_a_failed_sync_is_on_the_disk_once_a_flush_says_so",
        ),
    ),
    Mutant(
        name="failed-disk-is-passed-over",
        promise="After an error of a disk nothing of its logs advances, wherever the error showed.",
        file="broker/storage/log.py",
        rule="        self.notes.append(str(self._refused(what, error)))\n",
        instead="        self.notes.append(what)\n",
        red=(f"{STORAGE}/test_untrusted_disks.py",),
    ),
    Mutant(
        name="unclean-end-hidden-by-the-next",
        promise="A broker that ends before it has left the in-sync sets is still one that ended uncleanly.",
        file="broker/storage/log_manager.py",
        rule="if is_clean and (folder.was_clean or self._is_unclean_end_settled):",
        instead="if is_clean:",
        red=(
            f"{STORAGE}/test_log_manager.py"
            "::test_unclean_end_is_told_at_each_start_until_nobody_counts_on_what_it_took",
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
        name="new-topic-inherits-checkpoints",
        promise="A re-created topic does not inherit the start offset of the old one.",
        file="broker/storage/log_manager.py",
        rule="                    self._forget_checkpoints(partitions)\n",
        instead="",
        red=(
            f"{STORAGE}/test_log_manager.py::test_topic_made_anew_after_a_start_does_not_inherit_checkpoints",
            f"{STORAGE}/test_log_manager.py::test_topic_made_anew_does_not_inherit_checkpoints_after_a_kill",
        ),
    ),
    Mutant(
        name="new-topic-inherits-log",
        promise="A re-created topic does not go on in the log of the old one.",
        file="broker/storage/log_manager.py",
        rule='self.set_aside(tp, f"the cluster has another topic of this name, {topic_id}")\n',
        instead="log.set_topic_id(topic_id)  # type: ignore[arg-type]\n",
        red=(f"{STORAGE}/test_log_manager.py::test_topic_made_again_does_not_get_the_old_topic_s_log",),
    ),
    Mutant(
        name="stray-log-is-deleted",
        promise="A log that the cluster does not know is set aside and never removed.",
        file="broker/storage/log_manager.py",
        rule="            lambda: kept.extend(self._rename_log(tp, log, STRAY_SUFFIX)),\n",
        instead="            lambda: kept.extend(self._rename_log(tp, log, DELETE_SUFFIX)),\n",
        red=(f"{STORAGE}/test_strays.py::test_a_log_set_aside_is_kept_named_and_told_again_at_each_start",),
    ),
    Mutant(
        name="unknown-settings-are-the-defaults",
        promise="A log whose topic's settings are not known is not cut where compaction left a hole.",
        file="broker/storage/log_config.py",
        rule="        return None if unusable else config\n",
        instead="        return config\n",
        red=(
            f"{STORAGE}/test_strays.py"
            "::test_holes_cost_records_only_where_the_topic_is_known_not_to_be_compacted",
        ),
    ),
    Mutant(
        name="settings-of-a-namesake-cut-a-log",
        promise="A log is not cut at its holes by the settings of another topic of its name.",
        file="broker/coordination/topic_configs.py",
        rule=" or (topic_id is not None and found.topic_id != topic_id)",
        instead="",
        red=(
            f"{STORAGE}/test_strays.py"
            "::test_a_log_is_not_cut_at_its_holes_by_the_settings_of_another_topic_of_its_name",
        ),
    ),
    Mutant(
        name="taken-folders-are-marked-clean",
        promise="A process that took folders and opened none of their logs says nothing of them.",
        file="broker/storage/log_manager.py",
        rule="if folder.failure is None and self._has_opened:",
        instead="if folder.failure is None:",
        red=(f"{STORAGE}/test_strays.py::test_folders_that_were_only_taken_are_left_as_they_were",),
    ),
    Mutant(
        name="idle-file-closed-unflushed",
        promise="A file is closed only after it is flushed: an error in writing it back would go unheard.",
        file="broker/storage/log_durability.py",
        rule="    if any(segment.next_offset > log.recovery_point for segment in idle):\n",
        instead="    if not idle:\n",
        red=(f"{STORAGE}/test_idle_files.py::test_file_that_cannot_be_flushed_is_not_closed",),
    ),
    Mutant(
        name="file-closed-that-was-written-since-its-flush",
        promise="What was written while its file was flushed, to close it, keeps the file open.",
        file="broker/storage/segment.py",
        rule="            if not self._is_held and not self._is_used:\n",
        instead="            if not self._is_held:\n",
        red=(f"{STORAGE}/test_idle_files.py::test_file_that_was_written_since_its_flush_is_not_closed",),
    ),
    Mutant(
        name="closed-file-opened-by-anothers-name",
        promise="A closed file whose name has gone to another is never taken for the other.",
        file="broker/storage/segment.py",
        rule="        self.file.hold()\n        renamed = []\n",
        instead="        renamed = []\n",
        red=(
            f"{STORAGE}/test_idle_files.py"
            "::test_who_reads_a_closed_file_whose_name_goes_to_another_reads_the_first",
        ),
    ),
    Mutant(
        name="deleted-log-reads-its-heirs-files",
        promise="Who still reads a log that was deleted never reads one that was made anew under its name.",
        file="broker/storage/log.py",
        rule="                segment.file.hold()\n",
        instead="                pass\n",
        red=(
            f"{STORAGE}/test_idle_files.py"
            "::test_deleted_log_reads_its_own_closed_files_and_not_those_of_one_made_anew",
        ),
    ),
)

OF_COORDINATORS = (
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

OF_BROKER = (*OF_REPLICATION, *OF_STORAGE, *OF_COORDINATORS)
