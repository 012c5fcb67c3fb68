"""What an import does, and which names are there: what API.md promises, with no effect beside."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from shard_tools import ShardWriter
from tests.support.code.folders import ROOT
from tests.support.code.source_tree import KNOWN_TO, NOT_DECLARED, imports, is_under, modules, ours, report, tree

# What API.md promises. Names that a later release brings stand in COMING; one that arrives moves up.
PUBLIC: dict[str, tuple[str, ...]] = {
    "infra": ("DeviceMesh", "MeshError", "Launch", "discover"),
    "streaming": (
        "DataLoader",
        "StreamingDataset",
        "DeviceMeshFetcher",
        "Balanced",
        "Broadcast",
        "Curriculum",
        "DeviceMeshSampler",
        "DevicePrefetcher",
        "Mixture",
        "RetrySampler",
        "Schedule",
        "SequenceSlice",
        "Sound",
        "StageFields",
        "TableDataset",
        "TorchIterable",
        "Video",
        "as_torch",
        "one_behind",
    ),
    "streaming.metrics": ("prometheus", "opentelemetry", "flat", "headspace", "serve"),
    "streaming.contracts": ("Adapter", "CustomSource", "Decoder", "RowKind", "Orders", "Source"),
    "streaming.testing": ("StoreTests", "SourceTests", "DecoderTests", "RowTests", "OrderTests", "LayoutTests"),
    "shard_tools": ("ShardWriter", "lines", "optimize", "select"),
}
COMING: dict[str, tuple[str, ...]] = {}


PROBE = """
import logging, os, sys, threading, multiprocessing, types

class Library(types.ModuleType):
    # Stands for a part of a trainer's library, which takes seconds to import; tests/trainers import the true ones.

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, type(name, (), {"Config": type("Config", (), {})}))

sys.modules.update({name: Library(name) for name in %(stubs)r})

def probe(before, modules):
    for name in before:
        __import__(name)
    threads, handlers = set(threading.enumerate()), list(logging.getLogger().handlers)
    os.environ.__class__ = Watched
    for name in modules:
        __import__(name)
    os.environ.__class__ = Plain
    assert set(threading.enumerate()) == threads, threading.enumerate()
    assert logging.getLogger().handlers == handlers, "root logging handlers"
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("streaming", "shard_tools", "infra"):
            found = [h for h in logging.getLogger(name).handlers if not isinstance(h, logging.NullHandler)]
            assert not found and logging.getLogger(name).level == logging.NOTSET, (name, found)
    assert multiprocessing.active_children() == []
    assert reads == [], reads

ours = tuple(os.path.join(%(root)r, name) for name in ("streaming", "shard_tools", "infra"))
reads = []
Plain = os.environ.__class__

class Watched(os._Environ):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(ours):
                reads.append((key, frame.f_code.co_filename, frame.f_lineno))
                break
            if "site-packages" in frame.f_code.co_filename:
                break
            frame = frame.f_back
        return super().__getitem__(key)

for before, modules, without_torch in %(steps)r:
    probe(before, modules)
    assert not without_torch or "torch" not in sys.modules, "importing infra or the command line imports torch"
"""


@pytest.mark.thorough
def test_imports_have_no_side_effects() -> None:
    """No thread, no handler, no process, no look at the environment; and tools start without torch."""

    def step(package: str, *, without_torch: bool) -> tuple[list[str], list[str], bool]:
        seen: set[str] = set()
        stack = [module for module in modules() if is_under(module, (package,)) and "__main__" not in module]
        named = sorted(stack)
        while stack:
            module = stack.pop()
            if module not in seen:
                seen.add(module)
                stack.extend(ours(module))
        # Imported first, so that effects of theirs do not count as ours.
        theirs = {name for module in seen for name in imports(module) if name.split(".")[0] in KNOWN_TO}
        theirs = {name for name in theirs if name.split(".")[0] not in NOT_DECLARED}
        if without_torch:
            theirs = {name for name in theirs if name.split(".")[0] != "torch"}
        return sorted(theirs), named, without_torch

    steps = [step("infra", without_torch=True), step("shard_tools", without_torch=True)]
    steps.append(step("streaming", without_torch=False))
    stubs = {name for module in modules() for name in imports(module) if name.split(".")[0] in NOT_DECLARED}
    code = PROBE % {"root": str(ROOT), "steps": steps, "stubs": sorted(stubs - {"pytest"})}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", code]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


LOADED = """
import sys
from pathlib import Path
import streaming
print(*sorted(name.split(".")[0] for name in sys.modules if "." not in name))
from streaming import DeviceMeshSampler, RetrySampler
print(*sorted(sys.modules))
"""


@pytest.mark.thorough
def test_an_import_loads_what_it_needs() -> None:
    """The package next to nothing, the samplers torch, NumPy, infra and the plan: no reader, no store, no decoder."""
    command = [sys.executable, "-c", LOADED]
    lines = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=200, cwd=ROOT
    ).stdout.splitlines()
    package, samplers = (set(line.split()) for line in lines)
    assert package & {"torch", "numpy", "obstore", "pyarrow"} == set(), "import streaming"
    unneeded = {"obstore", "pyarrow", "fsspec", "PIL", "crc32c", "cloudpickle", "braceexpand"}
    assert samplers & unneeded == set(), "from streaming import DeviceMeshSampler"
    own = {name for name in samplers if is_under(name, ("streaming",)) and len(tree(name).body) > 1}  # no bare wings
    assert len(own) <= 35, sorted(own)  # 25 in November 2026; it was 135


def test_public_names_are_there_and_coming_ones_are_not() -> None:
    findings = []
    for package, names in PUBLIC.items():
        module = importlib.import_module(package)
        wrong = [n for n in names if n not in module.__all__ or not getattr(module, n, None).__doc__]
        findings += [f"{package}.{name} is promised, but missing, undocumented or not in __all__" for name in wrong]
    for package, names in COMING.items():
        module = importlib.import_module(package)
        findings += [f"{package}.{name} has arrived: move it to PUBLIC" for name in names if hasattr(module, name)]
    report(findings, "Names that users meet are a contract:")


OPENED = """
import sys
from pathlib import Path
from streaming import DataLoader, Mixture, Packed, StreamingDataset

made = {
    "samples": lambda some: some,
    "packs": lambda some: Packed(some, 16),
    "padded packs": lambda some: Packed(some, 16, padded=True),
    "packs under a budget": lambda some: Packed(some, 16, budgets={"patches": 8}),
    "alike packs": lambda some: Packed(some, 16, padded=True, alike=("patches",)),
    "lists": lambda some: Packed(some, 16, field=None),
    "a mixture": lambda some: Mixture({"a": Packed(some, 16)}),
}
for name, make in made.items():
    DataLoader(make(StreamingDataset(sys.argv[1])), batch_size=1).close()
    print(name, "pandas" in sys.modules)
"""


def test_opening_a_set_does_not_import_pandas(tmp_path: Path) -> None:
    """Arrow's ``to_numpy``, ``fill_null`` and others would import it: a quarter of a second of each rank."""
    columns = {"tokens": lambda sample: len(sample["tok"]) // 2, "patches": lambda sample: int(sample["__key__"]) % 3}
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns=columns) as writer:
        for number in range(40):
            writer.write({"__key__": f"{number:02d}", "tok": bytes(2 + 2 * (number % 7))})
    ran = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert importlib.util.find_spec("pandas") is not None
    found = [line.rpartition(" ") for line in ran.stdout.splitlines()]
    assert {name: imported for name, _, imported in found if imported != "False"} == {}
    assert len(found) == 7
