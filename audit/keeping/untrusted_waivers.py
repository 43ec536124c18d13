"""Waivers for what could not be trusted: a person accepts that some records or events were never understood.

`millrace audit waive --untrusted <words>` gives one for everything the last report tells among `untrusted`
whose name has these words in it: a cause ("header of an unknown version"), a place ("in ewr, topic flights"),
or the whole name. It keeps what it covers with the counts of that time, so that it lapses as soon as more
comes under its words: then nothing of it is covered any more, and only a new waiver ends that. It ends the
exit status 2 and lets the watermark go on; the verdict stays UNKNOWN.

Kept in the state as `waivers/<digest of the words>.<n>.untrusted` (`waiver_files`): the highest number is the
newest of these words.
Called by `runs.untrusted`, `job`, `status` and the command line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace.audit.keeping import upkeep, waiver_files
from millrace.audit.keeping.state import Commit, StateFolder
from millrace.audit.reconciliation.verdict_rows import iso_time
from millrace.broker.errors import ConfigError

ENDING = ".untrusted"
_KIND = "untrusted waiver"


@dataclass(frozen=True, slots=True)
class Accepted:
    """`named` are the words, `covers` {name of what could not be trusted: how much of it there was}."""

    named: str
    covers: dict[str, int]
    who: str
    why: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class StandingAccepted:
    """Such a waiver and whether it still stands."""

    waiver: Accepted
    stands: bool

    def told(self) -> dict[str, Any]:
        """As it stands in the summary."""
        return {
            "untrusted": self.waiver.named,
            "count": sum(self.waiver.covers.values()),
            "who": self.waiver.who,
            "why": self.waiver.why,
            "at": iso_time(self.waiver.at_ms),
            "stands": self.stands,
        }


def read_accepted(state: StateFolder) -> list[Accepted]:
    """All of them, of the same words in the order in which they were given. Raises StateDamaged."""
    found = [(number, Accepted(**body)) for number, _, body in waiver_files.read(state, ENDING, _KIND)]
    return [each for _, each in sorted(found, key=lambda one: (one[0], one[1].at_ms, one[1].named))]


def told_untrusted(latest: Commit, told: Mapping[str, int]) -> dict[str, int]:
    """What a waiver given now can be for: `told` by the last report, and all that the state has counted."""
    counted = {what: count for what, count in latest.untrusted.items() if not upkeep.is_unaudited(what)}
    return counted | {what: max(count, counted.get(what, 0)) for what, count in told.items()}


def accept(
    state: StateFolder, named: str, untrusted: Mapping[str, int], who: str, why: str, at_ms: int
) -> Accepted:
    """Keep a waiver for what the last report told. Raises ConfigError when there is nothing to waive."""
    if not why.strip():
        raise ConfigError("--why", why, "a reason: somebody will ask for it")
    if not who.strip():
        raise ConfigError("--who", who, "a name")
    covers = {what: count for what, count in untrusted.items() if named in what}
    if not named.strip() or not covers:
        raise ConfigError(
            "--untrusted", named, "words of something that the last report tells it could not trust"
        )
    waiver = Accepted(named, covers, " ".join(who.split()), " ".join(why.split()), at_ms)
    stem = hashlib.sha256(named.encode("utf-8", "backslashreplace")).hexdigest()[:16]
    waiver_files.give(state, stem, ENDING, _KIND, asdict(waiver))
    return waiver


def standing_accepted(waivers: Iterable[Accepted], untrusted: Mapping[str, int]) -> list[StandingAccepted]:
    """Whether each still covers all that comes under its words; the newest of the same words counts."""
    newest = {waiver.named: waiver for waiver in waivers}
    return [
        StandingAccepted(
            waiver,
            all(count <= waiver.covers.get(what, 0) for what, count in untrusted.items() if named in what),
        )
        for named, waiver in newest.items()
    ]


def waiver_of(standing: Sequence[StandingAccepted], what: str, count: int) -> Accepted | None:
    """The standing waiver that covers this thing."""
    for each in standing:
        if each.stands and count <= each.waiver.covers.get(what, 0):
            return each.waiver
    return None
