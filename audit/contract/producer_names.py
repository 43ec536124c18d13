"""The producer names that record headers carry, as cells keep them, and whether they agree. Pure.

Called by `counting` (names of a group of records), `reconciliation` (against the name that the events tell)
and the job (the doubts for the report).

A stream belongs to one producer, whose headers all carry its name or, with `identity: compact`, none. So a
second name under one stream id is a second producer, and one of its records may stand where a record of the
other was lost. A cell keeps the first two names it met, one to a line: no name that a producer writes has a
line break. A name that cannot be shown (too long, control characters, not UTF-8) is kept as a description
behind a tab.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.audit.contract.header import InvalidIdentity, decode_producer_name

SEPARATOR = "\n"
UNSHOWN = "\t"
ONE_STREAM = "two producers use one stream id: "
MORE_PAIRS = "two producers use one stream id, and more such pairs"
MOST_PAIRS_NAMED = 20
"""of one partition's range in a run, and of one topic in a cluster in the state; more are only counted"""
NO_NAME = "record headers carry a producer name that cannot be shown: "
_SHOWN_BYTES = 16
_MOST_DOUBTS = 10  # one is enough; a header may name anybody


def kept_name(name: bytes) -> str:
    """A header's name as a cell keeps it; never raises."""
    if not name:
        return ""
    try:
        return decode_producer_name(name)
    except InvalidIdentity:
        begins = "".join(
            each if each.isprintable() else "?" for each in name[:_SHOWN_BYTES].decode("ascii", "replace")
        )
        return f"{UNSHOWN}{len(name):,} bytes that begin with '{begins}'"


def is_shown(name: str) -> bool:
    """False for the description of a name that no audited producer writes."""
    return not name.startswith(UNSHOWN)


def plain(name: str) -> str:
    """For people."""
    return name.removeprefix(UNSHOWN)


def join_names(names: Iterable[str]) -> str:
    """Several names as a cell keeps them."""
    return SEPARATOR.join(filter(None, names))


def names_in(kept: str) -> list[str]:
    """The names of a cell; none for records without names."""
    return [name for name in kept.split(SEPARATOR) if name]


def disagreement(one: str, other: str) -> str:
    """The sentence for two names under one stream id."""
    return f"{ONE_STREAM}{plain(one)} and {plain(other)}"


def name_doubts(told: str, names: Iterable[str]) -> list[str]:
    """Why the headers' `names` do not fit the producer that the events tell, or each other where they tell
    none; empty where they do."""
    doubts: list[str] = []
    for name in sorted(set(names)):
        if not is_shown(name):
            doubts.append(f"{NO_NAME}{plain(name)}")
        elif told and name != told:
            doubts.append(f"{ONE_STREAM}it is known as {told}, record headers name {name}")
        else:
            told = name
    return doubts[:_MOST_DOUBTS]


def is_doubt(reason: str) -> bool:
    """Whether a reason is one of `name_doubts`."""
    return reason.startswith((NO_NAME, ONE_STREAM))
