"""From cells and events to verdicts. Pure but for `verdict_rows`, which runs inside Spark."""
