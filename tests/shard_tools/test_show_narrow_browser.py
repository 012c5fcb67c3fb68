"""Each page of ``show`` over each kind of set on a telephone and on a desk: nothing is cut off, no number breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.servers.browser import Tab, expect
from tests.support.servers.show_pages import Shown
from tests.support.sets.looked_at import LOOKED_AT

pytestmark = pytest.mark.thorough

NEW_TAB = Callable[..., Tab]
WIDTHS = (360, 800, 1280)
CUT = """() => [...document.querySelectorAll("body *")].filter((one) => {
    const style = getComputedStyle(one);
    if (one.closest("svg, audio, video, dialog, .skip, .says.drawn, .subject")) return false;
    if (innerWidth > 640 && one.closest(".wide")) return false;  // a wide table, with a bar to move it
    if (style.webkitLineClamp !== "none" || !one.offsetParent) return false;
    if (one.getBoundingClientRect().right > innerWidth + 1) return true;
    return style.overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1;
}).map((one) => `${one.tagName} ${one.className}: ${one.textContent.trim().slice(0, 80)}`)"""
"""Elements that reach beyond the window, or whose content does not fit and is cut off or hidden in a bar to move."""
BROKEN = r"""() => {
    const found = [], texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode;
        if (node.parentElement.closest("code, .code, pre, .tokens, .text, .utterance, .tree, .name, h1, h2")) continue;
        for (const match of node.data.matchAll(/\d[\d.,]*([ \u00a0](B|KiB|MiB|%|s|Hz)\b)?/g)) {
            const range = document.createRange();
            range.setStart(node, match.index);
            range.setEnd(node, match.index + match[0].length);
            const lines = new Set([...range.getClientRects()].map((one) => Math.round(one.top)));
            if (lines.size > 1) found.push(`${match[0]} of ${node.data.trim().slice(0, 80)}`);
        }
    }
    return found;
}"""
"""Numbers that are not on one line, with their unit; keys and texts are data, which may break anywhere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("narrow")
    for name, write in LOOKED_AT.items():
        write(folder / name)
    weights = {"shapes": 2, "talks": 1}
    sources = {name: {"url": f"{folder}/{name}/"} for name in weights}
    (folder / "mixture.json").write_text(json.dumps({"sources": sources, "weights": weights}))
    bad = {"url": f"{folder}/shapes/000000.tar", "key": "shapes/0002", "number": 2, "stage": "decode"}
    (folder / "bad.jsonl").write_text(
        json.dumps({**bad, "reason": "a long reason\nof two lines, with 1,234,567"}) + "\n"
    )
    return folder


KINDS = (*LOOKED_AT, "mixture.json")


@pytest.fixture(scope="module", params=KINDS)
def shown(request: pytest.FixtureRequest, folder: Path) -> Iterator[Shown]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with Shown((request.param,), {"bad": ("bad.jsonl",)}) as found:
            yield found


FURTHER = (
    "/?view=table", "/?text=e", "/?where=n+%3D", "/?where=n+%3D&view=table", "/sample?number=3", "/beside",
    "/step?step=99999&world=2", "/mixture?until=0", "/nothing",
)  # fmt: skip
"""Addresses beside those of the navigation."""


def test_nothing_is_cut_off_and_no_number_breaks(shown: Shown, tab: NEW_TAB) -> None:
    one = tab()
    home = shown.within(page := one.open(shown.address))
    links = page.locator("nav[aria-label=Pages] a").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
    assert len(links) >= 4
    wrong = []
    for path in (*links, *(f"{home}{path}" for path in FURTHER)):
        one.open(path if path.startswith("http") else f"{shown.root}{path}")
        for width in WIDTHS:
            one.width(width)
            wrong += [(path.removeprefix(home), width, "cut", what) for what in one.value(CUT)]
            wrong += [(path.removeprefix(home), width, "broken", what) for what in one.value(BROKEN)]
    assert not wrong, "\n".join(sorted({str(one) for one in wrong}))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_turns_of_a_conversation_stand_apart(folder: Path, tab: NEW_TAB, scheme: str) -> None:
    with Shown((f"{folder}/chats",)) as shown:
        one = tab(color_scheme=scheme)
        home = shown.within(one.open(shown.address))
        page = one.open(f"{home}/sample?number=3")
        roles = page.locator(".utterance dt")
        expect(roles).to_have_text(["system", "user", "tool", "assistant"])
        for width in WIDTHS:
            one.width(width)
            boxes = [turn.bounding_box() for turn in page.locator(".utterance").all()]
            assert all(below["y"] >= above["y"] + above["height"] for above, below in pairwise(boxes))
        code = page.locator(".utterance dd").last
        assert "\nmath.fsum(values)" in code.inner_text()


def test_a_wrong_number_keeps_the_form_of_the_step(folder: Path, tab: NEW_TAB) -> None:
    with Shown((f"{folder}/shapes",)) as shown:
        one = tab()
        home = shown.within(one.open(shown.address))
        page = one.open(f"{home}/step?world=2&global_batch_size=8&seed=5")
        field = page.get_by_label("step", exact=True)
        field.fill("7000")
        field.press("Enter")
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("0 to 6, got 7,000")
        expect(field).to_have_value("7000")
        expect(field).to_have_attribute("aria-invalid", "true")
        expect(field).to_have_accessible_description(" ".join(alert.inner_text().split()))
        expect(page.get_by_label("seed")).to_have_value("5")
        field.fill("2")
        field.press("Enter")
        expect(page.get_by_role("heading", name="Step 2 of epoch 0")).to_be_visible()


def test_a_wrong_condition_points_at_the_place(folder: Path, tab: NEW_TAB) -> None:
    with Shown((f"{folder}/shapes",)) as shown:
        one = tab()
        home = shown.within(one.open(shown.address))
        page = one.open(f"{home}/?where=tokens+%3E+%26+3")
        lines = page.get_by_role("alert").locator(".says")
        expect(lines).to_have_count(3)
        assert lines.nth(2).inner_text().rstrip().endswith("^")
        at = "one => { const range = document.createRange(); range.setStart(one.firstChild, %d); "
        at += "range.setEnd(one.firstChild, %d + 1); return range.getBoundingClientRect().left; }"
        text, caret = lines.nth(1), lines.nth(2)
        place = caret.evaluate("one => one.textContent.indexOf('^')")
        assert text.evaluate("(one, at) => one.textContent[at]", place) == "&"
        left = [one.evaluate(at % (place, place)) for one in (text, caret)]
        assert abs(left[0] - left[1]) < 1


def test_rows_that_both_sides_have_are_marked_not_by_color_alone(folder: Path, tab: NEW_TAB) -> None:
    with Shown((f"{folder}/shapes",)) as shown:
        one = tab()
        home = shown.within(one.open(shown.address))
        page = one.open(f"{home}/beside?epochs=0,1&global_batch_size=32")
        sides = shown.json("/beside", epochs="0,1", global_batch_size=32)["sides"]
        marked = [len(side["also"]) for side in sides]
        assert sum(marked) > 0
        expect(page.locator(".tile.shared")).to_have_count(sum(marked))
        expect(page.locator(".tile.shared .also").first).to_contain_text("also in epoch 1")
        edges = "one => getComputedStyle(one).borderTopStyle"
        assert page.locator(".tile.shared").first.evaluate(edges) == "double"
        assert page.locator(".tile:not(.shared)").first.evaluate(edges) == "solid"
