"""Answers that the next request would get too are errors at once: counted at the server."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

import pytest

from streaming.errors import StorageError
from streaming.storage import Storage
from streaming.storage.base.adapter import TransientError
from streaming.storage.base.options import RetryPolicy
from streaming.storage.requests.retry import retrying

Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that answers all requests so, and the requests that it got."""
    log: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            log.append(f"{self.command} {self.path}")
            answer(self)

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", log
        finally:
            server.shutdown()
            thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, *, sized: bool = True, **headers: str) -> None:
    handler.send_response(status)
    length = {"Content_Length": str(len(body))} if sized else {"Connection": "close"}
    for name, value in (length | headers).items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
    handler.close_connection = not sized


def listing(*keys: str) -> Answer:
    entries = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>&quot;x&quot;</ETag><Size>5</Size></Contents>"
        for key in keys
    ).replace("\x01", "&#1;")
    body = f"<?xml version='1.0'?><ListBucketResult><Name>b</Name>{entries}</ListBucketResult>".encode()
    return lambda handler: send(handler, 200, body, Content_Type="application/xml")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (listing("p/a.tar", "p//x.txt"), "p//x.txt"),
        (listing("p/a.tar", "p/x\x01.txt"), r"p/x\\x01.txt"),
        (listing("p/a.tar", "p/x\ty.txt"), r"p/x\\ty.txt"),
        (listing("p/a.tar", "p/../x.txt"), "p/../x.txt"),
        (lambda handler: send(handler, 200, b"Welcome"), "not a listing; check endpoint_url"),
    ],
    ids=["empty-part", "control", "tab", "dots", "no-listing"],
)
def test_a_listing_that_cannot_be_read_names_why_at_once(answer: Answer, named: str) -> None:
    with serving(answer) as (url, log):
        storage = Storage({"endpoint_url": url, "key": "a", "secret": "b", "region": "us-east-1"})
        with pytest.raises(StorageError) as caught:
            list(storage.list("s3://b/p/"))
        assert named.replace("\\\\", "\\") in str(caught.value)
        assert len(log) == 1
        assert storage.metrics.snapshot()["retries"] == 0


def redirected(handler: BaseHTTPRequestHandler) -> None:
    send(handler, 302, b"", Location=f"{handler.path}a")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("answer", "why", "most"),
    [
        (lambda handler: send(handler, 206, b"0123", sized=False, Content_Range="bytes 0-3/9"), "its length", 2),
        (lambda handler: send(handler, 206, b"0123", Content_Range="bytes 0-3/*"), "byte ranges as asked", 2),
        (lambda handler: send(handler, 206, b"0123"), "byte ranges as asked", 2),
        (redirected, "redirects more than ten times", 22),
    ],
    ids=["no-length", "no-total", "no-range", "redirects"],
)
def test_an_answer_that_no_request_can_mend_is_asked_for_once(answer: Answer, why: str, most: int) -> None:
    with serving(answer) as (url, log):
        storage = Storage()
        with pytest.raises(StorageError, match=why):
            storage.read(f"{url}/x.tar", 0, 4)
        assert len(log) <= most // 2, log
        log.clear()
        if why != "byte ranges as asked":  # whoever asks for no range needs none
            with pytest.raises(StorageError, match=why):
                storage.info(f"{url}/x.tar")
            assert len(log) <= most, log
        assert storage.metrics.snapshot()["retries"] == 0


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1.0])
def test_delays_before_retries_are_drawn_below_a_growing_bound(drawn: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full jitter: the clients of a store that failed for all come back at different times."""
    bounds: list[tuple[float, float]] = []
    slept: list[float] = []

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return low + drawn * (high - low)

    def failing() -> None:
        raise TransientError("for now")

    monkeypatch.setattr(random, "uniform", uniform)
    monkeypatch.setattr(time, "sleep", slept.append)
    policy = RetryPolicy(max_retries=6, first_backoff_s=0.02, max_backoff_s=4.0)
    with pytest.raises(TransientError):
        retrying(policy, failing)
    wanted = [0.02, 0.08, 0.32, 1.28, 4.0, 4.0]
    assert [low for low, _ in bounds] == [0.0] * len(bounds)
    assert [high for _, high in bounds][: len(wanted)] == pytest.approx(wanted)
    assert slept == pytest.approx([drawn * bound for bound in wanted])
