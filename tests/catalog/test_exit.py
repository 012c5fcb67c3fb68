"""What reading an index leaves for the interpreter's end: nothing that could abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sets.data_sets import write_set

_SCRIPT = """
import os, sys
from streaming.shards.index.chunk_table import ChunkTable

with open(sys.argv[1], "rb") as file:
    data = file.read()
before = len(os.listdir("/proc/self/task"))
assert ChunkTable.from_parquet(data, "here").total_samples == 32
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.thorough
def test_reading_an_index_starts_no_threads_of_arrow(tmp_path: Path) -> None:
    """They, beside torch's, aborted about one script in fifty at its end."""
    write_set(tmp_path, (20, 12))
    (path,) = map(str, tmp_path.glob("_shardstream/chunks*"))
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
