"""Links between pages: every relative link of a page leads to a file, and its anchor to a heading there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "infra/**/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"  # what was true of a release stays as it was written
)
_CODE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    fenced = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*?) *$", fenced.sub("", page.read_text()), re.MULTILINE)
    named = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in named}


def dead(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", page.read_text())):
        file, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`, three\n[a](#one-two-three) [b](page.md) [c](#two) [d](gone.md) `[e](code.md)`\n")
    assert dead(page) == ["#two", "gone.md"]
