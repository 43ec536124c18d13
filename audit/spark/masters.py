"""What a master's name says of where tasks run. Pure, and light to import."""

from __future__ import annotations


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's own JVM, on this machine."""
    return master == "local" or master.startswith("local[")


def is_elsewhere(master: str) -> bool:
    """Whether tasks may run on other machines than the driver. `local-cluster` starts workers beside it."""
    return not master.startswith("local")
