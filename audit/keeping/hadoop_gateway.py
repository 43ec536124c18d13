"""The JVM of this process, for Hadoop's file system API. Called by `state_files`.

Spark's own JVM and settings when it runs (or has run) here; else a JVM is started for the files alone, which
`audit status`, `audit waive` and `audit explain` need when the state lies at a URI. That one gets what file
systems need of the user's settings (`spark:` in audit.yaml): jars, and Hadoop's own settings.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from millrace.broker.errors import MillraceError

_lock = threading.Lock()
_own: list[Any] = []

_FOR_THE_JVM = ("spark.jars", "spark.driver.extra")
_HADOOP = "spark.hadoop."


def java_gateway(settings: Mapping[str, str] | None = None) -> tuple[Any, Any]:
    """(the JVM's view, a Hadoop configuration). `settings` are Spark's by name, for when it does not run.

    Raises JavaMissing; MillraceError when no JVM starts.
    """
    settings = settings or {}
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    from millrace.audit.spark.spark_session import require_java

    context = SparkContext._active_spark_context
    if context is not None and context._jsc is not None:
        jvm = context._jvm
        return jvm, jvm.org.apache.hadoop.conf.Configuration(context._jsc.hadoopConfiguration())  # type: ignore[union-attr]
    with _lock:
        gateway = SparkContext._gateway or (_own[0] if _own else None)
        if gateway is None:
            require_java()
            try:
                # What the JVM logs at its start says nothing of the audit.
                quiet = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL}
                chosen = [each for each in settings.items() if each[0].startswith(_FOR_THE_JVM)]
                gateway = launch_gateway(SparkConf().setAll(chosen), quiet)
            except Exception as problem:
                raise MillraceError(
                    f"the JVM for the state's file system did not start: {problem}"
                ) from problem
            _own.append(gateway)
    conf = gateway.jvm.org.apache.hadoop.conf.Configuration()
    for name, value in settings.items():  # not on the JVM's command line, where everybody sees secrets
        if name.startswith(_HADOOP):
            conf.set(name.removeprefix(_HADOOP), value)
    return gateway.jvm, conf
