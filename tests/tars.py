"""Tars by the standard library, which knows nothing of ours."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path


def tar_bytes(
    files: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT, mtime: float = 0,
    links: Iterable[tuple[str, str]] = (), kind: bytes = tarfile.LNKTYPE,
) -> bytes:  # fmt: skip
    """An archive of these files, and of links (name, target) behind them, hard ones where nothing else is said."""
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
    """The same in a file, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(files, **options))  # type: ignore[arg-type]
    return path
