"""The layer table of docs/design/0001-architecture.md, checked on the source and on what an import does."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("streaming", "shard_tools", "infra")

SURFACE = ("streaming", "streaming.dataset", "streaming.loader", "streaming.fetcher", "streaming.device")
SURFACE += ("streaming.torch_view", "streaming.table_file", "streaming.integrations")
SURFACE += ("streaming.loops", "streaming.samplers", "streaming.replicas", "streaming.remote")
# Lowest first. A module belongs to the longest prefix that fits; it may import its own layer and below.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("where am I", ("infra",)),
    (
        "words",
        (
            "streaming.errors",
            "streaming.arguments",
            "streaming.types",
            "streaming.metrics",
            "streaming.forks",
            "streaming.platforms",
        ),
    ),
    ("pure", ("streaming.plan", "streaming.tar", "streaming.index")),
    ("I/O", ("streaming.storage", "streaming.cache", "streaming.job")),
    ("work", ("streaming.catalog", "streaming.fetch", "streaming.decode")),
    ("run", ("streaming.batches", "streaming.engine")),
    ("surface", SURFACE),
    ("command line", ("shard_tools",)),
)
LAYER_OF = {prefix: level for level, (_, prefixes) in enumerate(LAYERS) for prefix in prefixes}

TORCH_MAY = (*(name for name in SURFACE if name != "streaming"), "streaming.engine", "streaming.batches")
TORCH_MAY += ("streaming.job",)
# Pure modules in packages that also do I/O.
ALSO_PURE = ("streaming.fetch.layout", "streaming.fetch.damage", "streaming.fetch.sums", "streaming.fetch.pieces")
# infra asks where the program runs; credentials come the way people have them, the environment too.
ENVIRONMENT_MAY = ("infra.launch", "streaming.storage.adapters.credentials")
# These hand it on, whole, to a process that starts.
ENVIRONMENT_MAY += ("streaming.engine.workers.context", "streaming.engine.workers.main")
INFRA_MAY = SURFACE

# Each third-party package is known to these modules only (prefixes); what is not listed must not be imported.
KNOWN_TO: dict[str, tuple[str, ...]] = {
    "numpy": PACKAGES,
    "torch": TORCH_MAY,
    "pyarrow": ("streaming.index", "shard_tools"),
    "crc32c": ("streaming", "shard_tools"),
    "obstore": ("streaming.storage",),
    "fsspec": ("streaming.storage",),
    "braceexpand": ("streaming.catalog", "shard_tools"),
    "PIL": ("streaming.decode", "shard_tools"),
    "simplejpeg": ("streaming.decode", "shard_tools"),
    "click": ("shard_tools",),
    "rich": ("shard_tools",),
    "cloudpickle": ("streaming.engine", "streaming.remote"),
}
IMPORT_HELPERS = {"import_module", "__import__", "require"}
# By exact name: names that load when they are first used, the helper `require`, and the server
# that imports what its users name.
COMPUTED_IMPORT_MAY = (
    "streaming",
    "streaming.engine.workers.fork_server",
    "streaming.decode.values",
    "streaming.decode.registry",
)
OPTIONAL = ("cv2", "msgpack", "safetensors", "boto3", "botocore", "s3fs", "gcsfs", "adlfs")
OPTIONAL += ("webdataset", "datasets", "matplotlib", "ray")
# Users of these import the module that needs them by name; nobody else does.
INTEGRATED = ("accelerate", "transformers")

# What API.md promises. Names that a later release brings stand in COMING; one that arrives must move up.
PUBLIC: dict[str, tuple[str, ...]] = {
    "infra": ("DeviceMesh", "MeshError", "Launch", "discover"),
    "streaming": (
        "DataLoader",
        "StreamingDataset",
        "DeviceMeshFetcher",
        "Broadcast",
        "DeviceMeshSampler",
        "DevicePrefetcher",
        "RetrySampler",
        "Schedule",
        "SequenceSlice",
        "StageFields",
        "TableDataset",
        "TorchIterable",
    ),
    "shard_tools": ("ShardWriter",),
}
COMING: dict[str, tuple[str, ...]] = {
    "streaming": ("Mixture", "Curriculum"),
}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that ``module`` imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*kept, *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            submodules = names & set(modules())
            found |= submodules
            if len(submodules) < len(names):
                found.add(base)
        elif isinstance(node, ast.Call) and is_import_call(node):
            if isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
            elif module not in COMPUTED_IMPORT_MAY:
                found.add("a computed module name")
    return frozenset(found - {module})


def is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in IMPORT_HELPERS and bool(node.args)


def is_under(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def layer(module: str) -> int:
    if module in LAYER_OF:
        return LAYER_OF[module]
    parent = module.rpartition(".")[0]
    assert parent not in {"", "streaming"}, f"{module} is in no layer: add it to the table of 0001 and to LAYERS"
    return layer(parent)


def ours(names: frozenset[str]) -> frozenset[str]:
    return names & modules().keys()


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module: str) -> None:
    for name in ours(imports(module)):
        assert layer(name) <= layer(module), f"{module} imports {name}, which stands above it"
    names = ours(imports(module))
    if module.startswith("infra"):
        assert [name for name in names if not name.startswith("infra")] == []
    elif (
        module != "streaming"
        and not is_under(module, ("shard_tools",))
        and not is_under(module, tuple(name for name in INFRA_MAY if name != "streaming"))
    ):
        assert [name for name in names if name.startswith("infra")] == [], "only the surface knows infra"
    if module.startswith("shard_tools"):
        assert [name for name in names if is_under(name, ("streaming.engine",))] == [], (
            "the command line needs no engine"
        )


def test_no_cycles_not_even_lazy_ones() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "cycle: " + " → ".join((*path[path.index(module) :], module))
        if module in done:
            return
        for name in sorted(ours(imports(module))):
            visit(name, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("module", sorted(modules()))
def test_third_party_packages_are_known_where_the_table_says(module: str) -> None:
    for name in imports(module):
        package = name.split(".")[0]
        if package in PACKAGES or package in sys.stdlib_module_names or package in OPTIONAL:
            continue
        if package in INTEGRATED and module == f"streaming.integrations.{package}":
            continue
        assert package in KNOWN_TO, f"{module} imports {name}: not a dependency that 0001 knows"
        assert is_under(module, KNOWN_TO[package]), f"{module} imports {name}: allowed in {KNOWN_TO[package]}"


def test_each_optional_dependency_is_known_to_one_adapter_module() -> None:
    """One per package: what `streaming` decodes, `shard_tools` encodes."""
    for package in OPTIONAL:
        users = [m for m in modules() if package in {name.split(".")[0] for name in imports(m)}]
        packages = [user.split(".")[0] for user in users]
        assert len(set(packages)) == len(packages), f"{package} is imported by {users}"
        for user in users:
            top = {a.name for n in tree(user).body if isinstance(n, ast.Import) for a in n.names}
            top |= {n.module or "" for n in tree(user).body if isinstance(n, ast.ImportFrom)}
            assert package not in {name.split(".")[0] for name in top}, f"{user} needs {package} just to be imported"


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=!~ ]", line)[0].lower() for line in project["dependencies"]}
    used = {name.split(".")[0] for module in modules() for name in imports(module)} & KNOWN_TO.keys()
    distributions = {"PIL": "pillow"}
    assert {distributions.get(name, name) for name in used} <= declared


@pytest.mark.parametrize("module", sorted(modules()))
def test_only_infra_reads_the_environment(module: str) -> None:
    for node in ast.walk(tree(module)):
        named = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb", "putenv"}
        imported = isinstance(node, ast.ImportFrom) and node.module == "os"
        imported = imported and bool({a.name for a in node.names} & {"environ", "getenv"})
        if named or imported:
            assert is_under(module, ENVIRONMENT_MAY), f"{module}:{node.lineno} reads the environment"


def pure_modules() -> list[str]:
    prefixes = next(prefixes for name, prefixes in LAYERS if name == "pure") + ALSO_PURE
    return [module for module in sorted(modules()) if is_under(module, prefixes)]


@pytest.mark.parametrize("module", pure_modules())
def test_the_pure_layer_does_no_io_and_reads_no_clock(module: str) -> None:
    clocks = {"time", "random", "secrets", "tempfile", "shutil"}
    banned = clocks | {"socket", "subprocess", "threading", "multiprocessing"}
    assert imports(module) & banned == set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", "") != "open", f"{module}:{node.lineno} opens a file"
        if isinstance(node, ast.Attribute) and node.attr == "random":
            raise AssertionError(f"{module}:{node.lineno}: numpy.random changes between releases, the order must not")


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_module_is_a_god(module: str) -> None:
    assert len(modules()[module].read_text().splitlines()) <= 500


def test_no_folder_is_a_corridor() -> None:
    """At most 12 modules lie in one folder, so that the room of a line is found by reading names."""
    rooms = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): count for folder, count in rooms.items() if count > 12} == {}


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_pickle_of_data_no_shell_no_eval(module: str) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            keywords = {k.arg: k.value for k in node.keywords}
            shell, allow = keywords.get("shell"), keywords.get("allow_pickle")
            assert not (isinstance(shell, ast.Constant) and shell.value), f"{module}:{node.lineno} starts a shell"
            assert not (isinstance(allow, ast.Constant) and allow.value), f"{module}:{node.lineno} allows pickle"
            assert getattr(node.func, "id", "") not in {"eval", "exec"}, f"{module}:{node.lineno} evaluates text"


PROBE = """
import logging, os, sys, threading, multiprocessing, warnings

import numpy
%(before)s
threads, handlers = set(threading.enumerate()), list(logging.getLogger().handlers)
ours = (%(root)r + "/streaming", %(root)r + "/shard_tools", %(root)r + "/infra")
reads = []

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

os.environ.__class__ = Watched
import %(module)s
os.environ.__class__ = os._Environ.__mro__[0]
assert set(threading.enumerate()) == threads, threading.enumerate()
assert logging.getLogger().handlers == handlers, "root logging handlers"
for name in list(logging.root.manager.loggerDict):
    if name.split(".")[0] in ("streaming", "shard_tools", "infra"):
        found = [h for h in logging.getLogger(name).handlers if not isinstance(h, logging.NullHandler)]
        assert not found and logging.getLogger(name).level == logging.NOTSET, (name, found)
assert multiprocessing.active_children() == []
assert reads == [], reads
"""


def third_party_of(package: str) -> str:
    """Imports of what ``package`` needs from others, so that their effects do not count as ours."""
    seen: set[str] = set()
    stack = [module for module in modules() if is_under(module, (package,))]
    while stack:
        module = stack.pop()
        if module not in seen:
            seen.add(module)
            stack.extend(ours(imports(module)))
    needed = {name for module in seen for name in imports(module) if name.split(".")[0] in KNOWN_TO}
    return "\n".join(f"import {name}" for name in sorted(needed))


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_side_effects(package: str) -> None:
    names = ", ".join(name for name in sorted(modules()) if is_under(name, (package,)) and "__main__" not in name)
    code = PROBE % {"before": third_party_of(package), "root": str(ROOT), "module": names}
    ran = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )
    assert ran.returncode == 0, ran.stderr


def test_no_code_at_the_top_but_definitions() -> None:
    """Statements that act (loops, bare calls) do not stand at the top of a module."""
    acting = (ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith, ast.Delete, ast.Raise)
    for module in modules():
        for node in tree(module).body:
            call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            acts = call or isinstance(node, acting)
            assert not acts, f"{module}:{node.lineno} acts when it is imported"


def test_importing_infra_and_the_command_line_does_not_import_torch() -> None:
    code = "import sys, infra, shard_tools.__main__; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100)


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, names in PUBLIC.items() for n in names])
def test_public_names_exist(package: str, name: str) -> None:
    module = importlib.import_module(package)
    assert getattr(module, name).__doc__
    assert name in module.__all__


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, names in COMING.items() for n in names])
def test_names_that_are_coming_are_not_half_there(package: str, name: str) -> None:
    assert not hasattr(importlib.import_module(package), name), f"{name} has arrived: move it to PUBLIC"


def test_documented_layers_are_the_tested_ones() -> None:
    page = (ROOT / "docs/design/0001-architecture.md").read_text()
    assert [name for name, _ in LAYERS if f"| {name} |" not in page] == []
