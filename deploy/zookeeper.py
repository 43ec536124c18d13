"""Runs Apache ZooKeeper from the jars that PySpark ships, so that a sandbox needs no download.

Called by `millrace zookeeper run`, by the local sandbox and by cluster tests. One standalone server with a
small heap, the admin server off and a quiet log on standard error. What a server needs is written beside its
data (`zoo.cfg`, `log4j2.properties`); `launch_command` prepares it and returns the command line,
`run_in_foreground` replaces the current process by it: signals and the exit status are ZooKeeper's own.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from millrace.broker.errors import DataFolderNotWritable, FatalError, PortTaken
from millrace.broker.protocol.address import Address
from millrace.deploy.java import find_java

MAIN_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"

# What a standalone server loads and nothing more of Spark's three hundred jars: a short class path is quick.
_JARS = (
    "zookeeper-[0-9]*.jar",
    "zookeeper-jute-*.jar",
    "slf4j-api-*.jar",
    "log4j-slf4j2-impl-*.jar",
    "log4j-api-*.jar",
    "log4j-core-*.jar",
    "metrics-core-*.jar",
    "commons-cli-*.jar",
    "commons-io-*.jar",
    "snappy-java-*.jar",
    "netty-buffer-*.jar",
    "netty-codec-base-*.jar",
    "netty-common-*.jar",
    "netty-handler-*.jar",
    "netty-resolver-[0-9]*.jar",
    "netty-transport-[0-9]*.jar",
)

# Serial GC and the first compiler only: a sandbox server lives for minutes beside brokers on few cores.
_JVM_OPTIONS = ("-Xms16m", "-Xmx{heap_mib}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")

# The tick bounds how quickly a dead session is noticed; the explicit limits let a client ask for 1 s to 60 s.
_SERVER_CONFIG = """\
dataDir={data}
clientPortAddress={host}
clientPort={port}
tickTime=500
minSessionTimeout=1000
maxSessionTimeout=60000
maxClientCnxns=0
maxCnxns=0
admin.enableServer=false
4lw.commands.whitelist=ruok,srvr,mntr
autopurge.snapRetainCount=3
autopurge.purgeInterval=1
"""

_LOG_CONFIG = """\
status=error
rootLogger.level={level}
rootLogger.appenderRef.console.ref=console
appender.console.type=Console
appender.console.name=console
appender.console.target=SYSTEM_ERR
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d{{yyyy-MM-dd HH:mm:ss}} zookeeper %p %c{{1}}: %m%n
"""


def launch_command(
    port: int,
    data: Path,
    *,
    host: str = "127.0.0.1",
    heap_mib: int = 128,
    log_level: str = "error",
    java: Path | None = None,
) -> list[str]:
    """Writes the server's configuration below `data` and returns the command line that starts it.

    Raises JavaMissing, PortTaken or DataFolderNotWritable before anything is started. `port` must be a real
    port: ZooKeeper cannot say which one it took.
    """
    program = java or find_java()
    _check_port_is_free(Address(host, port))
    server_config = data / "zoo.cfg"
    log_config = data / "log4j2.properties"
    try:
        (data / "version-2").mkdir(parents=True, exist_ok=True)
        server_config.write_text(
            _SERVER_CONFIG.format(data=data.resolve() / "version-2", host=host, port=port), encoding="utf-8"
        )
        log_config.write_text(_LOG_CONFIG.format(level=log_level), encoding="utf-8")
    except OSError as error:
        raise DataFolderNotWritable(
            f"ZooKeeper cannot write to its data folder {data} ({error.strerror}): choose another with --data"
        ) from error
    return [
        str(program),
        *(option.format(heap_mib=heap_mib) for option in _JVM_OPTIONS),
        f"-Dlog4j2.configurationFile={log_config.resolve()}",
        "-Dzookeeper.jmx.log4j.disable=true",
        f"-Djava.net.preferIPv4Stack={'false' if ':' in host else 'true'}",
        "-cp",
        ":".join(str(jar) for jar in server_jars()),
        MAIN_CLASS,
        str(server_config.resolve()),
    ]


def run_in_foreground(port: int, data: Path, *, host: str = "127.0.0.1", heap_mib: int = 128) -> NoReturn:
    """Becomes the ZooKeeper server: this process is replaced, so signals and the exit status are its own."""
    command = launch_command(port, data, host=host, heap_mib=heap_mib)
    print(f"ZooKeeper at {Address(host, port)}, data in {data} (Ctrl-C stops it)", flush=True)
    sys.stderr.flush()
    os.execv(command[0], command)


def server_jars() -> list[Path]:
    """The jars of PySpark that a ZooKeeper server needs, found without importing PySpark."""
    spec = importlib.util.find_spec("pyspark")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if not roots:
        raise FatalError("PySpark, whose jars hold ZooKeeper, is not installed: run pip install pyspark")
    folder = Path(roots[0]) / "jars"
    found: list[Path] = []
    for pattern in _JARS:
        matches = sorted(folder.glob(pattern))
        if not matches:
            raise FatalError(f"no {pattern} in {folder}: install the PySpark that constraints.txt names")
        found.extend(matches)
    return found


def is_serving(port: int, host: str = "127.0.0.1", timeout_s: float = 1.0) -> bool:
    """Whether a ZooKeeper at this address takes sessions: "srvr" tells its mode then, while "ruok" is
    answered a moment before, and who connects in that moment is turned away."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(b"srvr")
            connection.settimeout(timeout_s)
            return b"\nMode: " in b"".join(iter(lambda: connection.recv(4096), b""))
    except OSError:
        return False


def _check_port_is_free(address: Address) -> None:
    try:
        family, kind, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {address} is taken: stop what listens there or choose another --port"
            ) from error
        raise FatalError(f"cannot listen on {address} ({error.strerror}): check --host and --port") from error
