"""Use an installed shardstream as README shows it: write, train in worker processes, stop, go on with other ranks."""

import json
import sys
from pathlib import Path

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset

if __name__ == "__main__":
    base = Path(sys.argv[1]).resolve()
    with ShardWriter(f"{base}/train/{{:06d}}.tar", max_samples=50) as writer:
        for number in range(200):
            writer.write({"__key__": f"{number:03d}", "txt": "a", "cls": number % 10, "json": {"square": number**2}})
    dataset = StreamingDataset(f"{base}/train/", seed=1)
    seen = []
    with DataLoader(dataset, batch_size=16, num_workers=2, last_batch="partial") as loader:
        for step, batch in enumerate(loader):
            assert [one["square"] for one in batch["json"]] == [int(key) ** 2 for key in batch["__key__"]]
            seen += batch["__key__"]
            if step == 4:
                break
        state = json.dumps(loader.state_dict())
    for rank in range(2):
        mesh = DeviceMesh.from_sizes(dp_size=2, rank=rank)
        with DataLoader(dataset, batch_size=8, num_workers=0, last_batch="partial", device_mesh=mesh) as share:
            share.load_state_dict(json.loads(state))
            seen += [key for batch in share for key in batch["__key__"]]
    assert sorted(seen) == [f"{number:03d}" for number in range(200)]
    print(json.dumps({"batch": str(batch["cls"].dtype), "samples": len(seen)}))
