"""Make ``tfrecord/`` with TensorFlow, and ``tfrecord/expected.json``: what its parser finds in the records.

In an environment of its own::

    python3.11 -m venv /tmp/tf && /tmp/tf/bin/pip install tensorflow-cpu
    /tmp/tf/bin/python tests/shard_tools/data/make_tfrecord.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

HERE = Path(__file__).resolve().parent / "tfrecord"
JPG = b"\xff\xd8\xff\xe0"
PNG = b"\x89PNG\r\n\x1a\n"


def feature(value: Any) -> tf.train.Feature:
    values = value if isinstance(value, list) else [value]
    if values and isinstance(values[0], (bytes, str)):
        encoded = [one.encode() if isinstance(one, str) else one for one in values]
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=encoded))
    if values and isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def example(number: int) -> tf.train.Example:
    some: dict[str, Any] = {
        "image": (JPG, PNG)[number % 5 == 4] + bytes([number]) * (number * 31 % 200), "label": number - 3,
        "caption": f"Grüße {number} ☃", "tags": [f"t{i}" for i in range(number % 3 + 1)], "score": number / 3,
        "ids": [(-1) ** i * 2 ** (7 * i % 63) for i in range(number % 7)] or [0, -(2**63), 2**63 - 1],
        "box": [0.5, 1e-30, float(number), -1.0], "raw": bytes([0, 255, number]), "info": json.dumps({"n": number}),
        "views": [PNG + bytes([i, number]) for i in range(number % 3)] or [PNG, PNG],
    }  # fmt: skip
    if number % 4 == 3:
        del some["score"]
    made = {name: feature(value) for name, value in some.items()} | {"nothing": tf.train.Feature()}
    return tf.train.Example(features=tf.train.Features(feature=made))


def sequence(number: int) -> tf.train.SequenceExample:
    lists = {
        "frames": [[JPG + bytes([i])] for i in range(number + 1)], "tokens": [[i, i * i] for i in range(number + 1)],
        "times": [[i / 2] for i in range(number + 1)], "words": [["a", "b"][: 1 + i % 2] for i in range(number + 1)],
    }  # fmt: skip
    return tf.train.SequenceExample(
        context=tf.train.Features(feature={"id": feature(number)}),
        feature_lists=tf.train.FeatureLists(
            feature_list={name: tf.train.FeatureList(feature=map(feature, steps)) for name, steps in lists.items()}
        ),
    )


def write(name: str, records: list[Any], compression: str = "") -> None:
    path = HERE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path), tf.io.TFRecordOptions(compression_type=compression)) as out:
        for one in records:
            out.write(one if isinstance(one, bytes) else one.SerializeToString(deterministic=True))


def plain(one: Any) -> Any:
    kind = one.WhichOneof("kind")
    if kind is None:
        return {"none": []}
    values = list(getattr(one, kind).value)
    return {kind.removesuffix("_list"): [value.hex() for value in values] if kind == "bytes_list" else values}


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    for part in range(3):
        write(f"examples/train-{part:05d}-of-00003", [example(i) for i in range(part * 5, part * 5 + 5)])
    write("gzip/a.tfrecord", [example(i) for i in range(8)], "GZIP")
    write("zlib/a.tfrecord", [example(i) for i in range(8)], "ZLIB")
    write("sequences/a.tfrecords", [sequence(i) for i in range(5)])
    write("raw/a.tfrec", [f"line {i}\n".encode() for i in range(4)])
    dataset = tf.data.TFRecordDataset([str(HERE / f"examples/train-{part:05d}-of-00003") for part in range(3)])
    found = []
    for raw in dataset.as_numpy_iterator():
        one = tf.train.Example.FromString(raw)
        found.append({name: plain(value) for name, value in one.features.feature.items()})
    (HERE / "expected.json").write_text(json.dumps(found, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
