"""Systems other than Linux: macOS reads, writes and indexes with threads and one warning; others are refused by name.

There is no such machine here. The process is one whose ``sys.platform`` says otherwise and that lacks what only Linux
has, from before the first import of ours on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code.folders import ROOT

pytestmark = pytest.mark.thorough

MACOS = """
import sysconfig; sysconfig.get_config_vars()
import concurrent.futures.process, ctypes, fcntl, logging, mmap, multiprocessing, os, select, signal, socket, sys
import click, crc32c, fsspec, obstore, pyarrow.parquet, rich.progress, simplejpeg, torch, PIL.Image

ONLY_LINUX = {
    os: ("memfd_create", "MFD_CLOEXEC", "posix_fadvise", "POSIX_FADV_WILLNEED", "sched_getaffinity", "pidfd_open",
         "eventfd", "sched_setaffinity", "posix_fallocate", "splice", "copy_file_range", "O_DIRECT", "O_TMPFILE"),
    fcntl: ("F_SETLEASE", "F_GETLEASE", "F_SETSIG", "F_ADD_SEALS"),
    mmap: ("MADV_REMOVE", "MADV_HUGEPAGE", "MADV_POPULATE_READ", "MADV_DONTFORK", "MAP_NORESERVE", "MAP_POPULATE"),
    socket: ("SOCK_SEQPACKET", "MSG_CMSG_CLOEXEC", "SOCK_CLOEXEC"),
    select: ("epoll",),
    signal: ("pidfd_send_signal",),
}
for module, names in ONLY_LINUX.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

class Library:
    def __init__(self, *args, **options):
        pass
    def __getattr__(self, name):
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")

ctypes.CDLL = Library
opened = os.open
def without_proc(path, *args, **options):
    assert not str(path).startswith("/proc"), path
    return opened(path, *args, **options)
os.open = without_proc
import builtins
built_in_open = builtins.open
def without_proc_either(path, *args, **options):
    if str(path).startswith("/proc"):
        raise FileNotFoundError(path)
    return built_in_open(path, *args, **options)
builtins.open = without_proc_either
sys.platform = "darwin"

logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")

import io
import numpy as np
from shard_tools import ShardWriter
from shard_tools.__main__ import main
from streaming import DataLoader, DevicePrefetcher, ShuffleConfig, StreamingDataset

def doubled(sample):
    return {**sample, "twice": 2 * int(sample["cls"])}

target = sys.argv[1]
with ShardWriter(f"{target}/{{:04d}}.tar", max_samples=50) as writer:
    for number in range(200):
        writer.write({"__key__": f"{number:04d}", "cls": number, "npy": np.full(3_000, number)})
for options in ({"num_workers": 2}, {"num_workers": 2}, {"num_workers": 0}):
    with DataLoader(StreamingDataset(f"{target}/", transform=doubled), 10, **options) as loader:
        seen = []
        for batch in DevicePrefetcher(loader, "cpu"):
            assert (batch["twice"] == 2 * batch["cls"]).all() and (batch["npy"][:, 7] == batch["cls"]).all()
            seen += batch["cls"].tolist()
        assert sorted(seen) == list(range(200))
with DataLoader(StreamingDataset(f"{target}/", cache_dir=f"{target}/cache", cache_limit="100MB"), 10) as loader:
    assert sum(len(batch["cls"]) for batch in loader) == 200
import shutil
shutil.rmtree(f"{target}/_shardstream")
for verb in (["index", f"{target}/"], ["info", f"{target}/"], ["verify", f"{target}/"]):
    sys.argv = ["shard_tools", *verb]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (verb, end.code)
assert len(StreamingDataset(f"{target}/")) == 200
print("done")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_macos_reads_writes_and_indexes_with_threads_and_says_so_once(tmp_path: Path) -> None:
    done = run(MACOS, str(tmp_path / "train"))
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert len(told) == 1, told
    assert "num_workers=2" in told[0]
    assert "darwin" in told[0]
    assert "threads" in told[0]


def test_elsewhere_the_first_import_says_so() -> None:
    for package in ("streaming", "shard_tools"):
        done = run(f"import os; import sys; sys.platform = 'win32'\nimport {package}")
        assert done.returncode == 1
        assert "ImportError: shardstream runs on Linux and macOS, not on win32" in done.stderr, done.stderr
        assert "WSL" in done.stderr
