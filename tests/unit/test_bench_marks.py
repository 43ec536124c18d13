"""What the mirror's benchmark says of its marks."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.mirror.results import Results, Row, tables


def test_marks_are_told_as_reached_or_missed_by_the_medians_of_the_rounds(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl")

    def add(kind: str, system: str, workload: str, number: int, **figures: float) -> None:
        named = {"rate": "MB/s", "cpu": "CPU s/GB", "p99": "p99 ms", "peak": "peak MB"}
        told = {named[name]: value for name, value in figures.items()}
        results.add(Row(kind, "kafka", system, workload, number, told))

    for number, ours in enumerate((90.0, 20.0, 100.0)):
        add("backlog", "millrace-eos", "packed", number, rate=ours, cpu=2.0)
        add("backlog", "mm2-default-eos", "packed", number, rate=30.0, cpu=19.0)
    add("backlog", "millrace-eos", "single", 0, rate=16.0)
    add("backlog", "mm2-default-eos", "single", 0, rate=10.0)
    add("latency", "millrace-eos", "5 MB/s", 0, p99=210.0)
    add("latency", "mm2-tuned-eos", "5 MB/s", 0, p99=420.0)
    add("memory", "millrace-eos", "packed", 0, peak=290.0)
    add("memory", "mm2-default-eos", "packed", 0, peak=580.0)
    told = tables(results, {"packed": "64 KB batches", "single": "1 a batch"}).splitlines()
    marks = told[told.index("kafka at both ends: marks, exactly once") + 1 :]
    assert marks == [
        "reached  throughput: 3.00 times better than MirrorMaker 2 default (mark 3), 64 KB batches",
        "reached  throughput: 1.60 times better than MirrorMaker 2 default (mark 1.5), 1 a batch",
        "MISSED   CPU per GB: 9.50 times better than MirrorMaker 2 default (mark 10), 64 KB batches",
        "MISSED   memory: 2.00 times better than MirrorMaker 2 default (mark 3), 64 KB batches",
        "reached  p99 latency: 2.00 times better than MirrorMaker 2 tuned (mark 1), 5 MB/s",
    ]
