"""A data set with columns to order by, and the global batches of a curriculum over it."""

from __future__ import annotations

import json
import random
from typing import Any

from shard_tools import ShardWriter
from streaming import ShuffleConfig
from tests.support.sets.data_sets import Batches, loaders, merged

NUM = 240
DRAW = random.Random(5)
TOKENS = [DRAW.choice([8, 16, 64, 64, 64, 200, 512, 1000]) + DRAW.choice([0, 0, 1, 2]) for _ in range(NUM)]
RARITY = [round(DRAW.random(), 2) for _ in range(NUM)]
FEW_LANES = ShuffleConfig(lanes=2, window=10)


def write(url: str, *, num: int = NUM, payload: int = 0, max_samples: int = 6, **options: Any) -> str:
    columns = {"tokens": "json.tokens", "rarity": "json.rarity", "maybe": "json.maybe", "lang": "json.lang"}
    with ShardWriter(f"{url}/{{:06d}}.tar", max_samples=max_samples, columns=columns, **options) as writer:
        for number in range(num):
            row = {"tokens": TOKENS[number % NUM], "rarity": RARITY[number % NUM], "lang": "en"}
            maybe = None if number % 10 == 3 else number
            writer.write({"__key__": f"{number:05d}", "json": {**row, "maybe": maybe}, "bin": bytes(payload)})
    return f"{url}/"


def plain_world(dataset: Any, ranks: int, count: int, state: Any = None) -> tuple[Batches, dict[str, Any]]:
    found = []
    for loader in loaders(dataset, ranks, global_batch_size=12, num_threads=0):
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        batches = iter(loader)
        found.append([list(next(batches)["__key__"]) for _ in range(count)])
        saved = loader.state_dict()
    return merged(found), saved
