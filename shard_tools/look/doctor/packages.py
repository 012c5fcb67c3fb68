"""Report which packages are installed and which fail to import. Needs only Python: any other package may be broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec

from shard_tools.look.doctor.machine import without_home
from streaming.common.platforms import how_it_ended

NAME = "shardstream"
RIVAL = "mosaicml-streaming"
"""A package that installs its own files as the package ``streaming``."""
GIVES: Mapping[str, str] = {
    "images": "images are resized while they are decoded",
    "msgpack": "fields of MessagePack",
    "safetensors": "fields of safetensors",
    "aws": "named profiles and SSO for s3://, and clean on S3",
    "s3fs": "s3:// through fsspec",
    "gcsfs": "gs:// through fsspec",
    "azure": "az:// through fsspec",
    "webdataset": "its handlers as decoders",
    "ray": "readers on Ray, and --engine ray",
    "audio": "sounds as samples, and convert --from audio",
    "video": "videos as samples",
    "hf": "convert --from hf",
    "metrics": "Prometheus and OpenTelemetry",
    "plot": "plan --plot",
    "text": "convert --tokenizer",
    "show": "show, and stats --html",
}
"""Purpose of each extra."""
_FOR_DEVELOPERS = frozenset({"all", "dev", "docs"})
_MODULES = {
    "opencv-python-headless": "cv2",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "pillow": "PIL",
}
"""Modules whose names differ from those of their packages."""
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;.*?extra\s*==\s*['\"]([^'\"]+)['\"])?"
)
"""Name, version bounds, and the extra that requires it."""
_LEAST = re.compile(r">=\s*([0-9][0-9A-Za-z.]*)")
_TIMEOUT_S = 120.0
_IMPORTS = """
import importlib, json, os, sys
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for name in json.loads(sys.argv[1]):
    seen = {"module": name, "error": "", "says": {}}
    try:
        module = importlib.import_module(name)
        seen["version"] = str(getattr(module, "__version__", ""))
        if name == "torch":
            has_cuda = module.cuda.is_available()
            seen["says"] = {"cuda": module.version.cuda or "", "devices": module.cuda.device_count() if has_cuda else 0}
    except BaseException as error:
        seen["error"] = f"{type(error).__name__}: {error}"
    out.write(json.dumps(seen) + "\\n")
    out.flush()
os._exit(0)
"""
"""Import modules one by one and report each result immediately, since the next import may end the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageState:
    """One package that is required, directly or by an extra.

    Attributes:
        name: Name under which it is installed.
        extras: Extras that it belongs to; none: it is always required.
        version: Installed version; "": not installed.
        least: The lowest version that works; "": any.
        error: Why it fails to import; "": it imports, or that was not tried.
        says: What it reports about this machine.
    """

    name: str
    extras: tuple[str, ...]
    version: str
    least: str
    error: str = ""
    says: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_too_old(self) -> bool:
        """Whether the installed version is too old."""
        return bool(self.version and self.least) and _numbers(self.version) < _numbers(self.least)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON-able form."""
        return asdict(self)


def look_at_packages(*, imports: bool) -> tuple[PackageState, ...]:
    """Return all required packages and those of extras, with their versions and import errors.

    They are imported in a separate process, because some may end it.

    Args:
        imports: Import them; otherwise only report what is installed.
    """
    wanted = required()
    modules = {name: _MODULES.get(name, name.replace("-", "_")) for name in wanted}
    there = {name for name in wanted if _is_there(modules[name])}
    tried = try_imports([modules[name] for name in wanted if name in there]) if imports else {}
    found = []
    for name, (least, extras) in wanted.items():
        result = tried.get(modules[name], {})
        version = _version(name) or str(result.get("version") or ("unknown" if name in there else ""))
        error = without_home(str(result.get("error", "")))
        if version and name not in there:
            error = f"it is installed, but its module {modules[name]} is missing"
        says = result.get("says", {})
        found.append(
            PackageState(
                name=name, extras=extras, version=version, least=least, error=error,
                says=says if isinstance(says, dict) else {},
            )
        )  # fmt: skip
    return tuple(found)


def required(lines: Iterable[str] | None = None) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return, by package, the lowest version and the extras that require it; no extras: always required.

    Args:
        lines: Requirements as in a package's metadata; None: those of the installed shardstream, if any.
    """
    if lines is None:
        try:
            lines = metadata.requires(NAME) or ()
        except metadata.PackageNotFoundError:
            lines = ()
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is None or match[1].lower() == NAME or match[3] in _FOR_DEVELOPERS:
            continue
        name, bounds, extra = match[1].lower(), match[2], match[3]
        least = _LEAST.search(bounds)
        before = found.get(name, ("", ()))
        is_needed = extra is None or (name in found and not before[1])
        found[name] = (least[1] if least else before[0], () if is_needed else (*before[1], extra))
    return found


def try_imports(modules: Sequence[str], timeout_s: float = _TIMEOUT_S) -> dict[str, dict[str, object]]:
    """Import modules in another process; return the result of each."""
    results: dict[str, dict[str, object]] = {}
    left = list(modules)
    while left:
        command = [sys.executable, "-P", "-c", _IMPORTS, json.dumps(left)]
        try:
            ran = subprocess.run(  # noqa: S603  this interpreter, and names of our own
                command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                timeout=timeout_s,
            )  # fmt: skip
            said, why = ran.stdout, how_it_ended("the process that imports it", ran.returncode)
        except subprocess.TimeoutExpired as error:
            said, why = error.stdout or b"", f"its import takes longer than {timeout_s:.0f} s"
        except OSError as error:
            said, why = b"", f"no process could be started to import it: {error.strerror}"
        for line in said.splitlines():
            one = json.loads(line)
            results[one.pop("module")] = one
        left = [name for name in left if name not in results]
        if left:
            results[left.pop(0)] = {"error": why}
    return results


def troubles_of(packages: Sequence[PackageState]) -> list[tuple[str, str]]:
    """Return the problems of packages, each with its cure."""
    found = []
    for one in packages:
        whose = f" (extra {', '.join(one.extras)})" if one.extras else ""
        wanted = f"{one.name}>={one.least}" if one.least else one.name
        if one.error:
            cure = f"`pip install --force-reinstall '{wanted}'`"
            found.append((f"{one.name} {one.version}{whose} cannot be imported: {one.error}", cure))
        elif one.is_too_old:
            cure = f"`pip install -U '{wanted}'`"
            found.append((f"{one.name} {one.version}{whose} is older than {one.least}, which is needed", cure))
        elif not one.version and not one.extras:
            why = ": training needs it, the commands do not" if one.name == "torch" else ""
            found.append((f"{one.name} is not installed{why}", f"`pip install '{wanted}'`"))
    if _version(RIVAL):
        cure = f"`pip uninstall {RIVAL}`, then `pip install --force-reinstall {NAME}`; they need separate environments"
        found.append((f"{RIVAL} is also installed, and its files have the same names as ours", cure))
    return found


def why_not_started(error: BaseException) -> str:
    """Explain why the command line fails to import, if packages are to blame; "": they are not."""
    found = troubles_of(look_at_packages(imports=True))
    listed = "".join(f"\n- {what}; {cure}" for what, cure in found)
    return f"the commands cannot start: {type(error).__name__}: {error}{listed}" if found else ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package above is missing, or broken
        return False


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release without trailing zeros, such as (2, 4) for ``2.4.0rc1``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
