"""How a partition is named throughout: by its topic and its number. Pure."""

from __future__ import annotations

from typing import TypeAlias

TopicPartition: TypeAlias = tuple[str, int]
