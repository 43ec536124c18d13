"""Consumer groups that move from two sources to their aggregate. Where each target partition has one source
they move exactly, by the command and by the background sync; where sources merge they do not, unless some
records may be read again: the fewest that leave nothing out."""

from __future__ import annotations

from typing import Any

import yaml

from millrace.mirror.offsets.translate import Question
from millrace.mirror.offsets.translation import Answer, Translation
from tests.cluster.mirror_process import MirrorProcess
from tests.cluster.moving_groups import (
    Place,
    asked,
    check_read_once,
    committed,
    create,
    map_translations,
    next_places,
    places,
    produce,
    produce_in_transactions,
    read,
    stable_ends,
    translate,
    until,
    wait_until_carried,
)
from tests.pairs import End, Pair, in_pairs

SHIFT = 2
QUICKLY = {"interval_ms": 200}


def start(mirror: MirrorProcess, *of_sources: dict[str, Any]) -> MirrorProcess:
    """With more to say of each source."""
    for section, more in zip(mirror.settings["sources"], of_sources, strict=True):
        section |= more
    mirror.config_path.write_text(yaml.safe_dump(mirror.settings))
    return mirror.start()


def groups(mirror: MirrorProcess) -> list[dict[str, Any]]:
    return list(mirror.status().get("groups", ()))


@in_pairs("kafka-millrace", "millrace-kafka")
def test_a_group_that_reads_two_sources_has_a_place_of_its_own_for_each_at_their_aggregate(
    pair: Pair, second_source: End
) -> None:
    """One mirror gives every source a topic, and the group moves by the command; the other gives them shares
    of the partitions of one topic, and the group is kept in step. Either reader has every record once."""
    topic, group = pair.unique("several"), pair.unique("moves")
    widths = ((pair.source, 2), (second_source, 3))
    for source, width in widths:
        create(source, topic, width)
    produce(pair.source, topic, 2, range(40))
    produce_in_transactions(second_source, topic, 3, range(60))
    by_name = pair.mirror([topic], also=[second_source], naming="{cluster}.{topic}")
    by_share = pair.mirror([topic], also=[second_source], start=False)
    kept = {"groups": {"include": [group], **QUICKLY}}
    start(by_share, kept, kept | {"partition_offset": SHIFT})

    at_sources: list[bytes] = []
    for source, width in widths:
        at_sources += [value for _, value in read(source, group, {topic: width}, at_least=20)]
    produce(pair.source, topic, 2, range(40, 60))
    produce_in_transactions(second_source, topic, 3, range(60, 90))
    for source, width in widths:
        for mirror in (by_name, by_share):
            wait_until_carried(stable_ends(source, {topic: width}), mirror)

    named = {f"{source.name}.{topic}": width for source, width in widths}
    shared = {topic: SHIFT + 3}
    at_target = places(pair.target, named | shared)
    carried: list[bytes] = []
    stands: dict[Place, int] = {}  # where the group has to, by target partition
    for source, width in widths:
        at_source, read_to = places(source, {topic: width}), committed(source, group, {topic: width})
        for partition, end in stable_ends(source, {topic: width}).items():
            number = partition.partition
            records = at_source[topic, number]
            carried += records
            shift = SHIFT if source is second_source else 0
            for mirror, place in (
                (by_name, (f"{source.name}.{topic}", number)),
                (by_share, (topic, number + shift)),
            ):
                assert records.keys() == at_target[place].keys()
                wanted = next_places(records, at_target[place], end)
                found = map_translations(pair.target, mirror.settings["name"], partition, end)
                assert found == [Translation(Answer.EXACT, each) for each in wanted], (partition, place)
                stands[place] = wanted[read_to[topic, number]]
    assert len(stands) == 10 and any(stands.values())

    status, applied, said = translate(by_name.config_path, group, "--apply")
    assert status == 0, said
    assert [row["is"] for row in applied["partitions"]] == ["exact"] * 5
    of_command = {(row["topic"], row["partition"]): row["offset"] for row in applied["committed"]}
    assert of_command == {place: at for place, at in stands.items() if place[0] != topic}
    of_sync = {place: at for place, at in stands.items() if place[0] == topic}
    until(lambda: committed(pair.target, group, shared) == of_sync, lambda: str(groups(by_share)))
    synced = [(source.name, group, "synced") for source, _ in widths]
    until(
        lambda: [(each["source"], each["group"], each["state"]) for each in groups(by_share)] == synced,
        lambda: str(groups(by_share)),
    )
    for topics in (named, shared):
        read_there = [value for _, value in read(pair.target, group, topics)]
        assert read_there
        check_read_once(at_sources + read_there, carried)


@in_pairs("kafka-kafka", "millrace-millrace")
def test_where_sources_merge_no_group_is_synced_and_re_reads_are_the_fewest_that_leave_nothing_out(
    pair: Pair, second_source: End
) -> None:
    topic, alone = pair.unique("merged"), pair.unique("alone")
    half, one_read_out, newcomer, done = (f"{pair.unique('merges')}-{each}" for each in range(4))
    for end in (pair.source, second_source):
        create(end, topic, 1)
    create(pair.source, alone, 1)
    mirror = pair.mirror([topic, alone], also=[second_source], start=False)
    start(mirror, *[{"groups": {"include": ["merges-.*"], **QUICKLY}}] * 2)
    # All of the one lies before all of the other.
    produce(pair.source, alone, 1, range(10))
    for end, topics in ((pair.source, {topic: 1, alone: 1}), (second_source, {topic: 1})):
        produce(end, topic, 1, range(30))
        wait_until_carried(stable_ends(end, topics), mirror)

    read_at_all: dict[str, set[bytes]] = {}
    for group, source, count in (
        (half, pair.source, 10),
        (half, second_source, 20),
        (one_read_out, pair.source, 30),
        (one_read_out, second_source, 20),
        (newcomer, second_source, 20),
        (done, pair.source, 30),
        (done, second_source, 30),
    ):
        there = read(source, group, {topic: 1}, at_least=count)
        read_at_all.setdefault(group, set()).update(value for _, value in there)
    read(pair.source, half, {alone: 1}, at_least=4)

    # What has one source is synced, and of the rest it is said why it is not.
    (in_order,) = places(pair.target, {topic: 1}).values()
    (of_alone,) = places(pair.target, {alone: 1}).values()
    stands_alone = sorted(of_alone.values())[4]
    until(lambda: committed(pair.target, half, {alone: 1}) == {(alone, 0): stands_alone}, logs_of=[mirror])
    shown: list[dict[str, Any]] = []

    def are_told() -> bool:
        shown[:] = groups(mirror)
        return len(shown) == 7 and {each["state"] for each in shown} == {"partly"}

    until(are_told, lambda: str(shown), logs_of=[mirror])
    for each in shown:
        other = second_source if each["source"] == pair.source.name else pair.source
        assert (
            each["reason"] == f"{each['source']}/{topic}-0: merged: {other.name}/{topic}-0 go there as well"
        )
    for group in read_at_all:
        assert committed(pair.target, group, {topic: 1}) == {}

    status, refused, _ = translate(mirror.config_path, half, "--apply")
    assert status == 1
    assert {(row["topic"], row["is"], row["target_offset"]) for row in refused["partitions"]} == {
        (topic, "merged", None),
        (alone, "exact", stands_alone),
    }
    assert (refused["committed"], committed(pair.target, half, {topic: 1})) == ([], {})

    status, applied, said = translate(mirror.config_path, half, "--allow-rereads", "--apply")
    assert status == 0, said
    assert [row["is"] for row in applied["partitions"] if row["topic"] == topic] == ["with re-reads"] * 2
    for group in (one_read_out, newcomer, done):
        asked(mirror.config_path, Question(group, apply=True, allow_rereads=True))
    (end,) = stable_ends(pair.target, {topic: 1}).values()
    for group, values in read_at_all.items():
        unread = {value: at for value, at in in_order.items() if value not in values}
        # The first record that it has not read, of any source: none is left out, none before it read again.
        place = min(unread.values(), default=end)
        assert committed(pair.target, group, {topic: 1}) == {(topic, 0): place}, group
        at_target = {value for _, value in read(pair.target, group, {topic: 1})}
        assert at_target == {value for value, at in in_order.items() if at >= place}
        assert unread.keys() <= at_target
