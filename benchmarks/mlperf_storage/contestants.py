"""Who takes part in the storage benchmark, and with what. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

OURS = "shardstream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A loader of the benchmark.

    ``plug_in``: its class in ``loaders.py``; "": one that the benchmark ships with, by ``data_loader``. ``where``: the
    places from which it can read. ``workers``: ``read_threads``.
    """

    name: str
    title: str
    plug_in: str = ""
    data_loader: str = "pytorch"
    framework: str = "pytorch"
    format: str = "npy"
    workers: int = 2
    where: tuple[str, ...] = ("disk",)


CONTESTANTS = {
    one.name: one
    for one in (
        Contestant(name=OURS, title="shardstream", plug_in="Shardstream", workers=0, where=("disk", "s3")),
        Contestant(name="shardstream-2", title="shardstream, 2 workers", plug_in="Shardstream", where=("disk", "s3")),
        Contestant(name="torch", title="torch, 2 workers", plug_in="Torch"),
        Contestant(name="s3torch", title="torch with Amazon's S3 connector, 2 workers", plug_in="S3Torch",
                   where=("s3",)),
        Contestant(name="dali", title="DALI on the CPU, 2 threads", plug_in="Dali"),
        Contestant(name="tensorflow", title="tf.data, 2 threads", plug_in="TensorFlow",
                   data_loader="tensorflow", framework="tensorflow", format="tfrecord"),
        Contestant(name="torch-shipped", title="*its torch loader: hands over a constant*"),
        Contestant(name="dali-shipped", title="*its DALI loader: hands over a constant*", data_loader="dali"),
        Contestant(name="tensorflow-shipped", title="*its tf.data loader: parses nothing, hands over a constant*",
                   data_loader="tensorflow", framework="tensorflow", format="tfrecord"),
    )
}  # fmt: skip
