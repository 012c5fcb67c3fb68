"""The pages of the order in a browser: by the keyboard, on a narrow screen, in the dark, and as pictures."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shard_tools import ShardWriter
from tests.support.servers.browser import Pictures, Tab, expect
from tests.support.servers.show_pages import Shown

pytestmark = pytest.mark.thorough

NEW_TAB = Callable[..., Tab]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A mixture of two sources of packed documents, whose weights change."""
    folder, dice = tmp_path_factory.mktemp("browser"), random.Random(0)
    sources = {}
    for name, most in (("books", 900), ("web", 260)):
        with ShardWriter(
            f"{folder}/{name}/{{:03d}}.tar", max_samples=120, columns={"tokens": lambda one: one["n"]}
        ) as writer:
            for number in range(240):
                size = int(most ** dice.uniform(0.5, 1))
                writer.write({"__key__": f"{name}/{number:04d}", "tok": b"\0\1" * size, "n": size})
        sources[name] = {"url": f"{name}/", "packed": {"length": 1024, "overlong": "drop"}}
    weights = {"shape": "linear", "start": {"books": 0.2, "web": 0.8}, "end": {"books": 0.6, "web": 0.4}, "over": 4000}
    file = folder / "mixture.json"
    file.write_text(json.dumps({"sources": sources, "weights": {**weights, "segments": 20}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # pictures show a name, not a path of today
        with Shown(("mixture.json",)) as found:
            yield found


def there(shown: Shown, path: str) -> str:
    return f"{shown.root}{path}{'&' if '?' in path else '?'}token={shown.access.token}"


def open_first_row(page: Any) -> None:
    """By the keyboard; why it is there is shown when this returns."""
    page.keyboard.press("j")
    expect(page.locator("#row-0 :focus")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#row-0 dl.why")).to_be_visible()


STEP = "/step?world=4&rank=2&global_batch_size=32&step=30"


def test_the_keyboard_turns_steps_and_opens_reasons(shown: Shown, tab: NEW_TAB) -> None:
    page = (one := tab()).open(there(shown, STEP))
    assert "token" not in page.url
    for key, title in (("n", "Step 31"), ("n", "Step 32"), ("p", "Step 31")):
        page.keyboard.press(key)
        expect(page.get_by_role("heading", name=f"{title} of epoch 0")).to_be_visible()
        page.wait_for_load_state()  # the heading comes before the script that listens to keys
    assert "token" not in page.url
    open_first_row(page)
    expect(page.locator("dl.why >> nth=0")).to_contain_text("are cut into 4 equal parts")
    page.keyboard.press("j")
    expect(page.locator("#row-1 :focus")).to_be_visible()
    page.fill("input[name=rank]", "3")
    page.keyboard.press("Enter")
    expect(page.locator("nav.ranks [aria-current]")).to_contain_text("3")
    assert one.errors == []


@pytest.mark.parametrize("path", [STEP, "/mixture?global_batch_size=16", "/sample?source=web&number=3&world=4"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_any_screen(shown: Shown, tab: NEW_TAB, path: str, scheme: str) -> None:
    one = tab(color_scheme=scheme)
    page = one.open(there(shown, path))
    for width in (360, 800, 1600, 3840):
        one.width(width)
        assert one.value("document.documentElement.scrollWidth") <= width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
    assert one.errors == []
    assert all(asked.startswith((shown.root, "data:")) for asked in one.asked)


def test_bars_and_lines_are_drawn(shown: Shown, tab: NEW_TAB) -> None:
    page = tab().open(there(shown, "/step?global_batch_size=16&step=30"))
    bars = page.locator("svg.pack")
    expect(bars).to_have_count(16)
    for at in range(16):
        whole = bars.nth(at).bounding_box()
        tokens = [one.bounding_box() for one in bars.nth(at).locator("rect:not(.padding)").all()]
        assert tokens
        assert all(
            whole["x"] - 2 <= one["x"] <= one["x"] + one["width"] <= whole["x"] + whole["width"] + 2 for one in tokens
        )
    fills = {
        page.evaluate("one => getComputedStyle(one).fill", one)
        for one in page.locator("svg.pack rect").element_handles()
    }
    assert len(fills) == 3  # two sources and padding
    page = tab().open(there(shown, "/mixture?global_batch_size=16&until=400"))
    expect(page.locator("figure.shares polyline")).to_have_count(4)
    expect(page.locator("table.numbers tr[data-row]")).to_have_count(2)


def test_pictures_of_the_docs(shown: Shown, tab: NEW_TAB, pictures: Pictures) -> None:
    page = tab(viewport={"width": 1180, "height": 860}).open(there(shown, STEP))
    open_first_row(page)
    pictures.take(page, "step")
    page = tab(viewport={"width": 1180, "height": 640}).open(there(shown, "/mixture?global_batch_size=16&until=400"))
    pictures.take(page, "mixture")
