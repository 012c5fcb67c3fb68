"""Find interpreters, make clean environments of them, and run programs there; also of other systems, in their roots."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("3.11", "3.12", "3.13", "3.14", "3.14t", "3.15")
_PROBE = """
import ensurepip, json, platform, sys, sysconfig, venv
free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
try:
    import torch
    there = torch.__version__
except ImportError:
    there = ""
print(json.dumps({"version": platform.python_version(), "is_free_threaded": free, "torch": there}))
"""
_TIME_OUT_S = 1800


class FailedError(Exception):
    """A step that failed, with the end of what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python of this machine, or of another system in a folder of it.

    Attributes:
        command: What starts it.
        version: As ``3.14.0``.
        is_free_threaded: It is built without the lock.
        torch: Version of the torch that its system brings; "": none.
        root: The folder that is its system's root; None: this machine's.
    """

    command: tuple[str, ...]
    version: str
    is_free_threaded: bool
    torch: str
    root: Path | None

    @property
    def name(self) -> str:
        """As ``3.14t``."""
        return ".".join(self.version.split(".")[:2]) + "t" * self.is_free_threaded

    @property
    def shown(self) -> str:
        """As ``3.14.0t of debian``."""
        system = "" if self.root is None else f" of {self.root.name}"
        return self.version + "t" * self.is_free_threaded + system


def probed(command: tuple[str, ...], root: Path | None = None) -> Interpreter | None:
    """Return the interpreter that ``command`` starts; None if it is none, or cannot make environments."""
    try:
        ran = subprocess.run([*command, "-c", _PROBE], check=True, capture_output=True, text=True, timeout=120)
        told = json.loads(ran.stdout.splitlines()[-1])  # libraries print before it
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Interpreter(command=command, root=root, **told)


def interpreters(named: Sequence[str], roots: Sequence[Path]) -> list[Interpreter]:
    """Return the interpreters in these places and on this machine, the first of each kind, oldest first.

    Raises:
        SystemExit: A place that was named has none.
    """
    commands: list[tuple[tuple[str, ...], Path | None]] = [((path,), None) for path in named]
    for root in roots:
        every_file = [*root.glob("usr/bin/python3*"), *root.glob("usr/local/bin/python3*")]
        found = sorted(path for path in every_file if re.fullmatch(r"python3\.\d+(t|-nogil)?", path.name))
        commands += [(("chroot", str(root), f"/{path.relative_to(root)}"), root) for path in found]
    commands += [((path,), None) for name in NAMES if (path := shutil.which(f"python{name}"))]
    kept = Path.home() / ".pyenv" / "versions"
    commands += [((str(path),), None) for path in sorted(kept.glob("3.*/bin/python3"))]
    every: dict[str, Interpreter] = {}
    useful: set[str | Path | None] = set()
    for command, root in commands:
        if (one := probed(command, root)) and tuple(map(int, one.version.split(".")[:2])) >= (3, 11):
            every.setdefault(one.name, one)
            useful |= {command[0], root}
    for place in (*named, *roots):
        if place not in useful:
            raise SystemExit(f"no Python of 3.11 or newer with venv and ensurepip: {place}")
    return sorted(every.values(), key=lambda one: (len(one.name), one.name))


class Environment:
    """A clean environment of an interpreter, in a folder that is made anew."""

    def __init__(self, interpreter: Interpreter, folder: Path) -> None:
        self.interpreter, self.folder = interpreter, folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options = ["--system-site-packages"] if interpreter.torch else []
        self._started([*interpreter.command, "-m", "venv", *options, self.inside(folder / "venv")])

    @property
    def python(self) -> Path:
        """Its interpreter, as this machine sees it."""
        return self.folder / "venv" / "bin" / "python"

    def inside(self, path: Path) -> str:
        """Return the path as programs of its system see it."""
        root = self.interpreter.root
        return str(path) if root is None else f"/{path.relative_to(root)}"

    def taken(self, file: Path) -> str:
        """Copy a file to where its programs find it, and return its path there."""
        return self.inside(Path(shutil.copy(file, self.folder)))

    def pip(self, *arguments: str) -> str:
        """Run its pip."""
        quiet = ("--disable-pip-version-check", "--no-input")
        quiet += ("--quiet", "--no-compile") if arguments[0] == "install" else ()  # of a list it would leave nothing
        return self.run("-m", "pip", arguments[0], *quiet, *arguments[1:])

    def run(self, *arguments: str, script: str = "python") -> str:
        """Run one of its programs, by default Python, in a folder that holds nothing, and return what it printed.

        Raises:
            FailedError: It failed.
        """
        root = self.interpreter.root
        before = [] if root is None else ["chroot", str(root)]
        program = self.inside(self.folder / "venv" / "bin" / script)
        return self._started([*before, program, *arguments])

    def versions(self) -> dict[str, str]:
        """Return the version of each installed distribution, by its name in lower case."""
        listed: list[dict[str, Any]] = json.loads(self.pip("list", "--format", "json"))
        return {one["name"].lower(): one["version"] for one in listed}

    def _started(self, command: list[str]) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        (self.folder / "empty").mkdir(exist_ok=True)
        try:
            ran = subprocess.run(
                command, check=False, capture_output=True, text=True, env=kept, cwd=self.folder / "empty",
                timeout=_TIME_OUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise FailedError(f"{' '.join(command[:6])} …: not done after {_TIME_OUT_S} s") from None
        if ran.returncode:
            told = "\n".join((ran.stderr.strip() or ran.stdout.strip()).splitlines()[-12:])
            raise FailedError(f"{' '.join(command[:6])} …: exit {ran.returncode}: {told}")
        return ran.stdout
