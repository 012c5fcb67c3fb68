"""Tables that hold token ids already become packs: ``convert --tokens-field``; arrays are refused by name."""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.make.tokens import TokenizeOptions, tokenize
from streaming import DataLoader, Packed, StreamingDataset
from streaming.errors import ConfigError, DataError
from tests.support.sets.index_files import change_document
from tests.support.sets.meanings import schema_of

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(6)
IDS = [RNG.integers(0, 50_000, RNG.integers(1, 300)).tolist() for _ in range(60)]
MASKS = [RNG.integers(0, 2, len(ids)).tolist() for ids in IDS]
LABELS = [[token if said else -100 for token, said in zip(*pair, strict=True)] for pair in zip(IDS, MASKS, strict=True)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def parquet(path: Path, kind: pa.DataType | None = None, **columns: object) -> Path:
    ids = pa.array(IDS, pa.list_(kind or pa.int64()))
    pq.write_table(pa.table({"input_ids": ids, "mask": MASKS, "labels": LABELS, **columns}), path, row_group_size=25)
    return path


def jsonl(path: Path) -> Path:
    rows = ({"input_ids": ids, "mask": mask} for ids, mask in zip(IDS, MASKS, strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tar(path: Path) -> Path:
    with ShardWriter(str(path / "{:d}.tar")) as writer:
        for number, (ids, mask) in enumerate(zip(IDS, MASKS, strict=True)):
            fields = {"input_ids.npy": np.array(ids, np.int32), "mask.npy": np.array(mask, bool)}
            writer.write({"__key__": f"{number:09d}", "json": {"input_ids": ids, "mask": mask}, **fields})
    return path


def tokens_of(target: Path) -> list[list[int]]:
    dataset = StreamingDataset(str(target))
    return [dataset[number]["tok"].tolist() for number in range(len(dataset))]


@pytest.mark.parametrize(
    ("kind", "ids", "mask"),
    [
        ("parquet", "input_ids", "mask"), ("parquet", "input_ids", "labels"), ("jsonl", "input_ids", "mask"),
        ("tar", "input_ids.npy", "mask.npy"), ("tar", "json.input_ids", "json.mask"),
    ],
)  # fmt: skip
def test_a_tokenized_table_becomes_packs(tmp_path: Path, kind: str, ids: str, mask: str) -> None:
    source = {"parquet": parquet, "jsonl": jsonl, "tar": tar}[kind](tmp_path / f"in.{kind}")
    report = run("convert", source, tmp_path / "out", "--tokens-field", ids, "--mask-field", mask, "--json")
    assert report.exit_code == 0, report.output
    told = json.loads(report.stdout)
    assert (told["dtype"], told["masked"], told["sets"][0]["num_tokens"]) == ("uint32", True, sum(map(len, IDS)))
    assert tokens_of(tmp_path / "out") == IDS
    packs = Packed(StreamingDataset(str(tmp_path / "out")), 512, mask_field="mask")
    assert (packs.counts.documents, packs.counts.tokens) == (60, sum(map(len, IDS)))
    seen: dict[str, list[int]] = {}
    with DataLoader(packs, batch_size=1, num_workers=0, last_batch="partial") as loader:
        for batch in loader:
            for number, key in enumerate(batch["__key__"][0]):
                here = batch["document_ids"][0] == number
                seen[key] = batch["labels"][0][here].tolist()
    assert len(seen) == 60
    for number, labels in enumerate(LABELS):
        assert seen[f"{number:09d}"] == [-100, *labels[1:]]
    assert run("verify", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        (pa.uint16(), (), "uint16"),
        (pa.int32(), (), "uint32"),
        (pa.int64(), ("--tokenizer", "{}"), "uint16"),
    ],
)  # fmt: skip
def test_the_width_is_that_of_the_column_or_of_the_tokenizer(
    tmp_path: Path, kind: pa.DataType, options: tuple[str, ...], dtype: str
) -> None:
    (tmp_path / "ranks.tiktoken").write_text("".join(f"{_base64(number)} {number}\n" for number in range(50_000)))
    named = [option.format(tmp_path / "ranks.tiktoken") for option in options]
    more = ["--pattern", ".", "--eos", "50001"] if named else ["--bos", "7"]
    source = parquet(tmp_path / "in.parquet", kind)
    result = run("convert", source, tmp_path / "out", "--tokens-field", "input_ids", *named, *more)
    assert result.exit_code == 0, result.output
    said = schema_of(tmp_path / "out").fields["tok"]
    assert said.tokens
    assert (said.dtype, said.tokens.tokenizer is None, said.tokens.mask) == (dtype, not named, "")
    assert tokens_of(tmp_path / "out") == [[*ids, 50_001] if named else [7, *ids] for ids in IDS]


def _base64(number: int) -> str:
    return base64.b64encode(number.to_bytes(3, "big") if number > 255 else bytes([number])).decode()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"ids": [1, -2]}, "id out of range: token 1 is -2"),
        ({"ids": [1, 2**32]}, "id out of range: token 1 is 4294967296"),
        ({"ids": [1.5]}, "not token ids: 'ids' is an array [1] of float64"),
        ({"ids": [1, None]}, "not token ids"),
        ({"ids": [[1], [2]]}, "not token ids"),
        ({"ids": "a text"}, "not token ids"),
        ({"ids": 3}, "not token ids: 'ids' is of type int"),
        ({"ids": [1, 2], "m": [1]}, "bad mask: 'm' has 1 entries for 2 tokens"),
        ({"ids": [5, 6], "m": [6, -100]}, "bad mask: 'm' holds 6 at token 0, which is 5"),
        ({"ids": [5, 6], "other": 1}, "missing field"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_ids_is_an_error_that_names_it_or_is_counted(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    masked = "m" in row or "other" in row
    good = {"ids": [3, 4], **({"m": [0, 1]} if masked else {})}
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(one) for one in (good, row, good)) + "\n")
    options = TokenizeOptions(tokens_field="ids", mask_field="m" if masked else None)
    with pytest.raises(DataError, match=r"in\.jsonl:2.*document 1: ") as caught:
        tokenize(str(tmp_path / "in.jsonl"), str(tmp_path / "out"), options=options)
    assert said in str(caught.value)
    skip = TokenizeOptions(tokens_field="ids", mask_field=options.mask_field, on_error="skip")
    report = tokenize(str(tmp_path / "in.jsonl"), str(tmp_path / "skip"), options=skip)
    assert (report.sets[0].num_documents, sum(report.sets[0].rejected.values())) == (2, 1)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    source, out = parquet(tmp_path / "in.parquet"), tmp_path / "out"
    ids = ("--tokens-field", "input_ids")
    for options, said in (
        ((*ids, "--text-field", "text"), "--text-field and --tokens-field"),
        (("--mask-field", "mask"), "--mask-field applies to tokens"),
        (("--mask-field", "mask", "--tokenizer", "bytes"), "--mask-field is the mask of --tokens-field"),
        ((*ids, "--chat-template", "x"), "--chat-template"),
        ((*ids, "--pattern", "x"), "--pattern"),
        ((*ids, "--documents", "file"), "--documents file"),
        ((*ids, "--eos", "</s>"), "expected an id below"),
        ((*ids, "--engine", "ray"), "nothing to encode"),
        ((*ids, "--classes", "a,b"), "--classes"),
        (("--tokens-field", "input_id"), "no column 'input_id'"),
        ((*ids, "--mask-field", "masks"), "no column 'masks'"),
        ((*ids, "--tokenizer", "bytes"), "id out of range"),
    ):
        result = run("convert", source, out, *options)
        assert result.exit_code in {1, 2}
        assert said in result.stderr, result.stderr
    assert not list(out.glob("*.tar"))


def test_splits_resumes_and_kept_columns_are_as_with_a_tokenizer(tmp_path: Path) -> None:
    source = parquet(tmp_path / "in.parquet", doc=[f"d{number}" for number in range(60)])
    named = ("--tokens-field", "input_ids", "--keep", "doc", "--columns", "doc", "--max-samples", "10")
    assert run("convert", source, tmp_path / "split", *named, "--split", "val=30%").exit_code == 0
    train, val = (tokens_of(tmp_path / "split" / name) for name in ("train", "val"))
    assert len(val) > 5
    assert sorted(train + val) == sorted(IDS)
    assert run("convert", source, tmp_path / "out", *named).exit_code == 0
    assert len(StreamingDataset(str(tmp_path / "out"), where="doc = 'd7' and tokens > 0")) == 1
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")}
    journal = tmp_path / "out" / "_shardstream" / "convert.json"
    change_document(journal, complete=False)
    (tmp_path / "out" / "000004.tar").unlink()
    again = run("convert", source, tmp_path / "out", *named)
    assert "continued after 30 documents" in again.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tar")} == whole


@pytest.mark.parametrize("name", ["input_ids.npy", "x.npz", "json", "a.msgpack", "t.safetensors"])
def test_packs_refuse_fields_that_have_a_header(tmp_path: Path, name: str) -> None:
    """The error of the inference advised dtype="uint16", and packs then held the header of .npy as tokens."""
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns={"tokens": "json.n"}) as writer:
        for number in range(4):
            body = json.dumps({"n": 64}) if name == "json" else np.arange(64, dtype="<u2").tobytes()
            writer.write({"__key__": str(number), name: body, "json": {"n": 64}, "tok": bytes(128)})
    documents = StreamingDataset(str(tmp_path))
    for options in ({"field": name}, {"field": name, "dtype": "uint16"}, {"mask_field": name}):
        with pytest.raises(ConfigError, match=rf"{next(iter(options))}='{name}': a \.{name.rpartition('.')[2]} field"):
            Packed(documents, 128, **options)  # type: ignore[arg-type]


def test_a_type_that_the_sizes_contradict_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ShardWriter(str(tmp_path / "{:d}.tar"), columns={"tokens": "json.n"}) as writer:
        writer.write({"__key__": "a", "json": {"n": 64}, "tok": np.arange(64, dtype="<i8").tobytes()})
    documents = StreamingDataset(str(tmp_path))
    with pytest.raises(ConfigError, match=r"8 bytes for each token.*such as int64"):
        Packed(documents, 64)
    with caplog.at_level(logging.WARNING):
        Packed(documents, 64, dtype="uint32")
    assert "field 'tok' has 8 bytes for each token of column 'tokens', but dtype='uint32' has 4" in caplog.text


def test_a_column_counts_the_tokens_with_loss_where_there_is_a_mask(tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "in.jsonl"), tmp_path / "out"
    assert run("convert", source, out, "--tokens-field", "input_ids", "--mask-field", "mask").exit_code == 0
    counts = Counter(sum(mask) for mask in MASKS)
    assert {n: len(StreamingDataset(out, where=f"num_labels = {n}")) for n in counts} == counts
    packed = Packed(StreamingDataset(out), 512, mask_field="mask")
    with DataLoader(packed, batch_size=8, balance="local", cost="num_labels", last_batch="partial") as loader:
        for batch in loader:
            labels = [sum(sum(MASKS[int(key)]) for key in keys) for keys in batch["__key__"]]
            assert labels == sorted(labels, reverse=True)
    assert run("convert", source, tmp_path / "plain", "--tokens-field", "input_ids").exit_code == 0
    with pytest.raises(ConfigError, match="no column 'num_labels'"):
        StreamingDataset(tmp_path / "plain", where="num_labels = 1")
