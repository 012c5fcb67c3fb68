"""``show`` over hostile data and before hostile askers: nothing runs, nothing leaks, nothing is written, it goes on."""

from __future__ import annotations

import http.server
import io
import json
import os
import re
import signal
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from shard_tools.cli import cli
from shard_tools.look.show.decoding.workers import DecodingWorkers
from streaming.errors import DecodeError
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.browser import OUTLINES, PICTURES, Pictures, Tab, expect
from tests.support.servers.show_pages import Shown
from tests.support.sets.pretty_set import write_pretty
from tests.support.sets.tars import write_tar

pytestmark = pytest.mark.thorough

MARKUP = '<script>window.ran = 1; alert(1)</script><img src=x onerror="window.ran = 1; alert(2)">"\'&{{ 7*7 }}'
KEY = "<img src=x onerror=alert(2)><script>alert(3)<b>\"'&{{ 7*7 }}"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="window.ran = 1"><script>window.ran = 1</script></svg>'


def png(width: int, height: int, *, pixels: bytes | None = None) -> bytes:
    """A PNG that says that it is so large, with these bytes of pixels, or with none."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = zlib.compress(pixels if pixels is not None else b"")
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def npz_bomb() -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 30,)})
        for _ in range(64):
            file.write(bytes(1 << 20))
    return out.getvalue()


def jpeg() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 80, 20)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples whose keys, texts, JSON and columns are markup, whose images are bombs, and whose fields are pages."""
    folder = tmp_path_factory.mktemp("hostile") / "d"
    pickle = b"cos\nsystem\n(S'touch /tmp/ran'\ntR."
    files: list[tuple[str, bytes]] = []
    bad = (
        png(100_000, 100_000),
        png(100_000, 100_000),
        png(11_000, 11_000),
        b"no image",
        b"\xff\xd8\xff" + bytes(64),
        jpeg(),
    )
    for number in range(12):
        key = f"{number:02d}{KEY}"
        deep = b"[" * 100_000 if number == 0 else json.dumps({MARKUP: [MARKUP, {"bbox": [0, 0, 1e308, -1]}]}).encode()
        fields = {
            "jpg": bad[number % len(bad)], "txt": MARKUP.encode() * 3, "json": deep, "svg": SVG,
            "html": MARKUP.encode(),
            "cls": MARKUP.encode(), "npz": npz_bomb() if number == 0 else b"PK\x03\x04", "pkl": pickle,
            "npy": np.lib.format.magic(1, 0) + b"\x10\0", "wav": MARKUP.encode(), "note": b"javascript:alert(1)",
        }  # fmt: skip
        files += [(f"{key}.{name}", data) for name, data in fields.items()]
    write_tar(folder / "0.tar", files)
    assert CliRunner().invoke(cli, ["index", str(folder)]).exit_code == 0
    for column, field in (("text", "txt"), ("json.width", "txt")):
        done = CliRunner().invoke(cli, ["column", "add", str(folder), column, "--lift", field])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def shown(hostile: Path) -> Iterator[Shown]:
    with Shown((str(hostile),)) as found:
        yield found


PATHS = (
    "/overview",
    "/",
    "/columns",
    "/columns?name=text&against=json.width",
    "/sample?number=0",
    "/sample?number=3",
    "/bad",
)


def test_nothing_of_the_data_is_markup(shown: Shown) -> None:
    for path in PATHS:
        found = shown.get(path)
        assert found.status == 200, found.text
        assert "<script>window" not in found.text
        assert not re.search(r"<img src=x|<svg [^>]*onload|javascript:[^<]*\"|style=\"", found.text), path
        assert re.findall(r"<script[^>]*>", found.text) == ['<script src="/show.js" defer>']
        assert " on" not in " ".join(re.findall(r"<[a-z][^<>]*?(?= on\w+=)", re.sub(r"\"[^\"]*\"", '""', found.text)))
        assert "{{ 7*7 }}" in found.text or path == "/bad"


def test_no_value_is_sent_as_what_a_browser_runs(shown: Shown) -> None:
    fields = shown.json("/sample", number=3)["fields"]
    assert len(fields) == 11
    for name in fields:
        found = shown.get("/value", number=3, field=name)
        media = found.headers["content-type"]
        assert media in {"text/plain; charset=utf-8", "application/octet-stream", "audio/wav"}, name
        assert found.headers["x-content-type-options"] == "nosniff"
        assert (media == "application/octet-stream") == found.headers.get("content-disposition", "").startswith(
            "attachment"
        )
        assert '"' not in found.headers.get("content-disposition", "")[22:-1]


def test_bombs_make_a_broken_tile_and_the_server_goes_on(shown: Shown) -> None:
    """Twice in a row, and side by side."""
    for number in (0, 1, 6, 7, 2, 3, 4):
        found = shown.get("/value", number=number, field="jpg", view="small", format="json")
        assert found.status == 422
        assert "not decoded" in found.json["error"]["message"]
    assert "100,000 x 100,000 pixels" in shown.get("/value", number=0, field="jpg", view="large").text
    assert shown.get("/value", number=0, field="npz", view="small").status in {404, 422}
    assert shown.get("/value", number=5, field="jpg", view="small").status == 200


def test_a_worker_that_hangs_or_dies_is_replaced() -> None:
    workers = DecodingWorkers(PATIENCE_S)
    try:
        assert workers.decode("image", 384, jpeg()).facts["width"] == 64
        for _ in range(2):
            for one in workers._started:
                if one.runs:
                    os.kill(one._process.pid, signal.SIGSTOP)
            workers._seconds = 0.2
            with pytest.raises(DecodeError, match="it took too long"):
                workers.decode("image", 384, jpeg())
            workers._seconds = PATIENCE_S
            assert workers.decode("image", 384, jpeg()).picture[:3] == b"\xff\xd8\xff"
        for one in workers._started:
            if one.runs:
                os.kill(one._process.pid, signal.SIGKILL)
                one._process.wait()
        with pytest.raises(DecodeError, match="its process ended"):
            workers.decode("image", 384, jpeg())
        assert workers.decode("image", 384, jpeg()).facts["width"] == 64
    finally:
        workers.close()
    assert not any(one.runs for one in workers._started)


def test_a_value_that_takes_too_much_memory_costs_its_worker_at_most() -> None:
    out = io.BytesIO()
    np.save(out, np.zeros((1, 1)))
    header = out.getvalue()[:128].replace(b"(1, 1)", b"(8192, 2048)"[:6])
    workers = DecodingWorkers(PATIENCE_S)
    try:
        with pytest.raises(DecodeError):
            workers.decode("tensor", 384, header + b"x")
        found = workers.decode("tensor", 384, npz_bomb())
        assert found.picture == b""
        assert found.facts["arrays"] == [{"name": "a", "dtype": "float64", "shape": [1 << 30]}]  # and not its values
        with pytest.raises(DecodeError, match="more than"):
            workers.known(("a",), "image", 384, 1 << 40, lambda: b"")
    finally:
        workers.close()


def test_who_has_no_token_learns_nothing(shown: Shown, hostile: Path) -> None:
    token = shown.access.token
    for path in (*PATHS, "/value?number=5&field=jpg", "/nothing", "/?format=json", f"/?token={token[:-1]}", "/?token="):
        found = shown.ask(path)
        assert found.status == 401, path
        assert str(hostile) not in found.text
        assert "set-cookie" not in found.headers
    for headers in (
        {"Authorization": f"Bearer {token}x"},
        {"Authorization": token},
        {"Cookie": f"shardstream_show={token}"},
    ):
        assert shown.ask("/", headers).status == 401
    assert shown.ask(f"/?token={token}").status == 200
    assert "set-cookie" not in shown.ask(f"/?token={token}").headers


BROWSER = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.mark.parametrize("headers", [BROWSER, {"Accept": "text/html,*/*"}])
def test_a_browser_gets_a_session_of_its_own(shown: Shown, headers: dict[str, str]) -> None:
    token = shown.access.token
    found = shown.ask(f"/sample?number=3&token={token}", headers)
    assert (found.status, found.text) == (303, "")
    home = re.fullmatch(r"(/s/[\w-]{20,})/sample\?number=3", found.headers["location"])
    assert home is not None
    cookie = found.headers["set-cookie"]
    assert re.fullmatch(rf"shardstream_show=[\w-]{{30,}}; HttpOnly; Path={home[1]}; SameSite=lax", cookie)
    assert token not in cookie
    sent = {"Cookie": cookie.partition(";")[0]}
    page = shown.ask(f"{home[1]}/sample?number=3", sent)
    assert page.status == 200
    addresses = re.findall(r'(?:href|src|action)="(/[^"]*)"', page.text)
    assert addresses
    assert {one for one in addresses if not one.startswith(home[1] + "/")} == {"/show.css", "/show.svg", "/show.js"}
    # Neither half opens anything without the other, and another browser's half does not fit.
    other = shown.ask(f"/?token={token}", headers).headers["set-cookie"].partition(";")[0]
    for path, given in (
        ("/", sent), (f"{home[1]}/", {}), (f"{home[1]}/", {"Cookie": other}), (f"{home[1]}x/", sent), ("/s//", sent),
    ):  # fmt: skip
        assert shown.ask(path, given).status == 401
    assert shown.ask(f"{home[1]}/nothing", sent).status == 404


def test_what_a_browser_is_started_with_lets_in_once(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    """Command lines are seen by all users: whoever is second closes what the first has opened, and that is said."""
    address = shown.access.address_for_browser().removeprefix(shown.root)
    assert shown.access.token not in address
    assert shown.ask(address, method="HEAD").status == 401
    first = shown.ask(address)
    sent, home = {"Cookie": first.headers["set-cookie"].partition(";")[0]}, first.headers["location"]
    assert shown.ask(home, sent).status == 200
    second = shown.ask(address, BROWSER)
    assert second.status == 401
    assert "was used before" in second.text
    assert "set-cookie" not in second.headers
    assert "requested twice" in caplog.text
    assert shown.ask(home, sent).status == 401
    assert shown.ask(address).status == 401


def test_a_browser_sends_its_cookie_to_no_other_port(shown: Shown, tab: Callable[..., Tab]) -> None:
    heard: list[str] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        """Another user's server."""

        def do_GET(self) -> None:  # the name is http.server's
            heard.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        seen = tab()
        page = seen.open(shown.access.address_for_browser())
        assert page.title().startswith("Overview")
        assert shown.within(page)
        for path in ("/", "/sample", "/s/x/"):
            page.goto(f"http://127.0.0.1:{server.server_port}{path}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert heard
    assert set(heard) == {""}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1",
        "127.0.0.1:1",
        "evil.example:{port}",
        "127.0.0.1.evil.example:{port}",
        "",
        "[::1]:{port}",
    ],
)
def test_a_wrong_host_is_refused_even_with_the_token(shown: Shown, host: str) -> None:
    """A name of another site may lead to this machine."""
    headers = {"Host": host.format(port=shown.access.port)}
    found = shown.get("/", headers)
    assert found.status in {400, 421}
    assert "hostile" not in found.text
    assert shown.ask("/show.css", headers).status in {400, 421}
    assert shown.get("/", {"Host": f"localhost:{shown.access.port}"}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_served(shown: Shown, method: str) -> None:
    found = shown.ask(f"/?token={shown.access.token}", method=method)
    assert found.status == 405
    assert shown.ask(f"/?token={shown.access.token}", method="HEAD").body == b""


def test_pages_of_other_sites_are_refused(shown: Shown) -> None:
    """Also those at another port of this machine, whose requests bring the cookie along."""
    for site in ("cross-site", "same-site"):
        for path in ("/", "/value?number=5&field=jpg", "/show.js", "/show.css"):
            found = shown.get(path, {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"})
            assert found.status == 403
        framed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        assert shown.get("/", framed).status == 403
    headers = shown.get("/").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "private, no-store"
    assert "access-control-allow-origin" not in headers


# ------------------------------------------------------------------------------------------------------- in a browser


def test_hostile_data_in_a_browser(shown: Shown, tab: Callable[..., Tab]) -> None:
    seen = tab()
    home = shown.within(seen.open(shown.address))
    for path in PATHS:
        page = seen.open(home + path)
        assert page.evaluate("window.ran") is None
        assert page.evaluate("[...document.images].every((one) => one.src.startsWith(location.origin))")
    assert seen.dialogs == []
    ours = [error for error in seen.errors if "422" not in error and "404" not in error and "416" not in error]
    assert ours == []  # neither our pages nor the data's break the policy
    assert {url.split("/")[2] for url in seen.asked} == {f"127.0.0.1:{shown.access.port}"}
    stopped = page.evaluate("""async () => {
        const stopped = new Promise((end) => {
            const kinds = [];
            document.addEventListener("securitypolicyviolation", (one) => {
                if (kinds.push(one.effectiveDirective) === 4) end(kinds.sort());
            });
        });
        for (const [name, text] of [["script", "window.ran = 1"], ["style", "body { display: none }"]]) {
            const made = document.createElement(name); made.textContent = text; document.body.append(made);
        }
        const image = document.createElement("img"); image.src = "http://127.0.0.1:9/leak"; document.body.append(image);
        document.body.insertAdjacentHTML("beforeend", "<b onclick='window.ran = 1' id=b>b</b>");
        document.getElementById("b").click();
        return await stopped;
    }""")
    assert stopped == ["img-src", "script-src-attr", "script-src-elem", "style-src-elem"]
    assert page.evaluate("window.ran") is None
    assert page.evaluate("getComputedStyle(document.body).display") != "none"
    page = seen.open(f"{home}/value?number=3&field=txt")
    assert page.evaluate("document.querySelectorAll('script, img').length") == 0
    assert page.evaluate("window.ran") is None
    assert seen.dialogs == []


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder that another site serves, at another port of this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_page_of_a_second_site_gets_nothing(
    shown: Shown, tab: Callable[..., Tab], elsewhere: tuple[Path, str]
) -> None:
    """It embeds, frames and fetches, in a browser that has the cookie."""
    folder, site = elsewhere
    seen = tab()
    home = shown.within(seen.open(shown.address))
    target = f"{home}/value?number=5&field=jpg&view=small"
    (folder / "index.html").write_text(f"""<img src="{target}" id=i onload="document.title='loaded'">
        <iframe src="{home}/" id=f></iframe><script src="{shown.root}/show.js" id=s></script>""")
    assert seen.open(target).evaluate("document.images[0].naturalWidth") == 64
    page = seen.open(site)
    assert page.title() != "loaded"
    assert page.evaluate("document.getElementById('i').naturalWidth") == 0
    framed = page.frames[1]
    assert "samples" not in framed.evaluate("document.body ? document.body.textContent : ''")
    fetch = """async (url) => {
        try { return await (await fetch(url, {credentials: "include"})).text() } catch (e) { return "refused" }
    }"""
    assert page.evaluate(fetch, f"{home}/?format=json") == "refused"
    assert seen.open(f"{home}/").title().startswith("Samples")  # the server lives, and the cookie holds


# ------------------------------------------------------------------------------------------------------------- looks


@pytest.fixture(scope="module")
def pretty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A small set to look at, the same on every machine."""
    folder = tmp_path_factory.mktemp("pretty")
    write_pretty(folder / "shapes")
    here = os.getcwd()
    os.chdir(folder)
    try:
        with Shown(("shapes/",)) as found:
            yield found
    finally:
        os.chdir(here)


def test_pages_fit_every_screen_and_are_lit_as_asked(pretty: Shown, tab: Callable[..., Tab]) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        seen = tab(color_scheme=scheme)
        home = pretty.within(seen.open(pretty.address))
        for path in (
            "/overview",
            "/",
            "/columns",
            "/columns?name=tokens&against=lang",
            "/sample?number=1",
            "/bad",
            "/sample?number=x",
        ):
            seen.open(home + path)
            for width in (360, 768, 1920, 3840):
                seen.width(width)
                assert seen.value("document.documentElement.scrollWidth") <= width, (path, width)
        color = seen.value("getComputedStyle(document.body).backgroundColor")
        brightness[scheme] = sum(map(int, re.findall(r"\d+", color)[:3]))
        assert [error for error in seen.errors if "400" not in error] == []
        named = "one.alt !== undefined || one.labels?.length || one.ariaLabel || one.type === 'hidden'"
        asked = "[...document.querySelectorAll('img, input, select, svg[role=img], video, audio, nav')]"
        assert seen.value(f"{asked}.every((one) => {named})")
    assert brightness["light"] > 700
    assert brightness["dark"] < 100


def test_the_keyboard_goes_everywhere(pretty: Shown, tab: Callable[..., Tab]) -> None:
    seen = tab(viewport={"width": 1280, "height": 800})
    page = seen.open(pretty.address)
    assert "token" not in page.url  # the browser has a session
    keys, focused = page.keyboard, page.locator(":focus")
    keys.press("2")
    page.wait_for_url(f"{pretty.within(page)}/")
    keys.press("j")
    keys.press("j")
    expect(focused).to_have_text("shapes/0001")
    keys.press("k")
    expect(focused).to_have_text("shapes/0000")
    keys.press("ArrowDown")
    expect(focused).to_have_text(re.compile(r"shapes/(?!000[01])"))
    below = focused.text_content()
    keys.press("Enter")
    page.wait_for_url("**/sample?number=*")
    expect(page.locator("h1")).to_have_text(below)
    number = int(page.url.rpartition("=")[2])
    keys.press("n")
    page.wait_for_url(f"**/sample?number={number + 1}")
    expect(page.locator("h1")).to_have_text(f"shapes/{number + 1:04d}")
    keys.press("2")
    page.wait_for_url(f"{pretty.within(page)}/")
    keys.press("/")
    keys.type("tokens > 100")
    keys.press("Enter")
    page.wait_for_url("**/?where=*")
    total = pretty.json("/", where="tokens > 100")["total"]
    expect(page.locator("h1")).to_have_text(re.compile(rf"^\s*{total} sample"))
    keys.press("?")
    expect(page.locator("dialog")).to_be_visible()
    keys.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()
    assert seen.errors == []


def test_pages_can_be_read_without_scripts(pretty: Shown, tab: Callable[..., Tab]) -> None:
    seen = tab(java_script_enabled=False)
    page = seen.open(pretty.address)
    expect(page.locator("h1")).to_have_text("Overview")
    page.get_by_role("link", name="Samples", exact=True).click()
    expect(page.locator("article")).to_have_count(gallery_rows(pretty))
    page.get_by_role("link", name="shapes/0003", exact=True).click()
    expect(page.locator("h1")).to_have_text("shapes/0003")
    page.get_by_role("button", name="Check its bytes now").click()
    expect(page.get_by_text("they match the index")).to_be_visible()
    expect(page.get_by_role("button", name="Copy")).to_have_count(0)


def gallery_rows(shown: Shown) -> int:
    return len(shown.json("/")["rows"])


def test_a_video_is_played_by_ranges(pretty: Shown, tab: Callable[..., Tab]) -> None:
    seen = tab()
    home = pretty.within(seen.open(pretty.address))
    page = seen.open(f"{home}/sample?key=shapes/0002")
    page.wait_for_function("document.querySelector('audio').readyState >= 1")
    assert page.evaluate("document.querySelector('audio').duration") == pytest.approx(0.5, abs=0.05)
    assert page.evaluate("document.querySelector('.boxes rect').getBoundingClientRect().width") > 5


@pytest.mark.parametrize(
    ("name", "path", "scheme"),
    [
        ("overview", "/overview", "light"),
        ("samples", "/", "light"),
        ("sample", "/sample?number=1", "dark"),
        ("columns", "/columns", "light"),
    ],
)
def test_the_pictures_of_the_docs(
    pretty: Shown, tab: Callable[..., Tab], pictures: Pictures, name: str, path: str, scheme: str
) -> None:
    """They show the pages as they are; ``pytest --pictures`` takes them anew."""
    seen = tab(color_scheme=scheme, viewport={"width": 1200, "height": 720})
    home = pretty.within(seen.open(pretty.address))
    pictures.take(seen.open(home + path), name)


def test_no_picture_is_left_over_or_large() -> None:
    taken = {path.stem for path in PICTURES.glob("*.png")}
    assert taken == {path.stem for path in OUTLINES.glob("*.yaml")}
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < 600_000
