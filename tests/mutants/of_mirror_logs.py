"""The mirror's rules about which log it reads and where it goes on, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"

OF_MIRROR_LOGS = (
    Mutant(
        name="shorter-log-resumed-at-its-end",
        promise="A log that was cut and went on is read again from where histories part, not from its end.",
        file="mirror/sources/source_logs.py",
        rule="        if pipeline.progress.fetched_leader_epoch >= 0:\n",
        instead="        if pipeline.progress.fetched_leader_epoch > 1 << 32:\n",
        red=(
            f"{UNIT}/test_source_answers.py"
            "::test_log_that_was_restored_from_a_backup_is_cut_where_histories_part",
        ),
    ),
    Mutant(
        name="bounds-of-a-namesake-believed",
        promise="No bounds are believed of a topic that became another one while they were asked for.",
        file="mirror/sources/source_logs.py",
        rule="        return await self._still(before, partition), earliest, latest\n",
        instead="        return before, earliest, latest\n",
        red=(f"{UNIT}/test_source_answers.py::test_bounds_of_a_namesake_cut_nothing_and_expire_nothing",),
    ),
    Mutant(
        name="refused-id-cuts",
        promise="Where a topic's id is refused nothing is cut or expired by what is asked for by its name.",
        file="mirror/sources/source_logs.py",
        rule="        elif is_of_id:\n",
        instead="        elif is_of_id and offset < 0:\n",
        red=(
            f"{UNIT}/test_source_answers.py::test_bounds_of_a_namesake_cut_nothing_and_expire_nothing",
            f"{UNIT}/test_source_answers.py"
            "::test_look_that_saw_another_topic_is_no_word_of_how_far_this_one_goes",
        ),
    ),
    Mutant(
        name="epochs-of-a-namesake-compared",
        promise="Histories are not compared with those of a topic that was made while they were asked for.",
        file="mirror/sources/source_logs.py",
        rule="        await self._still(origin, pipeline.partition)\n        return parted\n",
        instead="        return parted\n",
        red=(f"{UNIT}/test_source_answers.py::test_epochs_of_a_namesake_are_not_compared",),
    ),
    Mutant(
        name="lost-seat-writes-on",
        promise="At least once, who lost the seat writes no position behind the new owner's.",
        file="mirror/delivery/at_least_once.py",
        rule="        for write in writes:\n            write.cancel()\n",
        instead="        writes = []\n",
        red=(
            f"{UNIT}/test_at_least_once.py::test_who_lost_the_seat_writes_no_position_behind_the_new_owners",
        ),
    ),
    Mutant(
        name="frozen-worker-writes-on",
        promise="At least once, who was frozen past its session turns its heir's position not back.",
        file="mirror/delivery/at_least_once.py",
        rule="            if not self._holds_seat():\n",
        instead="            if False:\n",
        red=(
            f"{UNIT}/test_at_least_once.py"
            "::test_who_was_frozen_past_its_session_writes_no_position_before_it_has_heard_of_the_loss",
        ),
    ),
    Mutant(
        name="given-up-position-tried-again",
        promise="A position of a partition that was given up is not tried any more.",
        file="mirror/delivery/at_least_once.py",
        rule="            if not self._pipelines.issuperset(moved):\n",
        instead="            if False:\n",
        red=(
            f"{UNIT}/test_at_least_once.py::test_position_of_a_partition_that_was_given_up_is_not_tried_any_more",
        ),
    ),
    Mutant(
        name="late-position-stays-the-newest",
        promise="A position that a former owner had sent does not stay behind the new owner's.",
        file="mirror/delivery/at_least_once.py",
        rule="                pipeline.progress.write_again()\n",
        instead="                continue\n",
        red=(
            f"{UNIT}/test_at_least_once.py"
            "::test_new_owner_writes_once_more_when_nothing_of_the_old_one_can_come",
        ),
    ),
    Mutant(
        name="what-was-let-pass-counts-for-others",
        promise="What an operator let pass says nothing of other records that have its offsets now.",
        file="mirror/gaps/open_gaps.py",
        rule="if each.to_offset <= offset or _tells(each, by.gap)]\n",
        instead="if each.to_offset <= 1 << 63]\n",
        red=(
            f"{UNIT}/test_let_pass.py::test_what_was_let_pass_says_nothing_of_other_records_at_its_offsets",
        ),
    ),
    Mutant(
        name="truncation-let-pass-for-good",
        promise="That an operator let a truncation pass says nothing of the next one over the same offsets.",
        file="mirror/gaps/open_gaps.py",
        rule="[each for each in self._let_pass if not _tells(each, by)]\n",
        instead="list(self._let_pass)\n",
        red=(
            f"{UNIT}/test_let_pass.py::test_truncation_is_asked_about_until_it_is_on_record_and_anew_after_that",
        ),
    ),
    Mutant(
        name="offset-out-of-range-asked-for-without-end",
        promise="Where an offset within its log is out of range, histories are compared, and it is cut.",
        file="mirror/sources/source_logs.py",
        rule="        if count < MAX_UNEXPLAINED or pipeline",
        instead="        if count > 0 or pipeline",
        red=(
            f"{UNIT}/test_source_answers.py"
            "::test_log_that_was_restored_from_a_backup_is_cut_where_histories_part",
        ),
    ),
    Mutant(
        name="other-history-taken-for-another-log",
        promise="Where two histories have a beginning in common, only what lies behind it is a gap.",
        file="mirror/sources/source_logs.py",
        rule='        self._at_parting(pipeline, parted, earliest, "the source\'s log goes on")\n',
        instead='        self._at_parting(pipeline, None, earliest, "the source\'s log goes on")\n',
        red=(
            f"{UNIT}/test_source_answers.py"
            "::test_log_that_was_restored_from_a_backup_is_cut_where_histories_part",
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
        name="parting-under-its-leader-is-a-cut",
        promise="Where topics have no ids, a leader under whom histories part from ours has another log.",
        file="mirror/sources/source.py",
        rule="            if asked.topic_id == NO_TOPIC_ID and 0 <= epoch <= pipeline",
        instead="            if asked.topic_id == NO_TOPIC_ID and 0 <= epoch < 0 <= pipeline",
        red=(
            f"{UNIT}/test_topics_without_ids.py"
            "::test_topic_made_anew_whose_leader_says_that_histories_part_is_not_a_log_that_was_cut",
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
        name="first-look-at-a-name",
        promise="What a first look has seen is owed by its topic's id.",
        file="mirror/delivery/beginnings.py",
        rule="        topic_id = NO_TOPIC_ID if seen is None else seen.topic_id\n",
        instead="        topic_id = NO_TOPIC_ID\n",
        red=(
            f"{UNIT}/test_beginnings.py"
            "::test_what_a_first_look_has_seen_is_owed_by_its_topic_id_until_it_is_begun",
        ),
    ),
    Mutant(
        name="begins-with-the-successor-of-what-was-seen",
        promise="A topic that was made anew before it was begun is a gap, and no silent start.",
        file="mirror/sources/source_logs.py",
        rule="        if is_other_log(owed, origin):\n",
        instead="        if False:\n",
        red=(
            f"{UNIT}/test_source_bounds.py"
            "::test_a_topic_that_was_made_anew_before_it_was_begun_is_a_gap_and_the_old_one_is_on_record_first",
        ),
    ),
    Mutant(
        name="fetched-by-the-name-of-a-topic-that-is-gone",
        promise="What is fetched by name is not taken for the topic that is known to be gone.",
        file="mirror/sources/source.py",
        rule="        elif self._logs.is_gone(pipeline):\n",
        instead="        elif False:\n",
        red=(
            f"{UNIT}/test_topics_without_ids.py"
            "::test_what_is_fetched_by_name_is_not_taken_for_the_topic_that_is_known_to_be_gone",
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
        name="retention-of-a-new-topic-untold",
        promise="What retention took of a topic made anew is a gap of its own.",
        file="mirror/sources/source_logs.py",
        rule="following, reason, resume_at=ANEW, origin",
        instead="following, reason, resume_at=earliest, origin",
        red=(
            "tests/unit/mirror/test_source_bounds.py"
            "::test_what_retention_took_of_a_topic_made_anew_is_a_gap_of_its_own",
        ),
    ),
)
