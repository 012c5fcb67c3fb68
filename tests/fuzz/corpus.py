"""The files that fuzzing begins with, and those that once failed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"
REGRESSIONS = CORPUS.parent / "regressions"
_FOLDERS = {"headers": "tar", "scanner": "tar", "gzipped": "gzip"}


def files_of(target: str) -> list[Path]:
    """The corpus of a target."""
    return sorted((CORPUS / _FOLDERS.get(target, target)).iterdir())


@cache
def seeds_of(target: str) -> tuple[bytes, ...]:
    """The content of these files, and nothing at all."""
    return (*(path.read_bytes() for path in files_of(target)), b"")


def regressions_of(target: str) -> list[Path]:
    """Inputs that a target once failed on."""
    folder = REGRESSIONS / target
    return sorted(folder.iterdir()) if folder.is_dir() else []
