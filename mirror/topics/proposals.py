"""Who of a mirror's processes proposes a route, and how long that counts. Pure.

Called by `route_guard`. A route is proposed before it is carried (`routes.decide`), and others wait for who
has proposed. One that died in between would keep them waiting for ever, so a proposal is a lease:

- who proposed may claim the route on that proposal only within `LEASE_MS`, measured on its own clock from
  before the proposal was written until after the claim is; who is later proposes anew and looks again;
- who waits proposes anew from time to time, each time under another name;
- a proposal that somebody saw unchanged for `DEAD_AFTER_MS`, on that one's clock, is passed over;
- a claim never is. Whether it was written in time only its own process knows, so nobody else of its mirror
  takes it for more than a proposal. Who has claimed in time tells the route as carried, however long that
  takes, for the claim stands until it is told; who has not takes the claim back.

Clocks are never compared, only stretches of time: the first is within the second, and the second begins
later. So a proposal that is passed over will not be carried, however long its mirror stood still, unless it
is proposed anew: and then its mirror sees who has passed it over, as that one had proposed before it looked.

What is told as carried was claimed in time, so nobody has passed it over, and it holds for the whole mirror:
another process joins when it has looked anew, at what its mirror tells and after that at what others do. It
neither proposes nor takes anything back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from uuid import uuid4

from millrace.mirror.topics.route_records import RouteKey
from millrace.mirror.topics.routes import Route

LEASE_MS = 60_000
RENEW_AFTER_MS = LEASE_MS // 2
# Twice the lease: two clocks do not run at quite the same speed.
DEAD_AFTER_MS = 2 * LEASE_MS


class Leases:
    """The proposals of this process, each with its name and the moment before it was written, on a clock that
    never jumps. Keys are a source and a topic."""

    def __init__(self) -> None:
        self._process = uuid4().hex[:16]
        self._count = 0
        self._since_ms: dict[RouteKey, int] = {}
        self._names: dict[RouteKey, str] = {}

    def began(self, keys: Iterable[RouteKey], now_ms: int) -> str:
        """Gives the name of the proposals: never one that was used before, by whatever process."""
        self._count += 1
        name = f"{self._process}-{self._count}"
        for key in keys:
            self._since_ms[key], self._names[key] = now_ms, name
        return name

    def ended(self, key: RouteKey) -> None:
        self._since_ms.pop(key, None)
        self._names.pop(key, None)

    def own(self, key: RouteKey, told: Mapping[RouteKey, Route]) -> Route | None:
        """This process's proposal of a route, when it is there: its writing may have failed."""
        name = self._names.get(key)
        route = None if name is None else told.get((*key, name))
        return None if route is None or route.is_withdrawn else route

    def is_own(self, proposal: RouteKey) -> bool:
        return self._names.get(proposal[:2]) == proposal[2]

    def is_held(self, key: RouteKey, now_ms: int) -> bool:
        """Whether the route may be claimed on what was proposed."""
        return self._age_ms(key, now_ms) < LEASE_MS

    def is_due(self, key: RouteKey, now_ms: int) -> bool:
        """Whether it is to be proposed, or proposed anew."""
        return self._age_ms(key, now_ms) >= RENEW_AFTER_MS

    def _age_ms(self, key: RouteKey, now_ms: int) -> int:
        since_ms = self._since_ms.get(key)
        return LEASE_MS if since_ms is None else now_ms - since_ms


class ProposalWatch:
    """Proposals of others, as one reader of one topic or cluster has seen them."""

    def __init__(self) -> None:
        self._seen_since_ms: dict[Route, int] = {}

    def living(self, routes: Iterable[Route], asked_at_ms: int, answered_at_ms: int) -> list[Route]:
        """What counts of the routes of one reading: all that are carried or claimed, and proposals not passed
        over."""
        found = list(routes)
        unchanged = self.unchanged(found, asked_at_ms, answered_at_ms)
        return [route for route in found if route.is_claimed or route not in unchanged]

    def unchanged(self, routes: Iterable[Route], asked_at_ms: int, answered_at_ms: int) -> Collection[Route]:
        """Of the proposals of one reading those that were there for long."""
        before = self._seen_since_ms
        self._seen_since_ms = {
            route: before.get(route, answered_at_ms) for route in routes if route.is_proposed
        }
        return {
            route
            for route, since_ms in self._seen_since_ms.items()
            if asked_at_ms - since_ms >= DEAD_AFTER_MS
        }
