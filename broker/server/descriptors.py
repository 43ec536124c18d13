"""How many files and sockets this process may hold open.

A broker holds one descriptor for each segment that was used of late and one for each connection; many systems
hand out 1,024 and allow far more to those who ask. Called once at start-up by `server/broker.py`.
"""

from __future__ import annotations

import resource

FEW_DESCRIPTORS = 4_096
"""Fewer than this are worth a warning."""


def raise_descriptor_limit() -> int:
    """Asks for as many as the system allows this process; returns how many it has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return soft  # a system that counts the hard limit differently; what there is must do
        soft = hard
    return soft
