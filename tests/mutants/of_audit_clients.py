"""The audit's rules for what runs beside an application, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/audit"
TESTIMONY = f"{UNIT}/test_consumer_testimony.py"
CONSUMER = "audit/consumer.py"
COMMITS = f"{UNIT}/test_consumer_commits.py"
CLOSING = "tests/cluster/test_audited_producer_ends.py"
TRANSACTIONS, ENDS = "audit/clients/transactions.py", f"{UNIT}/test_transactions.py"

OF_AUDIT_CLIENTS = (
    Mutant(
        name="consumer-killed-by-a-header",
        promise="A record with a header's key that is no UTF-8 does not kill the process that gets it.",
        file=CONSUMER,
        rule='_headers_of = operator.methodcaller("headers")',
        instead="_headers_of = lambda message: message.headers()",
        red=(f"{TESTIMONY}::test_a_header_whose_key_is_no_utf8_kills_no_consumer",),
    ),
    Mutant(
        name="unreadable-record-undoubted",
        promise="A group that got a record which it could not count is in doubt: what it lacks is not lost.",
        file="audit/clients/consumer_counts.py",
        rule="        self._told_count += 1\n",
        instead="",
        red=(
            f"{TESTIMONY}::test_a_group_that_got_a_record_which_nobody_could_count_is_in_doubt",
            f"{TESTIMONY}::test_and_so_it_is_when_its_session_got_nothing_else",
        ),
    ),
    Mutant(
        name="fetched-and-told-as-got",
        promise="What a call had fetched that ended otherwise is neither told as got nor committed.",
        file=CONSUMER,
        rule="            self._fetched.update(_places_behind(some))\n",
        instead="            self._count(some)\n",
        red=(
            f"{TESTIMONY}::test_what_was_fetched_by_a_call_that_is_interrupted_the_application_has_not_got",
        ),
    ),
    Mutant(
        name="commit-outlives-its-partition",
        promise="A commit that waits for a report is not sent after its partition went to somebody else.",
        file=CONSUMER,
        rule="                    offsets[:] = [] if gone is None else kept\n",
        instead="",
        red=(
            f"{TESTIMONY}::test_what_waits_for_a_report_when_its_partition_goes_is_not_committed_after_it",
            f"{TESTIMONY}::test_nor_what_a_report_that_is_under_way_meanwhile_covers",
        ),
    ),
    Mutant(
        name="commit-outlives-its-partition-under-way",
        promise="Nor one whose report is under way when the partition goes.",
        file=CONSUMER,
        rule="[*self._reported, *self._under_way]",
        instead="[*self._reported]",
        red=(f"{TESTIMONY}::test_nor_what_a_report_that_is_under_way_meanwhile_covers",),
    ),
    Mutant(
        name="callback-keeps-a-transaction-open",
        promise="A transaction that ended is over, whatever a callback raised in place of its answer.",
        file=TRANSACTIONS,
        rule="                    self._ask(finish, 0, outcome)\n",
        instead="                    pass\n",
        red=(f"{ENDS}::test_a_transaction_that_ended_has_ended_whatever_a_callback_raises",),
    ),
    Mutant(
        name="transaction-ended-by-another-refusal",
        promise="A commit that is still under way is not told as done because a callback hid that.",
        file=TRANSACTIONS,
        rule=' and "state Ready" in answer.str()',
        instead="",
        red=(f"{ENDS}::test_one_that_did_not_end_is_open_and_the_next_call_ends_it",),
    ),
    Mutant(
        name="commit-and-abort-told-as-abort",
        promise="Records of a transaction whose commit and abort had no answer are in doubt.",
        file=TRANSACTIONS,
        rule="outcome if asked in (None, outcome) else Outcome.UNKNOWN",
        instead="outcome",
        red=(f"{ENDS}::test_one_that_was_asked_for_both_ends_without_an_answer_has_an_unknown_one",),
    ),
    Mutant(
        name="commit-sets-its-group-back",
        promise="A commit without offsets does not set the group back behind what was committed.",
        file="audit/clients/known_commits.py",
        rule="            self.note(places)\n",
        instead="            pass\n",
        red=(f"{COMMITS}::test_what_rests_behind_what_was_committed_is_not_committed_again",),
    ),
    Mutant(
        name="commit-sets-a-waiting-one-back",
        promise="Nor behind a commit that waits for its report.",
        file=CONSUMER,
        rule="merge_commits(waiting + self._commits)",
        instead="[]",
        red=(f"{COMMITS}::test_nor_what_rests_behind_a_commit_that_waits_for_its_report",),
    ),
    Mutant(
        name="interrupted-close-is-the-last-word",
        promise="A producer whose close was interrupted can be closed, and tells its last counts then.",
        file="audit/producer.py",
        rule="(self._refusal != _CLOSED or self._ended_whole is not None)",
        instead="True",
        red=(f"{CLOSING}::test_a_close_that_was_interrupted_goes_on_when_it_is_repeated",),
    ),
    Mutant(
        name="last-counts-lost-in-an-interruption",
        promise="Nor are those lost that were not sent when it was interrupted.",
        file="audit/clients/event_publisher.py",
        rule="        except BaseException:  # a signal's handler has raised, perhaps before any was sent\n",
        instead="        except ZeroDivisionError:\n",
        red=(f"{CLOSING}::test_a_close_that_was_interrupted_goes_on_when_it_is_repeated",),
    ),
    Mutant(
        name="journal-believed-after-power-loss",
        promise="A journal that may lack its newest pages does not say how far its stream came.",
        file="audit/clients/recovery.py",
        rule="stale_because=journal.stale_because",
        instead='stale_because=""',
        red=(
            f"{UNIT}/test_journal_on_its_machine.py"
            "::test_a_stream_whose_machine_lost_its_power_is_not_closed_by_what_the_disk_still_has",
        ),
    ),
    Mutant(
        name="journal-damaged-in-the-middle-believed",
        promise="A journal that is damaged in the middle does not say how far its streams came.",
        file="audit/clients/journal.py",
        rule="        if self._goes_on_behind(position, limit):\n",
        instead="        if False:\n",
        red=(
            f"{UNIT}/test_journal_recovery.py::test_nothing_is_told_of_streams_whose_journal_is_damaged_in_the_middle",
        ),
    ),
    Mutant(
        name="what-a-handler-raises-taken-for-a-refusal",
        promise="A number goes to another record only where a client in Python refused the one that had it.",
        file="audit/clients/interruption.py",
        rule="        elif not code.co_filename.startswith(_OURS) and not _is_of_python(code.co_filename):\n",
        instead="        elif False:\n",
        red=(
            f"{UNIT}/test_refused_calls.py"
            "::test_kafka_python_may_have_taken_the_record_that_a_handler_interrupted",
        ),
    ),
    Mutant(
        name="number-of-a-taken-record-free",
        promise="A number goes to another record only where the client refused the one that had it.",
        file="audit/producer.py",
        rule="            if isinstance(error, _NOT_TAKEN) and is_refusal(error):\n",
        instead="            if isinstance(error, _NOT_TAKEN):\n",
        red=(
            f"{UNIT}/test_interrupted_produce.py"
            "::test_a_number_is_not_given_away_because_a_handler_raises_what_the_client_raises",
        ),
    ),
    Mutant(
        name="number-of-a-taken-record-free-in-a-batch",
        promise="The same in a batch.",
        file="audit/producer.py",
        rule="if sequence <= last and not (isinstance(error, _NOT_TAKEN) and is_refusal(error)):",
        instead="if sequence <= last and not isinstance(error, _NOT_TAKEN):",
        red=(f"{UNIT}/test_interrupted_produce.py::test_nor_in_a_batch",),
    ),
    Mutant(
        name="time-of-a-record-no-number",
        promise="A creation time that is no whole number is refused before it makes a window of its own.",
        file="audit/stream_reporter.py",
        rule="            created_ms = operator.index(created_ms)\n",
        instead="            pass\n",
        red=(f"{UNIT}/test_refused_calls.py::test_what_is_no_topic_and_no_time_is_refused",),
    ),
    Mutant(
        name="stamp-that-failed-pending",
        promise="A number of which its caller never heard does not stay pending: no promise waits for it.",
        file="audit/stream_reporter.py",
        rule="                stream.give_back(window, sequence)\n",
        instead="",
        red=(f"{UNIT}/test_refused_calls.py::test_whatever_ends_a_stamp_its_number_goes_to_the_next",),
    ),
    Mutant(
        name="journal-kept-though-it-ended",
        promise="A journal that could not go on does not say how far its streams came.",
        file="audit/clients/recovery.py",
        rule="            self._journal.wipe()\n",
        instead="",
        red=(
            f"{UNIT}/test_journal_on_its_machine.py"
            "::test_a_disk_that_is_full_when_the_journal_must_grow_ends_the_journal_and_not_the_producer",
        ),
    ),
    Mutant(
        name="told-before-it-was-written",
        promise="What a report tells was written into the journal before, failures too.",
        file="audit/clients/recovery.py",
        rule="        for window in self._doubtful.pop(stream.stream, ()):\n",
        instead="        for window in ():\n",
        red=(
            f"{UNIT}/test_journal_on_its_machine.py"
            "::test_a_report_does_not_tell_what_the_journal_has_not_written_down",
            f"{UNIT}/test_journal_on_its_machine.py"
            "::test_what_was_not_acknowledged_is_written_down_once_for_all_of_it",
        ),
    ),
    Mutant(
        name="end-before-the-last-beat",
        promise="A clock that was set back does not make two producers of one.",
        file="audit/clients/told_stream.py",
        rule="        self.at_ms = max(self.at_ms, now_ms)\n",
        instead="        self.at_ms = now_ms\n",
        red=(
            f"{UNIT}/test_stream_reporter.py"
            "::test_a_clock_that_was_set_back_far_does_not_make_two_producers_of_one",
        ),
    ),
    Mutant(
        name="recovered-end-before-the-last-beat",
        promise="Nor does the start that tells a killed one's end.",
        file="audit/clients/recovery.py",
        rule="    at_ms = max(now_ms, stream.at_ms)\n",
        instead="    at_ms = now_ms\n",
        red=(
            f"{UNIT}/test_journal_on_its_machine.py"
            "::test_a_stream_does_not_end_before_its_last_sign_of_life_where_the_clock_was_set_back",
        ),
    ),
    Mutant(
        name="journal-without-room",
        promise="A full disk does not kill an application through its producer's journal.",
        file="audit/clients/journal.py",
        rule="            os.posix_fallocate(self._file.fileno(), 0, self._size)\n",
        instead="            pass\n",
        red=(
            f"{UNIT}/test_journal_on_its_machine.py"
            "::test_a_journal_has_its_room_on_the_disk_before_it_is_written_to",
        ),
    ),
    Mutant(
        name="events-lost-with-their-connection",
        promise="Events that a connection took before it broke are told again.",
        file="audit/clients/event_publisher.py",
        rule="        drain(own, PURGE_TIMEOUT_S, [])\n",
        instead="",
        red=(
            f"{UNIT}/test_refused_reports.py"
            "::test_a_connection_of_their_own_that_broke_is_followed_by_another",
        ),
    ),
    Mutant(
        name="journal-known-by-its-device",
        promise="A volume that is attached under another device number has the same journal.",
        file="audit/clients/journal.py",
        rule='_birth(descriptor), _system_id("/etc/machine-id"))',
        instead='os.fstat(descriptor).st_dev, _system_id("/etc/machine-id"))',
        red=(
            f"{UNIT}/test_journals_owner.py"
            "::test_a_volume_that_is_attached_under_another_device_number_has_the_same_journal",
        ),
    ),
    Mutant(
        name="number-taken-after-the-end",
        promise="No number of a stream is given out after its last report, whichever window was looked up.",
        file="audit/clients/session.py",
        rule="len(list(self.current.numbers))",
        instead="length_hint(self.current.numbers)",
        red=(
            f"{UNIT}/test_session.py::test_a_number_that_the_end_of_a_stream_took_back_is_nobodys",
            f"{UNIT}/test_session.py"
            "::test_numbers_taken_without_the_lock_have_no_holes_and_are_counted_in_their_windows",
        ),
    ),
    Mutant(
        name="journal-held-by-a-child",
        promise="A journal whose owner was killed is free, whatever children the owner has forked.",
        file="audit/clients/journal.py",
        rule="fcntl.lockf(file",
        instead="fcntl.flock(file",
        red=(f"{UNIT}/test_journals_owner.py::test_the_child_of_a_killed_owner_does_not_hold_its_lock",),
    ),
    Mutant(
        name="journal-unlocked-by-growing",
        promise="A journal that grows stays its owner's alone.",
        file="audit/clients/journal.py",
        rule="        self._map.resize(self._size)",
        instead="        self._map.close()\n"
        "        os.truncate(self._file.fileno(), self._size)\n"
        "        self._map = mmap.mmap(self._file.fileno(), self._size)",
        red=(
            f"{UNIT}/test_journals_owner.py"
            "::test_a_journal_that_this_process_has_stays_locked_when_it_is_asked_for_again",
        ),
    ),
    Mutant(
        name="promise-broken-by-a-clock",
        promise="No record of a stream is older than what the stream has promised, whatever the clock does.",
        file="audit/clients/open_streams.py",
        rule="            if promise_ms is not None and created_ms < promise_ms:\n",
        instead="            if False:\n",
        red=(
            "tests/cluster/test_audited_producer.py"
            "::test_a_clock_that_jumped_ahead_and_was_set_right_changes_no_time_of_a_record",
        ),
    ),
    Mutant(
        name="promise-broken-by-a-moment",
        promise="No record takes the time of an earlier one that its stream has promised to be over.",
        file="audit/clients/session.py",
        rule="            self._end_run()  # The clock",
        instead="            pass  # The clock",
        red=(f"{UNIT}/test_session.py::test_a_moment_that_a_promise_has_passed_gives_no_number_to_anyone",),
    ),
    Mutant(
        name="refused-report-keeps-others-back",
        promise="A report that is refused keeps no other one back.",
        file="audit/clients/event_publisher.py",
        rule="kafka_error(refusal))\n                unsent.pop(0)\n",
        instead="kafka_error(refusal))\n                    return\n                unsent.pop(0)\n",
        red=(f"{UNIT}/test_refused_reports.py::test_a_report_that_is_refused_keeps_no_other_one_back",),
    ),
)
