"""A session as the audit's job has it, with the `millrace` format registered, for looking at records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from millrace.audit.spark.spark_session import SparkBeside
from millrace.audit.spark.spark_source import register


@contextmanager
def spark_session(
    master: str, work_folder: Path, settings: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """`work_folder` takes Spark's own temporary files, `settings` are Spark's, by name."""
    with SparkBeside(master, work_folder, settings) as spark:
        session = spark.session()
        register(session)
        yield session
