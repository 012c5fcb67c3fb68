"""Takes some steps of training on one version of a set, and goes on where the last call ended: `train.py SET v1`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from streaming import DataLoader, StreamingDataset

RUN = Path("run.json")  # a checkpoint: the loader's state, and here the keys that were trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("version")
    parser.add_argument("--steps", type=int, default=2)
    words = parser.parse_args()
    dataset = StreamingDataset(words.url, version=words.version, fields=("png", "cls"))
    run = json.loads(RUN.read_text()) if RUN.exists() else {"keys": []}
    with DataLoader(dataset, global_batch_size=8) as loader:
        if "loader" in run:
            loader.load_state_dict(run["loader"])
        for _, batch in zip(range(words.steps), loader, strict=False):
            run["keys"] += batch["__key__"]  # your step: batch["png"] is uint8 [8, 24, 24, 3], batch["cls"] int64 [8]
        run["loader"] = loader.state_dict()
    RUN.write_text(json.dumps(run))
    print(f"version {words.version}: {len(run['keys'])} of {len(dataset)} samples seen")


if __name__ == "__main__":
    main()
