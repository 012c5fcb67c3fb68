"""Pre-train a tiny GPT on a mixture of three corpora, whose shares change during the run.

    python examples/pretrain_gpt.py                            # Ctrl-C at any step, and run it again: it goes on
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py       # the same losses, also from that checkpoint

1. Tokenize each corpus into a set of its own, so that their shares can change later.
2. Pack each into rows of 128 tokens, and mix the packs by tokens: begin with code, end with prose (a schedule).
3. Train, and record the loss on each corpus. Packs, their order and the mixture depend neither on the number of ranks
   nor on crashes, so neither do the losses: the tests kill two ranks, go on on one, and compare.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from tiny_gpt import GPT, train_step
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from infra import DeviceMesh
from shard_tools.make.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, Mixture, Packed, Schedule, StreamingDataset

LENGTH, BATCH, VOCAB_SIZE, SAVE_EVERY = 128, 8, 512, 8
CODE_FIRST = {"asyncio": 0.4, "modules": 0.5, "reference": 0.1}
PROSE_LAST = {"asyncio": 0.2, "modules": 0.2, "reference": 0.6}
NAMES = sorted(CODE_FIRST)  # as ``source_ids`` of a batch count them


def corpora() -> dict[str, list[str]]:
    """Give texts of three kinds from Python itself: modules, a package, and the reference."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = [path.read_text(encoding="utf-8") for path in sorted(root.glob("*.py"))[:6]]
    package = [path.read_text(encoding="utf-8") for path in sorted(root.glob("asyncio/*.py"))[:12]]
    return {"modules": modules, "asyncio": package, "reference": list(pydoc_data.topics.topics.values())[:25]}


def write_sets(folder: Path) -> None:
    """Write token ids, as does ``shard_tools convert modules.jsonl sets/modules --tokenizer tokenizer.json``."""
    texts = corpora()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator((some[0] for some in texts.values()), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, some in texts.items():
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        options = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"))
        (one,) = tokenize(str(source), str(folder / "sets.part" / name), options=options).sets
        print(f"{name}: {one.num_documents:,} documents, {one.num_tokens:,} tokens")
    os.replace(folder / "sets.part", folder / "sets")  # complete


def train(folder: Path, mesh: DeviceMesh, schedule: Schedule, steps: int) -> torch.Tensor:
    """Train up to this step, from the checkpoint if there is one; return for each step what `train_step` returned."""
    torch.manual_seed(0)
    model = GPT(VOCAB_SIZE, LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    packs = {name: Packed(StreamingDataset(folder / "sets" / name), length=LENGTH, shift_labels=True) for name in NAMES}
    mixture = Mixture(packs, weights=schedule, unit="tokens", quotas="exact")  # exact: the corpora are small
    history: list[torch.Tensor] = []
    checkpoint = folder / "checkpoint.pt"
    with DataLoader(mixture, global_batch_size=BATCH, epoch_size=BATCH * steps, device_mesh=mesh) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            history = saved["history"]
            print(f"goes on at step {len(history)} on {mesh.world_size} rank(s)", flush=True)
        for batch in loader if len(history) < steps else ():
            history.append(train_step(model, optimizer, batch, len(NAMES)))
            step = len(history)
            if step % SAVE_EVERY == 0 and mesh.rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
                torch.save({**state, "loader": loader.state_dict()}, f"{checkpoint}.part")
                os.replace(f"{checkpoint}.part", checkpoint)
                print(f"step {step}: loss {float(history[-1][0].sum()):.3f}", flush=True)
    return torch.stack(history)  # [steps, 2, corpora]


def show(history: torch.Tensor, schedule: Schedule, path: Path) -> None:
    """Tell and draw the loss on each corpus and its share, in means over eight steps."""
    parts, shares = history.unflatten(0, (-1, 8)).mean(dim=1).unbind(1)
    losses, steps = parts / shares, range(4, len(history), 8)
    figure = Figure(figsize=(7, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for number, name in enumerate(NAMES):
        print(f"loss on {name}: {losses[0, number]:.3f} to {losses[-1, number]:.3f}")
        above.plot(steps, losses[:, number], label=name)
        below.plot(steps, shares[:, number], "o", color=f"C{number}")
        below.plot([schedule.at(BATCH * step)[name] for step in range(len(history))], ":", color=f"C{number}")
    above.set(ylabel="loss")
    above.legend()
    below.set(xlabel="step", ylabel="share of tokens", ylim=(0, 0.8))
    figure.savefig(path)
    print(f"picture: {path}")


def main(folder: Path, steps: int) -> None:
    """Write the sets once, train, and show."""
    mesh = DeviceMesh.from_sizes()  # which rank of how many this process is: the launcher has said so
    torch.set_num_threads(1)
    if mesh.world_size > 1:
        dist.init_process_group("gloo")
    if mesh.rank == 0 and not (folder / "sets").exists():
        write_sets(folder)
    if mesh.world_size > 1:
        dist.barrier()
    schedule = Schedule.linear(CODE_FIRST, PROSE_LAST, over=BATCH * steps)  # rows are packs, over all ranks
    history = train(folder, mesh, schedule, steps)
    if mesh.rank == 0:
        show(history, schedule, folder / "losses.png")
    if mesh.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/examples/pretrain_gpt"), help="folder to work in")
    parser.add_argument("--steps", type=int, default=96, help="a multiple of 8")
    given = parser.parse_args()
    main(given.out, given.steps)
