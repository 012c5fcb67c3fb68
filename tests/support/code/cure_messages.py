"""What messages of the packages name, and short ways to see a message and to do what it says."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from streaming import DataLoader, StreamingDataset
from streaming.errors import ShardstreamError
from tests.support.code.folders import ROOT, TESTS
from tests.support.code.source_tree import PACKAGES
from tests.support.sets.tars import write_tar

_OPTION = re.compile(r"(?<![\w.\"'/{:?&-])([a-z_][a-z0-9_]{2,})=")
FOREIGN_OPTIONS = {
    "image": "an example of --field COLUMN=EXT",
    "text": "an example of --field COLUMN=EXT",
    "batch_sampler": "torch's DataLoader",
    "mesh_dim_names": "torch's init_device_mesh",
    "multiprocessing_context": "torch's DataLoader, and ours for ordinary data sets",
    "ignore_data_skip": "transformers.TrainingArguments",
    "nofile": "docker run --ulimit",
    "num_cpus": "ray",
    "resources": "ray",
    **dict.fromkeys(("bytes", "camera", "charset", "filename", "geolocation", "microphone"), "headers of HTTP"),
}


@dataclass(frozen=True)
class Message:
    place: str
    text: str


def _text(node: ast.expr) -> str:
    """The text of a string, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


@functools.cache
def messages() -> tuple[Message, ...]:
    """All text in the packages that is no docstring and has a blank in it."""
    found = []
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        tree = ast.parse(path.read_text())
        seen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) not in seen and isinstance(node, ast.expr) and " " in (text := _text(node)):
                seen.update(id(inner) for inner in ast.walk(node))
                found.append(Message(f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return tuple(found)


def options_of(message: Message) -> list[str]:
    """Names of the options that a message writes as ``name=``."""
    return _OPTION.findall(message.text)


def tool(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")
    assert result.exit_code == code, result.output
    return result


def error_of(work: Callable[[], object], kind: type[Exception] = ShardstreamError) -> str:
    with pytest.raises(kind) as caught:
        work()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def keys(url: object, **options: object) -> list[object]:
    dataset = StreamingDataset(str(url), shuffle=False, **options)  # type: ignore[arg-type]
    with DataLoader(dataset, batch_size=1) as loader:
        return [key for batch in loader for key in batch["__key__"]]  # type: ignore[attr-defined]


def tar(path: Path, *members: tuple[str, bytes]) -> Path:
    return write_tar(path, members)


def source_of(test: str) -> str:
    """The text of a test, ``file::name``; of a helper that is no test and no cure nothing is proven.

    Raises:
        AssertionError: There is no such test or cure.
    """
    file, name = test.split("::")
    path = next(TESTS.rglob(file))
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in functions, f"there is no {test}"
    done = any("scenario(" in ast.unparse(one) for one in functions[name].decorator_list)
    assert name.startswith("test_") or done, f"nothing runs {test}"
    return ast.unparse(functions[name])
