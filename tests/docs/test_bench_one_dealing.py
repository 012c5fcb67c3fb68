"""The arithmetic of ``benchmarks/bench_one_dealing.py``: what is compared keeps to its memory, and is counted alike."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support.code.folders import ROOT
from tests.support.code.script_modules import script_modules
from tests.support.tiers import first_here

pytestmark = pytest.mark.thorough

ROWS = 2**14


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = "bench_one_dealing"
    return script_modules(monkeypatch, str(ROOT / "benchmarks"), ("common", name))[name]


def case_of(bench: ModuleType, num_sources: int = 2) -> Any:
    return bench.Case(records=bench.KINDS["100 kB"], num_sources=num_sources, num_ranks=1, global_batch=64)


def test_whole_chunks_take_one_request_each_in_both_dealings(bench: ModuleType) -> None:
    case = case_of(bench)
    per_gb = 1e9 / case.chunk_bytes
    for dealt in (bench.today(case), bench.by_samples(case, None, 1.0)):
        assert bench.requests_per_gb(case, dealt, ROWS * 4) == pytest.approx(per_gb, rel=0.1)


def test_weights_act_in_sixteen_steps_only_if_dealt_by_samples(bench: ModuleType) -> None:
    case = case_of(bench)
    assert bench.steps_to_weights(case, bench.by_samples(case, None, 1.0)) == bench.LEAST_STEPS
    assert bench.steps_to_weights(case, bench.today(case)) > bench.LEAST_STEPS


@pytest.mark.parametrize("part", first_here([0.5, 1.5, 1.0, 0.25], 1))
def test_units_are_cut_until_they_fit(bench: ModuleType, part: float) -> None:
    case = case_of(bench, 3)
    room = int(bench.today(case).live_bytes(case) * part)
    dealt = bench.chosen(case, room)
    assert dealt is not None
    assert dealt.live_bytes(case) <= room
    samples = sum(case.num_chunks * case.records.per_chunk for _ in case.weights)
    assert dealt.orders.chunk_samples.sum() == samples
    assert (dealt.sizes == dealt.orders.chunk_samples * case.records.sample_bytes).all()


def test_what_fits_into_no_unit_is_said(bench: ModuleType) -> None:
    case = case_of(bench, 2)
    assert bench.chosen(case, 1 << 20) is None


def test_a_cell_says_what_is_smaller_than_today(bench: ModuleType) -> None:
    case = case_of(bench)
    whole = bench.Figures(unit_kib=case.chunk_bytes / 1024, reach=1.0, live_mib=10, requests_per_gb=5, steps=16)
    assert whole.shown(case) == "10 · 5 · 16"
    assert replace(whole, unit_kib=700.0, reach=0.25).shown(case) == "10 · 5 · 16 (700 KiB, reach 0.25)"


def test_the_quick_run_prints_a_row_for_its_mixture(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench_one_dealing.py", "--quick"])
    bench.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 100 kB")]
    assert len(rows) == 1
    assert np.array_equal([cell.count("·") for cell in rows[0].split("|")[4:7]], [2, 2, 2])
