"""Go from raw data to training from a bucket, with a crash mid-epoch: ``make demo``.

1. Start an S3 server on loopback (or use the bucket in ``DEMO_URL=s3://…`` with the usual credentials).
2. Pack 1,797 handwritten digits as PNG, label and JSON into tar shards in the bucket.
3. Index and verify them with ``shard_tools``.
4. Train from ``s3://`` under ``torchrun --nproc-per-node 2``, and kill the job mid-epoch.
5. Resume from the last checkpoint in ONE process, and train to the end.
6. Count the keys that the training received: every sample of every epoch exactly once.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_digits

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming.errors import ShardstreamError

EXAMPLES = Path(__file__).resolve().parent
OUT = Path(os.environ.get("DEMO_OUT", EXAMPLES.parent / ".demo"))
EPOCHS = 20
KILL_IN_EPOCH = 8
TEST_SHARE = 5  # every fifth digit is held out for the test
_PROGRESS = re.compile(r"epoch (\d+) step (\d+)/(\d+) loss (\S+) (\d+) samples/s")
_ACCURACY = re.compile(r"test accuracy (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One progress line of the training."""

    epoch: int
    step: int
    num_steps: int
    samples_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one run of the training ended."""

    killed_at: Progress | None
    accuracy: float | None
    samples_per_s: int


def main() -> int:
    """Runs the demo; returns the exit code."""
    started = time.perf_counter()
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(OUT / "keys", ignore_errors=True)  # what an earlier demo left, and nothing else
    (OUT / "checkpoint.pt").unlink(missing_ok=True)
    url = os.environ.get("DEMO_URL", "")
    try:
        if url:
            passed = run_on(url.rstrip("/"), dict(os.environ))
        else:
            with local_s3() as (url, environ):
                os.environ.update(environ)  # for ShardWriter and shard_tools, in this process
                passed = run_on(url, os.environ | environ)
    except ShardstreamError as error:
        raise SystemExit(f"Error: {error}") from None
    say(f"\n{'done' if passed else 'FAILED'} in {time.perf_counter() - started:.0f} s")
    return 0 if passed else 1


def run_on(url: str, environ: Mapping[str, str]) -> bool:
    """Steps 2 to 6, on a bucket that is there."""
    train, test = f"{url}/train/", f"{url}/test/"
    keys = pack(train, test)
    headline("index and verify")
    for target in (train, test):
        run_tool(["index", target, "--force"])
        run_tool(["verify", target])
    run_tool(["info", train])

    script = [str(EXAMPLES / "train_digits.py"), "--train", train, "--test", test]
    script += ["--out", str(OUT), "--epochs", str(EPOCHS)]
    headline("train in two processes, and kill them in the middle of an epoch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    first = follow([*torchrun, *script], environ, kill_in_epoch=KILL_IN_EPOCH)
    if first.killed_at is None:
        say("the training ended before it could be killed")
        return False
    at = first.killed_at
    say(f"\nSIGKILL to every process, in epoch {at.epoch} after step {at.step} of {at.num_steps}")

    headline("go on from the last checkpoint, in one process")
    second = follow([sys.executable, *script], environ)
    headline("what was shown")
    counted = count_keys(keys)
    say(f"throughput: {first.samples_per_s:,} samples/s on 2 processes, {second.samples_per_s:,} on 1")
    say(f"test accuracy: {second.accuracy:.2%}" if second.accuracy is not None else "no test accuracy")
    return counted and second.accuracy is not None and second.accuracy >= 0.97


def pack(train_url: str, test_url: str) -> list[str]:
    """Packs the digits into shards of 100 samples; returns the keys of the training set."""
    headline("pack 1,797 digits into tar shards")
    digits = load_digits()
    keys: list[str] = []
    # index=False: these shards come without an index, as somebody else's would; the next step makes it.
    with (
        ShardWriter(train_url + "digits-{:04d}.tar", max_samples=100, index=False, overwrite=True) as train,
        ShardWriter(test_url + "digits-{:04d}.tar", max_samples=100, index=False, overwrite=True) as test,
    ):
        for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            held_out = number % TEST_SHARE == 0
            meta = {"source": "scikit-learn digits", "number": number, "split": "test" if held_out else "train"}
            sample = {"__key__": f"digit-{number:04d}", "png": as_png(image), "cls": int(label), "json": meta}
            (test if held_out else train).write(sample)
            if not held_out:
                keys.append(f"digit-{number:04d}")
    say(f"{len(keys):,} to {train_url} ({len(train.shards)} shards)")
    say(f"{len(digits.images) - len(keys):,} to {test_url} ({len(test.shards)} shards)")
    return keys


def as_png(image: np.ndarray) -> bytes:
    """A digit of 8 x 8 numbers in 0..16 as a gray PNG."""
    buffer = io.BytesIO()
    Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def run_tool(arguments: list[str]) -> None:
    """Runs a verb of shard_tools, as typed in a shell, but in this process, which has imported it."""
    say(f"\n$ shard_tools {shlex.join(arguments)}")
    try:
        cli(arguments, prog_name="shard_tools")
    except SystemExit as end:
        if end.code:
            raise SystemExit(f"shard_tools {arguments[0]} ended with exit code {end.code}") from None


def follow(command: list[str], environ: Mapping[str, str], *, kill_in_epoch: int | None = None) -> Outcome:
    """Runs a training and shows its progress; kills it once it is 40 % into ``kill_in_epoch``."""
    say("$ " + shlex.join(["torchrun" if "torch.distributed.run" in command else "python", *shown(command)]) + "\n")
    killed_at: Progress | None = None
    accuracy: float | None = None
    rates: list[int] = []
    environ = {"OMP_NUM_THREADS": "1", **environ}
    # A small pipe, which keeps the training from running far ahead of what is read here.
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, pipesize=4096, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                progress = show_line(line)
                if found := _ACCURACY.search(line):
                    accuracy = float(found[1])
                if progress is None:
                    continue
                if progress.step == progress.num_steps:
                    rates.append(progress.samples_per_s)
                due = progress.epoch == kill_in_epoch and progress.step >= 0.4 * progress.num_steps
                if due and killed_at is None:
                    kill_all(process.pid)
                if due or killed_at is not None:  # what was said before the kill is read after it
                    killed_at = progress
        finally:
            kill_all(process.pid)
    if process.returncode != 0 and killed_at is None:
        raise SystemExit(f"the training failed with exit code {process.returncode}")
    return Outcome(killed_at=killed_at, accuracy=accuracy, samples_per_s=int(np.median(rates)) if rates else 0)


def shown(command: list[str]) -> list[str]:
    """What a person would type."""
    skip = {sys.executable, "-m", "torch.distributed.run"}
    return [os.path.relpath(word) if word.startswith("/") else word for word in command if word not in skip]


def show_line(line: str) -> Progress | None:
    """Prints a line of the training; progress is drawn over itself on a terminal, else once an epoch."""
    found = _PROGRESS.search(line)
    if found is None:
        say(line.rstrip())
        return None
    progress = Progress(epoch=int(found[1]), step=int(found[2]), num_steps=int(found[3]), samples_per_s=int(found[5]))
    ended = progress.step == progress.num_steps
    if sys.stdout.isatty():
        print(f"\r{line.rstrip():<70}", end="\n" if ended else "", flush=True)
    elif ended:
        say(line.rstrip())
    return progress


def kill_all(pid: int) -> None:
    """SIGKILL to a process and all below it: torchrun gives each of its workers a session of its own."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def count_keys(keys: list[str]) -> bool:
    """Whether the logs hold every key once for each epoch; says what they hold."""
    seen: dict[int, Counter[str]] = {epoch: Counter() for epoch in range(EPOCHS)}
    per_run: Counter[str] = Counter()
    for path in sorted((OUT / "keys").glob("run*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            seen[entry["epoch"]].update(entry["keys"])
            per_run[path.stem] += len(entry["keys"])
    say("keys received: " + ", ".join(f"{count:,} by {name}" for name, count in sorted(per_run.items())))
    wrong = [epoch for epoch, counts in seen.items() if counts != Counter(keys)]
    for epoch in wrong:
        missing = sum((Counter(keys) - seen[epoch]).values())
        extra = sum((seen[epoch] - Counter(keys)).values())
        say(f"epoch {epoch}: {missing} samples missing, {extra} too many")
    if not wrong:
        say(f"every sample of every epoch was seen exactly once: {EPOCHS} epochs x {len(keys):,} samples")
    return not wrong


@contextmanager
def local_s3() -> Iterator[tuple[str, dict[str, str]]]:
    """An S3 server on loopback with one bucket: its URL, and the environment that leads there."""
    headline("start an S3 server on loopback")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (OUT / "server.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_for(endpoint, server)
            bucket = urllib.request.Request(f"{endpoint}/digits", method="PUT")
            urllib.request.urlopen(bucket, timeout=60).close()
            say(f"{endpoint}, log in {os.path.relpath(OUT)}/server.log")
            environ = {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
            environ |= {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo-secret"}
            yield "s3://digits", environ
        finally:
            server.terminate()


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    """Returns once the server answers."""
    for _ in range(3000):
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            if server.poll() is not None:
                raise SystemExit(f"the S3 server ended: see {OUT / 'server.log'}") from None
            time.sleep(0.1)
        else:
            return
    raise SystemExit(f"no answer from {endpoint} within five minutes: see {OUT / 'server.log'}")


def headline(text: str) -> None:
    """Says what comes."""
    say(f"\n== {text}")


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
