"""Check the built site: every link leads to a file and an anchor, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("link", "href"),
    ("object", "data"),
}
_IN_STYLE = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")]+)")


class _Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag says."""
        for name, value in attrs:
            if name in {"id", "name"} and value:
                self.anchors.add(value)
            elif (tag, name) in _LOADED and value:
                self.loads.append(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)
            elif name == "style" and value:
                self.loads += _IN_STYLE.findall(value)


def problems(out: Path) -> list[str]:
    """Return dead links, and addresses that a page would load from elsewhere."""
    pages = {path: _Page(path.read_text()) for path in sorted(out.rglob("*.html"))}
    wrong = [f"{path.relative_to(out)}: {one}" for path, page in pages.items() for one in _of(path, page, pages)]
    for path in sorted([*out.rglob("*.css")]):
        wrong += [f"{path.relative_to(out)}: loads {one}" for one in _IN_STYLE.findall(path.read_text())]
    return wrong


def _of(path: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[str]:
    for address in page.loads:
        parts = urlsplit(address)
        if parts.scheme == "data":
            continue
        if parts.scheme or parts.netloc:
            yield f"loads {address}"
        elif not (path.parent / unquote(parts.path)).exists():
            yield f"loads {address}, which is not there"
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        if not target.exists():
            yield f"links to {link}, which is not there"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield f"links to {link}: no such heading"
