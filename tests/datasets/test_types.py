"""What a type checker tells users of the public face: it knows the type of whatever they hold."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import blocks

HEAD = """
import numpy as np
import torch
from streaming import (
    Balanced, Curriculum, DataLoader, DeviceMeshFetcher, DevicePrefetcher, Mixture, Packed, Schedule, StreamingDataset
)

def stacked(samples: list[object]) -> torch.Tensor:
    return torch.zeros(len(samples))

dataset = StreamingDataset("s3://bucket/train/")
packed = Packed(dataset, length=8192)
mix = Mixture({"web": dataset, "code": dataset[::2]}, weights={"web": 0.7, "code": 0.3})
balanced = Balanced(dataset, by="cls")
curriculum = Curriculum(dataset, metric="tokens", schedule=Schedule.root(0.1, 1.0, over=100))
loader = DataLoader(mix, 8)
"""
SAMPLE, SAMPLES, BATCH = "dict[str, object]", "list[dict[str, object]]", "dict[str, Any]"
KNOWN = {
    "dataset[0]": SAMPLE, "dataset[np.int64(3)]": SAMPLE, "next(iter(dataset))": SAMPLE,
    "dataset[[3, 5]]": SAMPLES, "dataset[range(3)]": SAMPLES, "dataset[np.arange(3)]": SAMPLES,
    "dataset[torch.tensor([1])]": SAMPLES,
    "dataset[::2]": "StreamingDataset", "dataset.take(3).map(lambda sample: sample)": "StreamingDataset",
    "dataset.source": "SampleSource", "dataset.urls": "Sequence[str]", "dataset.fingerprint": "str",
    "dataset.fields": "tuple[str, ...] | None", "len(dataset)": "int",
    "packed[0]": SAMPLE, "packed[[0, 1]]": SAMPLES, "packed.documents": "StreamingDataset", "packed.fill": "float",
    "packed.counts.split": "int", "packed.source": "PackedDocuments | KindsOfPacks",
    "mix[0]": SAMPLE, "mix.sizes": "dict[str, int]", "mix.names": "tuple[str, ...]", "mix.source": "MixedSource",
    "mix.map(lambda sample: sample)": "Mixture", 'Mixture.from_file("mixture.json")': "Mixture",
    "balanced[0]": SAMPLE, "balanced.dataset": "StreamingDataset", "balanced.source": "GroupedSource",
    "curriculum.pool(0)": "dict[str, int]", "curriculum.map(lambda sample: sample)": "Curriculum",
    "loader.state_dict()": "dict[str, Any]", "loader.metrics()": "dict[str, Any]", "len(loader)": "int",
    "loader.seen()": "dict[str, dict[str, float]]", 'loader.set_weights({"web": 1})': "int", "loader.epoch": "int",
    "next(iter(loader))": BATCH, "next(iter(DevicePrefetcher(loader)))": BATCH,
    "next(iter(DataLoader(dataset, 8, collate_fn=stacked)))": "Tensor",
    "next(iter(DevicePrefetcher(DataLoader(dataset, 8, collate_fn=stacked))))": "Tensor",
    "next(iter(DeviceMeshFetcher(dataset, batch_size=8)))": "list[dict[str, Any]]",
}  # fmt: skip
"""Expressions, and what they are; a ``state_dict`` and metrics hold values of several types by name."""


PAGES = ("README.md", "docs/guide.md", "docs/mixing.md", "docs/curriculum.md", "docs/filters.md")
LENIENT = ("--allow-untyped-defs", "--allow-untyped-calls", *(f"--disable-error-code={code}" for code in (
    "name-defined", "no-redef", "import-not-found", "import-untyped")))  # fmt: skip
"""Pages do not annotate, name things of the reader's (a model), and use packages that need not be installed."""


def script_of(page: str, folder: Path) -> Path:
    """A script of all Python on a page."""
    script = folder / f"page_{Path(page).stem.lower()}.py"
    script.write_text("\n".join(one.code for one in blocks((ROOT / page).read_text()) if one.language == "python"))
    return script


def plain(revealed: str) -> str:
    """The type without the modules of its names."""
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", revealed)


@pytest.mark.thorough
def test_a_type_checker_knows_what_users_hold_and_takes_what_pages_write(tmp_path: Path) -> None:
    script = tmp_path / "held.py"
    script.write_text(HEAD + "".join(f"reveal_type({expression})\n" for expression in KNOWN))
    scripts = [script, *(script_of(page, tmp_path) for page in PAGES)]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file",
        "pyproject.toml",
        *LENIENT,
        *map(str, scripts),
    ]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    found = [plain(one) for one in re.findall(r'note: Revealed type is "(.*)"', told.stdout)]
    assert dict(zip(KNOWN, found, strict=True)) == KNOWN
