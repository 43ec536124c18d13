"""The audit's rules by which a consumer testifies, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTIMONY = "tests/unit/audit/test_consumer_testimony.py"
CONSUMER = "audit/consumer.py"

OF_AUDIT_CONSUMER = (
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
)
