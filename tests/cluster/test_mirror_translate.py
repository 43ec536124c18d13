"""`millrace mirror translate` as people see it, of a group that has a place at the target in one topic alone.
Of the others the target has dropped it, or one of the two logs was made anew."""

from __future__ import annotations

import asyncio

import pytest

from millrace.broker.client.admin import create_topic, delete_topic
from millrace.broker.client.group_offsets import CommittedOffset, commit_offsets
from tests.cluster.gap_stories import wait_until_gone
from tests.cluster.moving_groups import (
    committed,
    create,
    places,
    produce,
    stable_ends,
    translate_command,
    wait_until_carried,
)
from tests.pairs import End, Pair, in_pairs
from tests.record_deletion import delete_records

COUNT, READ = 10, 4
COLUMNS = ["SOURCE", "TOPIC", "PARTITION", "OFFSET", "LAG", "TO", "TARGET OFFSET", "TARGET LAG", "IS"]


async def make_anew(end: End, topic: str) -> None:
    async with end.cluster() as cluster:
        await delete_topic(cluster, topic)
        await wait_until_gone(cluster, topic)
        await create_topic(cluster, topic, 1, 1)


@pytest.mark.long
@in_pairs("kafka-millrace", "millrace-kafka")
def test_what_has_no_place_is_told_why_and_never_committed(pair: Pair) -> None:
    fine, dropped, anew, gone = topics = [
        pair.unique(f"{n}-{each}") for n, each in enumerate(("fine", "dropped", "anew", "gone"))
    ]
    group, widths = pair.unique("moves"), dict.fromkeys(topics, 1)
    mirror = pair.mirror(topics)
    for topic in topics:
        create(pair.source, topic, 1)
        produce(pair.source, topic, 1, range(COUNT))
    ends = stable_ends(pair.source, widths)
    wait_until_carried(ends, mirror)
    assert mirror.terminate() == 0
    place = {
        topic: sorted(of_topic.values())[READ] for (topic, _), of_topic in places(pair.target, widths).items()
    }

    async def damage() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await delete_records(target, {(dropped, 0): place[dropped] + 2})
            await make_anew(pair.source, anew)
            # As long as it was, and others write to the target's, beyond the place of the group.
            produce(pair.source, anew, 1, range(COUNT))
            await make_anew(pair.target, gone)
            produce(pair.target, gone, 1, range(place[gone] + 1))
            await commit_offsets(source, group, {(topic, 0): CommittedOffset(READ) for topic in topics})

    asyncio.run(damage())
    (end_there,) = stable_ends(pair.target, {fine: 1}).values()
    status, printed, said = translate_command(mirror.config_path, group)
    assert (status, said) == (1, "")
    title, *lines = printed.splitlines()
    assert [name for name in COLUMNS if name in title] == COLUMNS
    named = pair.source.name
    rows = {line.split()[1]: line.split() for line in lines[: len(topics)]}

    def row(topic: str, target_offset: str, target_lag: str, answer: str) -> list[str]:
        of_source = [named, topic, "0", str(READ), str(COUNT - READ)]
        return [*of_source, f"{topic}-0", target_offset, target_lag, *answer.split()]

    assert list(rows) == topics
    assert rows[fine] == row(fine, str(place[fine]), str(end_there - place[fine]), "exact")
    assert rows[dropped] == row(dropped, "-", "-", "too old")
    assert rows[anew] == row(anew, "-", "-", "another log")
    assert rows[gone] == row(gone, "-", "-", "another log")
    assert lines[len(topics) :] == [
        f"{named}/{dropped}-0: too old: the target has dropped it; its log begins at {place[dropped] + 2}",
        f"{named}/{anew}-0: another log: "
        "the topic was made anew at the source, and the mirror is still at the old one",
        f"{named}/{gone}-0: another log: the target's log ends at {place[gone] + 1}: it was made anew or cut",
        "nothing was changed: --apply commits these offsets on the target",
    ]
    assert committed(pair.target, group, widths) == {}

    for words in (["--apply"], ["--apply", "--allow-rereads", "--backwards"]):
        status, printed, said = translate_command(mirror.config_path, group, *words)
        assert (status, said) == (1, "")
        assert committed(pair.target, group, widths) == {(fine, 0): place[fine]}
        count = "1 partition" if len(words) == 1 else "0 partitions"
        assert f"committed for group {group} on the target: {count}\n" in printed
    assert printed.endswith(f"{fine}-0: left at {place[fine]}, where the group is already\n")

    status, printed, said = translate_command(mirror.config_path, "nobody", "--source", named)
    assert (status != 0, printed) == (True, "")
    assert f"nobody has committed nothing on {named}" in said
    status, printed, said = translate_command(mirror.config_path, group, "--source", "elsewhere")
    assert (status, printed) == (1, "")
    assert f"its sources are {named}" in said
