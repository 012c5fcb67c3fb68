"""A sample table that is gone: read on, with a word, and built anew by the command that the word names."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from shard_tools.cli import cli
from streaming.shards.catalog.build import index_shards
from streaming.shards.catalog.urls import expand_urls
from streaming.storage import Storage
from tests.support.sets.data_sets import merged, play, total, write_set


def tables(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "_shardstream" / "samples").iterdir()}


SLICED = 24
"""A batch of one rank: so large that its slice of a chunk costs less than the whole chunk."""


@pytest.mark.thorough
def test_two_ranks_in_storage_order_read_on_and_index_is_the_cure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = write_set(tmp_path, (40, 30, 20), chunk_samples=8)
    whole = play(samples.open(shuffle=False), 2, batch_size=SLICED, last_batch="partial")
    index_shards(Storage(), expand_urls(samples.url, Storage()), force=True)  # chunks as `shard_tools index` cuts them
    before = tables(tmp_path)
    (tmp_path / "_shardstream" / "samples" / "000001.tar.parquet").unlink()
    with caplog.at_level(logging.WARNING):
        got = play(samples.open(shuffle=False), 2, batch_size=SLICED, last_batch="partial")
    assert got == whole
    assert total(merged(got)) == Counter(samples.keys)
    (message,) = {record.getMessage() for record in caplog.records if "sample table is gone" in record.getMessage()}
    command = re.search(r"`shard_tools ([^`]+)`", message)
    assert command is not None
    assert CliRunner().invoke(cli, command[1].split()).exit_code == 0
    assert tables(tmp_path) == before
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert play(samples.open(shuffle=False), 2, batch_size=SLICED, last_batch="partial") == whole
    assert not caplog.records


def test_samples_are_found_one_by_one_without_it(tmp_path: Path) -> None:
    samples = write_set(tmp_path, (9, 9), chunk_samples=4)
    for path in (tmp_path / "_shardstream" / "samples").iterdir():
        path.unlink()
    dataset = samples.open()
    assert [dataset[number]["__key__"] for number in range(18)] == list(samples.keys)


def test_a_view_that_begins_inside_a_chunk_is_read_on_without_it(tmp_path: Path) -> None:
    samples = write_set(tmp_path, (9, 9), chunk_samples=9)
    view = samples.open()[3:]  # the first chunk's bytes begin with three samples beside it
    (tmp_path / "_shardstream" / "samples" / "000000.tar.parquet").unlink()
    wanted = view.source.slice(0, 2, 4)
    assert (wanted.first_sample + wanted.lead, wanted.num_samples) == (5, 9)
