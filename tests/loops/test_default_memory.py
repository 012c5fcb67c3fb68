"""The default of ``memory_limit``: what a control group leaves to loaders, as ``shard_tools doctor`` says it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from shard_tools.look.doctor import judge
from shard_tools.look.doctor.machine import look_at_machine
from streaming import DataLoader
from streaming.common.arguments import format_bytes
from streaming.common.platforms import GroupLimits
from streaming.run.loops import options
from tests.support.sets.data_sets import mesh_of, write_set


@pytest.mark.parametrize(
    ("group_bytes", "ranks", "expected"),
    [
        (None, 1, 4 << 30),
        (None, 64, 4 << 30),
        (512 << 20, 1, 256 << 20),
        (8 << 30, 1, 4 << 30),
        ((8 << 30) - 1, 1, (4 << 30) - (1 << 20)),
        (8 << 30, 8, 512 << 20),
        (64 << 30, 8, 4 << 30),
        (100 << 20, 4, 64 << 20),
    ],
)
def test_loaders_take_what_a_control_group_leaves_them_by_default_and_the_doctor_says_so(
    group_bytes: int | None, ranks: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(options, "group_limits", lambda: GroupLimits(memory_bytes=group_bytes))
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    monkeypatch.setenv("LOCAL_RANK", "0")
    dataset, mesh = write_set(tmp_path, (8,)).open(), mesh_of(1, 0)
    with caplog.at_level(logging.INFO), DataLoader(dataset, batch_size=8, device_mesh=mesh) as loader:
        assert loader._loop.config.memory.limit_bytes == expected
    said = [one.getMessage() for one in caplog.records if "control group" in one.getMessage()]
    assert len(said) == (expected != 4 << 30)
    assert all(f"memory_limit: {format_bytes(expected)} by default" in text for text in said)
    with DataLoader(dataset, batch_size=8, device_mesh=mesh, memory_limit="4GiB") as loader:
        assert loader._loop.config.memory.limit_bytes == 4 << 30
    if group_bytes is not None:
        here = replace(look_at_machine(None), memory_bytes=group_bytes, is_memory_limited=True)
        (said_here,) = [line for line in judge.limits(here, None, ranks_here=ranks) if line.startswith("memory")]
        assert f"up to {format_bytes(expected)} of" in said_here
        found = judge.troubles((), here, None, launcher="", ranks_here=ranks)
        assert "memory" not in {one.kind for one in found}  # the default follows what is there
