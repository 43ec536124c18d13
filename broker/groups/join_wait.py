"""How long a group waits for its members to join, before its next generation begins.

Part of the group state machine (`membership.py` is the only caller) and pure like it. There are two kinds of
wait. A group that was empty waits out `group.initial.rebalance.delay.ms` whoever has joined, and once more
whenever somebody joined meanwhile, all in all no longer than the members' rebalance timeout (KIP-134): a
deployment that starts its processes one by one has one rebalance and not one for each. Any later rebalance
is over as soon as all have joined, or at its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class JoinWait:
    """Made by `first` or `again`. `deadline_ms` is when, by the steady clock, `is_over` must be asked at the
    latest."""

    deadline_ms: int
    _delay_ms: int = 0
    """Of the first wait: by how much newcomers extend it; 0 for the others."""
    _extension_left_ms: int = 0
    _is_first: bool = False
    _has_newcomers: bool = False

    @classmethod
    def first(cls, steady_ms: int, delay_ms: int, rebalance_timeout_ms: int) -> JoinWait:
        """The group was empty."""
        return cls(steady_ms + delay_ms, delay_ms, max(rebalance_timeout_ms - delay_ms, 0), True)

    @classmethod
    def again(cls, steady_ms: int, timeout_ms: int) -> JoinWait:
        """The group has members, who are to join again."""
        return cls(steady_ms + timeout_ms)

    def newcomer(self) -> None:
        """Somebody joined who is not the first."""
        self._has_newcomers = True

    def is_over(self, steady_ms: int, everyone_joined: Callable[[], bool]) -> bool:
        """Whether the next generation may begin; a first wait that is due may be extended by this."""
        is_due = steady_ms >= self.deadline_ms
        if not self._is_first:
            return is_due or everyone_joined()
        if is_due and self._has_newcomers and self._extension_left_ms:
            extension_ms = min(self._delay_ms, self._extension_left_ms)
            self.deadline_ms = steady_ms + extension_ms
            self._extension_left_ms -= extension_ms
            self._has_newcomers = False
            return False
        return is_due
