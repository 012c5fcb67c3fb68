"""Serve the pages on this machine: the only module that knows Starlette and uvicorn. It treats pages as values."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from shard_tools.look.show.access import COOKIE, HEADERS, Access, Refusal
from shard_tools.look.show.base.page import Content, Media, Page, Query, address
from shard_tools.look.show.base.render import FILES, STYLES, template
from shard_tools.look.show.base.subject import Subject
from shard_tools.look.show.frames import Served, answered, as_text
from shard_tools.running.templates import jinja
from streaming.errors import ConfigError, DataError, NotFoundError, ShardstreamError, StateError
from streaming.storage import redact_text

_log = logging.getLogger("shard_tools.look.show")
_JSON, _HTML = "application/json; charset=utf-8", "text/html; charset=utf-8"
_ASSETS = {"/show.css": "text/css; charset=utf-8", "/show.js": "text/javascript; charset=utf-8"}
_ASSETS |= {"/show.svg": "image/svg+xml"}
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_OPEN_RANGE_BYTES = 4 << 20  # of an open-ended range: players request more later, and seldom play to the end
_STATUS = (
    (NotFoundError, HTTPStatus.NOT_FOUND), (ConfigError, HTTPStatus.BAD_REQUEST), (StateError, HTTPStatus.BAD_REQUEST),
    (DataError, HTTPStatus.UNPROCESSABLE_ENTITY),
)  # fmt: skip
_WORDS = {
    HTTPStatus.NOT_FOUND: "Not found",
    HTTPStatus.UNAUTHORIZED: "Who asks?",
    HTTPStatus.BAD_REQUEST: "Not understood",
}


def need_server() -> None:
    """Check that the packages of the server are installed.

    Raises:
        ConfigError: A package is missing.
    """
    jinja("shard_tools show", "show")
    try:
        import starlette  # noqa: F401, PLC0415  an extra
        import uvicorn  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError("shard_tools show: needs Starlette and uvicorn: pip install 'shardstream[show]'") from error


@dataclass(frozen=True, kw_only=True)
class _Site:
    """The site: pages and media over a subject, for callers with access."""

    subject: Subject
    access: Access
    pages: Sequence[Page]
    media: Sequence[Media]

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette  # noqa: PLC0415  an extra
        from starlette.routing import Route  # noqa: PLC0415

        endpoints: dict[str, Callable[[Any], Any]] = {page.path: self._guarded(self._page, page) for page in self.pages}
        endpoints |= {one.path: self._guarded(self._media, one) for one in self.media}
        endpoints["/{rest:path}"] = self._guarded(self._nothing, None)
        within = {f"/s/{{session}}{path}": endpoint for path, endpoint in endpoints.items()}  # a browser's session
        assets = {path: self._guarded(self._asset, path, is_open=True) for path in _ASSETS}
        methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        every = (assets | within | endpoints).items()
        return Starlette(routes=[Route(path, endpoint, methods=methods) for path, endpoint in every])

    def _guarded(
        self, answer: Callable[[Any, Any, Query], Any], what: Any, *, is_open: bool = False
    ) -> Callable[[Any], Any]:
        """Return an endpoint that first checks access, and turns errors into responses."""

        def endpoint(request: Any) -> Any:  # not async: on a thread of its own
            pairs = parse_qsl(request.url.query, keep_blank_values=True, encoding="utf-8", errors="surrogateescape")
            query = Query({name: value for name, value in pairs if name != "token"})
            token, session = dict(pairs).get("token", ""), request.path_params.get("session", "")
            refused = self.access.refusal(
                request.method, request.headers, request.cookies, token, session=session, is_open=is_open
            )
            if refused is not None:
                return self._failed(refused, query, knows=False)
            if not is_open and not session and self.access.opens(request.method, request.headers, token):
                return self._let_in(token, self._wanted(request.url.path, query), query)
            try:
                response = answer(request, what, query)
            except ShardstreamError as error:
                status = next((status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.BAD_GATEWAY)
                notes = [redact_text(note) for note in getattr(error, "__notes__", ())]
                message = "\n".join([redact_text(str(error)), *notes])
                response = self._failed(Refusal(status=status, message=message), query, session=session)
            except Exception:  # noqa: BLE001  the border of the thread: details go to the log, not to the page
                _log.exception("%s", request.url.path)
                message = "a fault of this program; its terminal shows where. Please report it"
                response = self._failed(Refusal(status=500, message=message), query, session=session)
            return response

        return endpoint

    @property
    def _first(self) -> Page | None:
        """The first page of the navigation; None: there is none."""
        return next((one for one in self.pages if one.is_listed(self.subject)), None)

    def _wanted(self, path: str, query: Query) -> str:
        """Return the page that a browser gets: for the printed address the first one, else the one it asks for."""
        first = self._first if path == "/" and not query.given else None
        return address(path, **query.given) if first is None else first.path

    def _let_in(self, token: str, where: str, query: Query) -> Any:
        """Begin a session, and redirect the browser to the requested page in it."""
        made = self.access.let_in(token)
        if isinstance(made, Refusal):
            return self._failed(made, query, knows=False)
        response = self._response("", _HTML, HTTPStatus.SEE_OTHER)
        response.headers["Location"] = made.home + where
        response.set_cookie(COOKIE, made.cookie, httponly=True, samesite="lax", path=made.home)
        return response

    def _page(self, request: Any, page: Page, query: Query) -> Any:
        if page.path == "/" and not page.fits(self.subject):  # the target of the printed address
            page = self._first or page
        query.check(page.path, page.asks)
        is_json = query.choice("format", "html", "json") == "json"
        if not page.fits(self.subject):
            raise NotFoundError(f"{page.path}: there is nothing to show: give {_NEEDED[page.needs]}")
        found = answered(page, self.subject, query)
        if is_json:
            return self._response(as_text(found.as_dict()), _JSON)
        html = self._served(request.path_params.get("session", "")).html(page, query, found)
        return self._response(html, _HTML, getattr(found.answer, "status", HTTPStatus.OK))

    def _served(self, session: str) -> Served:
        return Served(self.subject, self.pages, f"/s/{session}" if session else "")

    def _media(self, request: Any, media: Media, query: Query) -> Any:
        from starlette.responses import StreamingResponse  # noqa: PLC0415  an extra

        query.check(media.path, media.asks)
        found = media.answer(self.subject, query)
        headers = {**HEADERS, "Accept-Ranges": "bytes", "Cache-Control": _caching(found)}
        if found.file_name:
            headers["Content-Disposition"] = (
                f'attachment; filename="{re.sub(r"[^A-Za-z0-9._-]", "_", found.file_name)}"'
            )
        status, start, stop = HTTPStatus.OK, 0, found.num_bytes
        requested = _RANGE.fullmatch(request.headers.get("range", ""))
        if requested and any(requested.groups()):
            status, start, stop = _ranged(requested[1], requested[2], found.num_bytes)
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{found.num_bytes}"
            if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                headers["Content-Range"] = f"bytes */{found.num_bytes}"
        headers["Content-Length"] = str(stop - start)
        pieces = iter(()) if request.method == "HEAD" else found.read(start, stop)
        return StreamingResponse(pieces, status, headers, media_type=found.media_type)

    def _asset(self, request: Any, path: str, query: Query) -> Any:  # noqa: ARG002  the signature of all endpoints
        if path.endswith(".css"):
            return self._response("".join(template(one).render() for one in STYLES), _ASSETS[path])
        with open(os.path.join(FILES, path[1:]), encoding="utf-8") as file:
            return self._response(file.read(), _ASSETS[path])

    def _nothing(self, request: Any, what: None, query: Query) -> Any:  # noqa: ARG002  the signature of all endpoints
        there = ", ".join(page.path for page in self.pages if page.fits(self.subject))
        asked = request.url.path.removeprefix(
            f"/s/{request.path_params.get('session', '')}"
        )  # the browser's own prefix
        raise NotFoundError(f"no page {asked[:80]!r}; there are {there}")

    def _failed(self, refused: Refusal, query: Query, *, session: str = "", knows: bool = True) -> Any:
        """Return an error in the caller's format; a caller without a token learns nothing about the subject."""
        if query.given.get("format") == "json":
            body = {"ok": False, "error": {"status": int(refused.status), "message": refused.message}}
            return self._response(as_text(body), _JSON, refused.status)
        title = _WORDS.get(HTTPStatus(refused.status), "Not possible")
        served = self._served(session) if knows else Served(None, ())
        return self._response(served.error(title, refused.message), _HTML, refused.status)

    def _response(self, text: str, media_type: str, status: int = 200) -> Any:
        from starlette.responses import Response  # noqa: PLC0415  an extra

        headers = {**HEADERS, "Cache-Control": "private, no-store"}
        return Response(text.encode("utf-8", "backslashreplace"), status, headers, media_type=media_type)


_NEEDED = {"set": "the URL of shards, or the JSON file of a mixture", "run": "the address of a running job with --run"}


def _caching(content: Content) -> str:
    return f"private, max-age={content.seconds}" if content.seconds else "private, no-store"


def _ranged(first: str, last: str, num_bytes: int) -> tuple[HTTPStatus, int, int]:
    """Return the status and the bytes that a ``Range`` header requests."""
    if first:
        start = int(first)
        stop = min(int(last) + 1, num_bytes) if last else min(start + _OPEN_RANGE_BYTES, num_bytes)
    else:
        start, stop = max(num_bytes - int(last), 0), num_bytes
    if start >= stop:
        return HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, 0
    return HTTPStatus.PARTIAL_CONTENT, start, stop


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 picks a free port.

    Raises:
        ConfigError: It cannot listen there.
    """
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    except OSError as error:
        cure = "give another --port, or --port 0 for a free one" if port else "give another --host"
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}; {cure}") from error


def serve(
    subject: Subject, listening: socket.socket, access: Access, *, pages: Sequence[Page], media: Sequence[Media],
    began: Callable[[Callable[[], None]], None],
) -> None:  # fmt: skip
    """Serve until SIGINT or SIGTERM; on a thread other than the main one, which gets no signals, until stopped.

    Args:
        subject: The subject.
        listening: The socket.
        access: Rules of access.
        pages: The pages.
        media: The media that pages show.
        began: Called once, with a function that stops the server, before it accepts connections.
    """
    import uvicorn  # noqa: PLC0415  an extra

    site = _Site(subject=subject, access=access, pages=pages, media=media)
    config = uvicorn.Config(
        site.app(), log_level="warning", access_log=False, server_header=False, lifespan="off", proxy_headers=False,
        timeout_graceful_shutdown=1, ws="none", loop="asyncio", http="h11",
    )  # fmt: skip

    class Server(uvicorn.Server):
        """Exit with 0 at a signal, which uvicorn would raise again."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Ask the server to end at a signal while it runs."""
            mine = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
            before = {one: signal.signal(one, self.handle_exit) for one in mine}
            began(self.stop)
            try:
                yield
            finally:
                for one, handler in before.items():
                    signal.signal(one, handler)

        def stop(self) -> None:
            """Ask the server to end soon."""
            self.should_exit = True

    Server(config).run(sockets=[listening])
