"""Plug-ins for the storage benchmark: ``reader.data_loader_classname``, one class for each contestant of ours.

The loaders that the benchmark ships with hand over one constant array for every sample, whatever they have read, and
its ``tf.data`` reader parses nothing. The classes here hand over what they have read, one tensor of uint8 a batch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader


def asked() -> dict[str, Any]:
    """What ``turn.py`` was asked to do."""
    found: dict[str, Any] = json.loads(os.environ["MLPERF_STORAGE_TURN"])
    return found


class _Loader(BaseDataLoader):
    """A loader of batches that is opened once and then gives an epoch after the other."""

    def __init__(self, format_type: Any, dataset_type: Any, epoch: int) -> None:
        super().__init__(format_type, dataset_type, epoch, DataLoaderType.PYTORCH)
        self.asked = asked()
        self.files = list(self._args.file_list_train)
        self.workers = int(self._args.read_threads)

    def finalize(self) -> None:
        """Nothing is left of an epoch."""


class Shardstream(_Loader):
    """Ours, with its defaults."""

    def read(self) -> None:
        from streaming import DataLoader, StreamingDataset  # noqa: PLC0415

        dataset = StreamingDataset(
            self.asked["shards"], decode={"bin": "array:uint8"}, storage_options=self.asked["storage_options"]
        )
        self._loader = DataLoader(dataset, self.batch_size, num_workers=self.workers)

    def next(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch["bin"]


class Torch(_Loader):
    """torch's loader over one file for each sample, which ``numpy.load`` reads; as the benchmark configures it."""

    def read(self) -> None:
        self._loader = torch_loader(Files(self.files), self)

    def next(self) -> Iterator[Any]:
        yield from self._loader


class S3Torch(_Loader):
    """torch's loader over one object for each sample, by Amazon's connector for torch."""

    def read(self) -> None:
        from s3torchconnector import S3ClientConfig, S3MapDataset  # noqa: PLC0415

        store = self.asked["store"]
        os.environ |= {"AWS_ACCESS_KEY_ID": store["key"], "AWS_SECRET_ACCESS_KEY": store["secret"]}
        urls = [f"{self.asked['files']}/{os.path.basename(path)}" for path in self.files]
        dataset = S3MapDataset.from_objects(
            urls, region=store["region"], endpoint=store["endpoint"], transform=whole_object,
            s3client_config=S3ClientConfig(force_path_style=True),
        )  # fmt: skip
        self._loader = torch_loader(dataset, self)

    def next(self) -> Iterator[Any]:
        yield from self._loader


class Dali(_Loader):
    """DALI's own reader of npy files, on the CPU; batches are its own memory, and are given back at the next one.

    Without memory maps, or it would hand over pages of files that nobody has read.
    """

    def read(self) -> None:
        from nvidia.dali import fn, pipeline_def  # noqa: PLC0415

        @pipeline_def
        def pipeline() -> Any:
            return fn.readers.numpy(
                device="cpu", files=self.files, random_shuffle=True, initial_fill=64, prefetch_queue_depth=2,
                dont_use_mmap=True, pad_last_batch=True,
            )  # fmt: skip

        self._pipe = pipeline(
            batch_size=self.batch_size, num_threads=max(1, self.workers), device_id=None, prefetch_queue_depth=2
        )
        self._pipe.build()
        self._pipe.schedule_run()

    def next(self) -> Iterator[Any]:
        for _ in range(self.num_samples // self.batch_size):
            try:
                yield self._pipe.share_outputs()
            finally:  # the engine leaves an epoch at its last batch
                self._pipe.release_outputs()
                self._pipe.schedule_run()


class TensorFlow(_Loader):
    """``tf.data`` over TFRecord files: parsed, shuffled, decoded to arrays, batched, prefetched."""

    def read(self) -> None:
        import tensorflow as tf  # noqa: PLC0415

        threads = max(1, self.workers)

        def parsed(serialized: Any) -> Any:
            features = {"image": tf.io.FixedLenFeature([], tf.string), "size": tf.io.FixedLenFeature([], tf.int64)}
            return tf.io.decode_raw(tf.io.parse_single_example(serialized, features)["image"], tf.uint8)

        files = tf.data.Dataset.from_tensor_slices(self.files).shuffle(len(self.files))
        data = files.interleave(tf.data.TFRecordDataset, cycle_length=threads, num_parallel_calls=threads)
        data = data.shuffle(min(1024, (1 << 28) // self.asked["sample_bytes"]))
        data = data.map(parsed, num_parallel_calls=threads).batch(self.batch_size, drop_remainder=True).prefetch(2)
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        self._data = data.with_options(options)

    def next(self) -> Iterator[Any]:
        yield from self._data


class Files:
    """One npy file for each sample."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        import torch  # noqa: PLC0415

        return torch.from_numpy(np.load(self._files[index]))


NPY_HEADER_BYTES = 128


def whole_object(reader: Any) -> Any:
    import torch  # noqa: PLC0415

    return torch.frombuffer(bytearray(reader.read()), dtype=torch.uint8)[NPY_HEADER_BYTES:]


def torch_loader(dataset: Any, one: _Loader) -> Any:
    from torch.utils.data import DataLoader  # noqa: PLC0415

    more = {"prefetch_factor": 2, "persistent_workers": True} if one.workers else {}
    return DataLoader(dataset, one.batch_size, shuffle=True, num_workers=one.workers, drop_last=True, **more)
