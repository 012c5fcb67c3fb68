"""Overview and finding in a browser: pages that refine themselves, completion by the keyboard, narrow and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shard_tools.look.show.find import texts
from shard_tools.look.show.overview import page as overview
from shard_tools.look.stats import survey
from tests.support.servers.browser import Pictures, Tab, expect
from tests.support.servers.show_pages import Shown
from tests.support.sets.pretty_set import write_pretty

pytestmark = pytest.mark.thorough

NEW_TAB = Callable[..., Tab]
LABELED = """() => [...document.querySelectorAll(
        "input:not([type=hidden]), select, img, nav, [role=listbox], [role=region]")]
    .filter((one) => !(one.labels?.length || one.ariaLabel || one.alt !== undefined)).map((one) => one.outerHTML)"""


@pytest.fixture(scope="module")
def pretty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("find")
    write_pretty(folder / "shapes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with Shown(("shapes/",)) as found:
            yield found


PATHS = ("/overview", "/?view=table", "/?view=table&order=-score", "/?text=a", "/?where=n+%3D")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PATHS)
def test_pages_fit_any_screen_and_are_labeled(pretty: Shown, tab: NEW_TAB, path: str, scheme: str) -> None:
    seen = tab(color_scheme=scheme)
    home = pretty.within(seen.open(pretty.address))
    page = seen.open(home + path)
    for width in (360, 800, 1600, 3840):
        seen.width(width)
        assert seen.value("document.documentElement.scrollWidth") <= width, width
    assert page.evaluate(LABELED) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
    assert [error for error in seen.errors if "400" not in error] == []
    assert all(asked.startswith((pretty.root, "data:")) for asked in seen.asked)


def test_the_overview_refines_itself_until_all_is_seen(
    pretty: Shown, tab: NEW_TAB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "_THREADS", 1)
    monkeypatch.setattr(overview, "SECONDS", 0.0)
    with Shown(pretty.urls) as shown:
        seen = tab()
        page = seen.open(shown.address)
        expect(page.locator("#overview")).to_contain_text("by the index")
        expect(page.locator("#overview")).to_contain_text("Seen: all samples.")
        link = page.locator("nav[aria-label=Pages] [aria-current]")
        expect(link).to_have_text("Overview")
        assert seen.errors == []


def test_a_search_fills_its_page_and_keeps_the_focus(
    pretty: Shown, tab: NEW_TAB, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "SECONDS", 0.0)
    monkeypatch.setattr(texts, "_FIRST_SAMPLES", 8)
    total = pretty.json("/")["total"]
    with Shown(pretty.urls) as shown:
        seen = tab()
        home = shown.within(seen.open(shown.address))
        page = seen.open(f"{home}/?text=e&size=200")
        first = page.locator("#found [data-open]").first
        first.focus()
        expect(page.locator("h1")).to_contain_text("Samples")
        expect(page.locator("#found article")).to_have_count(total)
        expect(page.locator(":focus")).to_have_text(first.inner_text())
        page.keyboard.press("j")
        expect(page.locator(":focus")).to_have_text("shapes/0001")
        assert seen.errors == []


def test_columns_and_values_are_completed_by_the_keyboard(pretty: Shown, tab: NEW_TAB) -> None:
    seen = tab()
    home = pretty.within(seen.open(pretty.address))
    page = seen.open(f"{home}/")
    keys, options = page.keyboard, page.get_by_role("listbox", name="Completions").get_by_role("option")
    keys.press("/")
    expect(options).to_have_text(["langstring", "scoredouble", "tokensint64"])
    keys.type("la")
    expect(options).to_have_count(1)
    keys.press("ArrowDown")
    expect(options.first).to_have_attribute("aria-selected", "true")
    field = page.get_by_role("combobox", name="where")
    expect(field).to_have_attribute("aria-activedescendant", "hints-where-0")
    keys.press("Enter")
    expect(field).to_have_value("lang ")
    keys.type("= ")
    expect(options.first).to_contain_text("'en'")
    keys.press("ArrowDown")
    keys.press("Tab")
    expect(field).to_have_value("lang = 'en' ")
    keys.type("and tok")
    keys.press("Escape")
    expect(options).to_have_count(0)
    total = pretty.json("/", where="lang = 'en'")["total"]
    field.fill("lang = 'en'")
    keys.press("Enter")
    page.wait_for_url("**where=lang*")
    expect(page.locator("h1")).to_contain_text(f"{total} sample")
    assert seen.errors == []


def test_a_wrong_condition_keeps_the_form_and_says_why(pretty: Shown, tab: NEW_TAB) -> None:
    seen = tab()
    home = pretty.within(seen.open(pretty.address))
    page = seen.open(f"{home}/")
    page.get_by_role("combobox", name="where").fill("tokens >")
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("alert")).to_contain_text("where")
    field = page.get_by_role("combobox", name="where")
    expect(field).to_have_value("tokens >")
    expect(field).to_have_accessible_description(page.get_by_role("alert").inner_text().strip())


def test_keys_are_saved_and_a_table_turns_by_its_heads(pretty: Shown, tab: NEW_TAB) -> None:
    seen = tab()
    home = pretty.within(seen.open(pretty.address))
    page = seen.open(f"{home}/?where=tokens+%3E+100")
    with page.expect_download() as saved:
        page.get_by_role("link", name="keys as a file").click()
    assert saved.value.suggested_filename == "keys.txt"
    page.get_by_role("link", name="as a table").click()
    page.get_by_role("link", name="score", exact=True).click()
    expect(page.get_by_role("link", name="score ↑")).to_be_visible()
    page.get_by_role("link", name="score ↑").click()
    expect(page.get_by_role("link", name="score ↓")).to_be_visible()
    values = page.evaluate(
        "[...document.querySelectorAll('.rows tr')].slice(1).map((one) => Number(one.cells[3].innerText))"
    )
    assert values == sorted(values, reverse=True)
    page.wait_for_load_state()
    page.keyboard.press("j")
    expect(page.locator(".rows tr :focus")).to_be_visible()
    page.keyboard.press("Enter")
    page.wait_for_url("**/sample?number=*")


def test_finding_works_without_scripts(pretty: Shown, tab: NEW_TAB) -> None:
    page = tab(java_script_enabled=False).open(pretty.address)
    expect(page.locator("#overview")).to_contain_text("Seen: all samples.")
    page.get_by_role("link", name="Samples", exact=True).click()
    page.get_by_label("text").fill("a")
    page.get_by_label("order").select_option("")
    page.get_by_role("button", name="Find").click()
    expect(page.locator("#found article").first).to_be_visible()


def test_pictures_of_the_docs(pretty: Shown, tab: NEW_TAB, pictures: Pictures) -> None:
    seen = tab(viewport={"width": 1200, "height": 720})
    home = pretty.within(seen.open(pretty.address))
    pictures.take(seen.open(f"{home}/?view=table&order=-score"), "table")
