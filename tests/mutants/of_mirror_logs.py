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
)
