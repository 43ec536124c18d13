"""The file of a journal: blocks, halves, growth, damage."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.audit.clients.journal import (
    BLOCK_HEADER,
    MIN_SIZE,
    Journal,
)
from millrace.broker.protocol.checksum import crc32c, crc32c_reference
from tests.unit.audit.journal_stage import reopen


def test_blocks_come_back_in_order(tmp_path):
    journal = Journal(tmp_path / "j")
    assert journal.recovered == [] and not journal.append({"n": 0})
    journal.rewrite([{"n": 1}])
    assert journal.append({"n": 2})
    journal.close()
    assert reopen(tmp_path / "j") == [{"n": 1}, {"n": 2}]


def test_a_full_half_asks_for_a_snapshot_which_replaces_it(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    journal.rewrite([])
    count = 0
    while journal.append({"n": count}):
        count += 1
    assert count > 50
    journal.rewrite([{"snapshot": count}])
    assert journal.append({"after": 1})
    journal.close()
    assert reopen(tmp_path / "j") == [{"snapshot": count}, {"after": 1}]


def test_a_large_snapshot_grows_the_file_and_survives_every_growth(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    for size in (100, 3000, 100, 9000, 20_000, 50):
        journal.rewrite([{"text": "x" * size}])
        assert journal.append({"after": size})
        journal.close()
        journal = Journal(tmp_path / "j")
        assert journal.recovered == [{"text": "x" * size}, {"after": size}]
    journal.close()


@pytest.mark.parametrize("snapshots", [1, 2])
def test_growth_before_the_snapshot_is_written_loses_nothing(tmp_path, snapshots):
    """With one snapshot the upper half is in use, with two the lower one."""
    journal = Journal(tmp_path / "j", MIN_SIZE)
    for number in range(snapshots):
        journal.rewrite([{"snapshot": number}])
    for _ in range(3):
        journal._grow()
        journal.close()
        journal = Journal(tmp_path / "j")
        assert journal.recovered == [{"snapshot": snapshots - 1}]
    journal.rewrite([{"snapshot": "after"}])
    journal.close()
    assert reopen(tmp_path / "j") == [{"snapshot": "after"}]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2000), st.integers(1, 255))
def test_a_damaged_byte_ends_the_log_there_and_never_yields_a_wrong_block(tmp_path_factory, position, flip):
    path = tmp_path_factory.mktemp("journal") / "j"
    blocks = [{"n": number, "text": "x" * 50} for number in range(20)]
    journal = Journal(path, MIN_SIZE)
    journal.rewrite(blocks[:5])
    for block in blocks[5:]:
        journal.append(block)
    start = journal._start
    journal._map[start + 24 + position] ^= flip
    end = journal._end
    journal.close()
    journal = Journal(path)
    recovered = journal.recovered
    assert recovered == blocks[: len(recovered)]
    if recovered:  # the header is whole
        last = end - len(json.dumps(blocks[-1], separators=(",", ":")))
        is_in_the_middle = len(recovered) < len(blocks) and start + 24 + position < last - BLOCK_HEADER.size
        assert bool(journal.stale_because) is is_in_the_middle, "the last one may have been cut by a kill"
    journal.close()


def test_what_was_wiped_says_nothing_and_is_no_damage_of_what_comes_after_it(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    journal.rewrite([{"n": 1, "text": "x" * 300}])
    assert journal.append({"n": 2})
    journal.wipe()
    journal.close()
    journal = Journal(tmp_path / "j")
    assert (journal.recovered, journal.stale_because) == ([], "")
    journal.rewrite([{"n": 3}])
    journal.close()
    journal = Journal(tmp_path / "j")
    assert (journal.recovered, journal.stale_because) == ([{"n": 3}], "")
    journal.close()


def test_stale_blocks_of_an_older_generation_are_not_read(tmp_path):
    journal = Journal(tmp_path / "j", MIN_SIZE)
    for generation in range(4):
        journal.rewrite([{"generation": generation}])
        for number in range(30 - 10 * generation):
            journal.append({"n": number})
    journal.close()
    assert reopen(tmp_path / "j") == [{"generation": 3}]


def test_the_checksum_is_the_one_of_the_reference_implementation():
    assert crc32c(b"block", crc32c(b"generation")) == crc32c_reference(b"generationblock")
