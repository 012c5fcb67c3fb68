"""The pages: links lead to files and headings that are there, and calls name what the packages have.

Programs of some pages run in tests of their own (README, trainers, filters, ray, remesh, CONTRIBUTING). The
two that a newcomer begins with run here. Every call of a public name, in blocks and in the text, is compared with its
signature.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import infra
import shard_tools
import streaming
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import blocks

PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/**/*.md", "infra/**/*.md")
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
    for block in blocks(text):
        if block.language == "python" and "theirs" not in block.words:  # of another package
            yield ast.parse(block.code)
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


def names_in(module: str) -> set[str]:
    """The names of a module; of one that adapts to a trainer by its text, since trainers take seconds to import."""
    if not module.startswith("streaming.integrations."):
        return set(dir(importlib.import_module(module)))
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def wrong_calls(tree: ast.AST) -> tuple[int, list[str]]:
    """How many calls of ours there are, and those that name what is not there; imports, too."""
    seen, wrong = 0, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            there = names_in(str(node.module))
            wrong += [f"{node.module}.{name.name}" for name in node.names if name.name not in there]
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


# ---------------------------------------------------------------------------------- the programs of a newcomer, resumed


def here(folder: Path) -> dict[str, str]:
    return {"s3://bucket": str(folder)}


def program(page: str, section: str, **changed: str) -> str:
    """The Python of a section, with other addresses and numbers."""
    text = re.split(rf"\n##+ {section}\n", (ROOT / "docs" / page).read_text())[1]
    text = re.split(r"\n##+ ", text)[0]
    code = "\n".join(block for _, language, block in _FENCED.findall(text) if language == "python")
    for old, new in changed.items():
        assert old in code, old
        code = code.replace(old, new)
    return code


def test_train_on_your_own_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        with shard_tools.ShardWriter(f"{tmp_path}/imagenet/{part}/{{:06d}}.tar", max_samples=20) as writer:
            for number in range(50):
                out = io.BytesIO()
                Image.new("RGB", (40 + number, 30), (number, 0, 0)).save(out, "JPEG")
                writer.write({"__key__": f"{number:03d}", "jpg": out.getvalue(), "cls": number % 10})
    trained: list[torch.Tensor] = []
    evaluated: list[int] = []

    def train_step(images: torch.Tensor, classes: torch.Tensor) -> None:
        assert (images.shape, images.dtype) == ((8, 224, 224, 3), torch.uint8)
        trained.append(classes)

    class Model:
        def __call__(self, images: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[torch.zeros(len(images), dtype=torch.int64)]

        def state_dict(self) -> dict[str, Any]:
            return {}

    names = {"torch": torch, "rank": 0, "train_step": train_step, "model": Model()}
    code = program("guide.md", "Train on your own tars", **here(tmp_path), **{"=1024": "=8", "epoch, 90)": "epoch, 2)"})
    exec(compile(code + "    evaluated.append(len(correct))\n", "guide.md", "exec"), names | {"evaluated": evaluated})
    assert len(trained) == 2 * (50 // 8)
    assert sum(evaluated) == 50
    assert torch.load("checkpoint.pt")["loader"]["epoch"] == 2


def test_train_a_gpt_on_several_corpora(tmp_path: Path) -> None:
    for source, name in enumerate(("web", "code", "books")):
        with shard_tools.ShardWriter(f"{tmp_path}/tokens/{name}/{{:06d}}.tar", columns={"tokens": "json.n"}) as writer:
            for number in range(40):
                ids = np.full(20 + 3 * number, source, dtype="<u2")
                writer.write({"__key__": f"{number:03d}", "tok": ids.tobytes(), "json": {"n": len(ids)}})
    smaller = {"length=4096": "length=128", "=512": "=4", "% 1000": "% 5"}
    code = program("text.md", "Train a GPT on several corpora", **here(tmp_path), **smaller)

    def rows(steps: int, checkpoint: str) -> list[list[int]]:
        found: list[list[int]] = []
        names = {"STEPS": steps, "CHECKPOINT": str(tmp_path / checkpoint), "rank": 0, "model": torch.nn.Linear(1, 1)}
        exec(
            compile(code, "text.md", "exec"),
            names | {"train_step": lambda _, batch: found.append(batch["input_ids"].tolist())},
        )
        return found

    whole = rows(20, "undisturbed")
    assert len(whole) == 20
    assert rows(12, "stopped") == whole[:12]
    assert rows(20, "stopped") == whole[10:]  # from the last checkpoint, behind step 10


def test_a_program_that_reads_ahead(tmp_path: Path) -> None:
    """Killed after any step, it goes on with the next one, though two batches more were taken."""
    with shard_tools.ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=20) as writer:
        for number in range(50):
            writer.write({"__key__": f"{number:03d}", "cls": number})
    code = compile(program("trainers.md", "What a state continues with"), "trainers.md", "exec")

    class KilledError(Exception):
        pass

    def run(checkpoint: Path, steps: int) -> list[list[int]]:
        trained: list[list[int]] = []

        def train_step(_: object, batch: Any) -> None:
            if len(trained) == steps:
                raise KilledError
            trained.append(batch["cls"].tolist())

        names = {"URL": f"{tmp_path}/set/", "CHECKPOINT": str(checkpoint), "EPOCHS": 2, "model": None}
        with contextlib.suppress(KilledError):
            exec(code, names | {"train_step": train_step})
        return trained

    whole = run(tmp_path / "whole.pt", 100)
    assert len(whole) == 8
    for steps in range(1, 9):
        first = run(tmp_path / f"{steps}.pt", steps)
        assert first + run(tmp_path / f"{steps}.pt", 100) == whole
