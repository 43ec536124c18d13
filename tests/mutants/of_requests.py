"""The broker's rules by which requests are answered, and those of its client, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SERVER = "tests/unit/server"
ERROR_ANSWERS = "tests/unit/server/test_error_answers.py"

OF_REQUESTS = (
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
        "                first = end = 0\n                while first < len(partitions):\n"
        "                    if first and first == end:  # else it has waited already\n"
        "                        await asyncio.sleep(0)\n"
        "                    end = min(first + BATCHES_AT_ONCE, len(partitions))\n"
        "                    _, sequences = _transactional(partitions[first:end])\n"
        "                    errors = await self._gate.admit(transactional_id, producer, sequences)\n",
        instead="                first = end = 0\n                while first < len(partitions):\n"
        "                    end = min(first + BATCHES_AT_ONCE, len(partitions))\n"
        "                    _, sequences = _transactional(partitions[first:end])\n"
        "                    errors = await self._gate.admit(transactional_id, producer, sequences)\n"
        "                    if prepare is not None:\n                        await prepare()\n",
        red=(
            "tests/unit/server/test_produce_work.py::test_transactions_are_asked_about_after_what_takes_long",
        ),
    ),
    Mutant(
        name="transaction-asked-about-once-for-all-parts",
        promise="Each part of a request of very many batches is asked about right before it is appended.",
        file="broker/server/transactional_produce.py",
        rule="                    errors = await self._gate.admit(transactional_id, producer, sequences)\n",
        instead="                    if not first:\n"
        "                        _, sequences = _transactional(partitions)\n"
        "                        errors = await self._gate.admit(transactional_id, producer, sequences)\n",
        red=(
            "tests/unit/server/test_transactional_produce.py"
            "::test_others_have_their_turn_in_a_request_of_very_many_batches",
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
    Mutant(
        name="bombs-of-one-request-unbounded",
        promise="What the batches of one request hold when decompressed is bounded for all of them together.",
        file="broker/server/produce_work.py",
        rule="    limit = max(request_max_size, PLAUSIBLE_RATIO * size)\n",
        instead="    limit = max(1 << 40, size)\n",
        red=(
            f"{SERVER}/test_produce_work.py"
            "::test_bombs_are_looked_into_on_a_thread_and_no_further_than_a_request_may_hold",
        ),
    ),
    Mutant(
        name="bombs-decompressed-on-the-event-loop",
        promise="What takes long to decompress holds up nobody else's requests.",
        file="broker/server/produce_work.py",
        rule="    return Budget(PLAIN_AT_ONCE, TooMuchAtOnce)\n",
        instead="    return Budget(1 << 40, TooMuchAtOnce)\n",
        red=(
            f"{SERVER}/test_produce_work.py"
            "::test_bombs_are_looked_into_on_a_thread_and_no_further_than_a_request_may_hold",
        ),
    ),
    Mutant(
        name="large-batches-written-on-the-event-loop",
        promise="A batch of many MB holds up nobody else while it is written.",
        file="broker/replication/slow_appends.py",
        rule="len(checked.batch) > LARGE_APPEND_SIZE\n",
        instead="len(checked.batch) < 0\n",
        red=(
            f"{SERVER}/test_produce_work.py"
            "::test_large_batches_are_written_on_a_thread_and_others_are_served_meanwhile",
        ),
    ),
    Mutant(
        name="read-on-a-thread-waited-with-by-nobody",
        promise="A fetch waits for more where it has read on a thread, as where it has not.",
        file="broker/server/handlers/fetch.py",
        rule="            self.keys.append((topic, asked.partition))\n",
        instead="",
        red=(
            f"{SERVER}/test_fetch_handler.py"
            "::test_fetch_that_waits_for_more_than_it_reads_on_a_thread_is_woken_by_it",
        ),
    ),
    Mutant(
        name="memory-given-back-while-it-is-used",
        promise="A request under way counts in the memory of all, also when its client has gone.",
        file="broker/server/connection.py",
        rule="        if not self.received.is_pinned:\n            self.received.release()\n",
        instead="        self.received.release()\n",
        red=(
            f"{SERVER}/test_connection_frames.py::test_a_large_frame_counts_until_what_answers_it_has_ended",
        ),
    ),
    Mutant(
        name="large-batches-read-on-the-event-loop",
        promise="A batch of many MB holds up nobody else while it is read.",
        file="broker/storage/segment.py",
        rule="        if size > LARGE_READ_SIZE:\n",
        instead="        if size < 0:\n",
        red=("tests/unit/storage/test_log_files.py::test_much_at_once_is_read_where_nobody_else_waits",),
    ),
    Mutant(
        name="short-streams-copied-with-each-other",
        promise="Very many empty streams in one batch cost no more than their bytes.",
        file="broker/protocol/compression.py",
        rule="    return _LATER_WINDOW if position else len(view)\n",
        instead="    return len(view)\n",
        red=(
            "tests/unit/protocol/test_compression.py::test_many_short_streams_cost_no_more_than_their_bytes",
        ),
    ),
    Mutant(
        name="names-of-settings-compared-with-each-other",
        promise="Very many settings in one request hold up nobody.",
        file="broker/server/topic_settings.py",
        rule="for name, count in Counter(name for name, _, _ in steps).items() if count > 1]",
        instead="for name, _, _ in steps if sum(name == other for other, _, _ in steps) > 1]",
        red=(
            f"{SERVER}/test_topic_settings.py"
            "::test_many_settings_in_one_request_are_compared_a_few_times_each",
        ),
    ),
    Mutant(
        name="more-waited-for-than-an-answer-holds",
        promise="What no answer can hold is not waited for, whatever fetch.min.bytes a client has.",
        file="broker/server/handlers/fetch.py",
        rule="        self._min_size = min(request.min_bytes, limit)\n",
        instead="        self._min_size = request.min_bytes\n",
        red=(f"{SERVER}/test_fetch_handler.py::test_more_than_an_answer_can_hold_is_not_waited_for",),
    ),
    Mutant(
        name="one-wait-for-all-of-a-request",
        promise="Each partition of a produce request succeeds or fails by its own wait.",
        file="broker/server/handlers/produce.py",
        rule="waits.get((answer.topic, answer.partition))",
        instead="next(iter(waits.values()))",
        red=(
            f"{SERVER}/test_produce_handler.py"
            "::test_partitions_of_a_request_succeed_or_fail_each_by_its_own_wait",
        ),
    ),
    Mutant(
        name="refused-records-unnamed",
        promise="A producer is told which records of a refused batch are at fault.",
        file="broker/storage/refused_records.py",
        rule="    error.record_errors = named\n",
        instead="",
        red=(
            "tests/unit/storage/test_log_append.py"
            "::test_refused_batch_names_the_records_at_fault_and_no_others",
        ),
    ),
    Mutant(
        name="operations-on-the-cluster-untold",
        promise="Who asks what it may do with the cluster is told.",
        file="broker/server/handlers/describe_cluster.py",
        rule="            ALL_ON_CLUSTER if request.include_cluster_authorized_operations else NOT_ASKED\n",
        instead="            NOT_ASKED\n",
        red=(
            f"{SERVER}/test_authorized_operations.py::test_who_asks_what_it_may_do_is_told_everything[True]",
        ),
    ),
    Mutant(
        name="operations-on-topics-untold",
        promise="Who asks what it may do with topics is told.",
        file="broker/server/handlers/metadata.py",
        rule='            if topic["name"]:\n',
        instead='            if topic["name"] is None:\n',
        red=(
            f"{SERVER}/test_authorized_operations.py::test_who_asks_what_it_may_do_is_told_everything[True]",
        ),
    ),
    Mutant(
        name="operations-on-groups-untold",
        promise="Who asks what it may do with a group is told.",
        file="broker/server/handlers/describe_groups.py",
        rule="    operations = ALL_ON_GROUP if asked else NOT_ASKED\n",
        instead="    operations = NOT_ASKED\n",
        red=("tests/unit/groups/test_group_handlers.py::test_describe_groups_every_version",),
    ),
    Mutant(
        name="short-way-past-a-quota",
        promise="A consumer that reads on in small steps is throttled like any other.",
        file="broker/server/fetch_shortcut.py",
        rule="        if new is None or broker.quotas.fetch.active:\n",
        instead="        if new is None:\n",
        red=(
            f"{SERVER}/test_fetch_shortcut.py::test_a_quota_that_comes_later_holds_for_who_has_a_short_way",
        ),
    ),
    Mutant(
        name="short-way-past-aborted-transactions",
        promise="A reader of committed data is told which transactions were aborted, whichever way it reads.",
        file="broker/server/fetch_shortcut.py",
        rule=" or read.aborted:\n",
        instead=":\n",
        red=(f"{SERVER}/test_fetch_shortcut.py::test_every_answer_is_that_of_the_usual_way",),
    ),
    Mutant(
        name="short-way-in-a-larger-session",
        promise="The answer to a session tells of all its partitions that have news.",
        file="broker/server/fetch_sessions.py",
        rule="            and len(session.partitions) == 1\n",
        instead="",
        red=(f"{SERVER}/test_fetch_shortcut.py::test_a_session_of_more_partitions_goes_the_usual_way",),
    ),
    Mutant(
        name="records-held-by-a-fetch-that-waits",
        promise="A fetch that waits for more holds no records meanwhile.",
        file="broker/server/handlers/fetch.py",
        rule="            self.given = None\n",
        instead="            pass\n",
        red=(
            f"{SERVER}/test_fetch_handler.py::test_fetch_that_waits_for_more_holds_nothing_and_still_gets_all",
        ),
    ),
    Mutant(
        name="answers-waited-for-by-nobody",
        promise="What a client waits for ends when the client has gone.",
        file="broker/server/connection.py",
        rule="        self._give_up_answers()\n        self._parse()",
        instead="        self._parse()",
        red=(f"{SERVER}/test_connection.py::test_peer_that_is_gone_is_not_waited_with",),
    ),
    Mutant(
        name="large-request-decoded-on-the-loop",
        promise="A large request is not decoded on the event loop.",
        file="broker/server/dispatch.py",
        rule="            return self._run_large(handler.handle, _kept(frame), position, context)\n",
        instead=(
            "            return self._run(handler.handle, self._decode(head, frame, position), context)\n"
        ),
        red=(
            "tests/unit/server/test_large_answers.py"
            "::test_large_request_is_decoded_on_a_thread_and_a_small_one_at_once",
        ),
    ),
    Mutant(
        name="large-request-read-from-a-shared-buffer",
        promise="A request that is decoded on a thread is read from bytes that stay.",
        file="broker/server/dispatch.py",
        rule="    return frame if len(frame) >= KEPT_FRAME_SIZE else memoryview(bytes(frame))\n",
        instead="    return frame\n",
        red=(
            "tests/unit/server/test_large_answers.py"
            "::test_large_request_is_decoded_on_a_thread_and_a_small_one_at_once",
        ),
    ),
    Mutant(
        name="reader-keeps-the-interpreter",
        promise="A reader on a thread keeps the interpreter for one item at a time.",
        file="broker/protocol/gradual_reader.py",
        rule="    return entity if has_items else whole\n",
        instead="    return whole\n",
        red=(
            "tests/unit/protocol/test_entity_shape.py"
            "::test_a_reader_beside_which_others_go_on_is_native_for_one_item_at_a_time",
        ),
    ),
    Mutant(
        name="partition-deleted-from-twice",
        promise="Records of a partition that a DeleteRecords request names twice stay.",
        file="broker/server/handlers/delete_records.py",
        rule="        if repeated:\n",
        instead="        if False:\n",
        red=(
            "tests/unit/server/test_repeated_items.py::test_records_of_a_partition_that_is_named_twice_stay",
        ),
    ),
    Mutant(
        name="elections-answered-on-the-loop",
        promise="Elections of very many partitions are answered from a thread.",
        file="broker/server/handlers/elect_leaders.py",
        rule=(
            "    return await answer_of(len(results), context.head, "
            "replica_election_results=_by_topic(results))\n"
        ),
        instead="    return answer(API, version, replica_election_results=_by_topic(results))\n",
        red=(
            "tests/unit/server/test_large_answers.py"
            "::test_elections_of_very_many_partitions_are_answered_from_a_thread",
        ),
    ),
)
