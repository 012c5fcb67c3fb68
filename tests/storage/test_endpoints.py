"""Addresses that cannot be asked, ports that speak otherwise, and proxies that refuse: each is said as such."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shard_tools.cli import cli
from streaming.errors import ConfigError, ShardstreamError, StorageError
from streaming.storage import Storage
from streaming.storage.base.urls import checked_endpoint, server_fault
from tests.support.servers.on_loopback import free_port

IMPATIENT: dict[str, Any] = {"unreachable_s": 0.01, "max_retries": 0, "first_backoff_s": 0.0}
LARGE = 2 << 20
"""A range that is read in place."""
KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "s3": ("s3://bucket/x", {"key": "a", "secret": "b"}),
    "s3 by host": ("s3://bucket/x", {"key": "a", "secret": "b", "path_style": False}),
    "gs": ("gs://bucket/x", {"token": "a"}),
    "az": ("az://bucket/x", {"account_name": "a", "sas_token": "sv=1&sig=a"}),
}
MALFORMED = {
    "http://::1:5881": "needs brackets", "http://127.0.0.1:99999": "is not a number from 1 to 65535",
    "http://127.0.0.1: 80": "is not a number from 1 to 65535", "https://h:x": "is not a number from 1 to 65535",
    "http://h:": "is not a number from 1 to 65535", "http://h:0": "is not a number from 1 to 65535",
    "http://a b:80": "is not a host name", "http://ex%zzample": "is not a host name",
    "http://exa\nmple": "is not a host name", "http://a:b@c d": "is not a host name",
    "http://[::1": "is not an IPv6 address", "http://[fe80::1%25eth0]:1": "is not an IPv6 address",
    "http://": "names no host", "http:///x": "names no host", "http://u:p@": "names no host",
}  # fmt: skip
"""Of an http URL as well as of an endpoint."""
OF_ENDPOINTS = {
    "http://\u00e9xample:1": "xn--", "http://h/a b": "percent-encode", "http://h?x=1": "query", "http://h/#f": "query",
    "127.0.0.1:9000": "begins otherwise", "ftp://h": "begins otherwise",
}  # fmt: skip


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("endpoint", [*MALFORMED, *OF_ENDPOINTS])
def test_malformed_endpoints_are_errors_by_name(kind: str, endpoint: str) -> None:
    """obstore ends in a panic over them, which is no Exception."""
    url, options = KEYS[kind]
    storage = Storage({**options, **IMPATIENT, "endpoint_url": endpoint})
    words = {**MALFORMED, **OF_ENDPOINTS}[endpoint]
    for call in (lambda: storage.read(url), lambda: storage.read(url, 0, LARGE), lambda: [*storage.list(url)]):
        with pytest.raises(ConfigError, match=rf"(?s)endpoint_url '.*expected http://host:port.*{words}"):
            call()


@pytest.mark.parametrize("endpoint", MALFORMED)
def test_malformed_web_servers_are_errors_by_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"{MALFORMED[endpoint]}|control character"):
        Storage(IMPATIENT).read(f"{endpoint}/x.tar")


def test_the_variable_that_holds_an_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:99999")
    with pytest.raises(ConfigError, match=r"AWS_ENDPOINT_URL 'http://127\.0\.0\.1:99999'"):
        Storage(KEYS["s3"][1]).read("s3://bucket/x")


@pytest.mark.parametrize("endpoint", ["http://::1:5881", "http://127.0.0.1:99999", "http://a b"])
def test_doctor_says_what_is_wrong_with_an_endpoint(endpoint: str) -> None:
    command = ["doctor", "s3://bucket/x", "--no-imports", "--json", "--endpoint-url", endpoint, "--anon"]
    said = CliRunner().invoke(cli, command)
    assert MALFORMED.get(endpoint, "is not a host name") in json.loads(said.stdout)["store"]["trouble"]


@pytest.mark.parametrize("url", ["s3://a%zz/x", "s3://\u00e9/x"])
def test_what_still_panics_is_an_error_of_ours(url: str) -> None:
    options = {**KEYS["s3 by host"][1], **IMPATIENT, "endpoint_url": "http://h.invalid:1"}
    with pytest.raises(StorageError, match="the library obstore failed over it"):
        Storage(options).read(url)
    with pytest.raises(StorageError, match="key, for characters that cannot stand there") as caught:
        Storage({**IMPATIENT, "key": "a", "secret": "hunter2", "token": "to\nken"}).read("s3://b/x")
    assert "hunter2" not in str(caught.value)


HOST = st.one_of(
    st.sampled_from(["h", "h.example", "127.0.0.1", "[::1]", "[fe80::1]", "a_b-c~1"]),
    st.text(st.characters(codec="utf-8"), max_size=12),
)


@given(HOST, st.one_of(st.just(""), st.integers(-1, 70_000).map(str), st.text(max_size=6)), st.booleans())
def test_what_is_let_through_can_be_asked(host: str, port: str, secure: bool) -> None:
    """No address ends in anything but an error of ours; those with right parts are let through."""
    url = f"http{'s' * secure}://{host}{':' * bool(port)}{port}"
    if host in {"h", "h.example", "127.0.0.1", "[::1]"} and port.isascii() and port.isdecimal() and len(port) < 6:
        assert (server_fault(url) == "") is (0 < int(port) < 65_536)
    with suppress(ConfigError):
        checked_endpoint("endpoint_url", url)
        Storage({**KEYS["s3"][1], "endpoint_url": url})._store.adapter("s3://b/x").way("s3://b/x")  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------- other ports


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A port that says this to whatever comes, and ends the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def _page(text: str, version: str = "1.1") -> bytes:
    return f"HTTP/{version} 400 Bad Request\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()


SPEAK_TLS = {
    "go": _page("Client sent an HTTP request to an HTTPS server.\n", "1.0"),
    "nginx": _page("<html><head><title>400 The plain HTTP request was sent to HTTPS port</title></head></html>"),
    "apache": _page("Reason: You're speaking plain HTTP to an SSL-enabled server port."),
    "an alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "nothing": b"",
}


@pytest.mark.parametrize("stop", [10, LARGE], ids=["by obstore", "in place"])
@pytest.mark.parametrize("server", SPEAK_TLS)
def test_http_to_a_port_for_tls(server: str, stop: int) -> None:
    with answering(SPEAK_TLS[server]) as port:
        endpoint = f"http://127.0.0.1:{port}"
        for url, options in ((f"{endpoint}/x", {}), ("s3://b/x", {**KEYS["s3"][1], "endpoint_url": endpoint})):
            with pytest.raises(StorageError, match=r"write https://") as caught:
                Storage({**IMPATIENT, **options}).read(url, 0, stop)
            assert str(port) in str(caught.value)


def test_https_to_a_port_for_http() -> None:
    with answering(_page("what?")) as port:
        endpoint = f"https://127.0.0.1:{port}"
        for url, options in ((f"{endpoint}/x", {}), ("s3://b/x", {**KEYS["s3"][1], "endpoint_url": endpoint})):
            with pytest.raises(StorageError, match=r"does not speak TLS at that port: write http://"):
                Storage({**IMPATIENT, **options}).read(url, 0, 10)


# ----------------------------------------------------------------------------------------------------------- proxies

PROXIED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a web server": ("http_proxy", "http://store.invalid/x", {}),
    "a web server over TLS": ("HTTPS_PROXY", "https://store.invalid/x", {}),
    "s3": ("HTTPS_PROXY", *KEYS["s3"]),
    "gs": ("ALL_PROXY", *KEYS["gs"]),
    "s3 over http": ("HTTP_PROXY", KEYS["s3"][0], {**KEYS["s3"][1], "endpoint_url": "http://store.invalid:9000"}),
}
REFUSES = {
    "nobody": (None, "connection refused"),
    "wants a password": (b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n", "user and passw"),
    "forbids": (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n", r"refuses to connect there|access denied"),
}


@pytest.mark.parametrize("kind", PROXIED)
@pytest.mark.parametrize("why", REFUSES)
def test_a_proxy_that_refuses_is_named(kind: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, url, options = PROXIED[kind]
    answer, words = REFUSES[why]
    with answering(answer or b"") as port:
        at = f"127.0.0.1:{free_port() if answer is None else port}"
        monkeypatch.setenv(variable, f"http://me:hunter2@{at}")
        with pytest.raises(ShardstreamError, match=words) as caught:
            Storage({**IMPATIENT, **options}).read(url, 0, 10)
    assert f"through the proxy http://…@{at} of {variable}" in str(caught.value)
    assert "hunter2" not in str(caught.value)
