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

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PICTURES = ROOT / "docs" / "pictures"
OUTLINES = TESTS / "golden" / "pictures"
COLORS = 128  # of a picture, which makes it small


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


class Tab:
    """One page in a context of its own. It notes requests, errors of the console, and dialogs."""

    def __init__(self, browser: Any, **context: Any) -> None:
        self._context = browser.new_context(**context)
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
        """Go there, and wait until all is loaded."""
        self.page.goto(address, wait_until="networkidle")
        return self.page

    def width(self, pixels: int) -> None:
        self.page.set_viewport_size({"width": pixels, "height": 800})

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
        outline = re.sub(r"\d[\d,.]*", "0", page.locator("main").aria_snapshot()) + "\n"  # sizes differ by release
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
