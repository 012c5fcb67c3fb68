"""The pages for newcomers run as they stand: the tutorial, launchers, stores, and both columns of "coming from"."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import wave
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import shard_tools
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import PYTHON, SHELL, Block, blocks, run_python, run_shell
from tests.support.sources.robot_sets import RobotSet

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # a page has several programs

COMING_FROM = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
PEERS = {"webdataset": "webdataset", "torch": "torch", "datasets": "datasets"}
"""Pages whose left column runs where this package is installed."""


def run_block(block: Block, page: Path, folder: Path, names: dict[str, object]) -> bool:
    """Run a block unless it has an excuse; whether it has run."""
    if block.excuse is None and block.language in PYTHON:
        run_python(block, names, page)
    elif block.excuse is None and block.language in SHELL:
        run_shell(block, folder, page)
    else:
        return False
    return True


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (48, 32), (number % 250, 90, 30)).save(out, "JPEG")
    return out.getvalue()


class Pairs:
    """A map-style dataset of pairs, as torch's loader takes it."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, at: int) -> tuple[np.ndarray, int]:
        return np.full((4, 4), at, dtype=np.float32), at % 10


def write_inputs(folder: Path) -> None:
    """Four shards of images with classes, a table of texts, and what other libraries keep beside or instead of them."""
    with shard_tools.ShardWriter(f"{folder}/train/{{:06d}}.tar", max_samples=32) as writer:
        for number in range(128):
            writer.write({"__key__": f"{number:06d}", "jpg": jpeg(number), "cls": number % 10})
    with (folder / "table.jsonl").open("w") as table:
        for number in range(100):
            table.write(json.dumps({"text": f"text {number}", "tokens": number}) + "\n")
    write_speech(folder)
    rows = [{"id": f"{n:04d}", "image": jpeg(n), "label": n % 10} for n in range(128)]
    (folder / "rows").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows/000000.parquet")
    RobotSet(lengths=[18] * 4).write(folder / "robot")


def write_speech(folder: Path) -> None:
    """Sounds in tars with their texts beside them, as Lhotse's Shar and NeMo lay them out."""
    sound = io.BytesIO()
    with wave.open(sound, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        out.writeframes(bytes(3200))
    (folder / "shar").mkdir()
    (folder / "nemo").mkdir()
    manifest = io.StringIO()
    with (
        gzip.open(folder / "shar/cuts.000000.jsonl.gz", "wt") as cuts,
        tarfile.open(folder / "shar/recording.000000.tar", "w") as shar,
        tarfile.open(folder / "nemo/audio_0.tar", "w") as nemo,
    ):  # fmt: skip
        for number in range(128):
            key = f"cut-{number:04d}"
            supervision = {"id": key, "text": f"words {number}"}
            cuts.write(json.dumps({"id": key, "duration": 0.1, "supervisions": [supervision]}) + "\n")
            manifest.write(
                json.dumps({"audio_filepath": f"{key}.wav", "duration": 0.1, "text": f"words {number}"}) + "\n"
            )
            heard = sound.getvalue()
            for tar, name, content in (
                (shar, f"{key}.wav", heard), (shar, f"{key}.json", b"{}"), (nemo, f"{key}.wav", heard),
            ):  # fmt: skip
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    (folder / "nemo/tarred_audio_manifest.json").write_text(manifest.getvalue())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the peers
@pytest.mark.parametrize("page", COMING_FROM, ids=lambda page: page.stem)
def test_both_columns_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_fork_server: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write_inputs(tmp_path)
    found = list(blocks(page.read_text()))
    peer = PEERS.get(page.stem)
    theirs = [block for block in found if "theirs" in block.words]
    assert theirs
    assert any("ours" in block.words for block in found)
    assert all((block.excuse is None) == (peer is not None) for block in theirs)
    if peer is not None and find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed here")
    rows: list[int] = []

    def train_step(first: object, second: object) -> None:
        assert len(first) == len(second)  # type: ignore[arg-type]  # a tensor, or a list
        rows.append(len(first))  # type: ignore[arg-type]

    seen: list[tuple[bool, int]] = []
    names = {"__name__": "__main__", "train_step": train_step, "dataset": Pairs()}
    for block in found:
        rows.clear()
        if run_block(block, page, tmp_path, names):
            seen.append(("ours" in block.words, sum(rows)))
    assert max(count for ours, count in seen if ours) >= 64


def test_all_peers_have_a_page() -> None:
    assert {page.stem for page in COMING_FROM} == {
        *PEERS, "mosaic", "litdata", "energon", "dali", "lancedb", "webshart", "lhotse", "lerobot",
    }  # fmt: skip
    for page in COMING_FROM:
        assert "\n## Traps\n" in page.read_text(), page
        assert page.read_text().count("\n|") > 10, page


@pytest.mark.parametrize("page", ["tutorial", "launchers", "stores"])
def test_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_fork_server: None) -> None:
    monkeypatch.chdir(tmp_path)
    path, names = ROOT / "docs" / f"{page}.md", dict[str, object]({"__name__": "__main__"})
    assert sum(run_block(block, path, tmp_path, names) for block in blocks(path.read_text())) > 0


def test_words_of_a_fence_are_kept() -> None:
    (block,) = blocks("```python theirs\nx = 1\n```\n")
    assert block == Block(language="python", line=2, code="x = 1\n", excuse=None, words=("theirs",))
