"""What went wrong inside Spark, as the one line that a person needs. Pure.

Called by `job` around Spark's actions and by `spark_session` around its start. Spark wraps what a worker
raised into pages of Java and Python traces; what is expected to go wrong there is known by the words below.
Anything else is a defect and keeps its trace.
"""

from __future__ import annotations

import re

WORKER_ERRORS = ("ClusterUnreachable", "AccessRefused", "ConfigError", "UnsupportedVersion")
"""Our own errors, whose text is such a line already."""

_PYTHON = "spark.pyspark.python (audit.yaml: spark) or PYSPARK_PYTHON names the one to use"

_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"ModuleNotFoundError: No module named '([\w.]+)'",
        "Spark's workers lack the Python package {0}: install millrace's dependencies for their Python, or "
        "send them along (millrace audit package); " + _PYTHON,
    ),
    (
        r"PYTHON_VERSION_MISMATCH\]\s*(.*)",
        "Spark's workers run another Python than the driver: {0} " + _PYTHON,
    ),
    (
        r'Cannot run program "([^"]+)"',
        "Spark's workers cannot start {0}: no such program there; " + _PYTHON,
    ),
    (
        r"(?:SaslAuthenticationException|SslAuthenticationException): (.*)",
        "Spark's Kafka connector was refused: {0}",
    ),
    (
        r"(?:Some data may have been lost|Cannot fetch offset|OffsetOutOfRangeException|KAFKA_DATA_LOSS)",
        "offsets vanished between their pinning and Spark's connector reading them (retention); run again",
    ),
    (
        r"KafkaException: Failed to (?:construct kafka consumer|create new KafkaAdminClient)"
        r"[\s\S]*Caused by: [\w.]*?(\w+: [^\n]*)",
        "Spark's Kafka connector could not be set up: {0}",
    ),
    (
        r"TimeoutException: (Timed out waiting for a node assignment|Timeout of \d+ms expired)[^\n]*",
        "Spark's Kafka connector reached no broker: {0}",
    ),
    (
        r"(?:Call From \S+ to (?=\S+ failed on (?:connection|socket))|DestHost:destPort )([^\s,]+)",
        "Spark cannot reach the Hadoop server at {0}; run the audit again when it is back, the last good "
        "state is as it was",
    ),
    (
        r"SafeModeException: ([^\n]*)",
        "the state's file system takes no writes now ({0}); run the audit again when safe mode is over",
    ),
    (
        r"AccessControlException: (Permission denied[^\n]*)",
        "the state's file system refused Spark: {0}",
    ),
    (
        r"((?:File \S+ )?could only be written to \d+ of the [^\n]*|BlockMissingException: [^\n]*)",
        "the state's file system has too few data nodes: {0}",
    ),
    (
        r"(?:Mkdirs failed to create|FILE_NOT_EXIST\D[^\n]*?|PATH_NOT_FOUND\D[^\n]*?|FileNotFoundException: )"
        r"\s*(?:File )?((?:(?:file|hdfs|s3a):)?/\S*[^\s.:])",
        "Spark's executors do not find {0}: the state must lie where every one of them can reach it",
    ),
    (
        r"FAILED_READ_FILE\S* Encountered error while reading file (\S+?)\.?\s",
        "{0} cannot be read; restore it, or move the newest commit away to go back one run",
    ),
)


def one_line(problem: BaseException | str) -> str | None:
    """The line, or None for what is not expected to happen."""
    text = str(problem)
    for line in reversed(text.splitlines()):
        for name in WORKER_ERRORS:
            if f"{name}: " in line:
                return line.split(f"{name}: ", 1)[1].strip()
    for pattern, words in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            return words.format(*(group.strip() for group in found.groups()))
    return None
