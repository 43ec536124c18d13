"""`millrace log`: what it shows of each kind of file, and every kind of damage it must find."""

from __future__ import annotations

import json
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.broker.protocol.batch import HEADER_SIZE, seal
from millrace.broker.protocol.control_records import build_marker
from millrace.broker.protocol.records import Record, build_batch
from millrace.broker.storage import log_check
from millrace.broker.storage.leader_epochs import LeaderEpochCache
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_config import LogConfig
from millrace.broker.storage.log_manager import LogManager
from millrace.deploy import cli
from millrace.deploy.commands import log as log_command

TIME_MS = 1_700_000_000_000
SEGMENT = "00000000000000000000"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one partition: several segments, a transaction of each end, three epochs."""
    folder = tmp_path_factory.mktemp("log") / "data"
    manager = LogManager([folder], LogConfig(segment_bytes=2000, index_interval_bytes=100))
    manager.start(TIME_MS)
    log = manager.create(("flights", 0))
    for number in range(30):
        now_ms = TIME_MS + 1000 * number
        records = [Record(b"k%d" % n, b"v" * 20, (("h", b"\xff"),), now_ms + n) for n in range(3)]
        log.append(build_batch(records, compression=number % 5), leader_epoch=number // 10, now_ms=now_ms)
        if number % 10 == 5:
            batch = build_batch(
                records, producer_id=7, producer_epoch=1, base_sequence=number // 10 * 3, transactional=True
            )
            log.append(batch, leader_epoch=number // 10, now_ms=now_ms)
            marker = build_marker(7, 1, 2, number == 15, now_ms)
            log.append(marker, leader_epoch=number // 10, now_ms=now_ms, origin="internal")
    manager.close(TIME_MS)
    return folder


@pytest.fixture
def data(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "data")


def _dump(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, list[str], str]:
    status = cli.run(["log", "dump", *map(str, arguments)])
    shown = capsys.readouterr()
    return status, shown.out.splitlines(), shown.err


def test_log_is_shown_batch_by_batch(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = _dump(capsys, data / "flights-0" / f"{SEGMENT}.log")
    assert status == 0
    assert lines[0].startswith("OFFSETS")
    assert lines[1].split()[:5] == ["0-2", "3", "2023-11-14", "22:13:20.002", "160"]
    assert "snappy" in lines[3]
    assert any("7 e1 s0" in line and "in transaction" in line for line in lines)
    assert any(line.endswith("ABORT") for line in lines)
    assert lines[-1].endswith("bytes, all CRCs right")
    assert all(len(line) < 130 for line in lines)


def test_records_and_offset(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = _dump(capsys, data / "flights-0" / f"{SEGMENT}.log", "--records", "--offset", 4)
    assert lines[1].startswith("3-5")
    assert lines[2] == "    4  2023-11-14 22:13:21.001  k1 = vvvvvvvvvvvvvvvvvvvv  [h: 0xff]"


def test_nothing_from_an_offset_on_is_not_called_nothing_at_all(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (data / "flights-0" / f"{SEGMENT}.log", data / "flights-0" / f"{SEGMENT}.index"):
        assert _dump(capsys, path, "--offset", 99_999_999) == (0, ["nothing from offset 99999999 on"], "")
        path.write_bytes(b"")
        assert _dump(capsys, path) == (0, ["nothing in it"], "")
        assert _dump(capsys, path, "--offset", 99_999_999, "--json") == (0, [], "")


def test_of_a_file_that_cannot_be_read_nothing_is_said_but_why(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = data / "flights-0" / f"{SEGMENT}.log"
    path.write_bytes(b"\xff" * 100)
    for options in ([], ["--offset", 5]):
        status, lines, error = _dump(capsys, path, *options)
        assert (status, lines) == (1, [])
        assert f"{path}: byte 0: " in error


def test_json_has_everything(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = _dump(capsys, data / "flights-0" / f"{SEGMENT}.log", "--json", "--records")
    rows = [json.loads(line) for line in lines]
    assert rows[0]["records"][0] == {
        "offset": 0,
        "timestamp": TIME_MS,
        "key": "k0",
        "value": "v" * 20,
        "headers": [["h", "0xff"]],
    }
    assert {row["control"] for row in rows} == {None, "ABORT"}
    assert all(row["problem"] is None for row in rows)


def test_other_files_are_shown(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = data / "flights-0"
    for name, first in (
        (f"{SEGMENT}.index", "OFFSET"),
        (f"{SEGMENT}.timeindex", "TIMESTAMP"),
        (f"{SEGMENT}.txnindex", "PRODUCER ID"),
        (max(path.name for path in directory.glob("*.snapshot")), "PRODUCER ID"),
        ("leader-epoch-checkpoint", "LEADER EPOCH"),
        ("../recovery-point-offset-checkpoint", "TOPIC"),
    ):
        status, lines, _ = _dump(capsys, directory / name)
        assert status == 0, name
        assert lines[0].startswith(first)
        assert len(lines) > 2
        status, lines, _ = _dump(capsys, directory / name, "--json")
        assert all(json.loads(line) for line in lines)


def test_damage_is_shown_and_ends_with_status_1(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = data / "flights-0" / f"{SEGMENT}.log"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content[:-3])
    status, lines, error = _dump(capsys, path)
    assert status == 1
    assert "WRONG CRC" in lines[1]
    assert "is cut at" in error
    assert lines[-1].endswith("1 with problems")


@pytest.mark.parametrize("options", [["--records"], ["--records", "--json"]])
def test_records_that_cannot_be_read_are_damage_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    batch = bytearray(build_batch([Record(b"k", b"v" * 20, (), TIME_MS)]))
    batch[HEADER_SIZE] = 0x7E  # the record's own length; the CRC is right
    seal(batch)
    path = tmp_path / f"{SEGMENT}.log"
    path.write_bytes(batch)
    assert _dump(capsys, path)[0] == 0, "not looked at"
    status, lines, _ = _dump(capsys, path, *options)
    assert status == 1
    assert "--json" in options or lines[-1].endswith("1 with problems")


def test_what_cannot_be_shown_is_said_in_one_line(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (data, data / "flights-0" / "no.log", data / "flights-0" / "partition.metadata"):
        if path.name == "partition.metadata":
            path.write_text("")
        status, lines, error = _dump(capsys, path)
        assert status in (1, 64)
        assert lines in ([], [""])
        assert len(error.splitlines()) == 1


def _verify(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, list[str]]:
    status = cli.run(["log", "verify", str(path)])
    return status, capsys.readouterr().out.splitlines()


def test_sound_folder_has_no_problems(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (data, data / "flights-0"):
        status, lines = _verify(capsys, path)
        assert (status, len(lines)) == (0, 1), lines
        assert lines[0].startswith("1 partition, ")
        assert "102 records" in lines[0]
        assert lines[0].endswith(": no problems")


def _patch(path: Path, position: int, value: bytes, *, sealed: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[position : position + len(value)] = value
    if sealed is not None:
        size = int.from_bytes(content[sealed + 8 : sealed + 12], "big") + 12
        batch = bytearray(content[sealed : sealed + size])
        seal(batch)
        content[sealed : sealed + size] = batch
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "CRC": (lambda d, s: _patch(s, 70, b"\xff"), "has CRC"),
    "magic": (lambda d, s: _patch(s, 16, b"\1"), "magic 1"),
    "length": (lambda d, s: _patch(s, 8, b"\x7f"), "cut at"),
    "offset": (lambda d, s: _patch(s, 7, b"\5"), "missing before it"),
    "count": (lambda d, s: _patch(s, 60, b"\2", sealed=0), "bytes follow"),
    "epoch": (lambda d, s: _patch(s, 15, b"\1"), "the checkpoint says 0"),
    "tail": (lambda d, s: s.write_bytes(s.read_bytes()[:-9]), "is cut at"),
    "index": (lambda d, s: _patch(s.with_suffix(".index"), 7, b"\7"), "offset 5 at byte"),
    "index size": (lambda d, s: s.with_suffix(".index").write_bytes(b"123"), "not a multiple"),
    "time index": (lambda d, s: _patch(s.with_suffix(".timeindex"), 7, b"\0"), "being newer than"),
    "transactions": (
        lambda d, s: _patch(s.with_suffix(".txnindex"), 9, b"\5"),
        "an abort marker at offset 21 of producer 5",
    ),
    "snapshot": (lambda d, s: _patch(max(d.glob("*.snapshot")), 20, b"\5"), "wrong CRC"),
    "epochs": (lambda d, s: (d / "leader-epoch-checkpoint").write_text("x"), "not a checkpoint file"),
    "no epochs": (lambda d, s: (d / "leader-epoch-checkpoint").write_text(""), "and there are batches"),
    "recovery point": (
        lambda d, s: (d.parent / "recovery-point-offset-checkpoint").write_text("0\n1\nflights 0 9999\n"),
        "recovery point 9999 lies beyond",
    ),
    "checkpoint": (
        lambda d, s: (d.parent / "log-start-offset-checkpoint").write_text("0\n7\n"),
        "announces 7",
    ),
    "lost segment": (lambda d, s: sorted(d.glob("*.log"))[1].unlink(), "are missing before it"),
    "order": (
        lambda d, s: shutil.copy(s, d / f"{10:020d}.log"),
        "does not follow",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_found(data: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    directory = data / "flights-0"
    hurt, said = DAMAGES[name]
    hurt(directory, directory / f"{SEGMENT}.log")
    status, lines = _verify(capsys, data)
    assert status == 1
    assert any(said in line for line in lines), lines
    assert all(line.startswith(str(data)) for line in lines[:-1])
    assert "problem" in lines[-1]


def test_what_an_apache_kafka_at_work_leaves_unwritten_is_no_damage(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room behind the entries of the indexes that it writes to, and checkpoints that it only made so far."""
    segment = max((data / "flights-0").glob("*.log"))
    for suffix, size in ((".index", 8), (".timeindex", 12)):
        index = segment.with_suffix(suffix)
        index.write_bytes(index.read_bytes() + bytes(size * 1000))
    (data / "cleaner-offset-checkpoint").write_bytes(b"")
    (data / "flights-1").mkdir()
    for name in f"{SEGMENT}.log", "leader-epoch-checkpoint":
        (data / "flights-1" / name).write_bytes(b"")
    status, lines = _verify(capsys, data)
    assert (status, len(lines)) == (0, 1), lines
    assert cli.run(["log", "dump", str(index)]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 100
    assert cli.run(["log", "dump", str(data / "cleaner-offset-checkpoint")]) == 0


def test_folder_without_partitions_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["log", "verify", str(tmp_path)]) == 1
    assert "no partition" in capsys.readouterr().err


def test_nothing_is_found_while_a_broker_is_at_work(tmp_path: Path) -> None:
    config = LogConfig(
        segment_bytes=3000,
        index_interval_bytes=100,
        retention_bytes=100_000,
        cleanup_policy=frozenset({"compact", "delete"}),
        min_cleanable_dirty_ratio=0.0,
    )
    manager = LogManager([tmp_path], config)
    manager.start(0)
    log = manager.create(("t", 0))
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.is_set():
            record = Record(b"%d" % (number % 200), b"v" * 30, (), number)
            log.append(build_batch([record]), leader_epoch=0, now_ms=0)
            number += 1
            if number % 2000 == 0:
                manager.cleaning.compact_due(0, lambda tp: log.end_offset)
                manager.housekeeping(0)

    worker = threading.Thread(target=work)
    worker.start()
    totals = log_check.Totals()
    try:
        while log.end_offset < 8_000 and worker.is_alive():
            facts, problems = log_check.FolderFacts.read(tmp_path)
            problems += log_check.check_partition(log.directory, facts, totals)
            assert problems == []
    finally:
        done.set()
        worker.join()
    assert totals.batches > totals.partitions > 0
    manager.close()
    facts, problems = log_check.FolderFacts.read(tmp_path)
    assert problems + log_check.check_partition(log.directory, facts, totals) == []


@pytest.mark.parametrize("looks", [1, 2])
def test_election_while_a_partition_is_read_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    """The checkpoint was read before it, or between the batch and what the broker writes down of it."""
    log = Log.open(tmp_path / "t-0", LogConfig(), recovery_point=None, start_offset=0, now_ms=TIME_MS)
    batch = bytes(build_batch([Record(b"k", b"v", (), TIME_MS)]))
    for _ in range(3):
        log.append(memoryview(bytearray(batch)), leader_epoch=0, now_ms=TIME_MS)
    before = LeaderEpochCache.load(log.directory)
    left = looks

    def load(directory: Path) -> LeaderEpochCache:
        nonlocal left
        if left == looks:
            log.begin_epoch(1)
            log.append(memoryview(bytearray(batch)), leader_epoch=1, now_ms=TIME_MS)
        left -= 1
        return before if left >= 0 else LeaderEpochCache(directory, [(0, 0), (1, 3)])

    monkeypatch.setattr(log_check, "LeaderEpochCache", SimpleNamespace(load=load))
    facts, _ = log_check.FolderFacts.read(tmp_path)
    totals = log_check.Totals()
    assert log_check.check_partition(tmp_path / "t-0", facts, totals) == []
    assert totals.batches == 4
    log.close()


def test_first_batch_whose_epoch_is_about_to_be_written_is_no_problem(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data / "flights-0" / "leader-epoch-checkpoint"
    written = path.read_bytes()
    path.write_bytes(b"")
    monkeypatch.setattr(log_check.time, "sleep", lambda _: path.write_bytes(written))
    facts, _ = log_check.FolderFacts.read(data)
    assert log_check.check_partition(path.parent, facts, log_check.Totals()) == []


def test_partition_of_apache_kafka_s_kind_is_understood(tmp_path: Path) -> None:
    """Entries of indexes are relative to their segment; a snapshot may hold what is no longer in the log."""
    log = Log.open(tmp_path / "t-0", LogConfig(), recovery_point=None, start_offset=100, now_ms=0)
    log.append(build_batch([Record(None, b"x", (), 5)]), leader_epoch=0, now_ms=0)
    log.close()
    (tmp_path / "t-0" / f"{100:020d}.index").write_bytes(struct.pack(">II", 0, 0))
    assert (
        log_check.check_partition(tmp_path / "t-0", log_check.FolderFacts({}, {}, {}), log_check.Totals())
        == []
    )


def test_file_of_no_known_kind_is_one_line_of_error_and_none_of_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("x")
    assert cli.run(["log", "dump", str(path)]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "notes.txt is none of .log" in err) == ("", 1, True)


def test_pipe_that_was_closed_is_no_fault_of_the_file(
    original: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(log_command._Printer, "print", closed)
    with pytest.raises(BrokenPipeError):
        log_command.dump(original / "flights-0" / f"{SEGMENT}.log")
    assert capsys.readouterr().err == ""
