"""Spark: the data source, its session and workers, tasks, and reading through the Kafka connector."""
