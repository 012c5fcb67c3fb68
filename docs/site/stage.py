"""Lay out what Sphinx reads: pages of the repository, with links that hold on the site, and pages made from code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pygments.lexers import find_lexer_class_by_name
from pygments.util import ClassNotFound

from docs.site import messages, reference, tables

ROOT = Path(__file__).parents[2]
HOME = "README.md"
PATTERNS = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/**/*.md", "infra/**/*.md")

MADE: dict[str, Callable[[], tables.Made]] = {
    "options": tables.options,
    "decoders": tables.decoders,
    "commands": tables.commands,
    "finder": messages.finder,
    "messages": messages.pages,
    "reference": reference.pages,
}
"""What takes the place of ``<!-- site: NAME -->`` in a page, with the pages below it."""

NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": ("docs/tutorial", "examples/README", "docs/guide", "docs/life-of-a-set", "docs/faq", "docs/when-not"),
    "How to": (
        "docs/trainers",
        "docs/launchers",
        "docs/stores",
        "docs/text",
        "docs/sound-and-video",
        "docs/windows",
        "docs/packing",
        "docs/mixing",
        "docs/filters",
        "docs/late-fields",
        "docs/meaning",
        "docs/curriculum",
        "docs/random",
        "docs/settings",
        "docs/tickets",
        "docs/dispatch",
        "docs/ray",
        "docs/remesh",
        "docs/tools",
        "docs/show",
        "docs/extending",
    ),
    "Recipes": (
        "docs/recipes/index",
        "docs/recipes/nanogpt",
        "docs/recipes/nanochat",
        "docs/recipes/torchtitan",
        "docs/recipes/olmo-core",
        "docs/recipes/litgpt",
        "docs/recipes/trl",
        "docs/recipes/timm",
        "docs/recipes/mae",
        "docs/recipes/diffusers",
        "docs/recipes/open_clip",
        "docs/recipes/nanovlm",
        "docs/recipes/speechbrain",
        "docs/recipes/ultralytics",
    ),
    "Coming from": (
        "docs/coming-from/webdataset",
        "docs/coming-from/mosaic",
        "docs/coming-from/litdata",
        "docs/coming-from/energon",
        "docs/coming-from/torch",
        "docs/coming-from/datasets",
        "docs/coming-from/dali",
        "docs/coming-from/lancedb",
        "docs/coming-from/webshart",
        "docs/coming-from/lhotse",
        "docs/coming-from/lerobot",
    ),
    "When it fails or waits": (
        "docs/troubleshooting",
        "docs/tuning",
        "docs/waiting",
        "docs/metrics",
        "docs/reliability",
        "docs/security",
    ),
    "Reference": (
        "docs/every-option",
        "docs/every-decoder",
        "docs/every-command",
        "docs/api",
        "docs/options",
        "docs/format",
        "docs/glossary",
    ),
    "Why": ("docs/explanation", "docs/design/README", "benchmarks/peers/README", "benchmarks/README"),
    "Project": ("docs/versions", "SECURITY", "CONTRIBUTING", "RELEASING", "CHANGELOG"),
}
"""The side bar: sections, and the pages of each in the order in which they are read."""

_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^\n`]*)\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_PLACE = re.compile(r"^<!-- site: (\w+) -->$", re.MULTILINE)
_CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", re.DOTALL)


@dataclass
class Stage:
    """A folder that holds all pages; ``problems`` lists links that lead nowhere."""

    folder: Path
    problems: list[str] = field(default_factory=list)
    _files: set[Path] = field(default_factory=set)

    def fill(self) -> None:
        """Write all pages, and what they show or link to."""
        for page in source_pages():
            text = self._page(page.relative_to(ROOT), page.read_text())
            if re.fullmatch(r"docs/design/\d.*", str(page.relative_to(ROOT))):  # the page of contents leads there
                text = ORPHAN + text
            if str(page.relative_to(ROOT)) == HOME:
                text += "\n" + _side_bar()
            self._write(target_of(page.relative_to(ROOT)), text)
        for path in sorted(self._files):
            self._write(Path(f"{path}.md"), _shown(path))

    def _write(self, path: Path, text: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def _page(self, page: Path, text: str) -> str:
        """Return the text of a page of the repository, as the site has it."""
        text = in_columns("".join(self._part(page, part, is_code=code) for part, code in parts(text)))
        below: list[Path] = []

        def made(place: re.Match[str]) -> str:
            made = MADE[place[1]]()
            for name, content in made.below.items():
                path = page.parent / f"{name}.md"
                self._write(path, content)
                if not content.startswith(ORPHAN):
                    below.append(path)
            return made.text

        text = _PLACE.sub(made, text)
        if page == Path("benchmarks/README.md"):
            below += [one.relative_to(ROOT) for one in source_pages() if ROOT / "benchmarks" in one.parents]
            below.remove(page)
        elif page == Path("docs/tools.md"):
            below += [one.relative_to(ROOT) for one in source_pages() if one.parent == ROOT / "docs/tools"]
        elif page == Path("docs/launchers.md"):
            below += [Path("infra/deploy/README.md")]
        return text + (_tree(sorted(self._relative(page, one) for one in below)) if below else "")

    @staticmethod
    def _relative(page: Path, other: Path) -> str:
        return "/" + str(other.with_suffix("")) if page.parts else str(other)

    def _part(self, page: Path, part: str, *, is_code: bool) -> str:
        if is_code:
            return _known_language(part)
        return _outside_code(part, lambda text: _LINK.sub(lambda link: self._link(page, link), text))

    def _link(self, page: Path, link: re.Match[str]) -> str:
        """Return the link as it is on the site: folders lead to their page, programs to a page that shows them."""
        file, _, anchor = link[2].partition("#")
        if "://" in file or not file or file.startswith("mailto:"):
            return link[0]
        target = (ROOT / page.parent / file).resolve()
        if target.is_dir():
            target /= "README.md"
        if not target.exists():
            self.problems.append(f"{page}: {link[2]}")
            return link[0]
        path = target.relative_to(ROOT)
        if path.suffix in {".png", ".svg"}:
            copied = self.folder / path
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(target, copied)
        elif path.suffix != ".md":
            self._files.add(path)
            path = Path(f"{path}.md")
        return f"{link[1]}/{target_of(path)}{'#' if anchor else ''}{anchor}{link[3]}"


ORPHAN = "---\norphan: true\n---\n"
"""What a page begins with that is not in the side bar, whose making takes time for each heading of each page."""


def source_pages() -> list[Path]:
    """Return the pages of the repository."""
    return sorted({page for pattern in PATTERNS for page in ROOT.glob(pattern)})


def target_of(path: Path) -> Path:
    """Return where a page of the repository is on the site: its front page is the README."""
    return Path("index.md") if str(path) == HOME else path


def parts(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the text in pieces, each with whether it is a fenced block."""
    end = 0
    for fence in _FENCE.finditer(text):
        yield text[end : fence.start()], False
        yield fence[0], True
        end = fence.end()
    yield text[end:], False


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return the text with ``change`` applied, to which code in backticks is one letter that nobody writes."""
    kept: list[str] = []

    def hidden(code: re.Match[str]) -> str:
        kept.append(code[0])
        return f"\ue000{len(kept) - 1}\ue001"

    changed = change(_CODE.sub(hidden, text))
    return re.sub("\ue000(\\d+)\ue001", lambda found: kept[int(found[1])], changed)


def _known_language(block: str) -> str:
    """Return a fenced block in a language that can be coloured; its other words stay."""
    fence = _FENCE.match(block)
    words = fence[3].split() if fence else []
    if fence is None or not words or words[0].startswith("{"):
        return block
    try:
        find_lexer_class_by_name(words[0])
    except ClassNotFound:
        words[0] = "text"
    return f"{fence[1]}{fence[2]}{' '.join(words)}\n{fence[4]}{fence[1]}{fence[2]}"


def in_columns(text: str) -> str:
    """Return the text with each block of ``theirs`` beside the block of ``ours`` that follows it."""
    theirs, ours = (rf"^```(\w+) {word}\n(.*?)^```$" for word in ("theirs", "ours"))
    comments = r"(?:\s*<!--[^>]*-->)*\s*"
    return re.sub(
        theirs + comments + ours,
        lambda pair: (
            "::::{container} columns\n"
            f":::{{container}} theirs\n```{pair[1]}\n{pair[2]}```\n:::\n"
            f":::{{container}} ours\n```{pair[3]}\n{pair[4]}```\n:::\n::::"
        ),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def _shown(path: Path) -> str:
    """Return the page that shows a program, a notebook or a file of settings."""
    if path.suffix == ".ipynb":
        return f"{ORPHAN}{_notebook(path)}"
    languages = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".json": "json"}
    code = (ROOT / path).read_text()
    return f"{ORPHAN}# `{path}`\n\n`````{languages.get(path.suffix, 'text')}\n{code}\n`````\n"


def _notebook(path: Path) -> str:
    """Return the cells of a notebook, one below the other, with links to its neighbours as words."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads((ROOT / path).read_text())["cells"]]
    return "\n\n".join(
        f"`````python\n{text}\n`````" if kind == "code" else re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
        for kind, text in cells
    )


def _tree(pages: list[str], caption: str = "") -> str:
    lines = [":hidden:", *([f":caption: {caption}"] if caption else [":maxdepth: 1"])]
    return "\n\n```{toctree}\n" + "\n".join([*lines, "", *pages]) + "\n```\n"


def _side_bar() -> str:
    return "".join(_tree(["/" + page for page in pages], section) for section, pages in NAVIGATION.items())
