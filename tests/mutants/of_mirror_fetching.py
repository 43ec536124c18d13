"""The mirror's rules by which it fetches, and what that may keep of memory, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"
THROTTLE = "tests/unit/client/test_throttle.py"
SESSION = "tests/unit/client/test_fetch_session.py"
FETCHES = "tests/unit/client/test_fetches_in_a_session.py"
SESSIONS = f"{UNIT}/test_fetch_sessions_of_a_source.py"
TURNS = f"{UNIT}/test_turns_of_fetching.py"
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
        rule="        if gives or stable_end <= offset:\n",
        instead="        if gives:\n",
        red=(f"{UNIT}/test_silence.py::test_what_an_open_transaction_holds_back_is_not_told",),
    ),
    Mutant(
        name="crowded-answer-told-as-silence",
        promise="Who gets nothing because others took the room of the answer is not met with silence.",
        file="mirror/sources/source.py",
        rule="                had_room = key in with_room\n",
        instead="                had_room = True\n",
        red=(
            f"{UNIT}/test_silence.py::test_partition_that_others_leave_no_room_is_not_told_and_the_first_in_its_turn_is",
        ),
    ),
    Mutant(
        name="session-goes-on-after-what-was-not-taken",
        promise="What was said to a partition that did not take it is asked for anew.",
        file="mirror/sources/source.py",
        rule="                loop.session.end()  # what was not taken would not be said again\n",
        instead="                pass\n",
        red=(f"{SESSIONS}::test_answer_that_was_not_taken_is_asked_for_anew",),
    ),
    Mutant(
        name="session-goes-on-over-a-new-owner",
        promise="A partition that is given again is told all.",
        file="mirror/sources/source.py",
        rule="                    loop.session.end()  # its next owner here is told all\n",
        instead="                    pass\n",
        red=(f"{SESSIONS}::test_partition_that_is_taken_away_and_given_again_is_told_all",),
    ),
    Mutant(
        name="silence-taken-for-a-stable-end",
        promise="A transaction that is open still is asked for, as its end alone need not be said.",
        file="mirror/sources/source.py",
        rule="        if 0 <= ends.high_watermark <= stable_end:\n",
        instead="        if True:\n",
        red=(f"{SESSIONS}::test_stable_end_that_moves_alone_is_asked_for",),
    ),
    Mutant(
        name="session-of-a-broker-outlives-a-lost-answer",
        promise="After an answer that was lost all is said.",
        file="broker/client/raw_fetch.py",
        rule="        session.end()  # something that was answered may not have been taken\n",
        instead="        pass\n",
        red=(
            f"{FETCHES}::test_after_a_lost_answer_all_is_said",
            f"{FETCHES}::test_fetch_that_is_cancelled_ends_the_session",
        ),
    ),
    Mutant(
        name="session-forgets-nobody",
        promise="Who is not asked for any more leaves the session.",
        file="broker/client/fetch_session.py",
        rule="[self._forget(key) for key in [key for key in asked if key not in positions]]\n",
        instead="[self._forget(key) for key in ()]\n",
        red=(f"{SESSION}::test_somebody_whose_log_goes_on_and_who_gets_nothing_is_passed_over",),
    ),
    Mutant(
        name="served-ones-stay-first-in-a-session",
        promise="Who had room in an answer is found out by the order in which the broker reads.",
        file="broker/client/fetch_session.py",
        rule="                self._asked[key] = self._asked.pop(key)\n",
        instead="                pass\n",
        red=(f"{SESSION}::test_who_was_given_records_is_read_last_next_time",),
    ),
    Mutant(
        name="quota-taken-for-silence",
        promise="An answer that is empty because of a quota says nothing of anybody.",
        file="broker/client/fetch_session.py",
        rule="        self._is_of_all = not (is_throttled and not self._named)\n",
        instead="        self._is_of_all = True\n",
        red=(f"{SESSION}::test_answer_that_is_empty_because_of_a_quota_tells_nothing_and_loses_nothing",),
    ),
    Mutant(
        name="idle-one-asked-for-at-an-old-place",
        promise="One that was moved meanwhile is asked for from where it is now.",
        file="mirror/pipeline.py",
        rule="            offset == progress.fetch_offset\n            and self.state is RUNNING\n",
        instead="            self.state is RUNNING\n",
        red=(f"{TURNS}::test_position_that_has_changed_is_said_as_it_is_now",),
    ),
    Mutant(
        name="idle-one-fetched-while-it-waits",
        promise="Who waits before the next try is not fetched meanwhile, wherever it stands.",
        file="mirror/pipeline.py",
        rule="            and steady_ms >= self.retry_at_ms\n",
        instead="",
        red=(f"{TURNS}::test_who_wants_no_fetch_any_more_is_not_asked_for",),
    ),
    Mutant(
        name="passed-over-for-ever-in-a-session",
        promise="Who gets nothing in its place of a session's order is first in another one before long.",
        file="mirror/sources/fetch_loop.py",
        rule="        if self.session.passes_over:\n",
        instead="        if False:\n",
        red=(f"{SESSIONS}::test_who_is_passed_over_is_first_before_long",),
    ),
    Mutant(
        name="turns-that-go-by-unsaid",
        promise="Each partition is first in its turn, however many fetches lie between two turns.",
        file="mirror/sources/fetch_loop.py",
        rule="        if not self._was_for_one and self.session.says_all_next:\n",
        instead="        if not self._was_for_one:\n",
        red=(f"{SESSIONS}::test_who_is_passed_over_is_first_before_long",),
    ),
    Mutant(
        name="end-of-a-log-as-somebody-else-took-it",
        promise="Silence says that a log ends where the source has said last, whoever took that.",
        file="mirror/sources/source.py",
        rule="            pipeline.lag.sample(stable_end, now_ms, stable_end)\n",
        instead="            pipeline.lag.sample(pipeline.lag.log_end, now_ms, pipeline.lag.stable_end)\n",
        red=(f"{SESSIONS}::test_end_that_came_with_what_was_not_taken_is_known_by_silence",),
    ),
    Mutant(
        name="session-by-name",
        promise="Brokers without ids, which may starve partitions in a session, are asked for all each time.",
        file="broker/client/fetch_session.py",
        rule="            epoch = self._epochs.epoch if self._lasts and by_id else FINAL_EPOCH\n",
        instead="            epoch = self._epochs.epoch if self._lasts else FINAL_EPOCH\n",
        red=(f"{SESSION}::test_who_asks_by_name_says_all_each_time",),
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
        rule="if answer.partitions or not positions or not answer.throttle_ms or not session.said_all:\n",
        instead="if answer.throttle_ms >= 0:\n",
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
