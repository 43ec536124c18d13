"""Where Millrace is meant to differ from Apache Kafka as its clients see it, and why. Data only.

Every entry is asserted against both servers by the tests that name its id (`Subject.outcome`, `Apart`). An
entry that no test names, and an id that is not here, are failures of `test_differences.py`, which also holds
`table()` against the section in ARCHITECTURE.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One observable difference; the texts are cells of a table for users."""

    subject: str
    kafka: str
    millrace: str
    why: str


DIFFERENCES: dict[str, Difference] = {
    "acls": Difference(
        subject="DescribeAcls, CreateAcls, DeleteAcls",
        kafka="answered; SECURITY_DISABLED without an authorizer",
        millrace="not advertised",
        why="no security yet: who reaches the port may do everything",
    ),
    "apis": Difference(
        subject="SASL, delegation tokens, KRaft, share groups, AlterReplicaLogDirs, ListConfigResources",
        kafka="answered",
        millrace="not advertised",
        why="outside the scope; `NOT_SPOKEN` in tests/wire/test_api_versions.py has every number",
    ),
    "features": Difference(
        subject="features `group.version` and `transaction.version`",
        kafka="finalized: new consumer groups (KIP-848), transactions of version 2 (KIP-890, part 2)",
        millrace="none: clients use the classic group protocol and transactions of version 1",
        why="the scope ends at the APIs of Apache Kafka 3.9",
    ),
    "inferred-release": Difference(
        subject="the release that kafka-python infers from the versions of the APIs",
        kafka="4.1",
        millrace="3.9",
        why="the scope ends at the APIs of Apache Kafka 3.9, and a client may meet those of one release only",
    ),
    "unsupported-version": Difference(
        subject="an unknown API, or a version that is not advertised",
        kafka="closes the connection",
        millrace="answers UNSUPPORTED_VERSION, where the API's answer has a place for it",
        why="a silent close tells an operator nothing",
    ),
    "client-software-name": Difference(
        subject="a client's name in ApiVersions that breaks the rules for names",
        kafka="INVALID_REQUEST",
        millrace="not looked at",
        why="nothing here uses it",
    ),
    "settings-of-loggers-and-groups": Difference(
        subject="settings of a broker's loggers, of subscriptions to clients' metrics, of groups",
        kafka="described and altered",
        millrace="INVALID_REQUEST, as from an Apache Kafka that knew none of them",
        why="a process logs at one level, no clients push metrics, and there is no group protocol "
        "with settings on the broker's side",
    ),
    "settings-without-effect": Difference(
        subject="`file.delete.delay.ms`, `preallocate`, `segment.jitter.ms` of a topic",
        kafka="described, with their defaults",
        millrace="taken when a tool sets them, and described only then",
        why="they would change nothing here: files go as soon as no reader is in them, segments are not "
        "preallocated, rolls not spread",
    ),
    "settings-of-older-releases": Difference(
        subject="`message.format.version`, `message.downconversion.enable`, "
        "`message.timestamp.difference.max.ms` of a topic",
        kafka="INVALID_CONFIG since 4.0",
        millrace="taken, without effect",
        why="whoever comes from an older release has them in scripts and in topics that are made alike",
    ),
    "unknown-group": Difference(
        subject="description of a group that does not exist",
        kafka="GROUP_ID_NOT_FOUND (DescribeGroups version 6)",
        millrace="state Dead, no error (version 5)",
        why="as Apache Kafka 3.9; tools say the same in other words",
    ),
    "unreadable-batch": Difference(
        subject="a produced batch of an unknown codec, of 2 GB by its own length, whose records do not "
        "decompress, or are framed as Java's consumers do not read it (lz4 of linked blocks)",
        kafka="UNKNOWN_SERVER_ERROR",
        millrace="UNSUPPORTED_COMPRESSION_TYPE, INVALID_RECORD, CORRUPT_MESSAGE",
        why="the producer is at fault, not the server, and the code says how",
    ),
    "list-offsets-0": Difference(
        subject="ListOffsets version 0, which Burrow speaks",
        kafka="closes the connection (since 4.0, KIP-896)",
        millrace="answers, also with the starts of segments",
        why="monitors of consumers' lag that are in use ask it",
    ),
    "decompressed-size": Difference(
        subject="a produced batch whose records hold more than 64 MiB when decompressed",
        kafka="stores it",
        millrace="MESSAGE_TOO_LARGE",
        why="some KB must not cost whoever reads them gigabytes",
    ),
    "bytes-behind-a-batch": Difference(
        subject="bytes behind a produced batch that are no batch",
        kafka="drops them, stores the batch",
        millrace="INVALID_RECORD",
        why="what was sent is stored whole or refused",
    ),
    "partition-twice": Difference(
        subject="a partition that stands twice in one produce request",
        kafka="answers once, stores one of its batches",
        millrace="INVALID_REQUEST",
        why="what was sent is stored whole or refused",
    ),
    "deleted-from-twice": Difference(
        subject="a partition that stands twice in one DeleteRecords request",
        kafka="the last offset counts",
        millrace="INVALID_REQUEST",
        why="what is deleted is gone, and which offset was meant nobody can tell",
    ),
    "offsets-within-a-batch": Difference(
        subject="a produced batch whose records do not count 0, 1, 2 …",
        kafka="stores it",
        millrace="INVALID_RECORD",
        why="its readers would be given offsets that belong to other records, or to none",
    ),
    "negative-lengths": Difference(
        subject="a string or an array whose length is below -1",
        kafka="takes it for null",
        millrace="closes the connection",
        why="null is -1 alone; a request that is not understood is not carried out",
    ),
    "future-timestamps": Difference(
        subject="`message.timestamp.after.max.ms` by default",
        kafka="1 hour (since 4.0); INVALID_TIMESTAMP beyond it",
        millrace="no limit (as up to 3.9)",
        why="an aggregate must take what its sources have taken, whatever their release",
    ),
    "small-segments": Difference(
        subject="`segment.bytes` of a topic",
        kafka="1 MiB or more (since 4.0, KIP-1030); INVALID_CONFIG below it",
        millrace="14 or more (as up to 3.9)",
        why="the settings of a topic that a mirror makes anew are its source's, whatever that one's release",
    ),
    "other-quotas": Difference(
        subject="quotas by user and by address, of request time, of changes to topics, of new connections",
        kafka="kept",
        millrace="INVALID_REQUEST; byte rates by client id alone",
        why="there is one user and one thread here; a limit that would not be kept is refused",
    ),
    "fetch-size": Difference(
        subject="most bytes in one answer to a fetch",
        kafka="55 MiB",
        millrace="8 MiB (`fetch.max.bytes`)",
        why="it bounds what one slow reader can hold; the reader asks again",
    ),
    "coordinators-alone": Difference(
        subject="coordinators where there are fewer brokers than their topics have replicas by default (3)",
        kafka="none until there are enough",
        millrace="the topic gets as many replicas as there are brokers; the log says how to raise them later",
        why="the first broker of a datacenter works alone; a factor that the configuration names is kept",
    ),
}


def table() -> str:
    """The differences as a Markdown table, in the order of the list."""
    rows = ["| what | Apache Kafka 4.1 | Millrace | why |", "| --- | --- | --- | --- |"]
    rows += [f"| {d.subject} | {d.kafka} | {d.millrace} | {d.why} |" for d in DIFFERENCES.values()]
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
