"""The page of a running job: all ranks, by sockets or metrics addresses, now and over the run; the silent are named."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server

import streaming.metrics
import streaming.watch.metrics.server
from shard_tools.look.show.run import attach
from shard_tools.look.show.run import page as run_page
from streaming import DataLoader
from streaming.errors import ConfigError
from streaming.watch.metrics.waits import CAUSES, OWN, REST
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.browser import Tab, expect
from tests.support.servers.show_pages import Shown
from tests.support.sets.data_sets import SampleSet, mesh_of, write_set

pytestmark = pytest.mark.thorough

HOSTILE = '"><script>document.title="ran"</script><img src=x onerror=\'document.title="ran"\'>'


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> SampleSet:
    return write_set(tmp_path_factory.mktemp("run"), (9, 20, 9))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are asked in no hurry: one that answers late is none that is silent."""
    monkeypatch.setattr(attach, "_ANSWER_S", PATIENCE_S)


@contextmanager
def answering(path: Path, answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """A socket file at which a function answers, until it is told to stop."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def act() -> None:
            while not stop.is_set():
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    if not stop.is_set():
                        answer(connection)

        stop = threading.Event()
        thread = threading.Thread(target=act)
        thread.start()
        try:
            yield str(path)
        finally:
            stop.set()
            with suppress(OSError), socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join()


@contextmanager
def metrics_server(answer: Callable[[BaseHTTPRequestHandler], object]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):
                answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks, and who answers, waits as long as a busy machine needs."""
    for module in (attach, streaming.watch.metrics.server):
        monkeypatch.setattr(module, "_ANSWER_S", PATIENCE_S)


@contextmanager
def job(samples: SampleSet, folder: Path, world_size: int = 2) -> Iterator[list[DataLoader]]:
    """The loaders of all ranks in this process, each with its socket, after five batches."""
    loaders = [
        DataLoader(samples.open(), batch_size=2, device_mesh=mesh_of(world_size, rank), agreement_timeout=None)
        for rank in range(world_size)
    ]
    served = [streaming.metrics.serve(loader, folder / "rank{rank}.sock") for loader in loaders]
    for loader in loaders:
        for _ in zip(range(5), loader, strict=False):
            pass
    try:
        yield loaders
    finally:
        for one in (*served, *loaders):
            one.close()


def test_all_ranks_of_a_job(samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "_LEAST_S", 0.0)
    with job(samples, tmp_path) as loaders, Shown((), {"run": (f"{tmp_path}/rank*.sock",)}) as shown:
        found = shown.json("/run")
        assert (found["answered"], found["asked"]) == (2, [str(tmp_path / f"rank{rank}.sock") for rank in (0, 1)])
        assert [one["rank"] for one in found["ranks"]] == [0, 1]
        for one, loader in zip(found["ranks"], loaders, strict=True):
            assert one["place"]["world_size"] == 2
            assert one["numbers"]["batches"] == loader.metrics()["batches"] == 5
            assert one["describe"]
            assert [stage["name"] for stage in one["stages"]] == ["Fetch", "Build", "Hand-over"]
            (bar,) = one["bars"]
            assert (bar["name"], bar["steps"]) == ("whole run", 5)
            assert sum(part["width"] for part in bar["slices"]) == pytest.approx(100, abs=0.1)
            assert {part["words"] for part in bar["slices"]} <= {OWN, REST, *CAUSES.values()}
            own = next(part for part in bar["slices"] if part["words"] == OWN)
            assert own["width"] / 100 == pytest.approx(1 - bar["headspace"], abs=0.01)
        assert found["headspace"] == max(one["bars"][0]["headspace"] for one in found["ranks"])
        for _ in loaders[0]:
            pass
        again = shown.json("/run")["ranks"]
        assert [re.sub(r"\d+", "n", bar["name"]) for bar in again[0]["bars"]] == ["last n s", "whole run"]
        assert again[0]["bars"][0]["steps"] == again[0]["numbers"]["batches"] - 5
        assert [bar["name"] for bar in again[1]["bars"]] == ["whole run"]  # no step since
        text = shown.get("/run").text
        assert "2 of 2 ranks answer" in text
        assert "Rank 1 of 2" in text
        assert 'id="run"' in shown.get("/").text  # where the printed address leads


def test_a_metrics_address_says_the_same(samples: SampleSet, tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with job(samples, tmp_path) as loaders:
        for number, loader in enumerate(loaders):
            streaming.metrics.prometheus(loader, registry, name=f"train{number}")
        server, thread = start_http_server(0, "127.0.0.1", registry)
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        with closing(server.socket), Shown((), {"run": (f"{tmp_path}/rank*.sock", address)}) as shown:
            told = shown.json("/run")["ranks"]
            server.shutdown()
            thread.join()
    sockets, exported = [one for one in told if not one["loader"]], [one for one in told if one["loader"]]
    assert [(one["loader"], one["rank"], one["address"]) for one in exported] == [
        ("train0", 0, address), ("train1", 1, address)
    ]  # fmt: skip
    for one, other in zip(sockets, exported, strict=True):
        assert one["numbers"].items() <= other["numbers"].items()
        assert (one["bars"], one["stages"]) == (other["bars"], other["stages"])
        assert {**one["place"], **other["place"]} == one["place"]


def test_who_is_silent_is_named(samples: SampleSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Patient(socket.socket):
        """Waits for all but one as long as they need."""

        def connect(self, address: Any) -> None:
            self.settimeout(0.3 if address == str(stopped) else PATIENCE_S)
            super().connect(address)

    monkeypatch.setattr(attach, "socket", SimpleNamespace(socket=Patient, AF_UNIX=socket.AF_UNIX))
    killed = tmp_path / "killed.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(killed))
    held = threading.Event()
    stopped, unknown = tmp_path / "stopped.sock", tmp_path / "unknown.sock"
    addresses = (f"{tmp_path}/rank*.sock", str(killed), str(stopped), str(unknown), "http://127.0.0.1:1/metrics")
    with (
        job(samples, tmp_path, 1), answering(stopped, lambda _: held.wait(PATIENCE_S)),
        Shown((), {"run": addresses}) as shown,
    ):  # fmt: skip
        found = shown.json("/run")
        held.set()
        errors = {Path(one["address"]).stem: one["error"] for one in found["ranks"]}
        assert (found["answered"], errors.pop("rank0")) == (1, "")
        assert errors.pop("killed").startswith("no answer: the job has ended")
        assert errors.pop("stopped").startswith("no answer within")
        assert errors.pop("unknown").startswith("there is no such file; the job makes it with streaming.metrics.serve")
        assert errors.pop("metrics").startswith("no answer")
        assert errors == {}
        assert "1 of 5 ranks answer" in shown.get("/run").text


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", "the loader has ended"),
        (b"GET out", "Expecting value"),
        (b"[" * 100_000, "recursion"),
        (b"[1, 2]", "expected the answer of streaming.metrics.serve, format 1"),
        (b'{"format": 2}', "is it another version?"),
        (b'{"format": 1}', "'data_rank'"),
        (b'{"format": 1, "error": "broken"}', "the job says: broken"),
        (b"\xff\xfe\x00", "truncated data"),
    ],
)
def test_answers_of_any_kind(tmp_path: Path, answer: bytes, expected: str) -> None:
    with answering(tmp_path / "one.sock", lambda to: to.sendall(answer)) as address:
        (found,) = attach.ask([address])
    assert expected in found.error


def test_an_endless_answer_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_MOST_BYTES", 1 << 20)

    def endless(to: socket.socket) -> None:
        while True:
            to.sendall(bytes(1 << 16))

    with answering(tmp_path / "one.sock", endless) as address:
        (found,) = attach.ask([address])
    assert found.error.startswith("an answer of more than 1 MiB")


def test_numbers_that_are_none(tmp_path: Path) -> None:
    places = dict.fromkeys(("rank", "data_rank", "pid", "world_size", "epoch", "samples_seen"), 0)
    numbers = '{"batches": NaN, "in_loader_s": Infinity, "consumer_s": "x", "retries": 3, "epoch": true, "odd": 1e308}'
    text = json.dumps({**places, "format": 1, "host": "h", "numbers": 0}).replace(
        '"numbers": 0', f'"numbers": {numbers}'
    )
    with (
        answering(tmp_path / "one.sock", lambda to: to.sendall(text.encode())) as address,
        Shown((), {"run": (address,)}) as shown,
    ):
        (one,) = shown.json("/run")["ranks"]
        assert (one["bars"], one["trouble"]) == ([], [["requests repeated", "3"]])
        assert shown.get("/run").status == 200


def told_by(text: str, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(text.encode())

    return answer


def test_a_metrics_address_that_leads_elsewhere_is_not_followed() -> None:
    asked: list[str] = []

    def secret(request: BaseHTTPRequestHandler) -> None:
        asked.append(request.path)
        told_by("shardstream_batches_total 1\n")(request)

    with metrics_server(secret) as target, metrics_server(told_by("", 302, Location=target)) as address:
        (found,) = attach.ask([address])
    assert (found.error, asked) == ("HTTP 302 Found", [])


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        ("<html>hello</html>", 200, "nvalid"),
        ("python_gc_total 3\n", 200, "answers, but exports no loader: call streaming.metrics.prometheus(loader)"),
        ("", 404, "HTTP 404 Not Found"),
        ('shardstream_batches_total{rank="x"} 1\n', 200, "invalid literal"),
        ('shardstream_batches_total{rank="0"} NaN\n', 200, "exports no loader"),
        ("x" * (1 << 20), 200, "an answer of more than"),
    ],
)  # fmt: skip
def test_metrics_of_any_kind(text: str, status: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_MOST_BYTES", 1 << 19)
    with metrics_server(told_by(text, status)) as address:
        (found,) = attach.ask([address])
    assert expected in found.error


def test_addresses_come_from_the_command_line_alone(samples: SampleSet, tmp_path: Path) -> None:
    with job(samples, tmp_path, 1), Shown((), {"run": (f"{tmp_path}/rank0.sock",)}) as shown:
        for name in ("run", "address", "url"):
            found = shown.get("/run", **{name: "http://127.0.0.1:1/"})
            assert (found.status, f"no parameter &#39;{name}&#39;" in found.text) == (400, True)
    for address in ("ftp://host/x", "file:///etc/passwd", "gopher://x"):
        with pytest.raises(ConfigError, match=r"expected a socket file, a pattern such as 'run/\*\.sock'"):
            attach.check_addresses([address])
    attach.check_addresses(["run/rank0.sock", "run/*.sock", "http://host:9000/metrics"])


def test_without_a_job_there_is_no_page(samples: SampleSet) -> None:
    with Shown((samples.url,)) as shown:
        found = shown.get("/run")
        assert found.status == 404
        assert "the address of a running job with --run" in found.text


# -------------------------------------------------------------------------------------------------- in the browser


def test_the_page_renews_itself(samples: SampleSet, tmp_path: Path, tab: Callable[..., Tab]) -> None:
    with job(samples, tmp_path) as loaders, Shown((), {"run": (f"{tmp_path}/rank*.sock",)}) as shown:
        seen = tab(color_scheme="dark")
        for width in (360, 1280):
            seen.width(width)
            page = seen.open(shown.address)
            assert seen.value("document.documentElement.scrollWidth <= innerWidth")
        expect(page.locator(".rank")).to_have_count(2)
        first = page.locator(".timebar .axis span").first
        expect(first).to_contain_text(" 5 steps")
        for _ in loaders[0]:
            pass
        expect(first).not_to_contain_text(" 5 steps")
        assert seen.value("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
        colors = {seen.value(f"getComputedStyle(document.querySelector('.legend .cause{n}')).fill") for n in range(7)}
        assert len(colors) == 7
        assert seen.errors == []
        assert all(address.startswith((shown.root, "data:")) for address in seen.asked)
        page.wait_for_selector("#run:not(.stale)")
    page.wait_for_selector("#run.stale")  # the server has ended


def test_it_can_be_read_without_scripts(samples: SampleSet, tmp_path: Path, tab: Callable[..., Tab]) -> None:
    with job(samples, tmp_path), Shown((), {"run": (f"{tmp_path}/rank*.sock",)}) as shown:
        page = tab(java_script_enabled=False).open(shown.address)
        assert page.locator(".rank h2").all_inner_texts() == ["Rank 0 of 2", "Rank 1 of 2"]
        assert "a perfect loader would save" in page.locator("main").inner_text()
        label = page.get_by_role("img").first.get_attribute("aria-label")
        assert label.startswith("your step ")


def test_what_a_job_says_does_not_run(tmp_path: Path, tab: Callable[..., Tab]) -> None:
    places = dict.fromkeys(("rank", "data_rank", "pid", "world_size", "epoch", "samples_seen"), 1)
    told = {**places, "format": 1, "host": HOSTILE, "numbers": {"batches": 1, HOSTILE: 2}, "describe": HOSTILE}
    told["readers"] = {HOSTILE: {"batches": 1}}
    with (
        answering(tmp_path / "one.sock", lambda to: to.sendall(json.dumps(told).encode())) as address,
        Shown((), {"run": (address,)}) as shown,
    ):
        seen = tab()
        page = seen.open(shown.address)
        page.evaluate("document.getElementById('run').firstElementChild.id = 'first'")
        expect(page.locator("#first")).to_have_count(0)  # the page has renewed itself
        assert HOSTILE in page.locator(".describe").inner_text()
        assert page.title().startswith("Run")
        assert page.locator("main script, main img").count() == 0
        assert seen.errors == []
