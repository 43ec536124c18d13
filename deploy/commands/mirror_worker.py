"""Finds a worker of a mirror and speaks with its HTTP port, for `mirror_control.py`.

A worker is found by `--url`, or by the config that it was started with. Proxies of the environment are not
used: the port is on this machine or on one that is reached directly. The token of control calls comes from
the config's `control.token`, from a file or from the environment; it is never shown.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from millrace.broker.errors import FatalError
from millrace.broker.protocol.address import Address

if TYPE_CHECKING:
    from urllib.error import HTTPError

TIMEOUT_S = 10.0
# A worker drains for as long as its drain timeout says, once for the batches and once for the positions.
DRAIN_TIMEOUT_S = 120.0
TOKEN_VARIABLE = "MILLRACE_MIRROR_TOKEN"
DEFAULT_CONFIG = Path("mirror.yaml")

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The file of a worker on this machine; by default ./mirror.yaml."),
]
FileOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The mirror's file; by default ./mirror.yaml.")
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", "-u", envvar="MILLRACE_MIRROR_URL", help="http://host:port of any worker."),
]
TokenFileOption = Annotated[
    Path | None,
    typer.Option("--token-file", help=f"File with the control token (or {TOKEN_VARIABLE} holds it)."),
]


class WorkerUnreachable(FatalError):
    """Nothing that speaks HTTP answers at a worker's address."""

    exit_status = 20


class ConfigMissing(FatalError):
    """The file that was named is not there."""

    exit_status = 2


class CallRefused(FatalError):
    """The worker answered, and said no; the message is its sentence."""

    exit_status = 1


@dataclass(frozen=True)
class WorkerPort:
    """The HTTP port of one worker. `token` None: none is known."""

    url: str
    token: str | None = None

    def get(self, path: str) -> Any:
        """The JSON document. Raises WorkerUnreachable, CallRefused."""
        return self._ask(path, None, {}, TIMEOUT_S)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = TIMEOUT_S) -> Any:
        """Makes a control call; the JSON answer. Raises WorkerUnreachable, CallRefused."""
        headers = {"Content-Type": "application/json"}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        return self._ask(path, json.dumps(body).encode(), headers, timeout_s)

    def at(self, url: str) -> WorkerPort:
        """Another worker of the same mirror, with the same token."""
        return WorkerPort(url, self.token)

    def _ask(self, path: str, body: bytes | None, headers: dict[str, str], timeout_s: float) -> Any:
        # Imported here: it takes longer than all of `millrace --help`.
        from urllib.error import HTTPError, URLError
        from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

        class NoRedirect(HTTPRedirectHandler):
            """A worker never redirects, and a token must not follow someone else's."""

            def redirect_request(self, *_: Any) -> None:
                return None

        request = Request(self.url + path, body, headers, method="GET" if body is None else "POST")
        try:
            with build_opener(ProxyHandler({}), NoRedirect()).open(request, timeout=timeout_s) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise CallRefused(f"{self.url}: {_sentence(error)}") from None
        except (URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            words = getattr(reason, "strerror", None) or str(reason)
            raise WorkerUnreachable(
                f"no worker of the mirror answers at {self.url} ({words.lower()}): check that it runs, or "
                "name another one with --url"
            ) from None
        except ValueError:
            raise CallRefused(f"{self.url} answers, but is no mirror: its answer is not JSON") from None


def find_worker(config: Path | None, url: str | None, token_file: Path | None = None) -> WorkerPort:
    """The worker that the options name. Raises ConfigError, ConfigMissing, BadParameter."""
    if url is not None:
        return WorkerPort(_checked_url(url), _token(token_file))
    config = config_file(config, " or --url http://host:port")
    from millrace.mirror.config import load_control

    control = load_control(config)
    token = _token(token_file)
    if token is None and control.token is not None:
        token = control.token.read()
    at = Address.parse(control.advertised) if control.advertised else control.listen
    if at.is_everywhere:
        at = at._replace(host="::1" if ":" in at.host else "127.0.0.1")
    return WorkerPort(f"http://{at}", token)


def config_file(config: Path | None, instead: str = "") -> Path:
    """The file that `--config` names, or the default; `instead`: what else would do. Raises BadParameter,
    ConfigMissing."""
    if config is None and not DEFAULT_CONFIG.exists():
        raise typer.BadParameter(
            f"say which mirror: --config its file (there is no {DEFAULT_CONFIG} here){instead}"
        )
    if config is not None and not config.exists():
        raise ConfigMissing(f"--config {config}: there is no such file")
    return config or DEFAULT_CONFIG


def _checked_url(text: str) -> str:
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    try:
        is_good = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_good = False
    if not is_good or parts.path not in ("", "/") or parts.query or parts.username:
        raise typer.BadParameter(f"--url {text!r}: expected http://host:port, e.g. http://127.0.0.1:8090")
    return url.rstrip("/")


def _token(token_file: Path | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise typer.BadParameter(f"--token-file {token_file}: {reason}") from None
    if not token:
        raise typer.BadParameter(f"--token-file {token_file} is empty")
    return token


def _sentence(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code} {error.reason}"
