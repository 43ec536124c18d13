"""The broker's rules by which replicas are alike, and readers see what stays, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

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
            f"{REPLICATION}/test_leaders_reads.py::test_only_the_log_of_the_very_topic_is_read",
            "tests/unit/server/test_fetch_handler.py"
            "::test_a_topic_that_is_known_by_its_new_id_is_not_read_from_the_old_ones_log",
        ),
    ),
    Mutant(
        name="replica-that-left-taken-in",
        promise="Only a replica joins its partition's in-sync set, whatever its leader has heard of moves.",
        file="broker/replication/partition.py",
        rule="return set(self.added) <= set(replicas)",
        instead="return True",
        red=(
            "tests/unit/coordination/test_late_expansion.py"
            "::test_a_replica_that_has_left_is_not_taken_in_by_a_leader_that_has_not_heard_of_it",
            f"{REPLICATION}/test_replicated_partitions.py"
            "::test_follower_that_is_no_replica_any_more_does_not_join_and_others_do",
        ),
    ),
    Mutant(
        name="replica-that-left-in-the-same-epoch",
        promise="What a replica had before it left says nothing when it is back, with an empty log.",
        file="broker/coordination/reassignment.py",
        rule="return replace(state, leader_epoch=state.leader_epoch + 1) if goes else None",
        instead="return state if goes else None",
        red=(
            "tests/unit/coordination/test_late_expansion.py"
            "::test_what_a_replica_had_before_it_left_says_nothing_when_it_is_back",
        ),
    ),
    Mutant(
        name="cold-read-of-a-leader-that-was-replaced",
        promise="What a disk had is told by who leads in the same epoch as when it was asked.",
        file="broker/replication/replica_manager.py",
        rule="if not is_same or replica.role is not Role.LEADER or replica.leader_epoch != leader_epoch:",
        instead="if replica is None:",
        red=(
            f"{REPLICATION}/test_leaders_reads.py"
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
        rule="local.log.aborted_transactions(offset, read.next_offset) if with_aborted else ()\n",
        instead="()\n",
        red=(COMMITTED_READER,),
    ),
    Mutant(
        name="aborted-transactions-gone-with-retention",
        promise="Aborted records are not given without their abort where retention overtakes the read.",
        file="broker/replication/reading.py",
        rule="    if with_aborted and offset < local.log.start_offset:\n",
        instead="    if False:\n",
        red=(f"{REPLICATION}/test_replica_manager.py::test_no_aborted_record_comes_without_its_abort",),
    ),
    Mutant(
        name="answer-before-flush",
        promise="Where flush.messages asks for it, a produce request is answered after its flush.",
        file="broker/replication/replica_manager.py",
        rule="            wait = self._leading.with_flush(local, wait, is_internal=is_internal)\n",
        instead="            self._leading.with_flush(local, None, is_internal=is_internal)\n",
        red=(
            f"{REPLICATION}/test_replica_manager.py"
            "::test_flush_messages_is_awaited_and_never_on_the_event_loop",
        ),
    ),
    Mutant(
        name="append-beside-a-large-one",
        promise="While a large batch is on its way into a log, nobody else appends to it.",
        file="broker/replication/replica_manager.py",
        rule="        if local.appending is not None:\n",
        instead="        if local.appending == 0:\n",
        red=(
            f"{REPLICATION}/test_slow_appends.py::test_whoever_appends_meanwhile_waits",
            "tests/unit/server/test_produce_work.py"
            "::test_another_transaction_that_ends_while_a_large_batch_is_written_is_asked_about_anew",
        ),
    ),
    Mutant(
        name="large-append-under-another-leadership",
        promise="A large batch goes into the log under the leadership that let it in, or not at all.",
        file="broker/replication/slow_appends.py",
        rule="                self._check_same(local, acks)\n",
        instead="",
        red=(f"{REPLICATION}/test_slow_appends.py::test_a_leadership_that_is_over_writes_nothing",),
    ),
    Mutant(
        name="role-changes-under-a-large-append",
        promise="Roles do not change while a large batch is on its way into the log.",
        file="broker/replication/slow_appends.py",
        rule="            async with local.turn:\n",
        instead="            if True:\n",
        red=(f"{REPLICATION}/test_slow_appends.py::test_a_role_changes_after_the_batch_is_in_the_log",),
    ),
    Mutant(
        name="large-append-to-a-log-that-is-gone",
        promise="A large batch whose log failed while it was written is not acknowledged.",
        file="broker/replication/slow_appends.py",
        rule="                self._check_same(local, NO_ACKS)\n",
        instead="",
        red=(f"{REPLICATION}/test_slow_appends.py::test_a_log_that_is_gone_meanwhile_acknowledges_nothing",),
    ),
    Mutant(
        name="transaction-ends-before-its-large-batch",
        promise="The marker that ends a transaction comes behind a batch of it that is being written.",
        file="broker/server/transaction_markers.py",
        rule="                if slow_appends.is_under_way(partition):\n",
        instead="                if partition in held:\n",
        red=(f"{REPLICATION}/test_slow_appends.py::test_a_transaction_ends_behind_its_large_batch",),
    ),
    Mutant(
        name="log-hosted-with-the-defaults",
        promise="A log that is hosted has its topic's settings: retention looks at it from then on.",
        file="broker/replication/hosting.py",
        rule="            opened.config = log_config\n",
        instead="",
        red=(
            f"{REPLICATION}/test_hosted_settings.py"
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
            f"{REPLICATION}/test_hosted_settings.py"
            "::test_a_setting_that_cannot_be_used_leaves_the_others_as_they_are",
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
        name="answer-that-was-not-taken-is-not-asked-for-again",
        promise="What a follower has not taken of its leader's answer it is told again.",
        file="broker/replication/replica_fetcher.py",
        rule="                self._session.let_go((given.topic, given.partition))\n",
        instead="                pass\n",
        red=(
            f"{REPLICATION}/test_lane_sessions.py::test_an_answer_that_was_not_taken_whole_is_asked_for_again",
        ),
    ),
    Mutant(
        name="session-goes-on-behind-an-answer-that-was-cut-off",
        promise="Behind an answer that may not have been taken a follower asks its leader for everything.",
        file="broker/replication/replica_fetcher.py",
        rule="            self._session.end()  # something that was answered may not have been taken\n",
        instead="",
        red=(
            f"{REPLICATION}/test_lane_sessions.py"
            "::test_after_an_answer_whose_taking_was_cut_off_everything_is_asked_for",
        ),
    ),
    Mutant(
        name="another-owners-answers-taken-for-ones-own",
        promise="Who takes over the following of a partition is told everything that its leader knows.",
        file="broker/replication/follower_session.py",
        rule="        if any(before.get(key, asked)[0] is not asked[0] for key, asked in now.items()):\n",
        instead="        if any(before.get(key, asked)[0] is None for key, asked in now.items()):\n",
        red=(f"{REPLICATION}/test_follower_session.py::test_who_takes_a_partition_over_is_told_everything",),
    ),
    Mutant(
        name="leader-not-told-what-is-asked-for-no-more",
        promise="A leader is told which partitions a follower asks for no more, so it knows who lags behind.",
        file="broker/replication/follower_session.py",
        rule="[key for key in before if key not in now]",
        instead="[]",
        red=(f"{REPLICATION}/test_lane_sessions.py::test_what_was_let_go_of_is_forgotten_and_not_held",),
    ),
)
