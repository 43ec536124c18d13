"""Spark's own Kafka connector, `spark-sql-kafka-0-10`: the audit can read through it (`reader: spark-kafka`),
and its benchmark is measured beside it.

Its jars are gathered on first use by Maven (see spark_kafka.xml beside this file) into
`.peers/spark-kafka/libs`; `python -m tests.peers.spark_kafka` gathers them ahead of time.
"""

from __future__ import annotations

from pathlib import Path

from tests.peers.jars import ROOT, gather, pinned

POM = Path(__file__).with_name("spark_kafka.xml")
LIBS = ROOT / ".peers" / "spark-kafka" / "libs"
ARTIFACTS = (
    "spark-sql-kafka-0-10_2.13",
    "spark-token-provider-kafka-0-10_2.13",
    "kafka-clients",
    "commons-pool2",
)
"""What PySpark does not bring itself."""


def connector_jars() -> str:
    """The value of Spark's setting `spark.jars`: the connector's jars, gathered when they are missing."""
    libs = gather(POM, LIBS, f"{ARTIFACTS[0]}-{pinned(POM, 'spark')}.jar", ARTIFACTS)
    return ",".join(str(jar) for jar in sorted(libs.glob("*.jar")))


if __name__ == "__main__":
    print(connector_jars())
