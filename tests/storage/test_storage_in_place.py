"""Large ranges over plain HTTP are read in place; whatever is out of the ordinary there is obstore's."""

from __future__ import annotations

import gc
import itertools
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Self
from urllib.parse import quote

import numpy as np
import psutil
import pytest

from streaming.errors import AccessDeniedError, NotFoundError, StorageError, TransferError
from streaming.storage import Storage
from streaming.storage.adapters.credentials import proxy_of
from streaming.storage.adapters.object import ObjectAdapter
from streaming.storage.adapters.plain_http import can_ask
from tests.support.processes.waiting import PATIENCE_S, ended, started, until
from tests.support.servers.fault_proxy import Fault, FaultProxy
from tests.support.servers.on_loopback import GuardedHttpServer, HttpServer

MIB = 1 << 20
DATA = np.random.default_rng(13).integers(0, 256, 4 * MIB, np.uint8).tobytes()
SIGNATURE, PASSWORD = "5ec7e7", "p@ss"
QUICK: dict[str, Any] = {
    "first_backoff_s": 0.01, "max_backoff_s": 0.05, "read_timeout_s": 60.0, "max_retries": 2, "unreachable_s": 0.1,
    "hedge": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def url(mini_s3) -> str:
    """One object of 4 MiB."""
    mini_s3.create_bucket("public-place")
    Storage(mini_s3.storage_options).put("s3://public-place/a b/x+1.tar", DATA)
    return "s3://public-place/a b/x+1.tar"


@pytest.fixture
def through_obstore(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """The ranges that obstore is asked for."""
    asked: list[tuple[int, int | None]] = []
    get = ObjectAdapter._get

    def noted(self: ObjectAdapter, store: Any, key: str, place: Any, start: int, stop: int | None, version: Any) -> Any:
        asked.append((start, stop))
        return get(self, store, key, place, start, stop, version)

    monkeypatch.setattr(ObjectAdapter, "_get", noted)
    return asked


class Web:
    """A server on loopback that says what it is told to: ``answer(number, head)`` to each request, from 0 on.

    It ends a connection where the answer is empty, or ends with ``END``.
    """

    END = b"<end>"

    def __init__(self, answer: Callable[[int, str], bytes | Iterator[bytes]]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self.heads: list[str] = []
        self.num_connections = 0

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()

    def num_ends(self) -> int:
        """Number of ends of its connections that this process holds."""
        port = self._listener.getsockname()[1]
        found = [one for one in psutil.Process().net_connections("tcp") if one.raddr]
        return sum(port in {one.laddr.port, one.raddr.port} for one in found)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as requests:
            while True:
                lines = itertools.takewhile(lambda line: line not in {b"\r\n", b""}, iter(requests.readline, None))
                head = b"".join(lines).decode()
                if not head:
                    return
                with self._lock:
                    number = len(self.heads)
                    self.heads.append(head)
                said = self._answer(number, head)
                for piece in [said] if isinstance(said, bytes) else said:
                    connection.sendall(piece.removesuffix(self.END))
                    if not piece or piece.endswith(self.END):
                        return


def answer_to(head: str, *lines: str, status: str = "206 Partial Content", body: bytes | None = None) -> bytes:
    """The right answer, but for what is given."""
    found = re.search(r"range: bytes=(\d+)-(\d+)", head.lower())
    assert found is not None
    start, stop = int(found[1]), int(found[2]) + 1
    ordinary = {"content-range": f"bytes {start}-{stop - 1}/{len(DATA)}", "content-length": str(stop - start),
                "etag": '"one"', "last-modified": "Fri, 27 Nov 2026 10:00:00 GMT"}  # fmt: skip
    given = "".join(f"{line}\r\n" for line in lines)
    kept = "".join(f"{name}: {value}\r\n" for name, value in ordinary.items() if f"{name}:" not in given.lower())
    return f"HTTP/1.1 {status}\r\n{kept}{given}\r\n".encode() + (DATA[start:stop] if body is None else body)


def test_large_ranges_go_past_obstore_and_all_others_through_it(mini_s3, url: str, through_obstore) -> None:
    storage = Storage(mini_s3.storage_options)
    assert bytes(storage.read(url, 5, 5 + MIB)) == DATA[5 : 5 + MIB]
    assert bytes(storage.read(url, 0, len(DATA))) == DATA
    assert through_obstore == []
    assert bytes(storage.read(url, 5, 4 + MIB)) == DATA[5 : 4 + MIB]
    assert bytes(storage.read(url)) == DATA
    assert bytes(Storage({**mini_s3.storage_options, "client": "obstore"}).read(url, 0, MIB)) == DATA[:MIB]
    assert through_obstore == [(5, 4 + MIB), (0, None), (0, MIB)]


def test_they_are_anonymous_if_asked_to(mini_s3, url: str, through_obstore) -> None:
    storage = Storage({"endpoint_url": mini_s3.url, "anon": True})
    assert bytes(storage.read(url, 1, 2 * MIB)) == DATA[1 : 2 * MIB]
    assert through_obstore == []


def test_users_passwords_queries_and_odd_names_of_web_servers(tmp_path, through_obstore) -> None:
    (tmp_path / "ä b+%.tar").write_bytes(DATA)
    with HttpServer(tmp_path) as web:
        assert bytes(Storage().read(f"{web.url}/%C3%A4%20b+%25.tar", 7, 2 * MIB)) == DATA[7 : 2 * MIB]
    query = f"X-Amz-Signature={SIGNATURE}"
    with GuardedHttpServer(tmp_path, "me", PASSWORD, query) as guarded:
        url = f"{guarded.url.replace('//', f'//me:{quote(PASSWORD)}@')}/ä b+%25.tar?{query}"
        assert bytes(Storage().read(url, 7, 2 * MIB)) == DATA[7 : 2 * MIB]
        assert through_obstore == []
        with pytest.raises(AccessDeniedError, match="the user and password in the URL") as caught:
            Storage(QUICK).read(f"{url}0", 7, 2 * MIB)
    text = "".join(traceback.format_exception(caught.value))
    assert quote(PASSWORD) not in text
    assert SIGNATURE not in text


def test_connections_are_kept_and_shared_by_all_storages(through_obstore) -> None:
    with Web(lambda _, head: answer_to(head)) as web:
        storages = [Storage(QUICK) for _ in range(3)]
        for number in range(6):
            assert bytes(storages[number % 3].read(f"{web.url}/x", number, number + MIB)) == DATA[number : number + MIB]
        assert web.num_connections == 1
        assert all("if-match" not in head for head in web.heads)
        out = bytearray(MIB)
        for _ in range(2):
            storages[0].read_into(f"{web.url}/x", 0, memoryview(out))
        assert 'if-match: "one"' in web.heads[-1]
        assert out == DATA[:MIB]
        assert web.num_ends() == 2, "a connection, and the server's end of it, which is here, too"
        del storages
        gc.collect()
        until(lambda: not web.num_ends(), "the connection is closed with its last user, and then by the server")
    assert through_obstore == []


def test_a_connection_that_the_server_has_closed_is_replaced_unnoticed() -> None:
    """Before the next request, and in place of its answer."""

    def answer(number: int, head: str) -> bytes:
        return b"" if number in {3, 4} else answer_to(head) + (Web.END if number == 0 else b"")

    with Web(answer) as web:
        storage = Storage({**QUICK, "max_retries": 0})
        for _ in range(3):
            assert bytes(storage.read(f"{web.url}/x", 0, MIB)) == DATA[:MIB]
        assert web.num_connections == 2
        with pytest.raises(TransferError, match="closed before an answer"):  # a new one was, too
            storage.read(f"{web.url}/x", 0, MIB)
        assert web.num_connections == 3
        assert bytes(storage.read(f"{web.url}/x", 0, MIB)) == DATA[:MIB]


@pytest.mark.parametrize(
    ("line", "more"),
    [("connection: close", b""), ("Connection: Close", b""), ("content-length: 1048577", b"x"), ("x: y", b"x")],
)
def test_what_follows_an_answer_is_never_taken_for_the_next_one(line: str, more: bytes) -> None:
    with Web(lambda _, head: answer_to(head, line) + more) as web:
        storage = Storage(QUICK)
        for start in (0, 9):
            with suppress(StorageError):
                assert bytes(storage.read(f"{web.url}/x", start, start + MIB)) == DATA[start : start + MIB]
        assert web.num_connections >= 2


@pytest.mark.thorough
def test_what_is_left_of_an_answer_is_never_taken_for_the_next_one(through_obstore) -> None:
    """It comes when nobody waits for it any more."""

    asked_again = threading.Event()

    def answer(number: int, head: str) -> Iterator[bytes]:
        if number:
            asked_again.set()
        right = answer_to(head)
        yield right[: MIB // 2]
        assert asked_again.wait(PATIENCE_S)
        yield right[MIB // 2 :]

    with Web(answer) as web:
        storage = Storage({**QUICK, "read_timeout_s": 1.0})
        assert bytes(storage.read(f"{web.url}/x", 0, 3 * MIB)) == DATA[: 3 * MIB]
        assert web.num_connections == len(web.heads) >= 2, "each in place of one that was late"
    assert through_obstore == []


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["transfer-encoding: chunked"], "206 Partial Content"),
        (["content-length: 0x100000"], "206 Partial Content"),
        (["etag: one", "etag: two"], "206 Partial Content"),
        (["no colon here"], "206 Partial Content"),
        (["folded:", " line"], "206 Partial Content"),
        ([], "100 Continue\r\n\r\nHTTP/1.1 206 Partial Content"),
        ([], "403 Forbidden"),
        ([], "301 Moved Permanently"),
        (["x: " + "y" * (80 << 10)], "206 Partial Content"),
    ],
)
def test_an_odd_answer_is_asked_for_again_by_obstore(lines: list[str], status: str, through_obstore) -> None:
    """It can do it here; so it gets the next ones, too."""

    def answer(number: int, head: str) -> bytes:
        return answer_to(head, *lines, status=status) + Web.END if number == 0 else answer_to(head)

    with Web(answer) as web:
        storage = Storage(QUICK)
        for start in (0, 9):
            assert bytes(storage.read(f"{web.url}/x", start, start + MIB)) == DATA[start : start + MIB]
        assert through_obstore == [(0, MIB), (9, 9 + MIB)]
        assert len(web.heads) == 3
        assert storage.metrics.get("retries") == 0


def test_redirects_are_followed(through_obstore) -> None:
    with Web(lambda _, head: answer_to(head)) as target:
        moved = f"location: {target.url}/there"
        with Web(lambda _, head: answer_to(head, moved, status="307 Temporary Redirect", body=b"")) as web:
            assert bytes(Storage(QUICK).read(f"{web.url}/x", 3, 3 + MIB)) == DATA[3 : 3 + MIB]
    assert through_obstore == [(3, 3 + MIB)]


def test_another_range_is_none(through_obstore) -> None:
    for line, status in (
        ("content-range: bytes 1-1048576/9999999", "206 Partial Content"),
        ("content-range: bytes 8-1048576/9999999", "206 Partial Content"),
        ("content-range: bytes 9-1048585/9999999", "206 Partial Content"),
        ("x: y", "200 OK"),
    ):
        with (
            Web(lambda _, head: answer_to(head, line, status=status)) as web,  # noqa: B023  (called within)
            pytest.raises(TransferError, match="byte ranges"),
        ):
            Storage(QUICK).read(f"{web.url}/x", 9, 9 + MIB)
        assert len(web.heads) == 1
    assert through_obstore == []


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ("404 Not Found", NotFoundError, "no such object"),
        ("412 Precondition Failed", TransferError, "changed while it was read"),
        ("416 Range Not Satisfiable", TransferError, "past the object's end"),
        ("429 Too Many Requests", TransferError, r"busy or failing \(429 SlowDown: why GET"),
        ("500 Internal Server Error", TransferError, "busy or failing"),
        ("501 Not Implemented", StorageError, "refused"),
    ],
)
def test_refusals_are_those_of_obstore_and_tell_no_secret(
    status: str, kind: type[Exception], words: str, through_obstore
) -> None:
    """Neither in their words nor in those of the server, which repeats what it was asked."""

    def answer(number: int, head: str) -> bytes:
        said = f"<Code>SlowDown</Code><Message>why {head}</Message>".encode()
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(said)}\r\n\r\n".encode() + said

    with Web(answer) as web:
        options = {**QUICK, "endpoint_url": web.url, "key": "key-of-mine", "secret": "s3cr3t"}
        for url in (f"{web.url}/x?X-Amz-Signature={SIGNATURE}", "s3://bucket/x"):
            web.heads.clear()
            with pytest.raises(kind, match=words) as caught:
                Storage(options).read(url, 0, MIB)
            signature = re.search(r"X-Amz-Signature=(\w+)", web.heads[-1])
            assert signature is not None
            assert signature[1] not in "".join(traceback.format_exception(caught.value))
    assert through_obstore == []


def test_refusals_of_signatures_are_those_of_obstore(mini_s3, url: str) -> None:
    for changed in ({"secret": "oh-so-wrong"}, {"key": "who"}, {"region": "eu-north-1"}):
        options = {**mini_s3.storage_options, **changed}
        said = []
        for client in (None, "obstore"):
            with pytest.raises(AccessDeniedError) as caught:
                Storage({**options, "client": client}).read(url, 0, MIB)
            said.append(str(caught.value))
            assert "Signature=" not in "".join(traceback.format_exception(caught.value))
        assert said[0] == said[1]


def test_a_store_that_takes_no_signed_urls_is_read_through_obstore(mini_s3, url: str, through_obstore) -> None:
    def only_headers(method: str, path: str, span: str | None) -> Fault | None:
        return Fault(kind="status", status=403) if "X-Amz-Signature" in path else None

    with FaultProxy(mini_s3.port, choose=only_headers) as proxy:
        storage = Storage({**mini_s3.storage_options, "endpoint_url": proxy.url, **QUICK})
        for _ in range(3):
            assert bytes(storage.read(url, 0, MIB)) == DATA[:MIB]
    assert len(through_obstore) == 3
    assert len(proxy.log) == 4


def test_nobody_there(through_obstore) -> None:
    with socket.socket() as held:  # bound, so that nobody else takes the port, but not listening
        held.bind(("127.0.0.1", 0))
        at = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(TransferError, match=rf"cannot reach {at} \(connection refused\)"):
            Storage(QUICK).read(f"{at}/x", 0, MIB)
    with pytest.raises(TransferError, match=r"cannot reach http://no-such-host.invalid \(the name does not resolve\)"):
        Storage(QUICK).read("http://no-such-host.invalid/x", 0, MIB)
    assert through_obstore == []


@pytest.mark.thorough
def test_an_answer_that_stands_still_ends_after_the_time_out(mini_s3, url: str) -> None:
    for fault in (Fault(kind="silent"), Fault(kind="stall", at_bytes=MIB)):
        with FaultProxy(mini_s3.port, *[fault] * 3) as proxy:
            options = {**mini_s3.storage_options, **QUICK, "endpoint_url": proxy.url}
            storage = Storage({**options, "max_retries": 0, "read_timeout_s": 0.5})
            with pytest.raises(TransferError, match="no byte came for read_timeout_s"):
                storage.read(url, 0, 2 * MIB)


@pytest.mark.thorough
def test_bytes_that_trickle_are_all_taken() -> None:
    """Pieces are as small as they come, and none is waited for that is not to come."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            head = answer_to(connection.recv(4096).decode())
            for start in range(0, len(head), 30_000):
                connection.sendall(head[start : start + 30_000])
                time.sleep(0.012)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        read = Storage({**QUICK, "max_retries": 0}).read(f"http://127.0.0.1:{listener.getsockname()[1]}/x", 5, 5 + MIB)
        assert bytes(read) == DATA[5 : 5 + MIB]
        thread.join()


def test_time_outs_may_be_years(mini_s3, url: str) -> None:
    years = dict.fromkeys(("connect_timeout_s", "read_timeout_s", "deadline_s"), 1e9)
    assert bytes(Storage({**mini_s3.storage_options, **years}).read(url, 0, MIB)) == DATA[:MIB]


def test_the_deadline_bounds_an_answer_that_trickles() -> None:
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        """Without its last byte, which only comes when the read is over."""
        connection, _ = listener.accept()
        with suppress(OSError), connection:
            answer = answer_to(connection.recv(4096).decode())
            connection.sendall(answer[:-MIB])
            for start in range(len(answer) - MIB, len(answer) - 1):
                connection.sendall(answer[start : start + 1])
                if over.wait(0.02):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = started(lambda: serve(listener))
        storage = Storage({**QUICK, "max_retries": 0, "deadline_s": 0.3})
        with pytest.raises(TransferError):
            storage.read(f"http://127.0.0.1:{listener.getsockname()[1]}/x", 0, MIB)
        over.set()
        ended(*serving)


def exit_code_of_a_child(storage: Storage, url: str, through_obstore: list[Any]) -> int:
    """0 if a forked child reads the right bytes in place."""
    if not (pid := os.fork()):
        code = 1
        with suppress(BaseException):
            code = 0 if bytes(storage.read(url, 9, 9 + MIB)) == DATA[9 : 9 + MIB] and not through_obstore else 2
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_makes_connections_of_its_own(through_obstore) -> None:
    with Web(lambda _, head: answer_to(head)) as web:
        storage, url = Storage(QUICK), f"{web.url}/x"
        storage.read(url, 0, MIB)
        assert exit_code_of_a_child(storage, url, through_obstore) == 0
        assert web.num_connections == 2
        assert bytes(storage.read(url, 3, 3 + MIB)) == DATA[3 : 3 + MIB]
        assert web.num_connections == 2


def test_a_forked_child_signs_by_a_client_of_its_own(mini_s3, url: str, through_obstore) -> None:
    storage = Storage(mini_s3.storage_options)
    storage.read(url, 0, MIB)
    assert exit_code_of_a_child(storage, url, through_obstore) == 0


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "AWS_PROXY_URL"])
def test_proxies_are_obstores(name: str, through_obstore, monkeypatch: pytest.MonkeyPatch) -> None:
    with Web(lambda _, head: answer_to(head)) as web:
        monkeypatch.setenv(name, web.url)
        if name == "AWS_PROXY_URL":
            Storage(QUICK).read(f"{web.url}/x", 0, MIB)
        else:
            assert bytes(Storage(QUICK).read("http://elsewhere.invalid/x", 0, MIB)) == DATA[:MIB]
            monkeypatch.setenv("NO_PROXY", "127.0.0.1")
            assert bytes(Storage(QUICK).read(f"{web.url}/x", 0, MIB)) == DATA[:MIB]
    assert len(through_obstore) == 1


@pytest.mark.parametrize(
    ("spared", "proxied"),
    [("", True), ("*", False), ("store.lan", False), (".lan, other", False), ("tore.lan", True), ("10.0.0.0/8", True)],
)
def test_hosts_that_go_past_the_proxy(spared: str, *, proxied: bool) -> None:
    environ = {"http_proxy": "http://proxy:3128", "no_proxy": spared}
    assert (proxy_of("http://store.lan:9000/x", environ) is not None) is proxied
    assert proxy_of("http://store.lan:9000/x", {"no_proxy": spared, "https_proxy": "x", "http_proxy": ""}) is None


@pytest.mark.parametrize(
    "url", ["https://h/x", "http://u:p@h/x", "http:///x", "http://h:0/x", "http://h:x/", "http://[h/", "http://h/a b",
            "http://h/ä", "http://h/x\r\nA: b", "http://h/x#y", ""],
)  # fmt: skip
def test_urls_that_cannot_be_sent_as_they_are(url: str) -> None:
    assert not can_ask(url)
    assert can_ask("http://[::1]:9000/a%20b?c=d%2F")
