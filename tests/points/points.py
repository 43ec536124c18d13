"""The points at which tests make processes die, fail or wait: name -> where that is in the product.

`module:function` is named as it is looked up: a function that a module has imported by `from` is that
module's. `nth` counts calls; with `only` those alone in whose arguments' text
this pattern is found. A test may ask for
another call than the table's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    at: str
    when: str
    nth: int = 1
    only: str = ""


BEFORE, AFTER = "before", "after"
STORAGE, GROUPS = "millrace.broker.storage", "millrace.broker.groups"
SERVER, DELIVERY = "millrace.broker.server", "millrace.mirror.delivery"
KEEPING, LANE = "millrace.audit.keeping", "transactional_lane:TransactionalLane"

POINTS = {
    # -- a broker's log
    "batches appended, answer not made": Point(f"{SERVER}.handlers.produce:_answer", BEFORE),
    "log flushed, recovery point not written": Point(f"{STORAGE}.log_durability:flush", AFTER),
    "recovery point written aside, not renamed": Point(
        f"{STORAGE}.checkpoints:os.replace", BEFORE, only=r"recovery-point-offset-checkpoint\.tmp$"
    ),
    "roll: new segment made, index of the old one not written": Point(
        f"{STORAGE}.segment:Segment.close_indexes", BEFORE
    ),
    "roll: index written, producers not": Point(f"{STORAGE}.log_reshaping:producer_snapshot.write", BEFORE),
    "roll: both written, batch not appended": Point(f"{STORAGE}.segment_list:SegmentList.begin", AFTER),
    # -- a disk that fails under a log
    "batch written, its disk failed": Point(f"{STORAGE}.segment:LogFile.write", AFTER, nth=100),
    "batches replicated, not synced": Point(f"{STORAGE}.segment:LogFile.sync", BEFORE, nth=10),
    # -- its recovery
    "recovery: two segments recovered, the others not": Point(f"{STORAGE}.recovery:_recover", AFTER, nth=2),
    "recovery: torn batch cut off, indexes not rebuilt": Point(
        f"{STORAGE}.segment:Segment.rebuild_indexes", BEFORE
    ),
    "recovery: first log after the torn one removed": Point(
        f"{STORAGE}.recovery:Path.unlink", AFTER, only=r"\.log$"
    ),
    # -- its compaction
    "compaction: new segment counts, old ones not removed": Point(
        f"{STORAGE}.segment_swap:remove_replaced", BEFORE
    ),
    "compaction: indexes of the first old segment removed, its log not": Point(
        f"{STORAGE}.segment_swap:os.unlink", BEFORE, only=r"\.log$"
    ),
    "compaction: indexes have their final names, the log has not": Point(
        f"{STORAGE}.segment:Segment.rename_log", BEFORE, nth=2
    ),
    # -- its coordinators
    "offsets appended, commit not answered": Point(f"{GROUPS}.journal:Journal.append", AFTER),
    "marker of the first partition written, of the second not": Point(
        f"{SERVER}.transaction_markers:MarkerWriter._append", AFTER
    ),
    "commit decided, no marker written": Point(f"{SERVER}.transaction_markers:MarkerWriter._append", BEFORE),
    "commit decided, its markers on their way": Point(
        f"{SERVER}.transaction_markers:MarkerWriter.write_here", BEFORE, only="committed=True"
    ),
    # -- a mirror's transaction; the first of a lane puts down where partitions begin
    "partitions added, nothing sent": Point(f"{DELIVERY}.{LANE}._add", AFTER),
    "batches in the target's log, their answer not taken": Point(f"{DELIVERY}.sink:produce", AFTER),
    "records acknowledged, positions not written": Point(
        f"{DELIVERY}.{LANE}._write_positions", BEFORE, nth=2
    ),
    "positions written, fence not asked": Point(f"{DELIVERY}.{LANE}._fence", BEFORE, nth=2),
    "fence passed, end not asked for": Point(f"{DELIVERY}.{LANE}._end", BEFORE, nth=2),
    "end answered, lane not told": Point(f"{DELIVERY}.{LANE}._committed", BEFORE, nth=2),
    # -- and where it has none; the first positions are where partitions begin
    "acknowledged at least once, offset map not written": Point(
        f"{DELIVERY}.system_records:SystemRecords.write", BEFORE, only=r"^millrace\.offsets\."
    ),
    "acknowledged at least once, position not written": Point(
        f"{DELIVERY}.at_least_once:AtLeastOnce._write_positions", BEFORE
    ),
    # -- a mirror that begins with partitions, or takes them over
    "first look on record, nothing begun": Point(f"{DELIVERY}.beginnings:Beginnings.first_look", AFTER),
    "first position on record, its mark not": Point(f"{DELIVERY}.beginnings:Beginnings.mark", BEFORE),
    "barrier written, positions not read": Point(
        f"{DELIVERY}.positions_keeper:read_topic_to_end", BEFORE, only=r"^millrace\.positions\."
    ),
    "workers that left are fenced, their work not shared out": Point(
        f"{DELIVERY}.exactly_once:ExactlyOnce.fence",
        AFTER,
        only=r"^\{\d",  # any slots at all
    ),
    # -- the audit's job
    "commit written aside, without its name": Point(
        f"{KEEPING}.state_files:os.link", BEFORE, only="/commits/"
    ),
    "all written, commit not begun": Point(f"{KEEPING}.state:StateFolder.commit", BEFORE),
    "commit written aside, not renamed": Point(
        f"{KEEPING}.hadoop_files:HadoopFiles._rename", BEFORE, only=r"^commits/"
    ),
    "committed, nothing told": Point(f"{KEEPING}.state:StateFolder.commit", AFTER),
}
