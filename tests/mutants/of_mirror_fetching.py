"""The mirror's rules by which it fetches, and what that may keep of memory, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"
THROTTLE = "tests/unit/client/test_throttle.py"
MEMORY = f"{UNIT}/test_fetch_memory.py"
BUDGET = "mirror/sources/fetch_memory.py"
LOOP = "mirror/sources/fetch_loop.py"
BOUND = "tests/simulation/test_mirror_memory_bound.py"

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
        file=LOOP,
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
        file=LOOP,
        rule="        if standing_size < self.held.size // 2:\n",
        instead="        if standing_size < 0:\n",
        red=(f"{MEMORY}::test_four_partitions_that_stand_leave_room_for_the_others",),
    ),
    Mutant(
        name="answers-that-are-waited-for-uncounted",
        promise="Loops that ask at the same moment do not each take the room that is left.",
        file=BUDGET,
        rule=" - self.held_size - self.asked_size)",
        instead=" - self.held_size)",
        red=(
            f"{MEMORY}::test_what_other_loops_keep_and_ask_for_bounds_the_floor_too",
            f"{BOUND}::test_sources_that_start_while_the_target_stands_keep_an_answer_each",
        ),
    ),
    Mutant(
        name="floor-beyond-the-limit",
        promise="A loop that begins where others keep everything gets an answer, and not its whole floor.",
        file=BUDGET,
        rule="most = max(left, ",
        instead="most = max(self.share - held_size, ",
        red=(
            f"{MEMORY}::test_what_other_loops_keep_and_ask_for_bounds_the_floor_too",
            f"{BOUND}::test_sources_that_start_while_the_target_stands_keep_an_answer_each",
        ),
    ),
    Mutant(
        name="tries-without-a-pause",
        promise="Where all is full, partitions do not each keep an answer, one after the other.",
        file=LOOP,
        rule="at_ms >= self._may_at_ms and ",
        instead="",
        red=(
            f"{MEMORY}::test_those_that_try_where_all_is_full_do_so_with_growing_pauses",
            f"{BOUND}::test_partitions_without_number_do_not_each_keep_an_answer",
        ),
    ),
    Mutant(
        name="silent-leader-tried",
        promise="Where all is full, nothing more is fetched for a leader that answers nothing.",
        file=LOOP,
        rule=" and pipeline.may_get_on(at_ms))",
        instead=")",
        red=(
            f"{MEMORY}::test_who_has_a_silent_leader_does_not_try_where_all_is_full",
            f"{BOUND}::test_partitions_without_number_do_not_each_keep_an_answer",
        ),
    ),
    Mutant(
        name="lost-answer-taken-for-a-word",
        promise="A leader is silent until it answers something.",
        file="mirror/delivery/sink.py",
        rule="        if outcomes:\n",
        instead="        if request:\n",
        red=(f"{UNIT}/test_sink.py::test_leader_is_silent_while_it_answers_nothing_that_it_was_sent",),
    ),
    Mutant(
        name="memory-of-who-has-left-starves-others",
        promise="What stays of partitions that were given up, or have another leader, starves nobody.",
        file=LOOP,
        rule="(bool(standing) or not moving_size)",
        instead="bool(standing)",
        red=(
            f"{MEMORY}::test_loop_whose_memory_is_kept_by_partitions_that_have_left_goes_on",
            f"{BOUND}::test_batches_of_partitions_that_have_left_starve_nobody",
        ),
    ),
    Mutant(
        name="copies-without-room",
        promise="A copy that leaves an answer is not made where there is no room for both.",
        file=LOOP,
        rule="if standing_size <= MIN_FETCH_SIZE or ",
        instead="if standing_size or ",
        red=(f"{MEMORY}::test_no_copy_is_made_that_there_is_no_room_for",),
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
