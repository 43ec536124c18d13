"""The mirror's rules by which it fetches, and what that may keep of memory, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"
THROTTLE = "tests/unit/client/test_throttle.py"
MEMORY = f"{UNIT}/test_fetch_memory.py"
BUDGET = "mirror/sources/fetch_memory.py"

OF_MIRROR_FETCHING = (
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
        name="throttled-answer-is-a-breach",
        promise="An answer that holds a throttle time and no topic is asked for again.",
        file="broker/client/raw_fetch.py",
        rule="        if answer.partitions or not positions or not answer.throttle_ms:\n",
        instead="        if answer.throttle_ms >= 0:\n",
        red=(f"{THROTTLE}::test_answer_of_a_throttle_time_alone_is_not_about_the_partitions",),
    ),
    Mutant(
        name="throttle-time-disobeyed",
        promise="Nothing is sent to a server before the throttle time that it asked for is over.",
        file="broker/client/raw_fetch.py",
        rule="        connection.throttle(answer.throttle_ms)\n",
        instead="",
        red=(f"{THROTTLE}::test_nothing_is_sent_until_the_throttle_time_is_over[fetch_once]",),
    ),
    Mutant(
        name="failing-lane-takes-all-the-room",
        promise="Partitions that stand, however many they are, leave a part of the room to the others.",
        file=BUDGET,
        rule="        if some_stand or not held_size:\n",
        instead="        if held_size < 0:\n",
        red=(
            f"{MEMORY}::test_partitions_that_stand_and_need_all_that_they_keep_leave_a_part",
            f"{MEMORY}::test_each_of_seventeen_brokers_is_fetched_from_with_a_mebibyte_in_all",
        ),
    ),
    Mutant(
        name="part-of-the-others-taken-by-each-that-comes-to-stand",
        promise="However many partitions a target takes nothing of, they keep no more than is allowed.",
        file=BUDGET,
        rule="min(self.floor - moving_size, most)",
        instead="self.floor - moving_size",
        red=(
            f"{MEMORY}::test_partitions_that_come_to_stand_one_after_the_other_keep_no_more_than_is_allowed",
        ),
    ),
    Mutant(
        name="part-of-the-others-taken-at-once",
        promise="Of which nothing was delivered, that takes a small part of what is kept for the others.",
        file="mirror/sources/fetch_loop.py",
        rule="tries = self._is_in_floor and not pipeline.gets_on(at_ms)",
        instead="tries = False",
        red=(
            f"{MEMORY}::test_partition_of_which_nothing_was_delivered_tries_a_smallest_fetch_where_others_stand",
        ),
    ),
    Mutant(
        name="part-of-the-others-taken-by-who-gets-on",
        promise="What is kept for the time when others stand is not used up before.",
        file=BUDGET,
        rule="        room = min(self.share - self.floor - held_size, ",
        instead="        room = min(self.share - held_size, ",
        red=(f"{MEMORY}::test_those_that_get_on_may_not_take_what_is_kept_for_when_others_stand",),
    ),
    Mutant(
        name="small-batch-keeps-a-large-answer",
        promise="Who stands keeps its own batches, and not the whole answers that they came in.",
        file="mirror/sources/fetch_loop.py",
        rule="        if standing_size < self.held.size // 2:\n",
        instead="        if standing_size < 0:\n",
        red=(f"{MEMORY}::test_four_partitions_that_stand_leave_room_for_the_others",),
    ),
    Mutant(
        name="unknown-limit-guessed",
        promise="Nothing is given up by a limit that the target never told: it says what is too large.",
        file="mirror/topics/topics.py",
        rule="        return self._max_batch_size.get(topic, NO_LIMIT)\n",
        instead="        return self._max_batch_size.get(topic, 1_048_588)\n",
        red=(f"{UNIT}/test_target_limits.py::test_limit_that_is_not_known_is_none",),
    ),
    Mutant(
        name="too-large-unpacked-told-as-damage",
        promise="A batch that takes too much room unpacked is told as that: its bytes are as they should be.",
        file="mirror/batches/intake.py",
        rule="    if is_too_large:\n",
        instead="    if is_too_large and not reason:\n",
        red=(
            f"{UNIT}/test_unreadable_batches.py"
            "::test_a_batch_that_takes_too_much_room_unpacked_is_a_gap_of_its_own_class",
        ),
    ),
    Mutant(
        name="useless-answer-asked-for-without-end",
        promise="An answer that never reaches what was asked for is looked into, as damage.",
        file="mirror/sources/doubt.py",
        rule="            is_enough = self.refusal_count >= MAX_REFUSALS\n",
        instead="            is_enough = self.refusal_count < 0\n",
        red=(
            f"{UNIT}/test_pipeline_damage.py"
            "::test_answer_that_never_reaches_what_was_asked_for_is_damage_and_not_asked_for_for_ever",
        ),
    ),
    Mutant(
        name="useless-answer-asked-for-at-once",
        promise="What is refused is asked for again with growing pauses, and not in a hot loop.",
        file="mirror/sources/doubt.py",
        rule="        return min(MAX_PAUSE_MS, PAUSE_MS * self.refusal_count)\n",
        instead="        return 0\n",
        red=(
            f"{UNIT}/test_pipeline_damage.py"
            "::test_answer_that_never_reaches_what_was_asked_for_is_damage_and_not_asked_for_for_ever",
        ),
    ),
)
