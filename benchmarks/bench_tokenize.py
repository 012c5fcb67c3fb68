"""Tokens per second: ``convert --tokenizer`` against the bare tokenizer, both on all processors, in turns.

The corpus is the source of Python's standard library as JSONL, up to ``--megabytes``, in documents of at most
``--characters``; the tokenizer is a byte-level BPE of 2,000 tokens that is trained on a part of it. The bare tokenizer
is one ``encode_batch_fast`` of the library ``tokenizers`` over all texts, on as many threads as it takes; what comes
out is dropped. Ours is timed from the first to the last document: reading, parsing, encoding, writing shards and their
index to disk; the start of its processes (about a second each, once) and what is imported late are left out.

Two ratios: by the clock, and by processor time of all processes together, which is what the clock would say on a
machine that does nothing else.

Run: ``python benchmarks/bench_tokenize.py [--megabytes 8] [--characters 2000] [--rounds 3]``. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import common
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shard_tools.make.tokens import TokenizeOptions, tokenize
from shard_tools.running.processes import ProcessExecutor
from streaming.common.platforms import num_cores

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers"))
from processes import cpu_s


@dataclass(slots=True)
class Took:
    """What a turn took."""

    seconds: float = 0.0
    cpu_s: float = 0.0


def corpus(num_bytes: float, characters: int) -> list[str]:
    """The sources of the standard library, in order of their names, up to this size."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    texts: list[str] = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        num_bytes -= len(text)
        if num_bytes < 0:
            break
        texts += [text[start : start + characters] for start in range(0, len(text), characters)]
    return texts


@contextmanager
def timed() -> Iterator[Took]:
    """Time the block, by the clock and by the processors' time of this process and all below it."""
    took = Took()
    cpu_before_s, started_s = cpu_s(os.getpid()), time.perf_counter()
    yield took
    took.seconds, took.cpu_s = time.perf_counter() - started_s, cpu_s(os.getpid()) - cpu_before_s


def train(texts: list[str], path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def bare(tokenizer: Path, texts: list[str]) -> tuple[int, Took]:
    library = Tokenizer.from_file(str(tokenizer))
    with timed() as took:
        encoded = library.encode_batch_fast(texts, add_special_tokens=False)
    return sum(len(one) for one in encoded), took


def options_for(tokenizer: Path) -> TokenizeOptions:
    return TokenizeOptions(tokenizer=str(tokenizer), eos="none", workers=num_cores())


def ours(tokenizer: Path, source: Path, target: Path) -> tuple[int, Took, float]:
    """Tokens, what they took, and the part of that which this process did, in seconds of a processor."""
    options = options_for(tokenizer)
    with ProcessExecutor(num_cores()) as pool:
        warm = [pool.submit(time.sleep, 0.5) for _ in range(num_cores())]
        for one in warm:
            one.result()
        with timed() as took:
            began_s = time.process_time()
            report = tokenize(str(source), str(target), options=options, executor=pool)
            own_s = time.process_time() - began_s
    return report.sets[0].num_tokens, took, own_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8, help="size of the corpus")
    parser.add_argument("--characters", type=int, default=2000, help="of the longest document")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    texts = corpus(arguments.megabytes * 1e6, arguments.characters)
    folder = Path(tempfile.mkdtemp(prefix="bench-tokenize-"))
    try:
        train(texts[::10], folder / "tokenizer.json")
        source = folder / "corpus.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        size = os.path.getsize(source)
        print(f"{common.machine()}\n{len(texts):,} documents, {size / 1e6:.1f} MB of JSONL, {num_cores()} processors")
        few = folder / "few.jsonl"  # what is imported and opened once is left out
        few.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:20]))
        tokenize(str(few), str(folder / "few"), options=options_for(folder / "tokenizer.json"))
        ratios: dict[str, list[float]] = {"by the clock": [], "by processor time": []}
        for number in range(arguments.rounds):
            tokens, alone = bare(folder / "tokenizer.json", texts)
            same, whole, own_s = ours(folder / "tokenizer.json", source, folder / f"out{number}")
            if same != tokens:
                raise ValueError(f"convert made {same} tokens, the tokenizer {tokens}")
            ratios["by the clock"].append(alone.seconds / whole.seconds)
            ratios["by processor time"].append(alone.cpu_s / whole.cpu_s)
            print(
                f"bare {tokens / alone.seconds:,.0f} tokens/s, {tokens / alone.cpu_s:,.0f} a CPU second   "
                f"convert {tokens / whole.seconds:,.0f}, {tokens / whole.cpu_s:,.0f} ({own_s / whole.cpu_s:.0%} of it "
                f"in the process that reads and writes: {size / own_s / 1e6:.0f} MB of text a CPU second)"
            )
        for name, found in ratios.items():
            print(f"{name}: convert / bare {statistics.median(found):.0%} ({min(found):.0%} to {max(found):.0%})")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
