"""The rules of the broker's storage that protect data, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STORAGE = "tests/unit/storage"

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
        name="aborted-transaction-written-beside-a-sync",
        promise="An aborted transaction that is written beside a sync is on the disk after the next one.",
        file="broker/storage/transaction_index.py",
        rule="        self._synced = written\n",
        instead="        self._synced = self._written\n",
        red=(
            f"{STORAGE}/test_changes_meanwhile.py"
            "::test_aborted_transaction_that_is_written_beside_a_sync_is_left_to_the_next",
        ),
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
        name="new-segment-unlisted-after-a-refused-flush",
        promise="A flush that could not be tried leaves the folder's new names to the next one.",
        file="broker/storage/log_durability.py",
        rule="                log._has_new_files = True  # the directory may not have been synced\n",
        instead="",
        red=(f"{STORAGE}/test_failed_logs.py::test_flush_without_a_free_descriptor_is_tried_again",),
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
        name="compaction-beside-a-replay",
        promise="A compaction knows every aborted transaction, also where it begins during a truncation.",
        file="broker/storage/log_reshaping.py",
        rule="    with log._shape_lock:\n        segments = log._segments.all\n",
        instead="    if True:\n        segments = log._segments.all\n",
        red=(
            f"{STORAGE}/test_compaction_runs.py"
            "::test_compaction_during_a_truncation_knows_of_every_aborted_transaction",
        ),
    ),
    Mutant(
        name="compaction-over-a-truncation",
        promise="What was compacted before a truncation takes no segment's place after it.",
        file="broker/storage/log_reshaping.py",
        rule="            is_outdated = truncation_count != log.truncation_count\n",
        instead="            is_outdated = False\n",
        red=(
            f"{STORAGE}/test_compaction_runs.py::test_segment_that_was_cut_and_filled_anew_is_not_replaced",
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
        name="marker-refused-for-its-size",
        promise="A marker is written however small the topic's segments are, so every transaction ends.",
        file="broker/storage/batch_validation.py",
        rule='    if origin == "client":\n        check_size(size, config)\n',
        instead="    check_size(size, config)\n",
        red=(
            f"{STORAGE}/test_transactions.py::test_marker_that_is_larger_than_a_segment_has_one_for_itself",
        ),
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
        rule="            log.health.check()\n            with log._lock:\n                removed, files",
        instead="            with log._lock:\n                removed, files",
        red=(f"{STORAGE}/test_deleted_logs.py",),
    ),
    Mutant(
        name="flush-goes-on-in-the-next-log",
        promise="A flush that a deletion overtook writes nothing to the next log of its name.",
        file="broker/storage/log_durability.py",
        rule="    with log._name_lock:\n        log.health.check()\n",
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
        file="broker/storage/log_health.py",
        rule="        self._notes.append(str(self.refused(what, error)))\n",
        instead="        self._notes.append(what)\n",
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
        name="lost-end-is-a-compactions-hole",
        promise="What a loss of power took from the end of a segment is not taken for a compaction's hole.",
        file="broker/storage/recovery.py",
        rule="        if not is_whole or segment.next_offset != following:\n",
        instead="        if not is_whole or (segment.next_offset != following and not has_holes):\n",
        red=(f"{STORAGE}/test_power_loss.py::test_the_lost_end_of_a_segment_is_no_hole_of_a_compaction",),
    ),
    Mutant(
        name="hole-before-the-first-batch-is-a-torn-write",
        promise="A follower's log whose first batch lies behind a compaction's hole is not cut at it.",
        file="broker/storage/log.py",
        rule="                if header.base_offset > self.end_offset:\n",
        instead="                if header.base_offset > self.end_offset > self.start_offset:\n",
        red=(
            f"{STORAGE}/test_compaction_runs.py"
            "::test_follower_whose_first_batch_lies_behind_a_hole_is_recovered_whole",
        ),
    ),
    Mutant(
        name="cut-behind-a-hole-counts-the-hole-as-kept",
        promise="A log that is cut behind a hole, and ends before it, is not taken for damaged after a kill.",
        file="broker/storage/log_reshaping.py",
        rule="    is_end = before is not None and before.header.next_offset == offset\n",
        instead="    is_end = before is not None and before.header.next_offset >= offset\n",
        red=(f"{STORAGE}/test_missing_ends.py::test_log_that_was_cut_is_opened_after_a_kill_and_ends_there",),
    ),
    Mutant(
        name="truncation-brings-deleted-records-back",
        promise="A truncation makes no record visible again that DeleteRecords had deleted.",
        file="broker/storage/data_folder.py",
        rule="_lowered(self.start_offsets, tp, start_offset)",
        instead="_lowered(self.start_offsets, tp, offset)",
        red=(f"{STORAGE}/test_failing_disks.py::test_truncation_brings_no_deleted_record_back",),
    ),
    Mutant(
        name="old-start-written-beside-a-truncation",
        promise="Checkpoints written beside a truncation call nothing deleted that is written after it.",
        file="broker/storage/log_reshaping.py",
        rule="                log.start_offset = offset  # where it begins anew\n",
        instead="                pass\n",
        red=(
            f"{STORAGE}/test_failing_disks.py"
            "::test_log_that_begins_at_a_lower_offset_lowers_every_checkpoint",
        ),
    ),
    Mutant(
        name="aborted-transaction-outlives-its-records",
        promise="An aborted transaction whose records a loss of power took hides none that come after it.",
        file="broker/storage/producer_recovery.py",
        rule="        if segment.next_offset >= from_offset and segment.aborted.problem() is None:\n",
        instead="        if segment.next_offset > from_offset and segment.aborted.problem() is None:\n",
        red=(
            f"{STORAGE}/test_power_loss.py"
            "::test_an_aborted_transaction_that_outlived_its_records_hides_no_others",
        ),
    ),
    Mutant(
        name="new-topic-inherits-checkpoints",
        promise="A re-created topic does not inherit the start offset of the old one.",
        file="broker/storage/log_manager.py",
        rule="        if reason := self._forget_checkpoints(partitions):\n",
        instead='        if reason := "":\n',
        red=(
            f"{STORAGE}/test_log_manager.py::test_topic_made_anew_after_a_start_does_not_inherit_checkpoints",
            f"{STORAGE}/test_log_manager.py::test_topic_made_anew_does_not_inherit_checkpoints_after_a_kill",
        ),
    ),
    Mutant(
        name="announced-over-what-is-there",
        promise="A directory that lost its topic id is not taken for one of a topic that came later.",
        file="broker/storage/log_manager.py",
        rule='[tp for tp in partitions if f"{tp[0]}-{tp[1]}" not in present]',
        instead="list(partitions)",
        red=(
            f"{STORAGE}/test_new_partitions.py"
            "::test_what_has_a_directory_keeps_the_announcement_that_it_was_made_under",
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
    Mutant(
        name="batch-that-java-consumers-cannot-read-stored",
        promise="A compressed batch that Java's consumers would stop at is refused and not stored.",
        file="broker/storage/batch_validation.py",
        rule="            check_framing(codec, view[HEADER_SIZE:])\n",
        instead="",
        red=(
            "tests/unit/protocol/test_compression_framing.py"
            "::test_batch_that_java_consumers_do_not_read_is_not_stored",
        ),
    ),
    Mutant(
        name="middle-segment-taken-for-a-hole",
        promise=(
            "A segment that is missing in the middle of a compacted log is not taken for a compaction's hole."
        ),
        file="broker/storage/offset_holes.py",
        rule="            if is_as_left:\n",
        instead="            if False:\n",
        red=(
            "tests/unit/storage/test_missing_ends.py"
            "::test_a_segment_that_is_missing_in_the_middle_is_no_hole_of_a_compaction",
        ),
    ),
    Mutant(
        name="hole-of-a-truncation-unwritten",
        promise=(
            "A hole that a truncation leaves between two segments is written down before it is "
            "made: no damage."
        ),
        file="broker/storage/log_reshaping.py",
        rule="        _write_holes(log, (active.next_offset, log.start_offset))\n",
        instead="        _write_holes(log)\n",
        red=(
            "tests/unit/storage/test_missing_ends.py"
            "::test_a_hole_that_a_truncation_leaves_between_segments_is_no_damage",
        ),
    ),
    Mutant(
        name="hole-of-a-merge-unwritten",
        promise="Empty segments of another program that are merged leave no damage.",
        file="broker/storage/log_reshaping.py",
        rule="            _write_holes(log, *([(ends, reaches)] if ends < reaches else ()))\n",
        instead="            _write_holes(log)\n",
        red=(
            "tests/unit/storage/test_missing_ends.py"
            "::test_empty_segments_of_others_that_are_merged_leave_no_damage",
        ),
    ),
    Mutant(
        name="holes-of-others-are-damage",
        promise=(
            "In a folder that another program has used nothing is called damage for a hole that "
            "it may have made."
        ),
        file="broker/storage/data_folder.py",
        rule="            self.is_as_left = self._signed == self._digest()\n",
        instead="            self.is_as_left = True\n",
        red=(
            "tests/unit/storage/test_missing_ends.py"
            "::test_a_hole_that_another_may_have_made_is_let_stand_from_then_on",
        ),
    ),
    Mutant(
        name="holes-that-were-cut-off-stand",
        promise="A hole that was cut off is not told of any more, for its offsets are given again.",
        file="broker/storage/offset_holes.py",
        rule="(start, min(end, offset)) for start, end in self._between if start < offset",
        instead="(start, end) for start, end in self._between if start < offset",
        red=(
            "tests/unit/storage/test_missing_ends.py::test_holes_that_are_cut_off_are_not_told_of_any_more",
        ),
    ),
)
