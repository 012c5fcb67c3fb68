"""The page of windows runs as it stands, and ``plan`` and ``show`` take what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from shard_tools.look.show.base.page import Query
from shard_tools.look.show.data.values import value
from shard_tools.look.show.order.pages import step_page
from streaming import DataLoader, Mixture, StreamingDataset, Windows
from tests.support.code.folders import ROOT
from tests.support.code.page_blocks import PYTHON, blocks, run_python
from tests.support.servers.show_pages import opened_patiently
from tests.support.sets import recordings


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("page")
    recordings.write(home / "recordings", recordings.of_set())
    return home


def test_the_page_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    page = ROOT / "docs" / "windows.md"
    found = [block for block in blocks(page.read_text()) if block.language in PYTHON]
    names: dict[str, object] = {}
    for block in found:
        assert block.excuse is None
        run_python(block, names, page)
    assert len(found) == 3


OPTIONS = {"video": {"front.mp4": [-0.2, 0.0], "wrist.mp4": [0.0]}, "columns": {"action.npy": "0..8"}, "groups": 1}


def planned(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["plan", *arguments], prog_name="shard_tools")
    assert result.exit_code == 0, result.output
    return result.output


def test_plan_counts_units_and_what_they_read(home: Path, tmp_path: Path) -> None:
    url, options = str(home / "recordings"), json.dumps(OPTIONS)
    windows = Windows(StreamingDataset(url), **OPTIONS)
    found = json.loads(planned(url, "--windows", options, "--batch-size", "8", "--json"))
    assert (found["num_samples"], found["num_chunks"]) == (len(windows), len(windows.source.chunk_samples))
    assert found["windows"]["decoded_bytes"] == int(windows.source.chunk_bytes.sum())
    assert found["windows"]["read_bytes"] > found["windows"]["once_bytes"] > 0
    said = planned(url, "--windows", options, "--batch-size", "8")
    assert f"{len(windows):,} windows in" in said
    assert "units of groups of pictures" in said
    described = tmp_path / "mixture.json"
    described.write_text(json.dumps({"sources": {"a": {"url": url, "windows": OPTIONS}}, "weights": {"a": 1}}))
    assert Mixture.from_file(described).sizes == {"a": len(windows)}
    assert "windows" in planned(str(described), "--batch-size", "8", "--epoch-size", "64")


def test_who_and_when_name_the_moments_of_windows(home: Path, tmp_path: Path) -> None:
    url, options = str(home / "recordings"), json.dumps(OPTIONS)
    windows = Windows(StreamingDataset(url), **OPTIONS)
    with DataLoader(windows, batch_size=8, num_workers=0) as loader:
        batches = [batch for batch, _ in zip(loader, range(3), strict=False)]
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    asked = (url, "--windows", options, "--batch-size", "8", "--state", str(tmp_path / "state.json"))
    rows = json.loads(planned(*asked, "--step", "0..3", "--who", "--json"))["rows"]
    expected = {
        (step, key, round(time, 3)) for step, batch in enumerate(batches)  # as reports round seconds
        for key, time in zip(batch["__key__"], batch["__time__"].tolist(), strict=True)
    }  # fmt: skip
    assert {(row["step"], row["key"], row["time"]) for row in rows} == expected
    first = rows[0]
    assert f"{first['key']} at second {first['time']:.3f} (" in planned(*asked, "--step", "0..3", "--who")
    found = json.loads(planned(*asked, "--key", first["key"], "--when", "--json"))["rows"]
    assert first["time"] in {row["time"] for row in found}


def test_a_step_leads_to_the_recordings_of_its_windows(home: Path) -> None:
    subject = opened_patiently([str(home / "recordings")], windows=OPTIONS)
    try:
        page = step_page(subject, Query({"step": "1"}))
        assert len(page.step.rows) > 4
        for row in page.step.rows:
            (number,) = (int(part.partition("=")[2]) for part in page.sample(row).split("&") if "number=" in part)
            assert f"{number:04d}" == row.key
    finally:
        subject.close()


@pytest.mark.thorough
def test_show_opens_the_recordings_of_windows(home: Path) -> None:
    subject = opened_patiently([str(home / "recordings")], windows=OPTIONS)
    try:
        assert subject.set_of("").total == len(recordings.of_set())
        shown = value(subject, Query({"number": "2", "field": "front.mp4", "view": "strip"}))
        assert shown.media_type.startswith("image/")
        assert b"".join(shown.read(0, shown.num_bytes))[:4] == b"RIFF" or shown.num_bytes > 100
    finally:
        subject.close()
