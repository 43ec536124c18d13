"""The mirror's rules by which groups' offsets are translated, each taken out."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UNIT = "tests/unit/mirror"

OF_MIRROR_OFFSETS = (
    Mutant(
        name="cut-of-the-map-forgotten-before-what-it-cut",
        promise="The offset map keeps a cut for as long as what the cut makes void.",
        file="mirror/offsets/map_upkeep.py",
        rule="    return _without_cuts_in_force(chunks, gone)\n",
        instead="    return gone\n",
        red=(f"{UNIT}/test_offset_map.py::test_upkeep_changes_no_translation",),
    ),
    Mutant(
        name="records-of-a-source-that-left-forgotten",
        promise="A group is not moved past records of a source that the config lacks by now.",
        file="mirror/offsets/feeds.py",
        rule="                went_to = [*told, now] if now is not None else told\n",
        instead="                went_to = [now] if now is not None else ()\n",
        red=(f"{UNIT}/test_feeds.py::test_records_of_a_source_that_has_left_still_lie_between",),
    ),
    Mutant(
        name="unknown-way-of-a-source-that-left-taken-for-another",
        promise="A source of which nobody knows where its records went may have gone to every target.",
        file="mirror/offsets/feeds.py",
        rule="                went_to: Collection[TopicPartition] = list(found)\n",
        instead="                went_to: Collection[TopicPartition] = ()\n",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_source_that_has_left_and_does_not_say_where_it_went_may_have_gone_anywhere",
        ),
    ),
    Mutant(
        name="offsets-of-another-target-translated",
        promise="What a group has not read before a rename lies elsewhere, so it is not moved past that.",
        file="mirror/offsets/translation.py",
        rule="        if offset < index.elsewhere_until:\n",
        instead="        if offset < 0:\n",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_topic_that_is_renamed_translates_from_where_it_is_carried_under_the_new_name",
        ),
    ),
    Mutant(
        name="target-of-an-idle-partition-not-put-on-record",
        promise="Where a partition's records went is on record, also of one that stands still.",
        file="mirror/sources/source_logs.py",
        rule="(now != recorded or pipeline.target not in known.targets)",
        instead="now != recorded",
        red=(
            f"{UNIT}/test_source_bounds.py"
            "::test_position_tells_where_the_records_went_and_idle_partitions_say_it_too",
        ),
    ),
    Mutant(
        name="map-forgotten-by-another-targets-log",
        promise="A chunk of the offset map is forgotten only when its own target's log begins behind it.",
        file="mirror/offsets/map_upkeep.py",
        rule="_expired_at(starts.get(target, -1), of_target, last)",
        instead="_expired_at(max(starts.values(), default=-1), of_target, last)",
        red=(f"{UNIT}/test_offset_map.py::test_what_one_target_no_longer_has_another_may",),
    ),
    Mutant(
        name="map-kept-by-the-names-of-the-start",
        promise="Upkeep of the offset map goes by the sources and offsets of the config in force.",
        file="mirror/worker.py",
        rule="MapKeeper(target, self._system.write, self._leads, self._settings)",
        instead="MapKeeper(target, self._system.write, self._leads, lambda: (config, {}))",
        red=(f"{UNIT}/test_map_keeper.py::test_source_that_a_reload_has_brought_keeps_its_map",),
    ),
    Mutant(
        name="chunks-of-two-targets-joined",
        promise="A chunk of the offset map speaks of one target partition.",
        file="mirror/offsets/map_upkeep.py",
        rule="            and chunk.key.target == row[-1].key.target\n",
        instead="",
        red=(f"{UNIT}/test_offset_map.py::test_chunks_of_two_targets_are_never_one",),
    ),
    Mutant(
        name="translated-beyond-the-positions",
        promise="A group is not moved past records of a source that began while the map was read.",
        file="mirror/offsets/translate.py",
        rule="        elif committed.offset > position.next_offset:\n",
        instead="        elif committed.offset < 0:\n",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_what_was_carried_since_the_positions_were_read_is_not_translated_yet",
        ),
    ),
    Mutant(
        name="records-without-a-map-left-out-of-re-reads",
        promise="What a group reads again leaves out no records of which the map does not speak.",
        file="mirror/offsets/translate.py",
        rule="place is None and not map_of.chunks and not self._has_only_begun(feeder)",
        instead="place is None and map_of.chunks and not self._has_only_begun(feeder)",
        red=(
            f"{UNIT}/test_feeds.py"
            "::test_records_of_which_no_map_speaks_are_not_left_out_of_what_is_read_again",
        ),
    ),
    Mutant(
        name="source-that-began-meanwhile-overlooked",
        promise="A group is not moved past records of a source that began while the map was read.",
        file="mirror/offsets/translate.py",
        rule="            candidates[target] |= begun\n",
        instead="            assert begun is not None\n",
        red=(f"{UNIT}/test_rereads.py::test_source_that_begins_while_the_map_is_read_is_in_the_way",),
    ),
    Mutant(
        name="translated-into-a-log-made-anew",
        promise="A group is not moved into a log of which the map does not speak.",
        file="mirror/offsets/translate.py",
        rule="max(offset, self._known_end(row)) > ends[key].offset",
        instead="offset > ends[key].offset",
        red=(f"{UNIT}/test_rereads.py::test_log_that_ends_before_what_the_map_knows_is_another",),
    ),
    Mutant(
        name="records-on-their-way-left-out-of-re-reads",
        promise="What a group reads again leaves out no record that a source has and the map does not.",
        file="mirror/offsets/translate.py",
        rule="is_read_out = found.is_end and feeder in shared.read_out",
        instead="is_read_out = found.is_end",
        red=(f"{UNIT}/test_rereads.py::test_source_that_was_read_to_its_end_makes_nothing_be_read_again",),
    ),
    Mutant(
        name="records-that-have-left-the-target-skipped",
        promise="A group that has not read what the target has dropped of one source is not moved past it.",
        file="mirror/offsets/translate.py",
        rule="                    is_left_out = 0 <= began < found.bound\n",
        instead="                    is_left_out = False\n",
        red=(f"{UNIT}/test_rereads.py::test_what_the_map_has_forgotten_of_one_source_is_too_old_for_all",),
    ),
    Mutant(
        name="map-ordered-by-clocks-alone",
        promise="The offset map's chunks are in the order of their assignments, not of two workers' clocks.",
        file="mirror/pipeline.py",
        rule="            began_ms = max(self._now_ms(), start.at_ms + 1)\n",
        instead="            began_ms = self._now_ms()\n",
        red=(
            f"{UNIT}/test_map_order.py::test_a_chunk_that_its_owner_writes_again_is_joined_with_no_other",
            f"{UNIT}/test_map_order.py::test_a_cut_makes_nothing_void_of_what_a_later_owner_carries",
        ),
    ),
    Mutant(
        name="position-dated-by-the-clock-alone",
        promise="A position is never dated before the one that its owner began with.",
        file="mirror/pipeline.py",
        rule="        at_ms = max(now_ms, self.runs.began_ms)\n",
        instead="        at_ms = now_ms\n",
        red=(f"{UNIT}/test_map_order.py::test_a_cut_makes_nothing_void_of_what_a_later_owner_carries",),
    ),
)
