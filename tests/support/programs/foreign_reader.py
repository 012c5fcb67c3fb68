"""Read folders of shards by another library, and print what it finds: a line of keys and fields for each folder.

    python foreign_reader.py datasets|energon FOLDER...

It runs in the environment of that library, so it imports nothing of ours.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
from typing import Any

Found = list[tuple[str, Any]]


def by_datasets(folder: str) -> Found:
    """Return the key and the decoded ``json`` of each sample."""
    import datasets  # noqa: PLC0415

    datasets.disable_progress_bars()
    files = sorted(glob.glob(f"{folder}/*.tar"))
    cache = os.path.join(folder, "cache")
    rows = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True, cache_dir=cache)
    names = [name for name in ("__key__", "json") if name in (rows.column_names or ("__key__", "json"))]
    return [(row["__key__"], row.get("json")) for row in rows.select_columns(names)]


def by_energon(folder: str) -> Found:
    """Return the key and the bytes of ``json`` of each sample, decoded, after ``energon prepare``."""
    from megatron.energon import (  # type: ignore[import-not-found]  # noqa: PLC0415
        Cooker,
        DefaultTaskEncoder,
        WorkerConfig,
        get_loader,
        get_val_dataset,
        stateless,
    )

    program = shutil.which("energon", path=os.path.dirname(sys.executable))
    assert program is not None
    subprocess.run(
        [program, "prepare", "--non-interactive", "--split-ratio", "0,1,0", "--num-workers", "1",
         "--sample-type", "CrudeWebdataset", folder],
        check=True, stdout=sys.stderr,
    )  # fmt: skip

    @stateless
    def as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
        return dict(sample)

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = (Cooker(as_it_is),)

        @stateless
        def batch(self, samples: list[dict[str, Any]]) -> Any:
            return samples

    dataset = get_val_dataset(
        folder, split_part="val", worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=1,
        task_encoder=Encoder(),
    )  # fmt: skip
    return [(one["__key__"].partition("/")[2] or one["__key__"], json.loads(bytes(one["json"])))
            for batch in get_loader(dataset) for one in batch]  # fmt: skip


if __name__ == "__main__":
    read = {"datasets": by_datasets, "energon": by_energon}[sys.argv[1]]
    for place in sys.argv[2:]:
        print(json.dumps(read(place)))
