"""Compare what is in a wheel and in an sdist with what the repository holds."""

from __future__ import annotations

import email
import re
import tarfile
import zipfile
from pathlib import Path

PACKAGES = ("streaming", "shard_tools", "infra")
MOST_BYTES = 4 << 20
"""Of either file, packed: pictures, data of tests and figures of benchmarks are far larger."""


def tracked(root: Path, names: tuple[str, ...]) -> set[str]:
    """The files below ``names`` that belong to the repository."""
    found = {path for name in names for path in (root / name).rglob("*") if path.is_file()}
    return {str(path.relative_to(root)) for path in found if "__pycache__" not in path.parts}


def wheel_problems(wheel: Path, root: Path, version: str) -> list[str]:
    """What a wheel lacks, or holds beside the packages: templates, styles and scripts belong to them, tests do not."""
    info = f"shardstream-{version}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
    expected = tracked(root, PACKAGES)
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    problems = [f"missing: {name}" for name in sorted(expected - names)]
    problems += [f"not expected: {name}" for name in sorted(names - expected)]
    problems += [f"no marker of types in {name}" for name in PACKAGES if f"{name}/py.typed" not in names]
    if "shard_tools = shard_tools.__main__:main" not in scripts:
        problems.append("no script shard_tools")
    return problems + too_large(wheel) + description_problems(metadata, version)


def description_problems(metadata: str, version: str) -> list[str]:
    """What is wrong in the metadata, which PyPI shows: its links lead to addresses, or are none."""
    told = email.message_from_string(metadata)
    text = re.sub(r"^```.*?^```$", "", told.get_payload(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)", re.sub(r"`[^`\n]+`", "", text))
    problems = [f"a link of the description leads nowhere on PyPI: {one}" for one in targets if "://" not in one]
    for name, value in (("Version", version), ("Description-Content-Type", "text/markdown"), ("Name", "shardstream")):
        if told[name] != value:
            problems.append(f"{name}: expected {value}, got {told[name]}")
    if not text.lstrip().startswith("# shardstream"):
        problems.append("the description is not README.md")
    return problems


def sdist_problems(sdist: Path, root: Path, version: str) -> list[str]:
    """What an sdist lacks of what builds a wheel and tries it, or holds beside."""
    with tarfile.open(sdist) as archive:
        names = {member.name for member in archive.getmembers() if member.isfile()}
    base = f"shardstream-{version}/"
    alone = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md")
    expected = {base + name for name in tracked(root, (*PACKAGES, "tests/release"))}
    expected |= {base + name for name in (*alone, "PKG-INFO", ".gitignore")}
    problems = [f"missing: {name}" for name in sorted(expected - names)]
    return problems + [f"not expected: {name}" for name in sorted(names - expected)] + too_large(sdist)


def too_large(file: Path) -> list[str]:
    """The same, of a file that holds more than it should by its size."""
    size = file.stat().st_size
    return [f"{file.name}: {size:,} bytes, more than {MOST_BYTES:,}"] if size > MOST_BYTES else []
