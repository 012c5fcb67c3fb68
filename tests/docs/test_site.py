"""The site: it builds strictly, nothing leaves a page, every message is found, and it is readable narrow and dark."""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest

import streaming
from docs.site import messages as site_messages
from docs.site import stage, tables
from shard_tools.cli import cli
from streaming import DataLoader, Mixture, ShuffleConfig, StreamingDataset
from streaming.build.decode import images, registry
from tests.support.code.cure_messages import error_of, messages
from tests.support.code.folders import ROOT
from tests.support.servers.browser import expect

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]  # the site is built by the first test that needs it

DRAWN = 200  # messages that are looked for
FILLED = ("s3://bucket/train/000017.tar", "17", "'a/b'", "4.0 GiB", "tokens, lang", "3 of 8")
PAGES = (
    "index",
    "search",
    "docs/tutorial",
    "docs/guide",
    "docs/trainers",
    "docs/stores",
    "docs/launchers",
    "docs/troubleshooting",
    "docs/tuning",
    "docs/faq",
    "examples/README",
    "examples/look_at_a_data_set.ipynb",
    "docs/every-option",
    "docs/every-decoder",
    "docs/every-command",
    "docs/options",
    "docs/tools",
    "docs/tools/convert",
    "docs/coming-from/webdataset",
    "docs/coming-from/mosaic",
    "docs/messages/state",
    "docs/messages/convert",
    "docs/api/DataLoader",
    "docs/api/streaming.decode",
    "docs/design/0003-order",
    "benchmarks/peers/RESULTS",
    "infra/deploy/slurm/train.sbatch",
)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built once."""
    if find_spec("furo") is None or find_spec("myst_parser") is None:
        pytest.skip("the extra docs is not installed: pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site") / "site"
    ran = subprocess.run(
        [sys.executable, "-m", "docs.site", str(out)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == f"{out}/index.html\n"
    return out


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, as from any web server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def drawn() -> list[site_messages.Message]:
    """Messages of errors, the same in each run, of all topics."""
    of_errors = [one for one in site_messages.found() if one.kind and len(re.findall(r"[a-z]{2,}", one.text)) >= 5]
    return random.Random(36).sample(of_errors, DRAWN)


def filled(text: str) -> str:
    """A message as it is raised, with something in each gap."""
    values = iter(FILLED * 50)
    return re.sub(site_messages.GAP, lambda _: next(values), text)


# ------------------------------------------------------------------------------------- what pages are made from


def test_every_option_has_a_meaning_and_every_public_class_is_described() -> None:
    rows = [(name, *row) for name, target in tables.DESCRIBED.items() for row in tables.option_rows(name, target)]
    assert len(rows) > 150
    assert [row for row in rows if not row[3]] == []
    not_described = {"BatchHandle", "RemoteBatch", "Jagged", "Schedule"}  # are handed out, or made by their methods
    not_described |= {"as_torch", "one_behind"}  # functions of a loader, without options
    assert {name for name in streaming.__all__ if name not in tables.DESCRIBED} == not_described


def test_a_default_and_a_bar_stand_in_the_table_as_in_the_code() -> None:
    made = tables.options().text
    assert '| `last_batch` | `"drop"` |' in made
    assert "| `memory_limit` | `None` |" in made
    assert tables.markdown("``a | b``, *all*, :class:`~x.Y`") == "`a \\| b`, \\*all\\*, `~x.Y`".replace("~", "")


def test_every_name_of_decode_is_there() -> None:
    made = tables.decoders().text
    names = {*registry.BY_NAME, *images.MODES, *registry.BY_EXTENSION, *registry._REFUSED, *registry._IMAGES}
    assert {name for name in names if f"`{name}`" not in made} == set()


def test_every_verb_is_there_with_its_options() -> None:
    made = tables.commands().text
    for name, command in cli.commands.items():
        for inner, one in {"": command, **getattr(command, "commands", {})}.items():
            verb = f"shard_tools {name} {inner}".strip()
            section = made.partition(f"# `{verb}`\n")[2].partition("\n## ")[0]
            options = {text for option in one.params if isinstance(option, click.Option) for text in option.opts}
            hidden = {text for option in one.params if getattr(option, "hidden", False) for text in option.opts}
            assert {text for text in options - hidden if text not in section} == set(), verb


def test_every_page_of_the_repository_is_in_the_side_bar() -> None:
    listed = {page for pages in stage.NAVIGATION.values() for page in pages}
    below = ("docs/design/0", "docs/tools/", "infra/", "benchmarks/", "README")
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in stage.source_pages()}
    assert {page for page in pages - listed if not page.startswith(below)} == set()
    assert listed <= pages


def test_messages_are_those_that_the_packages_have() -> None:
    """What another reader of the sources finds as the text of an error is among them."""
    words = [" ".join(re.findall(r"\w+", one.text)) for one in site_messages.found()]
    whole = "\n".join(words)
    raised = [
        one
        for one in messages()
        if re.search(r"; [a-z]|\. [A-Z]|expected ", one.text) and not one.place.startswith("shard_tools/")
    ]
    pieces = {one.place: re.findall(r"\w+", max(re.findall(r"[^…%]+", one.text), key=len)) for one in raised}
    helps = ("streaming/watch/metrics/", "streaming/testing/")  # what a number means; what a battery waits for
    missing = [
        place
        for place, piece in pieces.items()
        if len(piece) > 5 and " ".join(piece[1:-1]) not in whole and not place.startswith(helps)
    ]
    assert len(raised) > 500
    assert missing == []


def test_a_text_is_followed_to_where_it_is_written() -> None:
    by_line = {one.text: one for one in site_messages.found()}
    assert "…: expected a positive integer, got …" in by_line
    kinds = {one.kind for one in site_messages.found()}
    assert {"ConfigError", "StateError", "NotFoundError", "MeshError", "UsageError"} <= kinds
    assert any(one.cure == "there are: …. Save one with `shard_tools view save`" for one in site_messages.found())


def test_a_dead_link_and_a_strange_language_are_seen() -> None:
    page = stage.Stage(Path("unused"))
    text = page._page(
        Path("docs/guide.md"), "[a](gone.md) [`b`](text.md#x) `[c](gone.md)`\n\n```house\n[d](gone.md)\n```\n"
    )
    assert page.problems == ["docs/guide.md: gone.md"]
    assert "[`b`](/docs/text.md#x) `[c](gone.md)`" in text
    assert "```text\n[d](gone.md)\n```" in text


def test_their_block_stands_beside_ours() -> None:
    text = "a\n\n```python theirs\nx = 1\n```\n\n```python ours\ny = 2\n```\n\nb\n"
    assert stage.in_columns(text).count(":::{container} ") == 3
    assert stage.in_columns("```python\nx = 1\n```\n") == "```python\nx = 1\n```\n"


# ------------------------------------------------------------------------------------------- what is built


def test_the_check_sees_what_is_wrong(site: Path, tmp_path: Path) -> None:
    from docs.site import check  # noqa: PLC0415

    (tmp_path / "a.html").write_text(
        '<a href="b.html">b</a><a href="a.html#x">x</a><a href="#y">y</a><a href="https://example.org/">ok</a>'
        '<p id="y"></p><script src="https://example.org/a.js"></script><img src="gone.png">'
        '<p style="background: url(//example.org/a.png)"></p>'
    )
    (tmp_path / "a.css").write_text("@import 'https://example.org/b.css'; p { background: url(c.png) }")
    assert check.problems(tmp_path) == [
        "a.html: loads https://example.org/a.js",
        "a.html: loads gone.png, which is not there",
        "a.html: loads //example.org/a.png",
        "a.html: links to b.html, which is not there",
        "a.html: links to a.html#x: no such heading",
        "a.css: loads https://example.org/b.css",
    ]
    assert check.problems(site) == []


def test_200_messages_have_a_heading_and_are_in_the_index(site: Path) -> None:
    pages: dict[str, str] = {}
    index = (site / "searchindex.js").read_text()
    found = json.loads(index[index.index("{") : index.rindex("}") + 1])
    titles = {title.lower() for title in found["alltitles"]}
    for one in drawn():
        page = f"docs/messages/{site_messages.topic_of(one)}"
        text = pages.setdefault(page, (site / f"{page}.html").read_text())
        section = text.partition(f'id="{one.anchor}"')[2][:20_000].partition("<section ")[0]
        heading = re.search(r"<h2>(.*?)<a class=", section, re.DOTALL)
        assert heading is not None, one
        said = " ".join(html.unescape(re.sub(r"<[^>]+>", "", heading[1])).split())
        assert one.text.startswith(said.removesuffix(" …").rstrip()[:60]) or said in " ".join(one.text.split()), one
        assert said.lower() in titles or said.lower().rstrip() in {" ".join(title.split()) for title in titles}, one


def test_the_table_for_the_browser_names_every_message() -> None:
    listed = site_messages.index()
    assert {text for _, text, _ in listed} == {one.text for one in site_messages.found()}
    assert len({address for address, _, _ in listed}) == len(listed)


# ------------------------------------------------------------------------------------------- in a browser


def test_nothing_leaves_a_page_and_nothing_is_wider_than_a_phone(
    site: Path, address: str, tab: Callable[..., Any]
) -> None:
    one = tab()
    one.width(400)
    for page in PAGES:
        one.open(f"{address}{page}.html")
        wide = one.value("document.documentElement.scrollWidth")
        assert wide <= 400, f"{page}: {wide} pixels"
        assert one.value("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), page
    assert [asked for asked in one.asked if not asked.startswith((address, "data:"))] == []
    assert one.errors == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_text_has_contrast(address: str, tab: Callable[..., Any], scheme: str) -> None:
    """At least 4.5 to 1, as WCAG asks, of everything with text: prose, code, links, tables."""
    one = tab(color_scheme=scheme)
    for page in ("docs/coming-from/webdataset", "docs/messages/state", "docs/api/DataLoader", "docs/troubleshooting"):
        one.open(f"{address}{page}.html")
        poor = one.value(
            """() => {
              const shine = (color) => {
                const [r, g, b] = color.map((one) => one / 255)
                  .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
              const behind = (node) => {
                for (; node; node = node.parentElement) {
                  const color = parse(getComputedStyle(node).backgroundColor);
                  if (color.length === 3 || color[3] > 0.9) return color.slice(0, 3);
                }
                return [255, 255, 255];
              };
              const found = [];
              for (const node of document.querySelectorAll("article *")) {
                const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.textContent.trim());
                if (!own || !node.offsetParent || node.classList.contains("headerlink")) continue;
                const [a, b] = [shine(parse(getComputedStyle(node).color)), shine(behind(node))];
                const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
                if (ratio < 4.5) found.push([node.textContent.slice(0, 30), node.className, ratio]);
              }
              return found;
            }"""
        )
        assert poor == [], page


def test_200_messages_are_found_by_what_is_raised(address: str, tab: Callable[..., Any]) -> None:
    one = tab()
    page = one.open(f"{address}docs/troubleshooting.html")
    page.fill("#find-message textarea", "batch_size: expected a positive integer, got 0")
    expect(page.locator(".found-messages a").first).to_be_visible()  # the table of messages is loaded
    asked = [(filled(message.text), message) for message in drawn()]
    found = page.evaluate("texts => texts.map(text => window.shardstreamFind(text, 3))", [text for text, _ in asked])
    wanted = [f"#{message.anchor}" for _, message in asked]
    first = sum(places[0].endswith(anchor) for places, anchor in zip(found, wanted, strict=True))
    missed = [text for (text, _), places, anchor in zip(asked, found, wanted, strict=True)
              if not any(place.endswith(anchor) for place in places)]  # fmt: skip
    assert missed == []
    assert first >= 0.95 * DRAWN


def test_messages_as_users_see_them_lead_to_a_heading(
    site: Path, address: str, tab: Callable[..., Any], tmp_path: Path
) -> None:
    """Through the search of the site, with what was raised pasted whole; served, and as files without any server."""
    raised = [
        error_of(lambda: StreamingDataset(tmp_path / "gone")[0]),
        error_of(lambda: DataLoader([1, 2], batch_size=0)),
        error_of(lambda: ShuffleConfig(window=-1)),
        error_of(lambda: StreamingDataset(tmp_path, decode="rgb9")),
        error_of(lambda: Mixture({})),
        error_of(lambda: DataLoader([1, 2], batch_size=1, last_batch="keep")),
    ]
    for root, context in ((address, {}), (site.as_uri() + "/", {"offline": True})):
        one = tab(**context)
        for text in raised:
            page = one.open(f"{root}search.html")
            page.fill("input[name=q]", text.splitlines()[0])
            page.press("input[name=q]", "Enter")
            page.wait_for_url("**/search.html?q=*")
            page.locator(".found-messages a").first.click()
            page.wait_for_url(re.compile("#"))
            anchor = page.url.partition("#")[2]
            heading = page.locator(f"section:has(> #{anchor}) > h2, section#{anchor} > h2").first.inner_text()
            words = set(re.findall(r"[a-z]{3,}", heading.lower()))
            assert words <= set(re.findall(r"[a-z]{3,}", text.lower())), (text, heading)
        assert one.errors == []


SEARCHES = {
    "deduplicate": "docs/tools/dedupe",
    "duplicates": "docs/life-of-a-set",
    "split": "docs/tools/split",
    "version": "docs/tools/version",
    "shuffle": "docs/guide",
    "captions": "docs/late-fields",
    "lerobot": "docs/coming-from/lerobot",
    "packing": "docs/packing",
    "memory limit": "docs/guide",
    "delete samples": "docs/tools/delete",
    "resume": "docs/trainers",
    "Resume on another world": "docs/trainers",
    "checkpoint": "docs/trainers",
    "state_dict": "docs/trainers",
    "elastic": "docs/remesh",
    "mixture": "docs/mixing",
    "mixture weights": "docs/mixing",
    "shuffling": "docs/guide",
    "cache": "docs/guide",
    "workers": "docs/guide",
    "num_workers": "docs/guide",
    "filter": "docs/filters",
    "where": "docs/filters",
    "s3": "docs/stores",
    "azure": "docs/stores",
    "convert": "docs/tools/convert",
    "parquet": "docs/tools/convert",
    "video": "docs/sound-and-video",
    "audio": "docs/sound-and-video",
    "tokenizer": "docs/text",
    "slurm": "docs/launchers",
    "slow": "docs/waiting",
    "seed": "docs/random",
    "prometheus": "docs/metrics",
}
"""Words that users type, and the page that must come first."""
_BELOW = re.compile(r"docs/(messages|design|api)/|benchmarks/|CHANGELOG")


def test_the_page_that_explains_comes_first(address: str, tab: Callable[..., Any]) -> None:
    one = tab()
    wrong = {}
    for asked, wanted in SEARCHES.items():
        page = one.open(f"{address}search.html?q={asked.replace(' ', '+')}")
        expect(page.locator("#search-results > p")).to_contain_text("finished")
        links = page.locator("#search-results .search li > a")
        first = [str(link).removeprefix(address) for link in links.evaluate_all("all => all.map(one => one.href)")[:10]]
        if not first or not first[0].startswith(f"{wanted}.html") or any(map(_BELOW.match, first[:3])):
            wrong[asked] = first
    assert not wrong, json.dumps(wrong, indent=1)
    assert one.errors == []
