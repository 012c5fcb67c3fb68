"""The contestants and the virtual environment of each, made from ``requirements/PEER.txt``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
_INSTALL_TIMEOUT_S = 1200.0


class PeerError(Exception):
    """A peer cannot take part; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a contestant makes rows of T tokens of documents: in words, and what the check has to allow."""

    rule: str
    cuts: bool = False
    """Rows begin and end in the middle of documents."""
    drops: bool = False
    """Some tokens, behind the last whole row of a file, are not delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A contestant: module ``peer_NAME``, whether it reads a copy of its own of the data, why it cannot read S3.

    ``only_packs``: it takes part in no other set. ``by_length``: its copy of the data is another for each length of
    packs. ``of``: the contestant whose environment and folder of data it shares. ``sets``: it takes part
    in these alone.
    """

    name: str
    title: str
    own_data: bool = False
    no_s3: str = ""
    packing: Packing | None = None
    only_packs: bool = False
    by_length: bool = False
    of: str = ""
    sets: tuple[str, ...] = ()

    @property
    def home(self) -> str:
        """Whose environment and data it has."""
        return self.of or self.name


OURS = "shardstream"
LIMIT = "limit"
"""What this machine could do at most; no loader."""
_NO_HANDLER = "webdataset has no s3:// handler; its documentation pipes from a shell command"
_BLOCK_SIZE = "its tar builder opens files with block_size=0, which s3fs hands on to aiobotocore, which refuses it"
PEERS = {
    one.name: one
    for one in (
        Peer(
            name=OURS,
            title="shardstream",
            packing=Packing(
                rule="`Packed`: best fit, documents whole, longer ones split; also labels, positions, borders"
            ),
        ),
        Peer(
            name="shardstream_cut",
            only_packs=True,
            by_length=True,
            of=OURS,
            title="shardstream, rows cut when written",
            own_data=True,
            packing=Packing(
                rule="no packing: a record is a row, the rest was dropped; `input_ids` alone", cuts=True, drops=True
            ),
        ),
        Peer(name="shardstream_views", of=OURS, title="shardstream, views", sets=("images-raw", "large")),
        Peer(
            name=LIMIT,
            of=OURS,
            title="*the limit: known places, nothing checked*",
            own_data=True,
            packing=Packing(rule="no packing: a gather from one flat file; `input_ids` alone", cuts=True, drops=True),
        ),
        Peer(name="webdataset", title="webdataset", no_s3=_NO_HANDLER),
        Peer(name="mosaic", title="Mosaic Streaming", own_data=True),
        Peer(
            name="litdata",
            title="LitData",
            own_data=True,
            packing=Packing(
                rule="`TokensLoader`: end to end and cut at T, a chunk's rest dropped; `input_ids` alone",
                cuts=True,
                drops=True,
            ),
        ),
        Peer(
            name="energon",
            title="Megatron-Energon",
            own_data=True,
            packing=Packing(rule="a buffer of 1,000, its user's first fit by falling length; `input_ids` alone"),
        ),
        Peer(name="torchdata", title="StatefulDataLoader over webdataset", no_s3=_NO_HANDLER),
        Peer(name="huggingface", title="Hugging Face datasets", own_data=True, no_s3=_BLOCK_SIZE),
        Peer(
            name="grain",
            title="Grain",
            own_data=True,
            no_s3="ArrayRecord has no S3 client",
            packing=Packing(rule="`FirstFitPackIterDataset`, a batch of bins; also positions, segments"),
        ),
        Peer(
            name="grain_concat",
            only_packs=True,
            of="grain",
            title="Grain, concatenate then split",
            own_data=True,
            packing=Packing(
                rule="`ConcatThenSplitIterDataset`: end to end and cut at T; also positions, segments", cuts=True
            ),
        ),
        Peer(
            name="torchtitan",
            title="TorchTitan",
            own_data=True,
            only_packs=True,
            packing=Packing(
                rule="end to end and cut at T, each worker's rest dropped; not shuffled; also labels, positions",
                cuts=True,
                drops=True,
            ),
        ),
        Peer(name="spdl", title="SPDL, own tar reader", no_s3="no storage clients of its own"),
    )
}


def interpreter(name: str, venvs: str) -> str:
    """The Python of an environment, installed if it is not yet there; ours is the one that runs this.

    Raises:
        PeerError: It does not install.
    """
    if name == OURS:
        return sys.executable
    return installed(os.path.join(venvs, name), os.path.join(HERE, "requirements", f"{name}.txt"))


def installed(folder: str, requirements: str, *, bare: str = "") -> str:
    """The Python of the environment ``folder``, installed if it is not yet there, or was of other requirements.

    ``bare`` is installed last, without what it depends on.

    Raises:
        PeerError: It does not install.
    """
    with open(requirements) as file:
        wanted = file.read() + bare
    python, mark = os.path.join(folder, "bin", "python"), os.path.join(folder, "installed.txt")
    if os.path.exists(mark):
        with open(mark) as file:
            if file.read() == wanted:
                return python
    print(f"installing {requirements} into {folder} …", file=sys.stderr)
    if not os.path.exists(python):
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([*pip, "-r", requirements], *([[*pip, "--no-deps", bare]] if bare else [])):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise PeerError(f"does not install: pip took more than {_INSTALL_TIMEOUT_S:.0f} s") from None
        if done.returncode:
            raise PeerError(f"does not install: {last_line(done.stderr)}")
    with open(mark, "w") as file:
        file.write(wanted)
    return python


def versions(name: str, python: str) -> dict[str, str]:
    """The installed versions of the packages that the requirements name."""
    names = ["torch", "numpy", "obstore"] if name == OURS else []
    if name != OURS:
        with open(os.path.join(HERE, "requirements", f"{name}.txt")) as file:
            names = [
                line.partition("==")[0].partition("[")[0] for line in file if "==" in line and not line.startswith("#")
            ]
    program = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
    )
    done = subprocess.run([python, "-c", program, *names], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def last_line(text: str) -> str:
    """The last line with anything in it, at most 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
