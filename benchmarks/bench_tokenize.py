"""Tokens per second: ``convert --tokenizer`` against the bare tokenizer, both on all processors, in turns.

The corpus is the source of Python's standard library as JSONL, up to ``--megabytes``; the tokenizer is a byte-level BPE
of 2,000 tokens that is trained on a part of it. The bare tokenizer is one ``encode_batch`` of the library
``tokenizers`` over all texts, on as many threads as it takes; what comes out is dropped. Ours is timed from the first
to the last document: reading, parsing, encoding, writing shards and their index to disk; the start of its processes
(about a second each, once) is left out, as the bare one's import is.

Run: ``python benchmarks/bench_tokenize.py [--megabytes 8] [--rounds 3]``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from shard_tools.tokens import TokenizeOptions, tokenize
from shard_tools.tokens.encode import open_processes
from streaming.platforms import num_cores


def corpus(num_bytes: float) -> list[str]:
    """The sources of the standard library, in order of their names, up to this size."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    texts = []
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        num_bytes -= len(text)
        if num_bytes < 0:
            break
        texts += [text] if text else []
    return texts


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


def bare(tokenizer: Path, texts: list[str]) -> float:
    library = Tokenizer.from_file(str(tokenizer))
    started = time.perf_counter()
    encoded = library.encode_batch(texts, add_special_tokens=False)
    seconds = time.perf_counter() - started
    return sum(len(one) for one in encoded) / seconds


def ours(tokenizer: Path, source: Path, target: Path) -> tuple[float, float]:
    """Tokens per second, and the share of this process's own processor time."""
    options = TokenizeOptions(tokenizer=str(tokenizer), eos="none", workers=num_cores())
    with open_processes(num_cores()) as pool:
        warm = [pool.submit(time.sleep, 0.5) for _ in range(num_cores())]
        for one in warm:
            one.result()
        began, started = time.process_time(), time.perf_counter()
        report = tokenize(str(source), str(target), options=options, executor=pool)
        seconds = time.perf_counter() - started
        own = time.process_time() - began
    return report.sets[0].num_tokens / seconds, own / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8, help="size of the corpus")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    texts = corpus(arguments.megabytes * 1e6)
    folder = Path(tempfile.mkdtemp(prefix="bench-tokenize-"))
    try:
        train(texts[::10], folder / "tokenizer.json")
        source = folder / "corpus.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        size = os.path.getsize(source)
        print(f"{len(texts):,} documents, {size / 1e6:.1f} MB of JSONL, {num_cores()} processors")
        rates = []
        for number in range(arguments.rounds):
            one = bare(folder / "tokenizer.json", texts)
            other, own = ours(folder / "tokenizer.json", source, folder / f"out{number}")
            rates.append(other / one)
            print(
                f"bare {one:,.0f} tokens/s   convert {other:,.0f} tokens/s   {other / one:.0%}   "
                f"(this process {own:.0%} of a processor)"
            )
        print(f"median {statistics.median(rates):.0%}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
