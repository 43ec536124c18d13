"""What Hadoop's servers have in common here: the jars, a command line, and files of settings.

The jar that Hadoop makes for tests has its servers; the client's jars come with PySpark. It is gathered on
first use by Maven (see hdfs.xml beside this file) into `.peers/hdfs/libs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspark

from tests.peers.jars import ROOT, gather, pinned

POM = Path(__file__).with_name("hdfs.xml")
LIBS = ROOT / ".peers" / "hdfs" / "libs"

_JVM = ("-Xmx256M", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_CLIENT_JARS = ("hadoop-client-*.jar", "log4j-*.jar", "slf4j-*.jar", "jcl-over-slf4j-*.jar")
_LOG4J = """\
rootLogger.level = warn
rootLogger.appenderRef.stdout.ref = stdout
appender.stdout.type = Console
appender.stdout.name = stdout
appender.stdout.layout.type = PatternLayout
appender.stdout.layout.pattern = %d %p %c{1}: %m%n
"""


def gather_jars() -> Path:
    """Make sure the pinned version's jar is in `.peers/hdfs/libs`; returns that folder."""
    return gather(POM, LIBS, f"hadoop-client-minicluster-{pinned(POM, 'hadoop')}.jar")


def command(configuration: Path, server: str, *arguments: str, beside: Sequence[Path] = ()) -> list[str]:
    """Runs a server by its class; what is configured, and how it logs, lies in the folder. `beside` are jars
    that it needs, too."""
    (configuration / "log4j2.properties").write_text(_LOG4J)
    brought = Path(pyspark.__file__).parent / "jars"
    jars = [str(jar) for pattern in _CLIENT_JARS for jar in sorted(brought.glob(pattern))]
    path = ":".join([str(configuration), *map(str, gather_jars().glob("*.jar")), *map(str, beside), *jars])
    return ["java", *_JVM, "-cp", path, server, *arguments]


def write_settings(path: Path, settings: Mapping[str, str]) -> None:
    rows = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>\n"
        for name, value in settings.items()
    )
    path.write_text(f"<configuration>\n{rows}</configuration>\n")
