"""A headless Chromium, driven by Playwright: notes all that pages ask for and complain of, takes pictures."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.code.folders import ROOT, TESTS
from tests.support.processes.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PICTURES = ROOT / "docs" / "pictures"
OUTLINES = TESTS / "golden" / "pictures"
COLORS = 128  # of a picture, which makes it small
_LOAD_ALL_IMAGES = """async () => {
    const settle = (image) => { image.loading = "eager"; return image.decode().catch(() => null); };
    await Promise.all([...document.images].map(settle));
    await new Promise((turn) => setTimeout(turn));  // of those that listen to images
}"""


def installed() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


_running: list[Any] = []


@contextmanager
def running() -> Iterator[Any]:
    """A browser, one for all who want it in this process: Playwright starts once. Skips where none is installed."""
    if _running:
        yield _running[0]
        return
    program = installed()
    if program is None:
        pytest.skip("no Chromium here")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  only tests of pages pay for it

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-background-networking", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        _running.append(browser)
        try:
            yield browser
        finally:
            _running.clear()
            browser.close()


def expect(shown: Any) -> Any:
    """Return Playwright's assertions about a page, or a part of it: they wait until they hold.

    Whatever follows a click or a key is asserted by these: what is read at once may be the page before, or none.
    """
    from playwright.sync_api import expect as assertions_of  # noqa: PLC0415  only tests of pages pay for it

    assertions_of.set_options(timeout=1000 * PATIENCE_S)
    return assertions_of(shown)


class Tab:
    """One page in a context of its own. It notes requests, errors of the console, and dialogs.

    Whatever it waits for, it waits for ``PATIENCE_S`` at most.
    """

    def __init__(self, browser: Any, *, java_script_enabled: bool = True, **context: Any) -> None:
        self._context = browser.new_context(java_script_enabled=java_script_enabled, **context)
        self._context.set_default_timeout(1000 * PATIENCE_S)
        self._runs_scripts = java_script_enabled
        self.page = self._context.new_page()
        self.asked: list[str] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda told: self.errors.append(told.text) if told.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", self._dialog)

    def _dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open(self, address: str) -> Any:
        """Go there, and wait until all is loaded, and the images that would be loaded when they are scrolled to."""
        self.page.goto(address)
        if self._runs_scripts:  # else no image is left for later
            self.page.evaluate(_LOAD_ALL_IMAGES)
        return self.page

    def width(self, pixels: int) -> None:
        """Have a window this wide."""
        self.page.set_viewport_size({"width": pixels, "height": 800})
        self.page.wait_for_function("pixels => innerWidth === pixels", arg=pixels)

    def value(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def close(self) -> None:
        self._context.close()


class Pictures:
    """Pictures of pages for the docs, and the outlines of those pages, which must not change unnoticed."""

    def __init__(self, *, renew: bool) -> None:
        self._renew = renew

    def take(self, page: Any, name: str) -> None:
        """Compare the outline of a page with the one of its picture; with ``--pictures`` write both."""
        seen = re.sub(r"/s/[\w-]{20,}(?=/)", "", page.locator("main").aria_snapshot())  # the browser's own addresses
        outline = re.sub(r"\d[\d,.]*", "0", seen) + "\n"  # sizes differ by release
        target, expected = PICTURES / f"{name}.png", OUTLINES / f"{name}.yaml"
        if self._renew:
            PICTURES.mkdir(exist_ok=True)
            OUTLINES.mkdir(parents=True, exist_ok=True)
            _write(target, page.screenshot(animations="disabled"))
            expected.write_text(outline)
        assert target.stat().st_size < 200_000
        assert outline == expected.read_text(), f"{name} looks different; see CONTRIBUTING: pytest --pictures"


def _write(target: Path, data: bytes) -> None:
    picture = (
        Image.open(io.BytesIO(data)).convert("RGB").quantize(COLORS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    )
    picture.save(target, optimize=True)
