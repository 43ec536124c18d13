"""The mirror's rules by which workers share what is carried, and keep their seats, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MIRROR = "tests/unit/mirror"
SEATS = "tests/simulation/test_group_members.py"

OF_MIRROR_WORKERS = (
    Mutant(
        name="seat-kept-by-who-cannot-join-again",
        promise="A member that cannot join again is told that its seat is lost: others have its work.",
        file="broker/client/group_member.py",
        rule="        if self.generation < 0 or self._on_lost_within_join is None:\n",
        instead="        if self.generation < 0 or self._on_lost_within_join is not None:\n",
        red=(f"{SEATS}::test_whoever_loses_its_seat_hears_of_it_whatever_it_is_at",),
    ),
    Mutant(
        name="share-taken-on-without-a-seat",
        promise="What a member does with its share is cancelled when the seat is lost.",
        file="broker/client/group_member.py",
        rule="await asyncio.wait([task, heartbeats], return_when=asyncio.FIRST_COMPLETED)",
        instead="await asyncio.wait([task])",
        red=(f"{SEATS}::test_whoever_loses_its_seat_hears_of_it_whatever_it_is_at",),
    ),
    Mutant(
        name="work-given-before-its-last-owner-is-fenced",
        promise="Whose seat is gone is fenced before anybody is given what it had.",
        file="mirror/worker.py",
        rule="        unfenced = await self._fence(departed_slots(claims, self._slots))\n",
        instead=(
            "        fencing = asyncio.ensure_future(self._fence(departed_slots(claims, self._slots)))\n"
            "        unfenced = {} if fencing else {}\n"
        ),
        red=(
            f"{MIRROR}/test_assignor.py::test_whose_seat_is_gone_is_fenced_before_anybody_is_given_its_work",
        ),
    ),
    Mutant(
        name="source-given-to-who-lacks-it",
        promise="No worker is given partitions of a source that its config lacks: nobody would carry them.",
        file="mirror/sharing/assignment.py",
        rule="rates, sources, move=is_level)",
        instead="rates, {}, move=is_level)",
        red=(f"{MIRROR}/test_assignment.py::test_worker_whose_config_lacks_a_source_is_given_nothing_of_it",),
    ),
    Mutant(
        name="claim-on-a-source-that-left",
        promise="What a worker carried of a source that its config lacks by now goes to the others.",
        file="mirror/sharing/assignment.py",
        rule="            if sources is not None and partition.source not in sources:\n",
        instead="            if sources is None and partition.source == worker:\n",
        red=(f"{MIRROR}/test_assignment.py::test_worker_whose_config_lacks_a_source_is_given_nothing_of_it",),
    ),
    Mutant(
        name="leaders-followed-when-the-target-answers",
        promise="A source's leaders are followed whether the target answers or not.",
        file="mirror/sources/source.py",
        rule="                self._has_new_view.set()\n",
        instead="                await self._on_view(self)\n",
        red=(
            f"{MIRROR}/test_source_fetching.py"
            "::test_leader_that_moves_is_followed_while_the_target_does_not_answer",
        ),
    ),
    Mutant(
        name="begun-before-the-first-look",
        promise="Nothing of a source is begun before its first look is on record.",
        file="mirror/worker.py",
        rule="            if partition.source in unseen:\n",
        instead="            if False:\n",
        red=(
            "tests/unit/mirror/test_beginnings.py"
            "::test_source_that_is_seen_late_is_begun_then_with_its_first_look_on_record",
        ),
    ),
    Mutant(
        name="first-look-at-nothing",
        promise="A first look says what was seen, however late that is.",
        file="mirror/worker.py",
        rule="        await reader.seen(pipelines)\n",
        instead="",
        red=(
            "tests/unit/mirror/test_beginnings.py"
            "::test_source_that_is_seen_late_is_begun_then_with_its_first_look_on_record",
        ),
    ),
    Mutant(
        name="two-first-looks",
        promise="Of two workers the one that sees a source later begins as the other.",
        file="mirror/delivery/beginnings.py",
        rule="is_first = source not in begun.first_looks\n",
        instead="is_first = True\n",
        red=(
            "tests/unit/mirror/test_beginnings.py"
            "::test_who_sees_a_source_late_begins_as_the_worker_that_saw_it_first",
        ),
    ),
    Mutant(
        name="empty-source-is-not-looked-at",
        promise="What comes to a source that was seen empty begins with its first record.",
        file="mirror/worker.py",
        rule="            await self._beginnings.nothing_seen(reader.name)\n",
        instead="            pass\n",
        red=(
            "tests/unit/mirror/test_beginnings.py"
            "::test_what_comes_to_a_source_that_was_seen_empty_begins_with_its_first_record",
        ),
    ),
)
