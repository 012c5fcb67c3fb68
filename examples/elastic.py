"""Lose half of a job in the middle of an epoch: torchrun goes on with one process, and no sample is lost or doubled.

    python examples/elastic.py

Two "nodes" of this machine run torchrun, as two machines would: ``torchrun --nnodes 1:2 --nproc-per-node 1 …``.

1. Each process reads its half of every global batch, and writes down the keys of its samples before it takes the step.
2. SIGKILL to one node. torchrun on the other notices, and starts its process again, now alone.
3. That process loads the last checkpoint and reads whole global batches. The steps since then are taken again; what the
   model had learnt from them went with the processes, so they count once.
4. Count the keys of all steps that made the model: each sample of each epoch, once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset

EPOCHS, GLOBAL_BATCH, SAVE_EVERY = 4, 32, 20


def run_rank(folder: Path, lost_at: int) -> None:
    """Train as one process of however many there are, from the last checkpoint if there is one.

    The machine is lost at step ``lost_at``, counted from 1; 0: it is not.
    """
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = DeviceMesh.from_sizes()  # torchrun has told this process its rank, and how many there are
    # "pad" fills up the last batch of an epoch and marks what it added, so that no sample is left out.
    loader = DataLoader(
        StreamingDataset(folder / "train"), global_batch_size=GLOBAL_BATCH, device_mesh=mesh, last_batch="pad"
    )
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint, step = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    elif mesh.world_size == 1:
        signal.pause()  # the other node is late: torchrun starts both processes when it has come
    start = torch.tensor(time.time_ns())
    dist.broadcast(start, 0)  # a name for this team of processes, later ones come later
    with loader, (folder / f"seen-{start}-{mesh.rank}.jsonl").open("w") as log:
        for epoch in range(loader.epoch, EPOCHS):
            for batch in loader:
                step += 1
                real = batch["__valid__"]
                losses = cross_entropy(model(batch["npy"].flatten(1)), batch["cls"], reduction="none") * real
                keys = [key for key, one in zip(batch["__key__"], real.tolist(), strict=True) if one]
                seen = {"step": step, "epoch": epoch, "keys": keys, "loss": float(losses.detach().sum()) / len(keys)}
                print(json.dumps(seen), file=log, flush=True)
                if step == lost_at:
                    signal.pause()  # until SIGKILL
                optimizer.zero_grad()
                # DDP takes the mean over the processes: this makes it the sum over the global batch, by its size.
                (losses.sum() * mesh.world_size / GLOBAL_BATCH).backward()
                optimizer.step()
                if step % SAVE_EVERY == 0 and mesh.rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save({**state, "loader": loader.state_dict()}, f"{checkpoint}.part")
                    os.replace(f"{checkpoint}.part", checkpoint)
    dist.destroy_process_group()


def start_node(folder: Path, number: int, port: int, lost_at: int) -> subprocess.Popen[bytes]:
    """Start torchrun as on a machine of a cluster; the first keeps the list of who is there."""
    # By default it waits 30 s for more nodes, and gives up those that are silent for 15 s.
    hurry = f"is_host={number == 0},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=2"
    command = (
        f"-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d "
        f"--rdzv-endpoint 127.0.0.1:{port} --rdzv-id lesson --local-addr 127.0.0.1 --rdzv-conf {hurry}"
    )
    own = ["--log-dir", str(folder / "torchrun"), __file__, "--rank", "--out", str(folder), "--kill-at", str(lost_at)]
    torchrun = [sys.executable, *command.split(), *own]
    # Without the first, torch 2.13 has the process that is left wait for an address of those that are gone.
    environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / f"node-{number}.log").open("w") as log:
        return subprocess.Popen(torchrun, env=environ, stdout=log, stderr=log)


def kill(node: subprocess.Popen[bytes]) -> None:
    """SIGKILL to torchrun and to what it has started: the machine is gone."""
    if node.poll() is None:
        for process in [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]:
            process.kill()
        node.wait()


def teams(folder: Path) -> list[dict[int, list[dict[str, Any]]]]:
    """Read what was written down: of each team of processes, by step, a line of each rank."""
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        team = found.setdefault(path.name.split("-")[1], {})
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # not one that was being written when its process was killed
                team.setdefault(json.loads(line)["step"], []).append(json.loads(line))
    return list(found.values())


def count(folder: Path, num_samples: int) -> bool:
    """Tell who took which steps, and whether the model has seen each sample once in each epoch."""
    kept: dict[int, list[dict[str, Any]]] = {}
    for team in teams(folder):
        again = len(kept.keys() & team.keys())
        print(f"{len(team[min(team)])} process(es): steps {min(team)} to {max(team)}, {again} of them once more")
        kept |= team  # a step that was taken again counts as it was taken last
    axes = (figure := Figure(figsize=(7, 3.5), layout="constrained")).subplots()
    for num_ranks in (2, 1):
        steps = sorted(step for step, lines in kept.items() if len(lines) == num_ranks)
        losses = [sum(line["loss"] for line in kept[step]) / num_ranks for step in steps]
        axes.plot(steps, losses, ".", label=f"on {num_ranks} process(es)")
    axes.set(xlabel="step", ylabel="loss", title="one of two processes is killed, the other goes on")
    axes.legend()
    figure.savefig(folder / "elastic.png")
    print(f"picture: {folder / 'elastic.png'}")
    seen = Counter((line["epoch"], key) for lines in kept.values() for line in lines for key in line["keys"])
    wanted = {(epoch, f"{number:04d}") for epoch in range(EPOCHS) for number in range(num_samples)}
    print(f"missing: {len(wanted - seen.keys())}, doubled: {sum(times > 1 for times in seen.values())}")
    print(f"each of {num_samples:,} samples, in each of {EPOCHS} epochs: {seen == Counter(wanted)}")
    return seen == Counter(wanted)


def main(folder: Path, kill_at: int) -> None:
    """Write the set, start two nodes, kill one, and count."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in [*folder.glob("seen-*.jsonl"), *folder.glob("checkpoint.pt")]:
        old.unlink()
    digits = load_digits()
    with ShardWriter(str(folder / "train" / "{:04d}.tar"), max_samples=200, overwrite=True) as writer:
        for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            writer.write({"__key__": f"{number:04d}", "npy": (image / 16).astype("float32"), "cls": int(label)})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [start_node(folder, number, port, kill_at * number) for number in range(2)]
    try:
        while not any(len(team.get(kill_at, ())) == 2 for team in teams(folder)):
            if nodes[0].poll() is not None:
                raise SystemExit(f"the training ended before a node could be killed: see {folder}/node-0.log")
            time.sleep(0.05)
        kill(nodes[1])
        print(f"killed one of two nodes after step {kill_at}; torchrun on the other goes on", flush=True)
        if nodes[0].wait() != 0:
            raise SystemExit(f"the other node failed: see {folder}/node-0.log")
    finally:
        for node in nodes:
            kill(node)
    if not count(folder, len(digits.target)):
        raise SystemExit("samples were lost or doubled")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/elastic"), help="folder to work in")
    parser.add_argument("--kill-at", type=int, default=97, help="step; an epoch has 57")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(given.out, given.kill_at)
    else:
        main(given.out, given.kill_at)
