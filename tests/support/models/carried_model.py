"""Documents whose values name the document they belong to, and a model of what a batch of their packs carries."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from shard_tools import ShardWriter
from streaming import Jagged, Mixture, Packed, StreamingDataset

LENGTH = 64
IMAGE, SOUND = 7, 8
CARRY = {"images": ("0.png", "1.png", "2.png"), "npy": ("npy",)}
PLACEHOLDER = {"images": IMAGE, "npy": SOUND}
_WORDS = 200
"""More than the tokens of a document; words of document n are 100 + 200 n and the next ones."""
Expected = tuple[int, int, int, np.ndarray[Any, Any]]
"""Row, number of the document in it, position of the first placeholder, value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """A document of the model.

    Attributes:
        key: Its key.
        tokens: Its tokens, with placeholders.
        values: Its values, by entry.
        offsets: Place of the first placeholder of each value, by entry.
    """

    key: str
    tokens: list[int]
    values: dict[str, list[np.ndarray[Any, Any]]]
    offsets: dict[str, list[int]]


def drawn(count: int, seed: int) -> dict[str, Document]:
    """Return documents of up to a few more than LENGTH tokens; a third of them have values."""
    rng = np.random.default_rng(seed)
    found = (_drawn(number, rng) for number in range(count))
    return {one.key: one for one in found}


def _drawn(number: int, rng: np.random.Generator) -> Document:
    words = iter(range(100 + _WORDS * number, 100 + _WORDS * (number + 1)))
    counts = {"images": int(rng.integers(4)), "npy": int(rng.integers(2))} if rng.random() < 0.4 else {}
    wanted = [name for name in CARRY for _ in range(counts.get(name, 0))]
    rng.shuffle(wanted)
    touches = rng.random() < 0.3  # values of different entries may have no word between them
    tokens = [next(words) for _ in range(int(rng.integers(3)))]
    values: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in CARRY}
    offsets: dict[str, list[int]] = {name: [] for name in CARRY}
    for name in wanted:
        if tokens[-1:] == [PLACEHOLDER[name]] or not touches:
            tokens.append(next(words))
        offsets[name].append(len(tokens))
        tokens += [PLACEHOLDER[name]] * int(rng.integers(1, 4))
        values[name].append(_value(name, number, len(values[name])))
    tokens += [next(words) for _ in range(int(rng.lognormal(2.2, 0.9)) % (LENGTH + 8))]
    return Document(key=f"{number:06d}", tokens=tokens or [next(words)], values=values, offsets=offsets)


def _value(name: str, number: int, nth: int) -> np.ndarray[Any, Any]:
    """Return a value that no other document or place has; sizes differ from value to value."""
    if name == "npy":
        return np.full(1 + number % 5, number, np.float32)
    image = np.zeros((1 + nth, 1 + number % 3, 3), np.uint8)
    image[:] = number // 256, number % 256, nth
    return image


def stored(document: Document) -> dict[str, Any]:
    """Return the sample of a document."""
    fields: dict[str, Any] = {"__key__": document.key, "tok": np.array(document.tokens, "<u4").tobytes()}
    for field, image in zip(CARRY["images"], document.values["images"], strict=False):
        with io.BytesIO() as file:
            Image.fromarray(image).save(file, "PNG")
            fields[field] = file.getvalue()
    return fields | ({"npy": document.values["npy"][0]} if document.values["npy"] else {})


def no_damage(sample: dict[str, Any]) -> dict[str, Any]:
    """Change nothing."""
    return sample


def bad_image(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with an image that does not decode."""
    return sample | {"0.png": b"no image"} if "0.png" in sample else sample


def lost_image(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample without its first image, whose placeholders stay."""
    return {name: value for name, value in sample.items() if name != "0.png"}


def stray_placeholder(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with a placeholder for which there is no value, if it ends with words."""
    tokens = np.frombuffer(sample["tok"], "<u4").copy()
    if min(tokens[-2:]) <= SOUND:
        return sample
    tokens[-1] = SOUND
    return sample | {"tok": tokens.tobytes()}


def longer(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with more tokens than the column will say."""
    return sample | {"tok": sample["tok"] + sample["tok"][-4:]}


DAMAGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "none": no_damage, "bad image": bad_image, "lost image": lost_image, "stray placeholder": stray_placeholder,
    "longer": longer,
}  # fmt: skip


def write(
    folder: Path, documents: Mapping[str, Document], damage: str = "none", each: int = 5, shards: str = "{:03d}.tar"
) -> set[str]:  # fmt: skip
    """Write the documents, every ``each``-th of those with values damaged; return the keys of those that packs lose."""
    lost, with_values, texts = set(), 0, {key: len(one.tokens) for key, one in documents.items()}
    columns = {"tokens": lambda sample: texts[sample["__key__"]]}
    with ShardWriter(str(folder / shards), max_samples=150, columns=columns) as writer:
        for key, document in documents.items():
            sample = stored(document)
            with_values += len(sample) > 2
            if len(sample) > 2 and with_values % each == 0:
                was, sample = sample, DAMAGES[damage](sample)
                lost |= {key} if sample != was else set()
            writer.write(sample)
    return lost


# --- what a batch has to carry ---


def expected(batch: Any, documents: Mapping[str, Document], name: str) -> list[Expected]:
    """Return what a batch has to carry, by its keys and document ids alone."""
    found: list[Expected] = []
    for row, keys in enumerate(batch["__key__"]):
        is_padded = isinstance(keys, str)
        for number, key in enumerate([keys] if is_padded else keys):
            if key == "":
                continue
            document = documents[key]
            begin = 0 if is_padded else int((batch["document_ids"][row] == number).nonzero()[0, 0])
            pairs = zip(document.offsets[name], document.values[name], strict=True)
            found += [(row, number, begin + offset, value) for offset, value in pairs]
    return found


def carried(batch: Any, name: str) -> Iterator[Expected]:
    """Yield what a batch carries, in its order."""
    document, position, values = batch[f"{name}_document"], batch[f"{name}_position"], batch[name]
    assert torch.equal(document.offsets, position.offsets)
    assert document.num_rows == len(batch["input_ids"])
    rows = np.arange(document.num_rows).repeat(document.lengths.numpy()).tolist()
    if isinstance(values, Jagged):
        listed = values.rows()
    else:
        assert [len(one) for one in values] == document.lengths.tolist()
        listed = [value for row in values for value in row]
    for row, number, place, value in zip(rows, document.values.tolist(), position.values.tolist(), listed, strict=True):
        yield row, number, place, np.asarray(value)


def check(batch: Any, documents: Mapping[str, Document]) -> int:
    """Check that each value of a batch belongs to its document and position; return the number of checks."""
    num_checks = 0
    for name in CARRY:
        found, wanted = list(carried(batch, name)), expected(batch, documents, name)
        assert len(found) == len(wanted), name
        for (row, number, place, value), own in zip(found, wanted, strict=True):
            assert (row, number, place) == own[:3]
            assert value.dtype == own[3].dtype
            assert np.array_equal(value, own[3])
            assert batch["input_ids"][row, place] == PLACEHOLDER[name]
            num_checks += 5
    ids, labels = batch["input_ids"], batch["labels"]
    assert not ((labels == IMAGE) | (labels == SOUND)).any()
    assert batch["num_labels"] == int((labels >= 0).sum())
    assert int((ids == IMAGE).sum() + (ids == SOUND).sum()) == sum(
        documents[key].tokens.count(token)
        for keys in batch["__key__"] for key in ([keys] if isinstance(keys, str) else keys) if key
        for token in (IMAGE, SOUND)
    )  # fmt: skip
    return num_checks + 1


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two batches, or parts of them, have the same types and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def keys_of(batches: list[Any]) -> Counter[str]:
    """Return how often each document came."""
    rows = [[keys] if isinstance(keys, str) else keys for batch in batches for keys in batch["__key__"]]
    return Counter(key for keys in rows for key in keys if key)


# --- kinds of set ---


def _plain(folder: Path, **options: Any) -> Packed:
    return Packed(
        StreamingDataset(folder, max_bad_samples=1.0, **options), LENGTH, carry=CARRY, placeholder=PLACEHOLDER
    )


def _packed(folder: Path, **options: Any) -> Packed:
    documents = StreamingDataset(folder, max_bad_samples=1.0)
    return Packed(documents, LENGTH, carry=CARRY, placeholder=PLACEHOLDER, **options)


def as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    """Change nothing: a transform that sees each document."""
    return {**sample}


def _mixture(folder: Path) -> Mixture:
    whole = StreamingDataset(folder, max_bad_samples=1.0)
    half = len(whole) // 2
    sources = {"a": whole[:half], "b": whole[half:]}
    made = {name: Packed(one, LENGTH, carry=CARRY, placeholder=PLACEHOLDER) for name, one in sources.items()}
    return Mixture(made, max_bad_samples=1.0)


KINDS: dict[str, Callable[[Path], Any]] = {
    "plain": _plain,
    "padded": lambda folder: _packed(folder, padded=True),
    "transform": lambda folder: _plain(folder, transform=as_it_is),
    "mixture": _mixture,
    "fixed shapes": lambda folder: _packed(folder, max_docs=3, multiple=4, shift_labels=True),
    "where": lambda folder: _plain(folder, where="tokens < 40"),
    "part": lambda folder: Packed(
        StreamingDataset(folder, max_bad_samples=1.0)[20:], LENGTH, carry=CARRY, placeholder=PLACEHOLDER
    ),
    "skip": lambda folder: _plain(folder, on_error="skip"),
}
