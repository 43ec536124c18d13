"""The rules of one replica of a partition: who leads, who is in sync, and how far readers may see.

Pure: values and `steady_ms` in, decisions out; no log, no clock, no network. `replica_manager.py` holds one
`Replica` per local partition, feeds it the states that stand in ZooKeeper, the fetches of the followers and
the positions of the logs, and does what it decides; `follower.py` has the rules of the fetching side.

Invariants:
- a leader epoch only grows, and within it the version of the state; older news is ignored;
- the high watermark never falls within one leadership, and never passes the leader's log end;
- while a change of the in-sync set is being written, nobody knows which of the two sets counts: the high
  watermark waits for every member of either (KIP-497's maximal set), `acks=all` counts the set that stands;
- a follower that is in sync holds everything below the high watermark, and everything of the epochs before
  the leader's own; what an earlier run of its broker had fetched does not count (KIP-903).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from millrace.broker.errors import FencedLeaderEpoch, NotLeaderOrFollower, UnknownLeaderEpoch

NO_LEADER = -1
ANY_EPOCH = -1
"""A request that names no leader epoch asks for no check."""
NO_VERSION = -1
ANY_BROKER_EPOCH = -1
"""A follower that does not say which run of its broker it belongs to."""
UNKNOWN_OFFSET = -1
NEVER_MS = -(2**62)
FOR_EVER_MS = 2**62


@dataclass(frozen=True, slots=True)
class PartitionState:
    """What stands in ZooKeeper for one partition. `isr` is ordered as the replicas are. `version` is the
    znode's, as read or written; it takes no part in comparisons."""

    leader: int
    leader_epoch: int
    isr: tuple[int, ...]
    controller_epoch: int
    version: int = field(default=NO_VERSION, compare=False)


class Role(Enum):
    """What this broker does for the partition."""

    NONE = "none"
    LEADER = "leader"
    FOLLOWER = "follower"


class Transition(Enum):
    """What a newly learnt state asks this broker to do."""

    IGNORE = "ignore"
    LEAD = "lead"
    """Begin to lead in a new epoch: record the epoch at the log's end, then serve."""
    CONTINUE = "continue"
    """Still leader in the same epoch; the in-sync set or the replicas may have changed."""
    FOLLOW = "follow"
    """Another broker leads (or none): stop serving, and fetch from it where there is one."""


def leads_on(led_epoch: int, epoch: int) -> bool:
    """Whether who led in `led_epoch` and leads in `epoch` has done so all the time. Every change of a state
    takes one epoch more: behind a gap another broker may have led, and written, without having been seen."""
    return epoch <= led_epoch + 1


@dataclass(slots=True)
class FollowerProgress:
    """What the leader knows of one follower by its fetches in this epoch.

    A fetch at offset X says that the follower has everything below X. `caught_up_ms` is the latest time at
    which it is known to have had everything that the leader had then: a follower that always fetches just
    before the next append was caught up at its previous fetch.
    """

    end_offset: int = UNKNOWN_OFFSET
    start_offset: int = UNKNOWN_OFFSET
    caught_up_ms: int = NEVER_MS
    fetched_ms: int = NEVER_MS
    leader_end_at_fetch: int = UNKNOWN_OFFSET
    broker_epoch: int = ANY_BROKER_EPOCH

    def fetched(
        self,
        offset: int,
        start_offset: int,
        leader_end: int,
        steady_ms: int,
        broker_epoch: int = ANY_BROKER_EPOCH,
    ) -> None:
        """Take in a fetch at `offset` that came when the leader's log ended at `leader_end`."""
        if offset >= leader_end:
            self.caught_up_ms = max(self.caught_up_ms, steady_ms)
        elif self.leader_end_at_fetch != UNKNOWN_OFFSET and offset >= self.leader_end_at_fetch:
            self.caught_up_ms = max(self.caught_up_ms, self.fetched_ms)
        self.end_offset, self.start_offset = offset, start_offset
        self.fetched_ms, self.broker_epoch = steady_ms, broker_epoch
        self.leader_end_at_fetch = max(self.leader_end_at_fetch, leader_end)

    def is_late(self, leader_end: int, steady_ms: int, max_lag_ms: int, *, registered: bool) -> bool:
        """Whether it lags for longer than `replica.lag.time.max.ms`. Who has everything is not late, however
        long ago it fetched, unless its broker is gone."""
        if registered and self.end_offset == leader_end:
            return False
        return steady_ms - self.caught_up_ms > max_lag_ms


@dataclass(frozen=True, slots=True, eq=False)
class IsrChange:
    """A change of the in-sync set on its way to ZooKeeper: `state` is to be written where the znode has
    version `state.version`. `added` and `removed` are broker ids; only one of them is not empty."""

    state: PartitionState
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()

    def fits(self, replicas: tuple[int, ...]) -> bool:
        """Whether who is to join is one of the partition's `replicas` still: who is none of them any more has
        deleted its log, or will."""
        return set(self.added) <= set(replicas)


@dataclass(slots=True)
class Replica:
    """The local replica of one partition and what is known of the others."""

    broker_id: int
    role: Role = Role.NONE
    leader: int = NO_LEADER
    leader_epoch: int = -1
    controller_epoch: int = -1
    version: int = NO_VERSION
    isr: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    high_watermark: int = 0
    epoch_start: int = 0
    """Where the log ended when this broker began to lead in this epoch."""
    followers: dict[int, FollowerProgress] = field(default_factory=dict)
    """The other replicas, in sync or not, while this broker leads; empty with one replica."""
    pending: IsrChange | None = None
    """The change of the in-sync set whose outcome is not known yet."""
    min_insync_replicas: int = 1
    max_lag_ms: int = FOR_EVER_MS
    registered: Mapping[int, int] | None = None
    """The living brokers and the epoch of each registration (a number that grows from run to run of the
    same broker); None where all are taken to live."""

    # -- what the cluster decided --------------------------------------------------------------------

    def apply(
        self, state: PartitionState, log_end_offset: int, replicas: tuple[int, ...] = (), steady_ms: int = 0
    ) -> Transition:
        """Take in what stands in ZooKeeper; `replicas` is the assignment (the in-sync set where it is not
        given). A state of an older epoch, or an older one of the same epoch, changes nothing."""
        if state.leader_epoch < self.leader_epoch:
            return Transition.IGNORE
        same_epoch = state.leader_epoch == self.leader_epoch and state.leader == self.leader
        if same_epoch and NO_VERSION != state.version < self.version:
            return Transition.IGNORE
        if not same_epoch or state.version == NO_VERSION or state.version > self.version:
            self.pending = None
        expelled = set(self.isr).difference(state.isr)
        self.leader, self.leader_epoch, self.isr = state.leader, state.leader_epoch, state.isr
        self.controller_epoch, self.version = state.controller_epoch, state.version
        self.replicas = replicas or state.isr
        if state.leader != self.broker_id:
            became = self.role is not Role.FOLLOWER or not same_epoch
            self.role = Role.FOLLOWER
            self.followers = {}
            return Transition.FOLLOW if became else Transition.IGNORE
        leading = same_epoch and self.role is Role.LEADER
        for broker in expelled:
            # Another one took it out, for a reason (its broker begins anew): what it had says nothing now.
            self.followers.pop(broker, None)
        self._track(steady_ms, anew=not leading)
        if leading:
            return Transition.CONTINUE
        self.role = Role.LEADER
        self.epoch_start = log_end_offset
        self.high_watermark = min(self.high_watermark, log_end_offset)
        return Transition.LEAD

    def _track(self, steady_ms: int, *, anew: bool) -> None:
        """Follow the progress of everyone in the assignment, and of in-sync members that have just left it:
        they hold back the high watermark until they are out of the in-sync set too."""
        known = {} if anew else self.followers
        self.followers = {
            broker: known.get(broker)
            or FollowerProgress(caught_up_ms=steady_ms if broker in self.isr else NEVER_MS)
            for broker in dict.fromkeys((*self.replicas, *self.isr))
            if broker != self.broker_id
        }

    def _is_registered(self, broker: int) -> bool:
        return self.registered is None or broker in self.registered

    def check_leader(self, current_leader_epoch: int = ANY_EPOCH) -> None:
        """Raise unless this broker leads, in the epoch the request believes in (KIP-320)."""
        if current_leader_epoch != ANY_EPOCH and current_leader_epoch != self.leader_epoch:
            if current_leader_epoch < self.leader_epoch:
                raise FencedLeaderEpoch(f"the partition is in leader epoch {self.leader_epoch}")
            raise UnknownLeaderEpoch(f"this broker knows leader epoch {self.leader_epoch}")
        if self.role is not Role.LEADER:
            raise NotLeaderOrFollower(f"broker {self.broker_id} does not lead this partition")

    # -- the leader's view of its followers ----------------------------------------------------------

    def check_follower(
        self, follower_id: int, current_leader_epoch: int, broker_epoch: int = ANY_BROKER_EPOCH
    ) -> FollowerProgress:
        """The progress of a follower that fetches. Raises unless this broker leads in the epoch that the
        follower names (it must name one: that is what fences the followers of an old leader), the follower
        is assigned to the partition, and the request is not from an earlier run of its broker."""
        self.check_leader(current_leader_epoch)
        progress = self.followers.get(follower_id)
        if progress is None or current_leader_epoch == ANY_EPOCH or follower_id not in self.replicas:
            # The follower may know a newer assignment than we do: it shall ask again.
            raise UnknownLeaderEpoch(
                f"broker {follower_id} is not a replica of this partition, or names no leader epoch"
            )
        registered_epoch = ANY_BROKER_EPOCH
        if self.registered is not None:
            registered_epoch = self.registered.get(follower_id, ANY_BROKER_EPOCH)
        if ANY_BROKER_EPOCH != broker_epoch < registered_epoch:
            raise NotLeaderOrFollower(f"a fetch of broker {follower_id} from before its last registration")
        return progress

    def advance(self, own_end: int, steady_ms: int = 0) -> bool:
        """Move the high watermark to what everyone in sync has. True when it moved.

        `own_end` is the end of what the leader itself vouches for: its log end, or its last flushed offset
        where only flushed records may be seen. As in Apache Kafka, who is caught up and about to join the
        in-sync set is waited for too, and too small an in-sync set shows nothing new (KIP-966).
        """
        reached = own_end
        if self.followers:
            reached = self._reached(own_end, steady_ms)
        if reached <= self.high_watermark:
            return False
        self.high_watermark = reached
        return True

    def _reached(self, own_end: int, steady_ms: int) -> int:
        if not self.has_enough_in_sync:
            return self.high_watermark
        joining = self.pending.added if self.pending is not None else ()
        reached = own_end
        for broker, follower in self.followers.items():
            if follower.end_offset < reached and (
                broker in self.isr
                or broker in joining
                or (steady_ms - follower.caught_up_ms <= self.max_lag_ms and self._is_registered(broker))
            ):
                reached = follower.end_offset
        return reached

    def in_sync_end(self, own_end: int) -> int:
        """Below this every member of the in-sync set has the records, be they too few for
        `min.insync.replicas` to call them committed."""
        joining = self.pending.added if self.pending is not None else ()
        ends = [
            follower.end_offset
            for broker, follower in self.followers.items()
            if broker in self.isr or broker in joining
        ]
        return min([own_end, *ends])

    @property
    def effective_min_insync(self) -> int:
        """`min.insync.replicas`, which cannot ask for more replicas than there are (KIP-966)."""
        return min(self.min_insync_replicas, len(self.replicas))

    @property
    def has_enough_in_sync(self) -> bool:
        """Whether a write that asks for acks=all may be taken or called written."""
        return len(self.isr) >= self.effective_min_insync

    @property
    def latest_is_known(self) -> bool:
        """False while a new leader's high watermark is below the start of its epoch: the true one may be
        higher, and to name the old one would show a reader's end going backwards (KIP-207)."""
        return self.high_watermark >= self.epoch_start

    @property
    def is_under_replicated(self) -> bool:
        """Whether this broker leads and some assigned replica is not in sync."""
        return self.role is Role.LEADER and len(self.isr) < len(self.replicas)

    def low_watermark(self, own_start: int) -> int:
        """The offset below which no living replica has records any more (DeleteRecords' answer); -1 while
        one of them has not told yet."""
        starts = [
            follower.start_offset
            for broker, follower in self.followers.items()
            if self._is_registered(broker)
        ]
        return min(own_start, *starts) if starts else own_start

    # -- the in-sync set -----------------------------------------------------------------------------

    def shrink_due(self, log_end_offset: int, steady_ms: int) -> IsrChange | None:
        """The in-sync set without those that lag for longer than `replica.lag.time.max.ms`; None while
        there is nothing to change, or a change is being written already."""
        if self.role is not Role.LEADER or self.pending is not None or len(self.isr) <= 1:
            return None
        late = tuple(
            broker
            for broker in self.isr
            if broker != self.broker_id
            and self.followers[broker].is_late(
                log_end_offset, steady_ms, self.max_lag_ms, registered=self._is_registered(broker)
            )
        )
        return self._change(removed=late) if late else None

    def expansion_due(self, follower_id: int) -> IsrChange | None:
        """The in-sync set with `follower_id`, once it has reached the high watermark and the start of the
        leader's epoch: below that there may be committed records that the high watermark does not show
        yet. Its broker must be registered, and in the same run as the one that fetched."""
        if self.role is not Role.LEADER or self.pending is not None or follower_id in self.isr:
            return None
        follower = self.followers.get(follower_id)
        if follower is None or follower_id not in self.replicas:
            return None
        if follower.end_offset < max(self.high_watermark, self.epoch_start):
            return None
        if self.registered is not None and (
            follower_id not in self.registered
            or follower.broker_epoch not in (ANY_BROKER_EPOCH, self.registered[follower_id])
        ):
            return None
        return self._change(added=(follower_id,))

    def _change(self, added: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> IsrChange:
        members = (set(self.isr) | set(added)) - set(removed)
        order = dict.fromkeys((*self.replicas, *self.isr))
        isr = tuple(broker for broker in order if broker in members)
        state = PartitionState(self.leader, self.leader_epoch, isr, self.controller_epoch, self.version)
        return IsrChange(state, added, removed)

    def begin(self, change: IsrChange) -> None:
        """The change is being written: from here on it may stand at any moment, until `written`, or until
        `apply` of another state, ends it."""
        self.pending = change

    def written(self, change: IsrChange, version: int) -> bool:
        """The change stands, at this version. False when the world has moved on meanwhile."""
        if self.pending is not change:
            return False
        self.pending = None
        self.isr, self.version = change.state.isr, version
        return True

    def called_off(self, change: IsrChange) -> None:
        """The change, which stands nowhere, will not be written: no newer state may ever end it."""
        if self.pending is change:
            self.pending = None

    def let_go(self) -> None:
        """The log is led and followed no more from here. A change that nobody has written yet must not be
        written after that: with a log that has failed it would leave the worst copy alone in sync."""
        self.role = Role.NONE
        self.pending = None

    # -- the follower's own high watermark -----------------------------------------------------------

    def follow(self, leader_high_watermark: int, own_end: int) -> bool:
        """Take the high watermark from a leader's answer, as far as the own log reaches. What was once
        known to be committed stays so, also when a new leader does not know it yet."""
        reached = min(leader_high_watermark, own_end)
        if reached <= self.high_watermark:
            return False
        self.high_watermark = reached
        return True

    def truncated(self, own_end: int) -> None:
        """The own log was cut and ends at `own_end`."""
        self.high_watermark = min(self.high_watermark, own_end)

    def begun_anew(self, start: int) -> None:
        """The own log was emptied and begins at the leader's start: what lay below was committed."""
        self.high_watermark = start
