"""Tokens a second of conversations with images: packs from shards, against a constant-length data set of a trainer.

Both sides deliver batches of 8 packs of 2,048 tokens with the images that belong to them, as uint8 [n, 224, 224, 3]:
the trainer with worker processes, as it is used, ours with as many threads. Made data: 2,000 conversations of one to
three images (JPEG of 640 x 480, 60 KB), 64 tokens per image, one to four turns of words; a BPE of 4,000 tokens. No
model, no network::

    python benchmarks/bench_talks.py [--rounds 3] [--workers N] [--conversations 2000]

- *trainer*: what nanoVLM and TRL do: a map-style data set opens, decodes (Pillow) and resizes the images of an item and
  tokenizes its messages with the chat template, at each epoch; an iterable data set over it fills rows of constant
  length greedily from a buffer; torch's ``DataLoader`` with workers.
- *trainer, our decoder*: the same, with the JPEG decoder of shardstream.
- *ours*: the conversations are converted once (``convert --messages-field``), and packs carry their images
  (``Packed(…, carry=…)``). Where ``Packed`` does not carry yet: documents as they are, not packed, with their images.
"""

from __future__ import annotations

import inspect
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from shard_tools.make.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, Packed, StreamingDataset
from streaming.build.decode import resolve_decoders

IMAGE, PER_IMAGE, SIDE = "<|image_pad|>", 64, 224
LENGTH, ROWS, BUFFER = 2048, 8, 64
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi") for b in ("ran", "lem", "dos", "tik", "pul")
]


def sentence(random: np.random.Generator, least: int, most: int) -> str:
    return " ".join(random.choice(WORDS, int(random.integers(least, most)))) + "."


def photo(random: np.random.Generator) -> bytes:
    """Smooth shapes with grain, which take about as many bytes as photos."""
    coarse = random.integers(0, 256, (12, 16, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC), np.int16)
    noisy = (pixels + random.normal(0, 6, pixels.shape)).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "JPEG", quality=85)
    return out.getvalue()


def make(folder: str, num: int) -> None:
    """Write images, a JSONL of conversations beside them, the tokenizer, and the shards."""
    random, place = np.random.default_rng(1), Path(folder)
    (place / "photos").mkdir()
    for number in range(200):
        (place / "photos" / f"{number}.jpg").write_bytes(photo(random))
    with open(place / "talks.jsonl", "w") as lines:
        for _ in range(num):
            names = [f"photos/{one}.jpg" for one in random.integers(200, size=random.integers(1, 4))]
            parts: list[dict[str, str]] = [{"type": "image", "image": name} for name in names]
            messages: list[dict[str, Any]] = []
            for turn in range(int(random.integers(1, 5))):
                asked = (
                    [*parts, {"type": "text", "text": sentence(random, 5, 30)}] if not turn else sentence(random, 5, 30)
                )
                messages += [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": sentence(random, 10, 120)},
                ]
            lines.write(json.dumps({"messages": messages}) + "\n")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [sentence(random, 20, 60) for _ in range(2000)]
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=4000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    special = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE)
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    made.save(str(place / "tokenizer.json"))
    (place / "template.jinja").write_text(TEMPLATE)
    options = TokenizeOptions(tokenizer=str(place / "tokenizer.json"), messages_field="messages",
                              chat_template=str(place / "template.jinja"), image_tokens=str(PER_IMAGE))  # fmt: skip
    tokenize(str(place / "talks.jsonl"), str(place / "shards"), options=options)


class Talks(Dataset[dict[str, Any]]):
    """The conversations of a JSONL, as trainers read them: everything is made anew for each item."""

    def __init__(self, folder: str, *, is_ours: bool) -> None:
        self.folder, self.is_ours = folder, is_ours
        self.rows = [json.loads(line) for line in open(Path(folder) / "talks.jsonl")]  # noqa: SIM115
        self.tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self.image = self.tokenizer.token_to_id(IMAGE)
        self.decode = resolve_decoders({"jpg": f"rgb8:{SIDE}x{SIDE}"}).decoder_for("jpg")

    def __len__(self) -> int:
        return len(self.rows)

    def picture(self, name: str) -> torch.Tensor:
        path = os.path.join(self.folder, name)
        if self.is_ours:
            return torch.from_numpy(np.asarray(self.decode(Path(path).read_bytes())))
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        return torch.from_numpy(pixels.copy())

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids, mask, images = list[int](), list[int](), []
        for message in self.rows[number]["messages"]:
            said = message["content"]
            text = f"<|im_start|>{message['role']}\n"
            for part in [{"type": "text", "text": said}] if isinstance(said, str) else said:
                if part["type"] == "image":
                    images.append(self.picture(part["image"]))
                    text += f"<|vision_start|>{PER_IMAGE * IMAGE}<|vision_end|>"
                else:
                    text += part["text"]
            found = self.tokenizer.encode(f"{text}<|im_end|>\n", add_special_tokens=False).ids
            ids += found
            mask += [int(message["role"] == "assistant")] * len(found)
        labels = [one if learned else -100 for one, learned in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "labels": labels, "images": images}


class ConstantLength(IterableDataset[dict[str, Any]]):
    """Rows of a constant length, filled greedily from a buffer of conversations."""

    def __init__(self, talks: Talks) -> None:
        self.talks = talks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        mine = range(0 if worker is None else worker.id, len(self.talks), 1 if worker is None else worker.num_workers)
        buffer: list[dict[str, Any]] = []
        for number in mine:
            buffer.append(self.talks[number])
            if len(buffer) == BUFFER:
                yield from self.packed(buffer)
                buffer = []
        yield from self.packed(buffer)

    def packed(self, buffer: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        rows: list[list[dict[str, Any]]] = []
        room: list[int] = []
        for one in sorted(buffer, key=lambda one: -len(one["input_ids"])):
            size = min(len(one["input_ids"]), LENGTH)
            place = next((number for number, free in enumerate(room) if free >= size), None)
            if place is None:
                rows.append([])
                room.append(LENGTH)
                place = len(rows) - 1
            rows[place].append(one)
            room[place] -= size
        for row in rows:
            ids = [token for one in row for token in one["input_ids"]][:LENGTH]
            labels = [token for one in row for token in one["labels"]][:LENGTH]
            pad = LENGTH - len(ids)
            yield {
                "input_ids": torch.tensor(ids + [0] * pad), "labels": torch.tensor(labels + [-100] * pad),
                "attention_mask": torch.tensor([1] * len(ids) + [0] * pad),
                "images": [image for one in row for image in one["images"]],
            }  # fmt: skip


def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels", "attention_mask")}
    return batch | {"images": torch.stack([image for row in rows for image in row["images"]])}


def trainer(folder: str, workers: int, *, is_ours: bool) -> int:
    data = ConstantLength(Talks(folder, is_ours=is_ours))
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS, collate_fn=collated, num_workers=workers)
    return sum(int(batch["attention_mask"].sum()) for batch in loader)


def ours(folder: str, threads: int) -> int:
    dataset = StreamingDataset(f"{folder}/shards", decode=dict.fromkeys(_FIELDS, f"rgb8:{SIDE}x{SIDE}"))
    if "carry" in inspect.signature(Packed).parameters:
        image = Tokenizer.from_file(f"{folder}/tokenizer.json").token_to_id(IMAGE)
        more: dict[str, Any] = {"carry": {"images": _FIELDS}, "placeholder": image}
        packed: Any = Packed(dataset, length=LENGTH, mask_field="mask", **more)
        with DataLoader(packed, batch_size=ROWS, num_threads=threads, jagged={"images": "flat"}) as loader:
            return sum(int(batch["num_tokens"]) for batch in loader)
    with DataLoader(dataset, batch_size=4 * ROWS, num_threads=threads, collate_fn=list) as loader:
        return sum(len(one["tok"]) for batch in loader for one in batch)


_FIELDS = ("jpg", "0.jpg", "1.jpg", "2.jpg")


def main() -> None:
    given = common.arguments(__doc__ or "", workers=common.num_cores(), conversations=2000)
    folder = common.made_once(given.data, f"talks-{given.conversations}", lambda at: make(at, given.conversations))
    contestants: dict[str, common.Run] = {
        "trainer": lambda: trainer(folder, given.workers, is_ours=False),
        "trainer, our decoder": lambda: trainer(folder, given.workers, is_ours=True),
        "ours": lambda: ours(folder, given.workers),
    }
    by_cpu: dict[str, list[float]] = {name: [] for name in contestants}

    def counted(name: str, run: common.Run) -> common.Run:
        def timed() -> int:
            begun_s = sum(os.times()[:4])
            count = run()
            by_cpu[name].append(count / (sum(os.times()[:4]) - begun_s))
            return count

        return timed

    title = f"tokens of conversations with images, {given.workers} workers or threads"
    turns = {name: counted(name, run) for name, run in contestants.items()}
    common.show(f"{title}, by the clock", common.take_turns(turns, given.rounds), against="trainer")
    rates = [common.Rates(name=name, per_second=tuple(found)) for name, found in by_cpu.items()]
    common.show(f"{title}, per CPU second of all processes", rates, against="trainer")
    print(common.machine())


if __name__ == "__main__":
    main()
