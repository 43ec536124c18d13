"""What the mirror's HTTP port answers: one handler for each route.

Made and started by `daemon`. `http/routes.py` is the table of calls, `http/guard.py` says who may make them,
`http/server.py` speaks HTTP; `operators` carries things out. A wish (pause, resume, retry, skip, throttle) is
answered when the target has it as a record: from then on it holds for every worker. Drain and reload are this
process' alone.

Invariant: a request, whatever it is, never ends the worker: what goes wrong in a handler is an answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel, ValidationError

from millrace.broker.client.groups import describe_group
from millrace.broker.client.security import SecretUnreadable
from millrace.broker.errors import ConfigError, MillraceError
from millrace.broker.expectations import expectation
from millrace.broker.protocol.address import Address
from millrace.broker.wording import count_of
from millrace.mirror.checks.check import StartRefused
from millrace.mirror.config import ControlConfig, MirrorConfig, load_config
from millrace.mirror.control.http.bodies import Selection, SkipBody, ThrottleBody
from millrace.mirror.control.http.client import NoAnswer, get_json
from millrace.mirror.control.http.guard import Guard
from millrace.mirror.control.http.messages import (
    Refusal,
    Request,
    Response,
    json_response,
    text_response,
)
from millrace.mirror.control.http.page import page_response
from millrace.mirror.control.http.routes import PROMETHEUS, ROUTES, Route, describe, find
from millrace.mirror.control.http.server import HttpServer
from millrace.mirror.control.operators import Connect
from millrace.mirror.control.wishes import Scope, WishRecord, retry_record, skip_record, throttle_record
from millrace.mirror.pipeline import State
from millrace.mirror.sharing.peers import Peer
from millrace.mirror.topics.routes import SourcePartition
from millrace.mirror.worker import Worker

log = structlog.get_logger("millrace.mirror.control.control")

# How long a wish may take to become a record on the target.
WISH_TIMEOUT_S = 5.0
# How long the target may take to say who is left in the mirror's group.
GROUP_TIMEOUT_S = 5.0
# The whole mirror is asked at most this often, however many pages are open.
MIRROR_MAX_AGE_S = 1.0

Handler = Callable[[Any], Awaitable[Response]]


class Control:
    """The HTTP surface of one worker. `config_path` is read again at a reload; None: there is no file."""

    def __init__(self, worker: Worker, connect: Connect, config_path: Path | None = None) -> None:
        self._worker = worker
        self._operators = worker.operators
        self._connect = connect
        self._config_path = config_path
        self._server = HttpServer(worker.config.control.listen, self.respond)
        self._draining: asyncio.Task[None] | None = None
        self._mirror: tuple[float, dict[str, Any]] | None = None
        self._asking_mirror = asyncio.Lock()
        self._handlers: dict[str, Handler] = {
            "page": self._page,
            "metrics": self._metrics,
            "health": self._health,
            "readiness": self._readiness,
            "status": self._status,
            "mirror": self._whole_mirror,
            "description": self._description,
            "pause": self._pause,
            "resume": self._resume,
            "retry": self._retry,
            "skip": self._skip,
            "throttle": self._throttle,
            "drain": self._drain,
            "reload": self._reload,
        }
        if set(self._handlers) != {route.name for route in ROUTES}:
            raise RuntimeError("every route has a handler, and every handler a route")

    @property
    def port(self) -> int:
        return self._server.port

    async def start(self) -> None:
        """Raises PortTaken, FatalError."""
        await self._server.start()
        self._operators.url = _url(self._worker.config.control, self.port)
        if self._guard(with_token=False).is_local:
            return
        if self._worker.config.control.token is None:
            log.warning(
                "control calls are refused: the port is open to the network and there is no control.token",
                listen=str(self._worker.config.control.listen),
            )

    async def stop(self) -> None:
        await self._server.stop()

    # --- requests --------------------------------------------------------------------------------

    async def respond(self, request: Request) -> Response:
        """The answer to any request."""
        try:
            self._guard(with_token=False).check(request, is_control=False)
            route = find(request.method, request.path)
            if not route.is_control:
                return await self._handlers[route.name](None)
            self._guard(with_token=True).check(request, is_control=True)
            return await self._handlers[route.name](_body(route, request.body))
        except Refusal as refusal:
            return refusal.response()
        except Exception:
            # A defect of ours: the worker goes on, and the log has all of it.
            log.exception("a request failed", method=request.method, path=request.path)
            return Refusal(500, "a defect of this program; its log says more").response()

    def _guard(self, *, with_token: bool) -> Guard:
        """As the config is now. The token is read anew each time, so a changed file needs no restart."""
        control = self._worker.config.control
        token = None
        if with_token and control.token is not None:
            try:
                token = control.token.read()
            except SecretUnreadable as error:
                raise Refusal(503, f"control.token cannot be read: {error}") from None
        return Guard(control.listen, token)

    # --- sight -----------------------------------------------------------------------------------

    async def _page(self, _: None) -> Response:
        return page_response()

    async def _metrics(self, _: None) -> Response:
        return Response(200, PROMETHEUS, self._worker.metrics.text())

    async def _health(self, _: None) -> Response:
        return text_response("ok")

    async def _readiness(self, _: None) -> Response:
        if self._operators.is_draining:
            is_done = self._draining is not None and self._draining.done()
            word = "drained: it carries nothing and can be ended" if is_done else "it is being drained"
            return text_response(f"not ready; {word}", 503)
        status = self._worker.status
        if status.is_ready():
            return text_response("ready")
        return text_response("; ".join(["not ready", *status.target_away(), *status.waits_for()]), 503)

    async def _status(self, _: None) -> Response:
        return json_response(self._worker.status.document())

    async def _description(self, _: None) -> Response:
        return json_response(describe(version("millrace")))

    async def _whole_mirror(self, _: None) -> Response:
        async with self._asking_mirror:
            now = time.monotonic()
            if self._mirror is None or now - self._mirror[0] > MIRROR_MAX_AGE_S:
                self._mirror = (now, await self._ask_workers())
            return json_response(self._mirror[1])

    async def _ask_workers(self) -> dict[str, Any]:
        own = self._worker.status.document()
        crew = self._operators.crew.workers
        at = Counter(peer.url for peer in crew)
        others = [
            peer
            for peer in crew
            # The crew is that of the last rebalance: this worker may have another id since, or none.
            if peer.id != own["member"]
            and (peer.url != own["url"] or (at[peer.url] > 1 and not own["draining"]))
        ]
        answers = await asyncio.gather(*(self._ask(peer, has_own_url=at[peer.url] == 1) for peer in others))
        mine = {"id": own["member"], "url": own["url"], "status": own, "error": None}
        workers = sorted([mine, *answers], key=lambda each: str(each["url"]))
        return {"mirror": own["mirror"], "crew_is_old": own["draining"], "workers": workers}

    async def _ask(self, peer: Peer, *, has_own_url: bool) -> dict[str, Any]:
        """`has_own_url`: no other worker names the same, as those of several machines do that all say
        127.0.0.1. Then whoever answers there under it is this one, also without its member id: it was
        drained, or has joined again since the crew was told."""
        answer: dict[str, Any] = {"id": peer.id, "url": peer.url, "status": None, "error": None}
        if peer.url is None:
            return answer | {"error": "it has not said where it answers (another version?)"}
        try:
            status = await get_json(f"{peer.url}/status")
        except NoAnswer as error:
            return answer | {"error": str(error)}
        is_this_one = isinstance(status, dict) and (
            status.get("member") == peer.id
            or (
                has_own_url
                and status.get("url") == peer.url
                and status.get("mirror") == self._worker.config.name
            )
        )
        if not is_this_one:
            reason = "another worker answers there: is it on another machine? set its control.advertised"
            return answer | {"error": reason}
        return answer | {"status": status}

    # --- wishes ----------------------------------------------------------------------------------

    async def _pause(self, body: Selection) -> Response:
        await self._check_exists(body.scope)
        records = self._operators.wishes.pause_records(body.scope, paused=True, at_ms=self._now_ms())
        await self._say(records)
        return _done(f"{body.scope} is paused until it is resumed")

    async def _resume(self, body: Selection) -> Response:
        await self._check_exists(body.scope)
        records = self._operators.wishes.pause_records(body.scope, paused=False, at_ms=self._now_ms())
        await self._say([*records, retry_record(body.scope, self._now_ms())])
        return _done(f"{body.scope} goes on")

    async def _retry(self, body: Selection) -> Response:
        await self._check_exists(body.scope)
        await self._say([retry_record(body.scope, self._now_ms())])
        return _done(f"what is stopped of {body.scope} is tried again")

    async def _skip(self, body: SkipBody) -> Response:
        partition = SourcePartition(body.source, body.topic, body.partition)
        scope = Scope(body.source, body.topic, body.partition)
        await self._check_exists(scope)
        first, gap_class = body.from_offset, body.gap_class
        pipeline = self._worker.owned.get(partition)
        if pipeline is not None:
            gap = pipeline.gap
            if gap is None or pipeline.state is not State.STOPPED:
                raise Refusal(409, f"{scope} is not stopped at a gap; its state is {pipeline.state.value}")
            if first is not None and (first, gap_class) != (gap.from_offset, gap.gap_class):
                raise Refusal(
                    409,
                    f"{scope} is stopped at another gap than that: {gap.gap_class.value}, from "
                    f"{gap.from_offset} up to {gap.to_offset}",
                )
            first, gap_class = gap.from_offset, gap.gap_class
        if first is None or gap_class is None:
            raise self._unknown_gap(scope)
        await self._say([skip_record(partition, first, gap_class.value, self._now_ms())])
        return _done(f"the {gap_class.value} gap of {scope} at offset {first} is let pass")

    def _unknown_gap(self, scope: Scope) -> Refusal:
        """This worker does not carry the partition, and was not told which gap is meant."""
        which = "say which gap with from and class"
        if self._operators.is_draining:
            return Refusal(409, f"this worker is drained and carries nothing: {which}, or ask another worker")
        if not self._worker.is_assigned:
            return Refusal(
                503,
                f"this worker has no share yet and does not know who carries {scope}: ask again, or {which}",
            )
        return Refusal(
            409, f"this worker does not carry {scope}: {which}, or ask the worker that does (see /mirror)"
        )

    async def _throttle(self, body: ThrottleBody) -> Response:
        await self._check_exists(Scope(body.source))
        await self._say([throttle_record(body.source, body.bytes_per_second, self._now_ms())])
        if body.bytes_per_second is None:
            return _done(f"{body.source} is read as fast as it goes")
        limit = f"{body.bytes_per_second} bytes/s"
        return _done(f"{body.source} is read at {limit} at most, all workers together")

    async def _check_exists(self, scope: Scope) -> None:
        """Raises Refusal 404 for a name that this mirror does not have: a wish for it would be a typing error
        that nobody notices. What a source has is not known before it has answered once."""
        readers = self._worker.readers
        if scope.source is not None and scope.source not in readers:
            raise Refusal(404, f"no source {scope.source!r} in this mirror; it has {', '.join(readers)}")
        if scope.topic is None:
            return
        asked = [reader for name, reader in readers.items() if scope.source in (None, name)]
        if any(reader.view is None for reader in asked):
            return
        topics = [
            topic for reader in asked for topic in reader.selected_topics() if topic.name == scope.topic
        ]
        known = {partition.topic for partition in self._worker.owned if partition.source == scope.source}
        if not topics and scope.topic not in known:
            where = f"source {scope.source} has" if scope.source else "no source has"
            none = "no topic" if scope.source else "a topic"
            raise Refusal(404, f"{where} {none} {scope.topic!r} that this mirror carries")
        if scope.partition is not None and topics:
            count = max(len(topic.partitions) for topic in topics)
            if scope.partition >= count:
                raise Refusal(404, f"topic {scope.topic} has {count_of(count, 'partition')}, numbered from 0")

    async def _say(self, records: Sequence[WishRecord]) -> None:
        if not self._operators.reader.is_ready:
            raise Refusal(503, "the wishes on the target have not been read yet; try again")
        try:
            async with asyncio.timeout(WISH_TIMEOUT_S):
                await self._operators.reader.write(records)
        except TimeoutError:
            raise Refusal(
                503,
                f"target {self._worker.target.name} does not take the record now: it is not certain whether "
                "this holds; ask again",
            ) from None

    # --- this process alone ----------------------------------------------------------------------

    async def _drain(self, _: BaseModel) -> Response:
        count, seat = len(self._worker.owned), self._worker.member.member_id
        if self._draining is None:
            # A task of its own: the drain goes on when the one who asked for it goes away.
            self._operators.is_draining = True
            self._draining = asyncio.get_running_loop().create_task(self._worker.drain())
        await asyncio.shield(self._draining)
        left = self._worker.work_left()
        parts = [f"drained: {count_of(count, 'partition')} given up" if left is None else str(left)]
        if await self._nobody_else(seat):
            parts.append("no other worker is in the mirror's group: nothing is carried until one is started")
        return _done("; ".join([*parts, "the process can be ended"]))

    async def _nobody_else(self, seat: str) -> bool:
        """Whether the mirror's group is known to have no member but the one that has left `seat`."""
        try:
            async with asyncio.timeout(GROUP_TIMEOUT_S):
                group = await describe_group(self._worker.target, self._worker.config.group_id)
        except (MillraceError, TimeoutError):
            return False
        return all(each.member_id == seat for each in group.members)

    async def _reload(self, _: BaseModel) -> Response:
        if self._config_path is None:
            raise Refusal(409, "this mirror was not started with a config file")
        try:
            config = await asyncio.to_thread(load_config, self._config_path)
        except ConfigError as error:
            raise Refusal(422, str(error)) from None
        return await self.reload(config)

    async def reload(self, config: MirrorConfig) -> Response:
        try:
            plan = await self._operators.reload(config, self._connect)
        except StartRefused as error:
            raise Refusal(422, f"nothing was changed: {error}") from None
        if plan.refused:
            raise Refusal(
                409,
                f"nothing was changed: {', '.join(plan.refused)} cannot be changed without a restart",
            )
        changed = ", ".join(plan.changed)
        done = f"reloaded: {changed}" if changed else "nothing has changed in the file"
        return json_response({"done": done, "changed": list(plan.changed)})

    async def reload_from_file(self) -> None:
        """What SIGHUP asks for; the log says what became of it."""
        try:
            answer = await self._reload(Selection(all=True))
            log.info("told to reload", answer=json.loads(answer.body)["done"])
        except Refusal as refusal:
            log.error("not reloaded", reason=str(refusal))

    def _now_ms(self) -> int:
        return self._worker.now_ms()


def _body(route: Route, body: bytes) -> BaseModel:
    """Raises Refusal 400 with the first mistake by name."""
    if route.body is None:
        raise RuntimeError("a control call has a body")
    try:
        return route.body.model_validate_json(body or b"{}")
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in mistake["loc"])
        words = f"expected {expectation(mistake)}"
        raise Refusal(400, f"{where}: {words}" if where else words) from None


def _done(sentence: str, more: Mapping[str, Any] | None = None) -> Response:
    log.info("as told", what=sentence)
    return json_response({"done": sentence, **(more or {})})


def _url(control: ControlConfig, port: int) -> str:
    """Where others find this port."""
    if control.advertised is not None:
        return f"http://{control.advertised}"
    host = socket.gethostname() if control.listen.is_everywhere else control.listen.host
    return f"http://{Address(host, port)}"
