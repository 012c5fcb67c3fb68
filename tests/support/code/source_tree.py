"""The packages as a graph: every module, its syntax tree, and what it imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.support.code.folders import ROOT

PACKAGES = ("streaming", "shard_tools", "infra")
# Each third-party package is known to these packages and modules only; what is not listed must not be imported.
KNOWN_TO: dict[str, tuple[str, ...]] = {
    "numpy": PACKAGES,
    "torch": (
        *("FACE", "INTEGRATIONS", "OTHERS", "RUN", "TESTING"),
        *("streaming.build.batches", "streaming.common.job", "streaming.watch.tracing"),
    ),
    "pyarrow": ("streaming.shards.index", "shard_tools"),
    "crc32c": ("streaming", "shard_tools"),
    "obstore": ("streaming.storage",),
    "fsspec": ("streaming.storage",),
    "braceexpand": ("streaming.shards.catalog", "shard_tools"),
    "PIL": ("streaming.build.decode", "shard_tools", "streaming.run.engine.workers.surroundings"),
    "simplejpeg": ("streaming.build.decode", "shard_tools"),
    "click": ("shard_tools",),
    "rich": ("shard_tools",),
    "cloudpickle": ("streaming.run.engine", "streaming.others.remote", "shard_tools.running.functions"),
    # Users of these import the module that needs them by name; nobody else does.
    "accelerate": ("streaming.integrations.accelerate",),
    "transformers": ("streaming.integrations.transformers", "streaming.integrations.trl"),
    "torchtitan": ("streaming.integrations.torchtitan",),
    "olmo_core": ("streaming.integrations.olmo_core",),
    "pytest": ("streaming.testing",),
}
NOT_DECLARED = ("accelerate", "transformers", "torchtitan", "olmo_core", "pytest")
NEVER_RUN = ("typing_extensions",)  # type checkers bring it
# Extras: one module of each of our packages knows one, and imports it when it is used.
OPTIONAL = ("cv2", "msgpack", "safetensors", "boto3", "botocore", "s3fs", "gcsfs", "adlfs")
OPTIONAL += ("webdataset", "datasets", "matplotlib", "ray", "tokenizers", "sentencepiece", "tiktoken")
OPTIONAL += ("jinja2", "nvidia", "starlette", "uvicorn", "prometheus_client", "opentelemetry")
OPTIONAL += ("soundfile", "soxr", "av")
IMPORT_HELPERS = {"import_module", "__import__", "require"}
# These import what has a name only at run time: lazy names, `require`, and what users name.
COMPUTED_IMPORT_MAY = (
    "streaming",
    "streaming.contracts",
    "streaming.testing",
    "streaming.run.engine.workers.fork_server",
    "streaming.run.engine.workers.surroundings",
    "streaming.build.decode.values",
    "streaming.build.decode.registry",
    "shard_tools",
    "shard_tools.running.functions",
    "streaming.sets.datasets.mixture_file",
    "streaming.common.platforms",
)


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
def nodes(module: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(module)))


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that ``module`` imports anywhere: at the top, in functions, under TYPE_CHECKING."""
    found: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*kept, *filter(None, [node.module])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            submodules = names & modules().keys()
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


def ours(module: str) -> frozenset[str]:
    return imports(module) & modules().keys()


def is_under(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def report(findings: list[str], cure: str) -> None:
    if findings:
        pytest.fail("\n  ".join([cure, *sorted(findings)]), pytrace=False)
