"""What went wrong inside Spark, as the one line that a person needs. Pure.

Called by `job` around Spark's actions and by `spark_session` around its start. Spark wraps what a worker
raised into pages of Java and Python traces; what is expected to go wrong there is known by the words below.
Anything else is a defect and keeps its trace.
"""

from __future__ import annotations

import re

WORKER_ERRORS = ("ClusterUnreachable", "AccessRefused", "ConfigError", "UnsupportedVersion")
"""Our own errors, whose text is such a line already."""

UNREADABLE = " cannot be read"
"""Behind the name of a file of the state's; `spark_cells` says what to do."""

_PYTHON = "spark.pyspark.python (audit.yaml: spark) or PYSPARK_PYTHON names the one to use"
_CURE = f"for its Python, or send them along (millrace audit package); {_PYTHON}"

_HOST = re.compile(r"Lost task [\d.]+ in stage [\d.]+ \(TID \d+\) \((\S+) executor")
_ABSENT = re.compile(r"^\s*ModuleNotFoundError: No module named '([\w.]+)'", re.MULTILINE)
_UNLOADED = re.compile(r"^\s*(ImportError|OSError):[ ]*(.*)$", re.MULTILINE)
_ORIGINAL = re.compile(r"Original error was: (.+)")  # numpy's own words begin with an empty line
_FRAME = re.compile(r'^\s*File "([^"\n]*)", line \d+, in (.+)$', re.MULTILINE)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/(\w+)")
_NAMED = re.compile(r"cannot import name '\w+' from (?:partially initialized module )?'(\w+)")
_NOT_LIBRARIES = ("millrace", "pyspark")

_KNOWN: tuple[tuple[str, str], ...] = (
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
        f"{{0}}{UNREADABLE}",
    ),
)


def one_line(problem: BaseException | str) -> str | None:
    """The line, or None for what is not expected to happen."""
    text = str(problem)
    for line in reversed(text.splitlines()):
        for name in WORKER_ERRORS:
            if f"{name}: " in line:
                return line.split(f"{name}: ", 1)[1].strip()
    library = _library(text)
    if library is not None:
        return library
    for pattern, words in _KNOWN:
        found = re.search(pattern, text)
        if found is not None:
            return words.format(*(group.strip() for group in found.groups()))
    return None


def _library(text: str) -> str | None:
    """The line for a worker that lacks a library, or on which one is there and cannot be loaded: compiled
    for another machine, beside another version of what it needs, or without a system library."""
    found = _HOST.search(text)
    worker = f"Spark's worker {found[1]}" if found else "A worker of Spark's"
    if absent := _ABSENT.search(text):
        return f"{worker} lacks the Python package {absent[1]}: install millrace's dependencies {_CURE}"
    problem = next(reversed(list(_UNLOADED.finditer(text))), None)
    if problem is None:
        return None
    kind, said = problem.groups()
    if not said and (original := _ORIGINAL.search(text, problem.end())):
        said = original[1]
    frames = _FRAME.findall(text, 0, problem.start())
    # Any other OSError is no library's: a disk or a socket.
    importing = _libraries([place for place, where in frames if where == "<module>"])
    if kind == "OSError" and not importing:
        return None
    named = _NAMED.search(said)
    libraries = _libraries([place for place, _ in frames]) + _libraries([said])
    library = named[1] if named else libraries[-1] if libraries else "that it needs"
    return (
        f"{worker} cannot load the Python package {library} ({kind}: {said.strip()}): install millrace's "
        f"dependencies anew {_CURE}"
    )


def _libraries(texts: list[str]) -> list[str]:
    """The installed packages whose files these name."""
    found = [name for text in texts for name in _INSTALLED.findall(text)]
    return [name for name in found if name not in _NOT_LIBRARIES]
