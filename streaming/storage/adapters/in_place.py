"""Read large ranges over plain HTTP directly into the caller's memory, and everything else through obstore.

obstore collects each answer in its own memory, from which it must be copied. The copy is most of the work over plain
HTTP, and the smaller part over TLS. obstore still signs each request: the signed URL is used once, immediately, so
nothing has to be renewed, and credentials rotate as usual. All unusual cases (redirects, refused signatures, answers
without a length, proxies) are left to obstore, too. Figures: docs/design/0048-reads-into-place.md.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

from streaming.storage.adapters.credentials import proxy_of, s3_endpoint_of_process
from streaming.storage.adapters.object import ObjectAdapter, without_user
from streaming.storage.adapters.object_errors import RequestPlace, object_errors
from streaming.storage.adapters.obstore_client import client
from streaming.storage.adapters.plain_http import LeftError, RangeAnswer, Request, Server, ask, can_ask, server_of
from streaming.storage.base.adapter import RangeBody, Sink
from streaming.storage.base.options import StorageOptions
from streaming.storage.base.urls import scheme_of, split_query
from streaming.types import override

LEAST_BYTES = 1 << 20
"""Minimum size of such a range; obstore reads more small ranges at a time."""
_SIGNED_FOR = timedelta(hours=1)
"""A URL is used immediately; the rest allows for clocks that differ."""
_LEFT_S = 60.0
"""Time for which a bucket is left to obstore after an answer that only obstore could handle."""
_HTTP_SAFE = "/~!$&'()*+,;=:@"


class _PlacedRange:
    """One answer, received into the caller's memory."""

    def __init__(self, place: RequestPlace, answer: RangeAnswer) -> None:
        self._place = place
        self._answer = answer
        self.num_bytes = answer.num_bytes
        self.version = answer.version

    def fill(self, sink: Sink) -> None:
        """See :meth:`RangeBody.fill`."""
        with object_errors(self._place, "reading"):
            self._answer.fill(sink)

    def close(self) -> None:
        """See :meth:`RangeBody.close`."""
        self._answer.close()


class InPlaceAdapter(ObjectAdapter):
    """s3, gs, az, http and https; ranges of at least ``LEAST_BYTES`` over plain HTTP (s3, http) bypass obstore."""

    def __init__(self, options: StorageOptions) -> None:
        super().__init__(options)
        self._servers: dict[str, Server | None] = {}
        """Servers by host and port; None: behind a proxy."""
        self._left_until_s: dict[str, float] = {}
        """Buckets and hosts that are left to obstore, and until when."""

    @override
    def _get(
        self, store: Any, key: str, place: RequestPlace, start: int, stop: int | None, version: str | None
    ) -> RangeBody:
        bucket = urlsplit(place.url).netloc
        if stop is None or stop - start < LEAST_BYTES or time.monotonic() < self._left_until_s.get(bucket, 0.0):
            return super()._get(store, key, place, start, stop, version)
        try:
            found = self._request(store, key, place, start, stop, version)
            if found is not None:
                return _PlacedRange(place, ask(*found))
        except (LeftError, client().errors.BaseError):  # BaseError: the request cannot be signed
            body = super()._get(store, key, place, start, stop, version)
            self._left_until_s[bucket] = time.monotonic() + _LEFT_S  # obstore can handle it
            return body
        return super()._get(store, key, place, start, stop, version)

    def _request(
        self, store: Any, key: str, place: RequestPlace, start: int, stop: int, version: str | None
    ) -> tuple[Server, Request] | None:
        """Return the server and the request; None if the server is not reached over plain HTTP."""
        headers = {} if version is None else {"if-match": version}
        scheme = scheme_of(place.url)
        url = ""
        if scheme == "http":
            url, authorization = _plain_url(place.url, key)
            headers |= {"authorization": authorization} if authorization else {}
        elif scheme in {"s3", "s3a"} and (s3_endpoint_of_process(self._options) or "").startswith("http://"):
            url = self._s3_url(store, key, place)
        if not can_ask(url):
            return None
        server, retry = self._server(url), self._options.retry
        if server is None:
            return None
        request = Request(
            url=url, start=start, stop=stop, headers=headers, connect_timeout_s=retry.connect_timeout_s,
            read_timeout_s=retry.read_timeout_s, deadline_s=retry.deadline_s,
        )  # fmt: skip
        return server, request

    def _s3_url(self, store: Any, key: str, place: RequestPlace) -> str:
        if not self._options.anon:
            return str(client().api.sign(store, "GET", key, _SIGNED_FOR))
        scheme, _, host = (s3_endpoint_of_process(self._options) or "").partition("://")
        bucket = urlsplit(place.url).netloc
        base = f"{scheme}://{bucket}.{host}" if self._options.path_style is False else f"{scheme}://{host}/{bucket}"
        return f"{base}/{quote(key, safe='/-_.~')}"

    def _server(self, url: str) -> Server | None:
        host = urlsplit(url).netloc
        if host not in self._servers:
            self._servers[host] = server_of(url) if proxy_of(url) is None else None
        return self._servers[host]


def _plain_url(url: str, key: str) -> tuple[str, str]:
    """Return an http URL without user and password, encoded again, and the header that carries them; "": none."""
    path, query = split_query(url)
    base, authorization = without_user(f"http://{urlsplit(path).netloc}")
    if any(part in {"", ".", ".."} for part in key.split("/")):
        return "", ""
    return f"{base}/{quote(key, safe=_HTTP_SAFE)}{query}", authorization
