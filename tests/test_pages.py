"""The pages: links lead to files and headings that are there, and calls name what the packages have.

Programs of some pages run in tests of their own (README, trainers, filters, ray, remesh, CONTRIBUTING). Here every call
of a public name, in blocks and in the text, is compared with its signature.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import infra
import shard_tools
import streaming

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "infra/**/*.md")
    for page in ROOT.glob(pattern)
    if page.name != "CHANGELOG.md"  # what was true of a release stays as it was written
)
OURS = ("streaming", "shard_tools", "infra")
PUBLIC = {name: getattr(package, name) for package in (streaming, shard_tools, infra) for name in package.__all__}
VARIABLES = {
    "loader": streaming.DataLoader,
    "dataset": streaming.StreamingDataset,
    "curriculum": streaming.Curriculum,
    "batches": streaming.DevicePrefetcher,
}
"""What a variable of this name is, on all pages."""
_FENCED = re.compile(r"^(```+|~~~+)[ \t]*(\w*).*?\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ +(.*?) *$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    named = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in named}


def dead_links(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", _FENCED.sub("", page.read_text()))):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            found.append(link)
    return found


def code(page: Path) -> Iterator[ast.AST]:
    """The Python of a page: its blocks, and what of its text parses (``…`` may stand for anything)."""
    text = page.read_text()
    for _, language, block in _FENCED.findall(text):
        if language == "python":
            yield ast.parse(block)
    for span in re.findall(r"`([^`\n]+)`", _FENCED.sub("", text)):
        try:
            yield ast.parse(re.sub(r"\(…, |, …(?=\))", lambda gap: gap[0].strip("…, "), span).replace("…", "..."))
        except SyntaxError:
            continue


def called(function: ast.expr) -> Any:
    """The object of ours that is called; None: it is not ours. AttributeError: there is none of this name."""
    if isinstance(function, ast.Name):
        return PUBLIC.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = PUBLIC.get(function.value.id) or VARIABLES.get(function.value.id)
        return owner and getattr(owner, function.attr)
    return None


def wrong_calls(tree: ast.AST) -> tuple[int, list[str]]:
    """How many calls of ours there are, and those that name what is not there; imports, too."""
    seen, wrong = 0, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            module = importlib.import_module(str(node.module))
            wrong += [f"{node.module}.{name.name}" for name in node.names if not hasattr(module, name.name)]
        elif isinstance(node, ast.Call):
            try:
                function = called(node.func)
            except AttributeError:
                wrong.append(ast.unparse(node.func))
                continue
            if function is not None:
                seen += 1
                parameters = inspect.signature(function).parameters.values()
                names = {parameter.name for parameter in parameters}
                if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                    wrong += [
                        f"{ast.unparse(node.func)}({k.arg}=)" for k in node.keywords if k.arg and k.arg not in names
                    ]
    return seen, wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_calls_name_what_is_there() -> None:
    found = [(page.name, *wrong_calls(tree)) for page in PAGES for tree in code(page)]
    assert sum(seen for _, seen, _ in found) > 200
    assert [(page, wrong) for page, _, wrong in found if wrong] == []


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n[a](#one-two-three) [b](page.md) [c](#two) [d](gone.md) `[e](code.md)`\n"
        "`DataLoader(…, batchsize=8)` `DataLoader(…, batch_size=8)` `loader.rewind()` `loader.seen()` `other(x=1)`\n"
        "```python\nfrom streaming import DataLoader, Loader\n```\n"
    )
    assert dead_links(page) == ["#two", "gone.md"]
    assert [wrong for tree in code(page) for wrong in wrong_calls(tree)[1]] == [
        "streaming.Loader", "DataLoader(batchsize=)", "loader.rewind"
    ]  # fmt: skip
