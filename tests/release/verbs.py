"""Use an installed shardstream as a data engineer does, on a machine that may have no torch: every verb once.

``python verbs.py FOLDER`` makes data in the empty FOLDER, and prints a JSON object: what each step said, "" if it is
done. It imports nothing of the tests, so that it runs from a clean environment.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROWS = 40
NEEDS = {"stats --html": "jinja2", "show --html": "starlette", "convert --from hf": "datasets"}
"""Steps that need a package of an extra."""
REFUSED = "needs torch, which is not installed; pip install torch\n"
"""What a verb says that builds batches, where there is no torch."""
FUNCTIONS = """
def shorter(sample):
    return {"txt": sample["txt"][:3]}


def is_long(sample):
    return len(sample["txt"]) > 20


def sample_of(number):
    return {"txt": str(number)}
"""


def make(base: Path) -> None:
    """Write the data from which the steps begin."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    for number in range(ROWS):
        out = io.BytesIO()
        Image.fromarray(np.full((16, 16 + number % 5, 3), number, np.uint8)).save(out, "JPEG")
        picture = base / "photos" / ("cats", "dogs")[number % 2] / f"{number:03d}.jpg"
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(out.getvalue())
        pair = base / "files" / f"{number:03d}.txt"
        pair.parent.mkdir(exist_ok=True)
        pair.write_text(f"text {number}")
        pair.with_suffix(".json").write_text(json.dumps({"n": number}))
    rows = [{"n": number, "text": f"Story {number}. " * (1 + number % 7)} for number in range(ROWS)]
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "rows.csv").write_text("n,text\n" + "".join(f"{row['n']},{row['text']}\n" for row in rows))
    (base / "lines.txt").write_text("".join(f"{row['text']}\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), base / "rows.parquet")
    scores = pa.table({"key": [str(n) for n in range(ROWS)], "score": [n / ROWS for n in range(ROWS)]})
    pq.write_table(scores, base / "scores.parquet")
    (base / "functions.py").write_text(FUNCTIONS)
    for rank in range(2):
        times = [{"asked_us": n * 10.0, "received_us": n * 10.0 + 1, "ended_us": n * 10.0 + 9} for n in range(4)]
        steps = [{"epoch": 0, "samples_seen": 8 * n} | one for n, one in enumerate(times, 1)]
        ours = {"format": 1, "rank": rank, "world_size": 2, "clock": "one", "is_cut_off": False, "steps": steps}
        (base / f"trace{rank}.json").write_text(json.dumps({"shardstream": ours, "traceEvents": []}))


COMMANDS: tuple[tuple[str, str], ...] = (
    ("convert --from images", "convert photos images --max-samples 8"),
    ("convert --from files", "convert files stems --from files --max-samples 8"),
    ("convert --from jsonl", "convert rows.jsonl pairs --key n --field text=txt --columns n --max-samples 8"),
    ("convert --from parquet", "convert rows.parquet parquet --columns n --max-samples 7"),
    ("convert --from csv", "convert rows.csv csv"),
    ("convert --from text", "convert lines.txt text"),
    ("convert --from tars", "convert images/*.tar tars"),
    ("convert --format", "convert photos small --image-max-side 8 --format png"),
    ("convert --tokenizer", "convert rows.jsonl tokens --tokenizer bytes"),
    ("copy", "copy pairs copied"),
    ("index", "index copied"),
    ("info", "info images --json"),
    ("ls", "ls pairs --where n>3 --limit 2"),
    ("cat", "cat pairs 7 --field txt"),
    ("verify", "verify images --decode"),
    ("verify of columns", "verify pairs"),
    ("plan", "plan images --dp 2 --batch-size 4"),
    ("plan --who", "plan pairs --dp 2 --batch-size 4 --state state.json --step 1..2 --who"),
    ("plan --when", "plan pairs --dp 2 --batch-size 4 --state state.json --key 7 --when"),
    ("plan --length", "plan tokens --dp 2 --batch-size 2 --length 64"),
    ("plan of a mixture", "plan mixture.json --dp 2 --batch-size 4"),
    ("stats", "stats images"),
    ("stats --html", "stats pairs --html stats.html"),
    ("diff", "diff pairs copied"),
    ("reshard", "reshard pairs sorted --sort n --max-samples 5"),
    ("column add", "column add pairs score --from scores.parquet --on key"),
    ("column list", "column list pairs"),
    ("field list", "field list pairs"),
    ("view save", "view save pairs best --where score>=0.5"),
    ("view list", "view list pairs"),
    ("map", "map pairs mapped functions:shorter --workers 2"),
    ("export --to dali", "export images dali --to dali"),
    ("export --to wids", "export images wids --to wids"),
    ("export --to energon", "export images images --to energon --split train=*"),
    ("export --to card", "export images images --to card --split train=*"),
    ("export --to parquet", "export images exported --to parquet"),
    ("export --to hf", "export pairs hf --to hf"),
    ("convert --from hf", "convert hf/data back --from parquet"),
    ("clean", "clean pairs"),
    ("append", "append files stems"),
    ("dedupe", "dedupe pairs --by key"),
    ("split", "split images parts/train=70% parts/val=30%"),
    ("delete", "delete pairs --where n>35"),
    ("version tag", "version tag stems v1"),
    ("version list", "version list stems"),
    ("version show", "version show stems v1"),
    ("version diff", "version diff stems v1"),
    ("version prune", "version prune stems"),
    ("repair", "repair images --to mended"),
    ("show --html", "show pairs --html pages.html"),
    ("trace merge", "trace merge trace0.json trace1.json --out merged.json"),
    ("bench", "bench images --seconds 0.2"),
)


def from_python() -> dict[str, Callable[[], object]]:
    """What users call from Python."""
    import functions  # which was just written

    import shard_tools
    import streaming

    def by_number() -> None:
        dataset = streaming.StreamingDataset("images")
        assert len(dataset) == ROWS
        assert dataset[3]["jpg"].shape[2] == 3
        mixture = streaming.Mixture({"a": dataset, "b": streaming.StreamingDataset("tars")})
        assert len(mixture) == 2 * ROWS

    def write() -> None:
        with shard_tools.ShardWriter("written/{:06d}.tar") as writer:
            writer.write({"__key__": "a", "json": {"n": 1}})

    def select() -> None:
        assert shard_tools.select(functions.is_long, "pairs", "long", fields=["txt"])

    def optimize() -> None:
        report = shard_tools.optimize(functions.sample_of, list(range(9)), "made", workers=2)
        assert report.num_samples == 9

    return {"StreamingDataset": by_number, "ShardWriter": write, "select": select, "optimize": optimize}


def state() -> dict[str, Any]:
    """The state of a run that has seen 16 samples, as a loader, which needs torch, saves it."""
    from streaming import StreamingDataset
    from streaming.order.plan.order import OrderSettings
    from streaming.order.plan.state import LoaderState

    order = OrderSettings(seed=0, lanes=4, window=8)
    fingerprint = StreamingDataset("pairs").fingerprint
    return LoaderState(epoch=0, samples_seen=16, order=order, fingerprint=fingerprint, num_samples=ROWS).to_dict()


def run(base: Path) -> dict[str, str]:
    """Take each step, in ``base``, and return what became of it; "": it is done."""
    os.chdir(base)
    sys.path.insert(0, str(base))
    sources = {"lines": {"url": "text"}, "pairs": {"url": "pairs"}}
    Path("mixture.json").write_text(json.dumps({"sources": sources}))
    said = {}
    for name, command in COMMANDS:
        if name == "plan --who":
            Path("state.json").write_text(json.dumps(state()))
        is_there = name not in NEEDS or find_spec(NEEDS[name]) is not None
        said[name] = done(command) if is_there else f"not run: no {NEEDS[name]}"
    for name, call in from_python().items():
        try:
            call()
            said[name] = ""
        except Exception as error:
            said[name] = repr(error)
    return said


def done(command: str) -> str:
    """Run a command line and return what failed; "" if nothing did."""
    from click.testing import CliRunner

    from shard_tools.cli import cli

    result: Any = CliRunner().invoke(cli, command.split(), prog_name="shard_tools")
    if result.exit_code == 2 and result.output.endswith(REFUSED):
        return result.output.strip()
    return "" if result.exit_code == 0 else f"exit {result.exit_code}: {result.output} {result.exception!r}"


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    make(folder)
    print(json.dumps({"steps": run(folder), "torch": "torch" in sys.modules}))
