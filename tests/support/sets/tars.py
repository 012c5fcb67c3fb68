"""Tars made by the standard library, independently of our writer."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path


def tar_bytes(
    files: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT, mtime: float = 0,
    links: Iterable[tuple[str, str]] = (), kind: bytes = tarfile.LNKTYPE,
) -> bytes:  # fmt: skip
    """An archive of these files, followed by links (name, target), hard ones unless specified otherwise."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, encoding="utf-8") as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), mtime
            archive.addfile(member, io.BytesIO(data))
        for name, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    return out.getvalue()


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], **options: object) -> Path:
    """The same in a file, whose folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(files, **options))  # type: ignore[arg-type]
    return path
