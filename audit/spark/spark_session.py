"""A small Spark for one job: started lean, stopped by whoever started it.

`job` uses `SparkBeside`, which starts Spark while the clusters are looked at and stops it while the report
is written. Local masters get a driver bound to
loopback, a daemon of our own for the Python workers, and as few shuffle partitions as cores. On a cluster the
executors get our package with the application (`spark_package`), and a master that is not there, or has no
room, is one line. A session that runs already in the process is used and left running; so is the JVM that
spark-submit started this program from. What the user sets (`spark:` in audit.yaml) comes before what
spark-submit was given, and both before what is set here.

What takes the time of a small job is Spark's own start, so the JVM is told not to optimise for hours to come:
with the first compiler alone it needs 10 CPU seconds where it needed 17.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from millrace.audit.spark.masters import is_elsewhere, is_local
from millrace.audit.spark.spark_failures import one_line
from millrace.audit.spark.spark_package import ship_package
from millrace.broker.errors import JavaMissing, MillraceError
from millrace.broker.protocol.address import Address

LOCAL = "local[*]"
MOST_EXECUTORS = 1_000  # more is no number that anybody counts on
DRIVER_MEMORY = "1g"  # the driver's JVM only moves cells and verdicts; records never enter it
MINIMUM_JAVA = 17
EXECUTOR_TIMEOUT_S = 120.0  # how long a standalone master may take to give the first executor
CONNECT_TIMEOUT_S = 5.0

_MASTERS = re.compile(
    r"local|local\[(\d+|\*)(,\s*\d+)?\]|local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]|yarn"
    r"|spark://[^\s/,]+:\d+(,[^\s/,]+:\d+)*|k8s://\S+"
)

# The driver's JVM lives for seconds, and has little to collect: it must be quick to warm up. Where it carries
# rows by the hundred thousand, code that the second compiler made takes a fourth of the time; only the
# hottest is worth that compiler's own, so that it begins ten times later than it would.
_JAVA_OPTIONS = (
    "-XX:+UseSerialGC -Xshare:auto -XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 "
    "-XX:Tier4CompileThreshold=150000 -XX:Tier4BackEdgeThreshold=400000"
)
# Spark's own rule for what its pages and logs leave out, and more: the keys of Azure's and Google's stores,
# and the whole login of a Kafka client.
_SECRET_NAME = re.compile(
    r"(?i)secret|password|passphrase|token|credential|(access|account|private|encryption)[.]?key|sas[.]|jaas"
)
_START_LINES = (b"WARNING: Using incubator modules: jdk.incubator.vector",)

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = spark: %p %m%n
logger.pythonsource.name = org.apache.spark.sql.execution
logger.pythonsource.level = off
logger.executor.name = org.apache.spark.executor
logger.executor.level = off
logger.scheduler.name = org.apache.spark.scheduler
logger.scheduler.level = off
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""


def require_java() -> None:
    """Raises JavaMissing when there is no Java that Spark can start with."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        raise JavaMissing(
            f"no Java found for Spark; install Java {MINIMUM_JAVA} or newer "
            "(Debian, Ubuntu: apt-get install openjdk-17-jre-headless), or set JAVA_HOME"
        )
    told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    found = re.search(r'version "(\d+)(?:\.(\d+))?', told)
    number = (int(found[2] or 0) if found[1] == "1" else int(found[1])) if found else 0
    if number < MINIMUM_JAVA:
        raise JavaMissing(
            f"{java} is Java {number or 'of an unknown version'}; Spark needs {MINIMUM_JAVA} or newer"
        )


def chosen_master(given: str | None) -> str:
    """Where the job runs: on the session's own master where one runs already, else as the command line says,
    else as spark-submit was told, else here."""
    running = SparkContext._active_spark_context
    if running is not None:
        return str(running.master)
    return given or submitted().get("spark.master") or LOCAL


def submitted() -> dict[str, str]:
    """What spark-submit was given, when it started this program; it has started the JVM before."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


def core_count(master: str) -> int | None:
    """How many tasks run at once: the brackets of `local[n]`; None for a cluster, whose session knows."""
    found = re.fullmatch(r"local(?:\[(\d+|\*)(?:,\s*\d+)?\])?", master)
    if found is None:
        return None
    if found[1] == "*":
        return len(os.sched_getaffinity(0))
    return int(found[1] or 1)


def session_cores(session: SparkSession) -> int:
    """How many tasks run at once in a session that has started.

    A cluster's executors come one by one: those that are there are counted, unless more were asked for (YARN,
    Kubernetes), or may be asked for (dynamic allocation with a bound).
    """
    context = session.sparkContext
    cores = core_count(context.master or "")
    if cores is not None:
        return cores
    conf = context.getConf()
    each, running = _number(conf, "spark.executor.cores", 1), int(context.defaultParallelism)
    if conf.get("spark.dynamicAllocation.enabled") != "true":
        return max(running, each * _number(conf, "spark.executor.instances", 0))
    most = _number(conf, "spark.dynamicAllocation.maxExecutors", 0)
    return max(running, each * most if most <= MOST_EXECUTORS else 0)


def is_elastic(session: SparkSession) -> bool:
    """Whether the session gets as many executors as it has tasks for, without a bound that means anything."""
    context = session.sparkContext
    if core_count(context.master or "") is not None:
        return False
    conf = context.getConf()
    if conf.get("spark.dynamicAllocation.enabled") != "true":
        return False
    most = _number(conf, "spark.dynamicAllocation.maxExecutors", 0)
    return most == 0 or most > MOST_EXECUTORS


def _number(conf: SparkConf, name: str, absent: int) -> int:
    text = conf.get(name, "")
    return int(text) if text and text.isdigit() else absent


class SparkBeside:
    """A session that starts and stops in a thread, while the caller does what needs no Spark.

    `session()` waits for it; after `release()` it is gone. One that runs already is used and left running.
    """

    def __init__(
        self, master: str | None, work_folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self._master = master or LOCAL
        self._work_folder = work_folder
        self._settings = dict(settings or {})
        self._thread = ThreadPoolExecutor(1, "spark")
        # Not `getActiveSession`: that knows only the sessions of the thread that asks.
        self._running = SparkSession.builder.getOrCreate() if SparkContext._active_spark_context else None
        self._starting: Future[SparkSession] | None = None

    def __enter__(self) -> SparkBeside:
        if self._running is None:
            self._starting = self._thread.submit(_start, self._master, self._work_folder, self._settings)
        return self

    def __exit__(self, *problem: object) -> None:
        self.release()
        self._thread.shutdown()

    def session(self) -> SparkSession:
        if self._starting is not None:
            return self._starting.result()
        if self._running is None:
            raise RuntimeError("this Spark session was released")
        return self._running

    def release(self) -> None:
        """Stop the session, if it was started here; `__exit__` waits until it has."""
        starting, self._starting, self._running = self._starting, None, None
        if starting is not None:
            self._thread.submit(_stop, starting)


def _start(master: str, work_folder: Path, settings: Mapping[str, str]) -> SparkSession:
    require_java()
    require_master(master)
    # The driver's own path, unless the user names the Python that the workers have.
    named = {**submitted(), **settings}.get("spark.pyspark.python")
    python = named or os.environ.get("PYSPARK_PYTHON") or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    session = _build(master, work_folder, settings)
    session.sparkContext.setLogLevel("OFF")
    if not is_local(master):
        try:
            ship_package(session, work_folder)
            _wait_for_executor(session, master)
        except BaseException:
            session.stop()
            raise
    return session


def require_master(master: str) -> None:
    """Raises MillraceError for what is no master, which Spark would answer with a Java trace, and when none
    of a standalone cluster's masters listens: Spark itself would try for a minute, and then say that it was
    stopped."""
    if not _MASTERS.fullmatch(master):
        raise MillraceError(
            f"{master!r} is no Spark master; give local, local[4], local[*], spark://host:port, yarn, or "
            "k8s://https://host:port"
        )
    if not master.startswith("spark://"):
        return
    reasons = []
    for address in master.removeprefix("spark://").split(","):
        try:
            with socket.create_connection(Address.parse(address), CONNECT_TIMEOUT_S):
                return
        except OSError as problem:
            reasons.append(f"{address}: {problem.strerror or problem}")
        except ValueError as problem:
            reasons.append(f"{address}: expected {problem}")
    raise MillraceError(f"Spark master {master} cannot be reached ({'; '.join(reasons)})")


def _wait_for_executor(session: SparkSession, master: str) -> None:
    """A standalone cluster without room lets an application wait for ever, in silence."""
    conf = session.sparkContext.getConf()
    if not master.startswith("spark://") or conf.get("spark.dynamicAllocation.enabled") == "true":
        return
    context = session.sparkContext._jsc.sc()
    deadline = time.monotonic() + EXECUTOR_TIMEOUT_S
    while context.getExecutorMemoryStatus().size() < 2:  # the driver is one of them
        if time.monotonic() > deadline:
            asked = conf.get("spark.executor.memory", "1g")
            raise MillraceError(
                f"Spark master {master} gave no executor within {EXECUTOR_TIMEOUT_S:.0f} s: its workers are "
                f"busy, absent, or have less than {asked} of memory free"
            )
        time.sleep(0.05)


def _stop(starting: Future[SparkSession]) -> None:
    if starting.exception() is None:
        starting.result().stop()


def _build(master: str, work_folder: Path, settings: Mapping[str, str]) -> SparkSession:
    conf = _configuration(master, work_folder, settings)
    try:
        SparkContext(conf=conf, gateway=_java(_sayable(conf)))
    except Exception as problem:
        reason = one_line(problem) or _first_line(problem)
        raise MillraceError(f"Spark did not start on {master}: {reason}") from problem
    return SparkSession.builder.getOrCreate()


def _first_line(problem: BaseException) -> str:
    """Of a Java error the line that names it, without the call that was made."""
    lines = [line.strip(": \t") for line in str(problem).splitlines() if line.strip(": \t")]
    named = [line for line in lines if re.match(r"[\w.$]+(Exception|Error)\b", line)]
    return (named or lines or [type(problem).__name__])[0]


def _sayable(conf: SparkConf) -> SparkConf:
    """What may stand on the JVM's command line, which every user of the machine can read. The rest reaches it
    through the gateway, before anything uses it."""
    launch = SparkConf(loadDefaults=False)
    for name, value in conf.getAll():
        if not name.startswith("spark.hadoop.") and not _SECRET_NAME.search(name):
            launch.set(name, value)
    return launch


def _java(conf: SparkConf) -> Any:
    """The gateway to this process's JVM; a later session uses the first one's.

    The JVM's standard error goes through a thread that leaves out what is said at every start.
    """
    if SparkContext._gateway is not None:
        return SparkContext._gateway
    reading, writing = os.pipe()
    thread = threading.Thread(target=_relay_from, args=(reading,), name="spark-stderr", daemon=True)
    thread.start()
    gateway = None
    try:
        gateway = launch_gateway(conf, {"stdin": subprocess.PIPE, "stderr": writing})
    finally:
        os.close(writing)
        if gateway is None:
            thread.join(5)  # a JVM that could not start says why before it ends
    return gateway


def _relay_from(descriptor: int) -> None:
    with open(descriptor, "rb") as lines:
        relay(lines)


def relay(lines: Iterable[bytes]) -> None:
    """Pass the JVM's standard error on, without the lines that every start says."""
    for line in lines:
        if not line.startswith(_START_LINES):
            sys.stderr.buffer.write(line)
            sys.stderr.flush()


def scratch_folder(work_folder: Path) -> str:
    """Where Spark's own files lie while it runs. It reads commas as the ends of folders."""
    return tempfile.gettempdir() if "," in str(work_folder) else str(work_folder / "local")


def _configuration(master: str, work_folder: Path, settings: Mapping[str, str]) -> SparkConf:
    log4j = work_folder / "log4j2.properties"
    log4j.write_text(_LOG4J, "utf-8")
    cores = core_count(master)
    chosen = {
        "spark.app.name": "millrace audit",
        "spark.master": master,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": DRIVER_MEMORY,
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j.as_uri()} {_JAVA_OPTIONS}",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.parquet.compression.codec": "zstd",
        "spark.sql.warehouse.dir": str(work_folder / "warehouse"),
        "spark.python.worker.reuse": "true",
        "spark.redaction.regex": _SECRET_NAME.pattern,
        "spark.shuffle.compress": "false" if cores is not None and cores <= 4 else "true",
    }
    if cores is not None:  # what a cluster has is asked when it is there (`session_cores`)
        chosen |= {"spark.sql.shuffle.partitions": str(cores), "spark.default.parallelism": str(cores)}
    if not is_elsewhere(master):  # it is a setting of the executors, too
        chosen["spark.local.dir"] = scratch_folder(work_folder)
    if is_local(master):
        chosen |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.python.daemon.module": "millrace.audit.spark.spark_daemon",
        }
    return SparkConf().setAll(list({**chosen, **submitted(), **settings, "spark.master": master}.items()))
