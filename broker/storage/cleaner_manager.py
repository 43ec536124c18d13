"""Which logs are compacted, and when: the dirtiest first, one at a time, none that cannot be read whole.

Made and held by the log manager (`LogManager.cleaning`), run by the broker on a thread of its own. `Cleaner`
does the work on one log, `compaction_plan.py` says what of it is due. Named after Apache Kafka's
LogCleanerManager.

Invariants: one run at a time, and none while logs are being closed; a log that cannot be compacted holds up
no other, and is left as it is until the next start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

import structlog

from millrace.broker.errors import KafkaError, KafkaStorageError
from millrace.broker.protocol.topic_partition import TopicPartition
from millrace.broker.storage.cleaner import Cleaner, CleanerConfig, CleanResult, view_segments
from millrace.broker.storage.compaction_plan import Plan, plan_log
from millrace.broker.storage.log import Log
from millrace.broker.storage.log_reshaping import CompactionAbandoned

events = structlog.get_logger(__name__)


class CleanerManager:
    """See the module. `logs_now` gives every log that is open, `is_stopping` ends a run early, `notes` are
    the log manager's; `log_failed` and `disk_failed` tell it of errors."""

    def __init__(
        self,
        config: CleanerConfig,
        *,
        logs_now: Callable[[], Collection[tuple[TopicPartition, Log]]],
        is_stopping: Callable[[], bool],
        notes: list[str],
        log_failed: Callable[[TopicPartition, Log, str], None],
        disk_failed: Callable[[Path, str, OSError], None],
    ) -> None:
        self._logs_now = logs_now
        self._is_stopping = is_stopping
        self._notes = notes
        self._log_failed = log_failed
        self._disk_failed = disk_failed
        self._cleaner = Cleaner(config, is_stopping)
        self._running = threading.Lock()
        self.uncleanable: dict[TopicPartition, str] = {}
        """Logs that compaction leaves alone until the next start, with the reason in one line."""
        self.compactions: list[tuple[TopicPartition, CleanResult]] = []
        """Runs of compaction since these were last taken out, for the log."""

    def set_config(self, config: CleanerConfig) -> None:
        """Holds for a run under way as far as its pace goes, and whole for the next."""
        self._cleaner.config = config

    def at_rest(self) -> AbstractContextManager[object]:
        """While it is held nothing is compacted; a run under way is waited for."""
        return self._running

    def forget(self, tp: TopicPartition) -> None:
        """The partition is another's, or nobody's."""
        self.uncleanable.pop(tp, None)

    def compact_due(self, now_ms: int, stable_offset_of: Callable[[TopicPartition], int | None]) -> None:
        """Compacts the logs that are due, the dirtiest first, up to their last stable offsets (None: not
        now). Does nothing with `log.cleaner.enable=false`.

        For a thread of its own, where it may take minutes; a second caller returns at once. Raises nothing:
        a log that cannot be compacted is noted once, in `uncleanable`, and the others go on.
        """
        if not self._cleaner.config.enabled or not self._running.acquire(blocking=False):
            return
        try:
            due = []
            for tp, log in self._logs_now():
                if not log.config.is_compacted or log.failure is not None or tp in self.uncleanable:
                    continue
                stable_offset = stable_offset_of(tp)
                if stable_offset is not None:
                    plan = _plan(log, stable_offset, now_ms)
                    if plan.is_due:
                        due.append((plan.is_overdue, plan.dirty_ratio, tp, log, plan))
            for *_, tp, log, plan in sorted(due, key=lambda job: job[:3], reverse=True):
                if self._is_stopping():
                    return
                self._compact(tp, log, plan, now_ms)
        finally:
            self._running.release()

    def _compact(self, tp: TopicPartition, log: Log, plan: Plan, now_ms: int) -> None:
        try:
            result = self._cleaner.clean(log, plan, now_ms)
            self.compactions.append((tp, result))
        except CompactionAbandoned:
            return  # what came between is not in its way the next time
        except KafkaStorageError as error:
            self._log_failed(tp, log, str(error))
        except OSError as error:
            if log.failure is None:
                self._disk_failed(log.directory.parent, f"{log.directory}: {error}", error)
                self._notes.append(f"{log.directory}: not compacted this time: {error}")
        except Exception as error:
            # Also what nobody has thought of: it would end the broker, at the next start again, and those of
            # all other replicas.
            if not isinstance(error, KafkaError):
                events.exception("a log was not compacted", directory=str(log.directory))
            self.uncleanable[tp] = str(error)
            self._notes.append(
                f"{log.directory} cannot be compacted and grows until it is repaired: {error}; "
                "millrace log verify shows all that is wrong with it"
            )


def _plan(log: Log, stable_offset: int, now_ms: int) -> Plan:
    return plan_log(
        view_segments(log.segments, log.end_offset),
        log.config,
        cleaned_offset=log.cleaned_offset,
        start_offset=log.start_offset,
        stable_offset=stable_offset,
        now_ms=now_ms,
    )
