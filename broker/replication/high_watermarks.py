"""`replication-offset-checkpoint` of each data folder: the high watermarks, in Apache Kafka's format.

A replica that starts again goes on from its checkpointed high watermark: too low a value is put right by the
leader's first answer (or, on the leader, by the followers' first fetches), and it is never too high, because
what was committed stays so. Called by the replica manager; reading and writing wait for the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.checkpoints import known_at_start, read_offsets, write_offsets

HIGH_WATERMARK_CHECKPOINT = "replication-offset-checkpoint"


class HighWatermarkCheckpoints:
    """The checkpoints of some data folders; `notes` has what could not be read or written, one line each.
    `disk_failed` is told, with the reason, of every write that fails."""

    def __init__(self, folders: Iterable[Path], disk_failed: Callable[[Path, str, OSError], None]) -> None:
        self._disk_failed = disk_failed
        self._written: dict[Path, dict[TopicPartition, int]] = {}
        self.notes: list[str] = []
        for folder in folders:
            path = folder / HIGH_WATERMARK_CHECKPOINT
            try:
                # Where there are none the followers, or the leader, tell them anew.
                self._written[folder] = known_at_start(read_offsets, path, self.notes)
            except OSError as error:
                self.notes.append(f"{folder}: high watermarks are not known: {error}")
                self._written[folder] = {}

    def get(self, folder: Path, key: TopicPartition) -> int:
        """The last one written for a partition in this folder, 0 where there is none."""
        return self._written.get(folder, {}).get(key, 0)

    def write(self, by_folder: Mapping[Path, Mapping[TopicPartition, int]]) -> None:
        """Put these in place of what was there. A folder that fails keeps its old file: it is still true."""
        for folder, marks in by_folder.items():
            if marks == self._written.get(folder):
                continue
            try:
                write_offsets(folder / HIGH_WATERMARK_CHECKPOINT, marks)
            except OSError as error:
                reason = f"{folder}: high watermarks not written: {error}"
                self.notes.append(reason)
                self._disk_failed(folder, reason, error)
            else:
                self._written[folder] = dict(marks)
