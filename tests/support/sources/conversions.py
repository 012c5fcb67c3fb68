"""Sources of conversions, and what conversions wrote."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shard_tools.make.tokens import TokenizeOptions, TokenizeReport, tokenize


def members(target: Path) -> dict[str, bytes]:
    """All members of all shards of ``target``, by Python's own tar reader."""
    found: dict[str, bytes] = {}
    for shard in sorted(target.glob("*.tar")):
        with tarfile.open(shard) as archive:
            for member in archive:
                reader = archive.extractfile(member)
                assert reader is not None
                assert member.name not in found
                found[member.name] = reader.read()
    return found


def tree(target: Path) -> dict[str, bytes]:
    """Every visible file below ``target``."""
    return {
        str(path.relative_to(target)): path.read_bytes()
        for path in sorted(target.rglob("*"))
        if path.is_file() and not path.name.startswith(".~")
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for what its inputs were like on this machine."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "sources.parquet")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def parquet_source(folder: Path, num_rows: int = 900) -> str:
    for part in range(2):
        numbers = range(part * num_rows // 2, (part + 1) * num_rows // 2)
        columns = {
            "id": [f"row{number:04d}" for number in numbers],
            "text": ["x" * (number * 37 % 1500) for number in numbers],
            "tokens": list(numbers),
        }
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), folder / f"{part}.parquet", row_group_size=130)
    return str(folder)


TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "def function(argument):\n    return argument + 1\n",
    "Grüße aus Köln — naïve café, 東京 ☃",
    "a",
    "<|endoftext|> is no end in the middle of a text <eos>",
]


def jsonl(path: Path, rows: list[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(source: Path | str, target: Path, tokenizer: Path | str = "bytes", **options: Any) -> TokenizeReport:
    executor = options.pop("executor", None)
    return tokenize(
        str(source), str(target), options=TokenizeOptions(tokenizer=str(tokenizer), **options), executor=executor
    )
