"""The mirror's page in a real browser: what a tired operator needs is there, in light, dark and narrow.

The page and the server are the product's own; the mirror's state is made up, so that everything that can go
wrong is on one page, but for one test, whose mirror runs: that its answers have what the page reads. Set
MILLRACE_SCREENSHOTS to a folder to look at it.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.broker.client.admin import create_topic
from millrace.broker.protocol.address import Address
from millrace.broker.protocol.records import Record, build_batch
from millrace.mirror.control.http.bodies import MirrorAnswer
from millrace.mirror.control.http.messages import Request, Response, json_response
from millrace.mirror.control.http.page import page_response
from millrace.mirror.control.http.server import HttpServer
from millrace.mirror.gaps.advice import what_to_do
from millrace.mirror.gaps.gaps import GapClass
from tests.browser.devtools import Page, browser
from tests.cluster.mirror_calls import call, partitions, runs, states
from tests.cluster.mirror_process import send, until
from tests.pairs import Pair, in_pairs
from tests.waiting import patience

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=document.title='owned'>"
LONG = "orders.europe.invoices.corrected.v2.partitioned-by-customer"
AT_MS = 1_774_000_000_000
DAY_MS = 86_400_000


def partition(
    source: str, topic: str, number: int, state: str = "running", lag: float = 0.0, **more: Any
) -> dict[str, Any]:
    return {
        "source": source,
        "topic": topic,
        "partition": number,
        "to": f"{topic}-{number}",
        "state": state,
        "position": 1_000_000,
        "log_end": 1_000_000 + int(lag * 100),
        "lag_records": int(lag * 100),
        "lag_seconds": lag,
        "outstanding_bytes": 0,
        **more,
    }


def gap(gap_class: GapClass, reason: str) -> dict[str, Any]:
    return {
        "from": 1_000_000,
        "to": 1_000_107,
        "class": gap_class.value,
        "reason": reason,
        "todo": what_to_do(gap_class),
        "at_ms": AT_MS,
    }


def rate(source: str, topic: str, per_second: float) -> dict[str, Any]:
    return {
        "source": source,
        "topic": topic,
        "records": 10**7,
        "bytes": 10**10,
        "records_per_second": per_second,
        "bytes_per_second": per_second * 240,
    }


def status(number: int, **more: Any) -> dict[str, Any]:
    return {
        "mirror": "aggregate",
        "url": f"http://10.0.0.{number}:8090",
        "ready": True,
        "stopping": False,
        "draining": False,
        "delivery": "exactly_once",
        "transactions": {"committed": 7, "aborted": 0, "open_seconds": 0.7, "last_open_seconds": 0.1},
        "member": f"member-{number}",
        "generation": 7,
        "leader": number == 1,
        "at_ms": AT_MS,
        "paused": [],
        "target": {"cluster": "agg", "connected": True, "retries": 0, "queued_batches": 0},
        "sources": [
            {"cluster": "ewr", "connected": True, "throttle_bytes_per_second": None},
            {"cluster": "lhr", "connected": True, "throttle_bytes_per_second": None},
        ],
        "refused_topics": [],
        "internal_topics": [],
        "groups": [],
        "topics": [],
        "partitions": [],
        **more,
    }


def group(name: str, state: str, **more: Any) -> dict[str, Any]:
    known = {
        "source": "ewr",
        "group": name,
        "state": state,
        "partitions": 12,
        "committed": 40,
        "at_ms": AT_MS,
    }
    return known | more


def mirror(*workers: dict[str, Any]) -> dict[str, Any]:
    document = {
        "mirror": "aggregate",
        "workers": [
            each
            if "status" in each
            else {"id": each["member"], "url": each["url"], "status": each, "error": None}
            for each in workers
        ],
    }
    MirrorAnswer.model_validate(document)  # what the page is shown is what the description says
    return document


def healthy() -> dict[str, Any]:
    one = status(
        1,
        partitions=[partition("ewr", "flights", number) for number in range(3)],
        topics=[rate("ewr", "flights", 12_400)],
    )
    two = status(
        2,
        partitions=[partition("lhr", "flights", 0, lag=3), partition("lhr", LONG, 0)],
        topics=[rate("lhr", "flights", 310), rate("lhr", LONG, 0.4)],
    )
    return mirror(one, two)


def troubled() -> dict[str, Any]:
    one = status(
        1,
        paused=["ewr/flights:2"],
        sources=[
            {"cluster": "ewr", "connected": True, "throttle_bytes_per_second": 10_000_000},
            {
                "cluster": "lhr",
                "connected": False,
                "error": "connection refused",
                "throttle_bytes_per_second": None,
            },
        ],
        partitions=[
            partition("ewr", "flights", 0),
            partition(
                "ewr",
                "flights",
                1,
                "stopped",
                7_300,
                gap=gap(GapClass.EXPIRED, "retention deleted it before it was fetched"),
            ),
            partition("ewr", "flights", 2, "paused", 95),
            partition("lhr", LONG, 0, lag=14),
            partition("ewr", HOSTILE, 0, lag=1),
        ],
        topics=[rate("ewr", "flights", 12_400)],
    )
    two = status(
        2,
        partitions=[
            partition(
                "ewr",
                LONG,
                11,
                "stopped",
                400_000,
                gap=gap(GapClass.TOO_LARGE, "the target says: message too large"),
            ),
            partition("ewr", LONG, 12, "starting") | {"position": None, "log_end": None, "lag_records": None},
        ],
        topics=[rate("ewr", LONG, 0)],
        refused_topics=[{"source": "lhr", "topic": "loops", "reason": "it would be carried into itself"}],
        internal_topics=[{"source": "ewr", "topic": "_schemas", "reason": "a Schema Registry's"}],
        groups=[
            group("billing", "synced"),
            group(HOSTILE, "active_on_target"),
            group("reports", "failing", reason="sources merge into agg/flights"),
            group("search", "partly"),
        ],
    )
    silent = {
        "id": "member-3",
        "url": "http://10.0.0.3:8090",
        "status": None,
        "error": "no answer within 2 s",
    }
    return mirror(one, two, silent)


class PageServer:
    """The real server in a thread; `document` is what `/mirror` says, None: it fails."""

    def __init__(self) -> None:
        self.document: dict[str, Any] | None = healthy()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server = HttpServer(Address("127.0.0.1", 0), self._respond)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}/"

    def start(self) -> PageServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(patience())
        return self

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(patience())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience())

    async def _respond(self, request: Request) -> Response:
        if request.path == "/":
            return page_response()
        if request.path == "/mirror" and self.document is not None:
            return json_response(copy.deepcopy(self.document))
        return json_response({"error": "not now"}, 503)


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    serving = PageServer().start()
    yield serving
    serving.stop()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(page: Page, server: PageServer, document: dict[str, Any], **how: Any) -> str:
    """The text of the page once it shows the document."""
    server.document = document
    page.messages.clear()
    page.requests.clear()
    page.show(server.url, **how)
    page.until("document.getElementById('when') && document.getElementById('when').textContent !== ''")
    if folder := os.environ.get("MILLRACE_SCREENSHOTS"):
        page.value("new Promise(done => setTimeout(done, 2500))")
        name = "-".join(
            ["mirror", "troubled" if "stopped" in str(document) else "healthy", *map(str, how.values())]
        )
        page.screenshot(Path(folder) / f"{name}.png")
    return str(page.value("document.body.innerText"))


def test_a_healthy_mirror_says_so_at_a_glance(page: Page, server: PageServer) -> None:
    text = show(page, server, healthy())
    assert page.value("document.getElementById('state').textContent") == "running"
    assert page.value("document.title") == "running · aggregate"
    for words in ("aggregate → agg", "2 of 2", "exactly once", "flights", "12 k", "3 s"):
        assert words in text, words
    assert "Needs you" not in text
    assert page.messages == []


def test_what_is_wrong_comes_first_with_what_to_do(page: Page, server: PageServer) -> None:
    text = show(page, server, troubled())
    assert page.value("document.getElementById('state').textContent") == "2 stopped"
    for words in (
        "http://10.0.0.3:8090 does not answer: no answer within 2 s",
        "cannot reach source lhr: connection refused",
        "lhr/loops is not carried",
        "never carried: ewr/_schemas (a Schema Registry's)",
        "paused by an operator: ewr/flights:2",
        "throttled: ewr to 10 MB/s",
        "107 offsets from 1000000",
        "millrace mirror skip ewr/flights:1",
        f"millrace mirror retry ewr/{LONG}:11",
        "raise max.message.bytes",
        "4 d",
        "2 h 1 min",
    ):
        assert words in text, words
    order = page.value("[...document.querySelectorAll('#topics tbody td.name')].map(each => each.innerText)")
    assert [name.split(" / ")[1] for name in order] == [LONG, "flights", LONG, HOSTILE]


def test_groups_are_listed_and_those_that_are_not_in_step_come_first(page: Page, server: PageServer) -> None:
    show(page, server, healthy())
    assert page.value("document.getElementById('moving').hidden")
    text = show(page, server, troubled())
    assert not page.value("document.getElementById('moving').hidden")
    rows = page.value("[...document.querySelectorAll('#groups tbody')].map(each => each.innerText)")
    assert ["reports" in rows[0], "search" in rows[1], HOSTILE in rows[2], "billing" in rows[3]] == [True] * 4
    assert "not in step" in rows[0] and "sources merge into agg/flights" in rows[0]
    assert "partly in step" in rows[1] and "read on the target" in rows[2] and "in step" in rows[3]
    assert "Consumer groups kept in step" in text


def test_what_was_not_asked_yet_is_not_called_down(page: Page, server: PageServer) -> None:
    unknown = {"connected": False, "starting": True}
    document = healthy()
    for worker in document["workers"]:
        for cluster in (worker["status"]["target"], *worker["status"]["sources"]):
            cluster |= unknown
    text = show(page, server, document)
    assert page.value("document.getElementById('state').textContent") == "starting"
    assert "cannot reach" not in text and "down" not in text
    for worker in document["workers"]:
        worker["status"]["target"]["starting"] = False
    text = show(page, server, document)
    assert page.value("document.getElementById('state').textContent") == "target down"
    assert "cannot reach target agg" in text and "cannot reach source" not in text


def test_a_mirror_whose_workers_are_all_drained_is_not_called_well(page: Page, server: PageServer) -> None:
    def drained(number: int) -> dict[str, Any]:
        return status(number, ready=False, draining=True, member="", leader=False)

    text = show(page, server, mirror(drained(1), drained(2)) | {"crew_is_old": True})
    assert page.value("document.getElementById('state').textContent") == "drained"
    assert page.value("document.getElementById('state').className") == "pill bad"
    assert (
        "Nothing is carried: every worker that answers is drained; start one, unless one was started since"
        in text
    )
    assert "it names the workers of when it left" in text
    text = show(page, server, mirror(drained(1), status(2)))
    assert page.value("document.getElementById('state').textContent") == "running"
    assert "othing is carried" not in text and "it names the workers" not in text


def test_what_goes_on_of_what_is_paused_is_named(page: Page, server: PageServer) -> None:
    one = status(1, paused=["ewr", "lhr/flights"], resumed={"ewr": ["ewr/flights:0"]})
    text = show(page, server, mirror(one, status(2, paused=["ewr", "lhr/flights"])))
    assert "paused by an operator: ewr (but not ewr/flights:0), lhr/flights" in text


def test_names_stay_text_and_nothing_comes_from_elsewhere(page: Page, server: PageServer) -> None:
    show(page, server, troubled())
    page.value("new Promise(done => setTimeout(done, 300))")
    assert page.value("document.title") == "2 stopped · aggregate"
    assert page.value("document.images.length") == 0
    assert {address.split("?")[0] for address in page.requests if not address.startswith("data:")} == {
        server.url,
        f"{server.url}mirror",
    }
    assert page.messages == []


def test_the_browser_is_told_to_run_nothing_else(page: Page, server: PageServer) -> None:
    show(page, server, healthy())
    page.value(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran=1'}))"
    )
    assert page.value("window.ran === undefined")
    assert any("Content Security Policy" in message for message in page.messages)


def test_a_topic_opens_to_its_partitions_and_stays_open(page: Page, server: PageServer) -> None:
    show(page, server, healthy())
    page.value("document.querySelector('button.toggle').click()")
    assert page.value("document.querySelectorAll('tr.part').length") == 1
    before = page.value("document.getElementById('when').textContent")
    page.until(f"document.getElementById('when').textContent !== {before!r}")
    assert page.value("document.querySelectorAll('tr.part').length") == 1


def test_a_worker_that_goes_away_is_said_and_comes_back(page: Page, server: PageServer) -> None:
    show(page, server, healthy())
    server.document = None
    page.until("!document.getElementById('lost').hidden")
    assert "what is shown is old" in page.value("document.getElementById('lost').textContent")
    assert page.value("document.title").startswith("no answer")
    server.document = healthy()
    page.until("document.getElementById('lost').hidden")
    assert page.value("document.title") == "running · aggregate"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_it_fits_and_can_be_read(page: Page, server: PageServer, width: int, dark: bool) -> None:
    """No sideways scrolling, nothing cut off, and contrast of at least 4.5 to 1 (WCAG 2.1, AA)."""
    show(page, server, troubled(), width=width, dark=dark)
    page.value("document.querySelectorAll('button.toggle').forEach(each => each.click())")
    assert page.value("document.documentElement.scrollWidth") <= width
    wide = page.value(
        """(width => [...document.querySelectorAll('main *')]
            .filter(each => each.children.length === 0 && each.getClientRects().length)
            .filter(each => each.getBoundingClientRect().right > width + 1)
            .map(each => each.textContent))(document.documentElement.clientWidth)"""
    )
    assert wide == []
    assert page.value(CONTRAST) == []


@in_pairs("millrace-millrace")
def test_a_mirror_that_runs_shows_its_lag_what_is_paused_and_where_it_is_stopped(
    page: Page, pair: Pair
) -> None:
    page.show("about:blank")  # or it goes on asking the mirror of the pair before, which is gone
    waiting, stopping = pair.unique("waiting"), pair.unique("stopping")
    mirror = pair.mirror([waiting, stopping], start=False, config_sync={"enabled": False})
    src, dst, lasting = pair.source.name, pair.target.name, time.time_ns() // 1_000_000 - DAY_MS

    async def story() -> None:
        async with pair.source.cluster() as source, pair.target.cluster() as target:
            await create_topic(source, waiting, 2, 1)
            await create_topic(source, stopping, 1, 1)
            await create_topic(target, stopping, 1, 1, {"max.message.bytes": "1000"})
            mirror.start()
            await runs(mirror, 3)
            call(mirror, "POST", "/pause", {"source": src, "topic": waiting, "partition": 1})
            await until(lambda: is_paused(waiting, 1), logs_of=[mirror])
            for size in (1, 1, 5_000, 1):
                await send(source, stopping, 0, build_batch([Record(b"k", b"." * size, (), lasting)]))
            for _ in range(7):
                await send(source, waiting, 1, build_batch([Record(b"k", b"v", (), lasting)]))

            async def is_told() -> bool:
                found = partitions(mirror)
                is_behind = found[waiting, 1].get("lag_records") == 7
                return is_behind and found[stopping, 0]["state"] == "stopped" and "paused" in states(mirror)

            await until(is_told, lambda: str(partitions(mirror)), logs_of=[mirror])

    async def is_paused(topic: str, number: int) -> bool:
        return bool(partitions(mirror)[topic, number]["state"] == "paused")

    asyncio.run(story())
    page.messages.clear()
    page.show(f"http://127.0.0.1:{mirror.port}/")
    page.until("document.querySelectorAll('article.gap').length === 1")
    # The page may have been before the mirror's own next second.
    page.until("document.getElementById('topics').innerText.includes('1 paused')")
    text = page.value("document.body.innerText")
    for words in (
        f"{mirror.settings['name']} → {dst}",
        f"paused by an operator: {src}/{waiting}:1",
        f"{src}/{stopping}:0 too large",
        "1 offset from 2, since ",
        "raise max.message.bytes",
        f"millrace mirror skip {src}/{stopping}:0",
        "exactly once",
        "1 of 1",
    ):
        assert words in text, (words, text)
    assert page.value("document.getElementById('state').textContent") == "1 stopped"
    assert page.value("document.title") == f"1 stopped · {mirror.settings['name']}"
    for word in ("undefined", "NaN", "null", "[object"):
        assert word not in text, text
    page.value("document.querySelectorAll('button.toggle').forEach(each => each.click())")
    rows = page.value("[...document.querySelectorAll('#topics tbody')].map(each => each.innerText)")
    shown = [[line.split("\t") for line in row.splitlines()] for row in rows]
    # Without how long the oldest has waited, and the rates.
    assert [(name, state, behind, parts) for (name, state, _, behind, _, _, parts), *_ in shown] == [
        (f"{src} / {stopping}", "stopped", "2", "1"),
        (f"{src} / {waiting}", "1 paused", "7", "2"),
    ]
    of_parts = [(name, state, *rest) for _, *parts in shown for name, state, _, *rest in parts]
    assert of_parts == [
        (f"0 → {stopping}-0", "stopped", "2", "2 of 4"),
        (f"0 → {waiting}-0", "running", "0", "0 of 0"),
        (f"1 → {waiting}-1", "paused", "7", "0 of 7"),
    ]
    assert page.messages == []


# Every text that is seen, against the first opaque background behind it.
CONTRAST = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(each => each / 255)
    .map(each => each <= .03928 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4)
    .reduce((sum, each, index) => sum + each * [.2126, .7152, .0722][index], 0);
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = channels(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll('main *')) {
    const own = [...node.childNodes].some(each => each.nodeType === 3 && each.textContent.trim());
    if (!own || !node.getClientRects().length) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) poor.push(node.textContent + ' ' + ((a + .05) / (b + .05)).toFixed(2));
  }
  return poor;
})()"""
