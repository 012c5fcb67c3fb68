"""Pre-train a tiny GPT on text found on this machine, crash halfway, and resume on fewer ranks.

1. Write three corpora as JSONL: modules of Python's standard library, its package asyncio, and some of its reference.
2. Train a byte-level BPE on some of it, then convert each corpus to token ids, as does
   ``shard_tools convert FILE SETS/NAME --tokenizer tokenizer.json``.
3. Pack each corpus into rows of 128 tokens and mix them by tokens: half asyncio, a quarter each of the others.
4. Train on one rank to the end, without interruption, and record the losses.
5. Train the same on two ranks, kill both (SIGKILL) halfway, and resume on ONE rank from the last checkpoint.
6. Compare: the losses are the same. Packs, their order and the mixture depend neither on ranks nor on the crash.

Run: ``python examples/pretrain_gpt.py``. It takes about twenty seconds of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

from shard_tools.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, Mixture, Packed, StreamingDataset

LENGTH, BATCH, STEPS, SAVE_EVERY, KILL_AT = 128, 8, 24, 4, 10
VOCAB_SIZE = 512
WEIGHTS = {"modules": 0.25, "asyncio": 0.5, "reference": 0.25}


# --- data


def corpora() -> dict[str, list[str]]:
    """Give some texts of each kind; the same on every machine with this release of Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = [path.read_text(encoding="utf-8") for path in sorted(root.glob("*.py"))[:6]]
    package = [path.read_text(encoding="utf-8") for path in sorted(root.glob("asyncio/*.py"))[:12]]
    return {"modules": modules, "asyncio": package, "reference": list(pydoc_data.topics.topics.values())[:25]}


def write_sets(folder: Path) -> None:
    """Write the corpora as token ids, each into a set of shards of its own."""
    texts = corpora()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((some[0] for some in texts.values()), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    options = TokenizeOptions(tokenizer=str(folder / "tokenizer.json"))
    for name, some in texts.items():
        source = folder / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        (one,) = tokenize(str(source), str(folder / "sets" / name), options=options).sets
        print(f"{name}: {one.num_documents:,} documents, {one.num_tokens:,} tokens")


def open_loader(folder: Path) -> DataLoader:
    """Open packs of the three sets, mixed by tokens: ``BATCH`` packs for all ranks together."""
    packs = {
        name: Packed(StreamingDataset(folder / "sets" / name), length=LENGTH, shift_labels=True) for name in WEIGHTS
    }
    mixture = Mixture(packs, weights=WEIGHTS, unit="tokens", ends=None)
    return DataLoader(mixture, global_batch_size=BATCH, epoch_size=BATCH * STEPS)


# --- model


class Block(nn.Module):
    """Attention and a feed-forward net, each after a norm and around a residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [B, T, width] to the same shape; ``mask`` is bool [B, 1, T, T]."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """A decoder of two blocks. Double precision: sums in another order give the same digits."""

    def __init__(self, vocab_size: int, length: int = LENGTH, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 2), Block(width, 2)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size))
        self.double()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch of packs, summed over its labels: a token sees its own document alone."""
        ids, documents = batch["input_ids"], batch["document_ids"]
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & causal
        x = self.tokens(ids) + self.places(batch["position_ids"])
        for block in self.blocks:
            x = block(x, mask[:, None])
        logits = self.head(x).flatten(0, 1)
        return functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def train_step(model: GPT, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """Take a step by the mean over all labels of all ranks, whatever number of them each rank has; that loss."""
    total = torch.tensor([0.0, float((batch["labels"] != -100).sum())], dtype=torch.float64)
    loss = model(batch)
    total[0] = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(total)
    optimizer.zero_grad()
    (loss / total[1]).backward()
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return float(total[0] / total[1])


# --- one rank


def train(folder: Path, checkpoint: Path) -> Iterator[tuple[int, float]]:
    """Train from the checkpoint on, if there is one; yield number and loss of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(VOCAB_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    with open_loader(folder) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            loader.load_state_dict(saved["loader"])
            step = saved["step"]
        for batch in loader:
            yield step, train_step(model, optimizer, batch)
            step += 1
            if step % SAVE_EVERY == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**state, "loader": loader.state_dict()}, f"{checkpoint}.part")
                os.replace(f"{checkpoint}.part", checkpoint)


def shares_read(folder: Path, checkpoint: Path) -> str:
    """Describe the share of each corpus in the tokens up to a checkpoint."""
    with open_loader(folder) as loader:
        loader.load_state_dict(torch.load(checkpoint)["loader"])
        tokens = {name: found["tokens"] for name, found in loader.seen().items()}
    return ", ".join(f"{name} {count / sum(tokens.values()):.1%}" for name, count in tokens.items())


def run_rank(folder: Path, checkpoint: Path) -> None:
    """Train as one of the ranks that ``start_ranks`` started; rank 0 tells the losses."""
    dist.init_process_group("gloo")
    for step, loss in train(folder, checkpoint):
        if dist.get_rank() == 0:
            print(json.dumps([step, loss]), flush=True)
    dist.destroy_process_group()


# --- all of it


def start_ranks(folder: Path, num_ranks: int) -> list[subprocess.Popen[str]]:
    """Start ranks as torchrun does: each is told by its environment who it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, __file__, "--rank-of", str(folder)]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def losses_until(ranks: list[subprocess.Popen[str]], kill_at: int) -> dict[int, float]:
    """Read the losses that rank 0 tells; at step ``kill_at`` all ranks are killed."""
    losses: dict[int, float] = {}
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            step, loss = json.loads(line)
            losses[step] = loss
            if step == kill_at:  # what was told meanwhile is read, too: a checkpoint may be behind it
                for rank in ranks:
                    rank.send_signal(signal.SIGKILL)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    return losses


def main(folder: Path) -> None:
    """Show that a crash and another number of ranks change no loss."""
    write_sets(folder)
    calm = dict(train(folder, folder / "calm.pt"))
    print(f"one rank, undisturbed: loss {calm[0]:.3f} to {calm[STEPS - 1]:.3f} in {STEPS} steps")
    print(f"shares of the tokens: {shares_read(folder, folder / 'calm.pt')}")
    crashed = losses_until(start_ranks(folder, 2), KILL_AT)
    if KILL_AT not in crashed:
        raise SystemExit("the ranks failed before they could be killed")
    print(f"two ranks: killed at step {max(crashed)}")
    resumed = dict(train(folder, folder / "crashed.pt"))
    print(f"one rank: went on at step {min(resumed)} to {max(resumed)}")
    apart = max(abs(calm[step] - loss) for some in (crashed, resumed) for step, loss in some.items())
    print(f"largest difference of a loss: {apart:.1e}")
    if apart > 1e-9 or {*crashed, *resumed} != {*calm} or calm[STEPS - 1] > calm[0] - 0.5:
        raise SystemExit("the losses are not the same, or the model did not learn")
    print("the same loss curve")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        run_rank(given.rank_of, given.rank_of / "crashed.pt")
    else:
        with tempfile.TemporaryDirectory(prefix="pretrain-gpt-") as made:
            main(Path(made))
