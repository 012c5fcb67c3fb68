"""Sets of Hugging Face, written by its library: saved ones and those of local builders; times and decimals of Arrow."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from shard_tools.cli import cli
from shard_tools.make.convert import ConvertOptions, convert
from streaming import StreamingDataset
from streaming.errors import ConfigError, DataError, NotFoundError
from tests.support.sources.conversions import members
from tests.support.sources.foreign_sets import hf, picture, write_sound

pytestmark = pytest.mark.thorough

HF = ConvertOptions(kind="hf")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="shard_tools")


def rows(target: Path) -> list[dict[str, Any]]:
    return [json.loads(body) for name, body in members(target).items() if name.endswith(".json")]


FEATURES = datasets.Features(
    {
        "image": datasets.Image(),
        "sound": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
        "label": datasets.ClassLabel(names=["zebra", "ant"]),
        "tokens": datasets.Sequence(datasets.Value("int16")),
        "grid": datasets.Array2D((2, 3), "float32"),
        "spans": [{"start": datasets.Value("int32"), "text": datasets.Value("string")}],
        "day": datasets.Value("date32"),
        "at": datasets.Value("timestamp[ns, tz=UTC]"),
        "price": datasets.Value("decimal128(8, 2)"),
        "note": datasets.Value("string"),
    }
)


def every_feature(tmp_path: Path, count: int = 4) -> datasets.Dataset:
    write_sound(tmp_path / "a.wav", 0.1)
    sound = (tmp_path / "a.wav").read_bytes()
    return datasets.Dataset.from_list(
        [
            {
                "image": {"bytes": picture(number), "path": "x.jpg"},
                "sound": {"bytes": sound, "path": None},
                "label": number % 2,
                "tokens": list(range(number)),
                "grid": [[number, 1, 2], [3, 4, 5]],
                "spans": [{"start": 1, "text": "x"}],
                "day": dt.date(2024, 2, 29),
                "at": dt.datetime(2024, 2, 29, 12, 0, 0, 5, dt.UTC),
                "price": decimal.Decimal("1.50"),
                "note": None if number == 2 else f"n{number}",
            }
            for number in range(count)
        ],
        features=FEATURES,
    ).cast_column("sound", datasets.Audio())


def test_every_feature_keeps_its_type(tmp_path: Path) -> None:
    every_feature(tmp_path).save_to_disk(str(tmp_path / "in"))
    report = convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert (report.kind, report.num_samples, report.classes) == ("hf", 4, {"zebra": 0, "ant": 1})
    assert report.classes_from == "the column 'label'"
    found = members(tmp_path / "out")
    assert found["000000001.image.jpg"] == picture(1)
    assert found["000000001.sound.wav"] == (tmp_path / "a.wav").read_bytes()
    arrays = {
        name: np.load(io.BytesIO(found[f"000000003.{name}.npy"]), allow_pickle=False) for name in ("tokens", "grid")
    }
    assert (arrays["tokens"].dtype, arrays["tokens"].tolist()) == (np.int16, [0, 1, 2])
    assert (arrays["grid"].dtype, arrays["grid"].shape) == (np.float32, (2, 3))
    told = rows(tmp_path / "out")
    assert told[3] == {
        "label": 1, "spans": [{"start": 1, "text": "x"}], "day": "2024-02-29",
        "at": "2024-02-29T12:00:00.000005+00:00", "price": "1.50", "note": "n3",
    }  # fmt: skip
    assert told[2]["note"] is None
    journal = json.loads((tmp_path / "out/_shardstream/convert.json").read_text())
    assert all(journal["fields"].values()), journal["fields"]
    assert len(StreamingDataset(str(tmp_path / "out"), where="label = 1")) == 2
    assert run("verify", tmp_path / "out", "--decode").exit_code == 0
    options = ConvertOptions(fields=(("label", "cls"), ("note", "txt")))
    assert convert(str(tmp_path / "in"), str(tmp_path / "named"), options=options).num_samples == 4
    assert members(tmp_path / "named")["000000001.cls"] == b"1"


def test_translations_are_json(tmp_path: Path) -> None:
    pairs = {"pair": [{"de": "ä", "en": "a"}]}
    features = datasets.Features({"pair": datasets.Translation(["de", "en"])})
    datasets.Dataset.from_dict(pairs, features=features).save_to_disk(str(tmp_path / "in"))
    convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert rows(tmp_path / "out") == [{"pair": {"de": "ä", "en": "a"}}]


def test_the_same_as_the_same_table_in_parquet(tmp_path: Path) -> None:
    saved = every_feature(tmp_path).remove_columns(["grid"])
    saved.save_to_disk(str(tmp_path / "in"), num_shards=3)
    saved.to_parquet(str(tmp_path / "in.parquet"))
    for source in ("in", "in.parquet"):
        convert(str(tmp_path / source), str(tmp_path / f"{source}.out"))
    assert members(tmp_path / "in.out") == members(tmp_path / "in.parquet.out")


def test_a_split_of_a_dict_is_chosen(tmp_path: Path) -> None:
    parts = {"train": datasets.Dataset.from_dict({"n": [1, 2]}), "test": datasets.Dataset.from_dict({"n": [3]})}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "in"))
    refused = run("convert", tmp_path / "in", tmp_path / "out")
    assert "hf with several splits; take one with --source-split: test, train" in refused.stderr
    assert run("convert", tmp_path / "in", tmp_path / "out", "--source-split", "test").exit_code == 0
    assert rows(tmp_path / "out") == [{"n": 3}]
    alone = run("convert", tmp_path / "in" / "train", tmp_path / "alone")
    assert alone.exit_code == 0
    assert "is one split, saved by itself" in run(
        "convert", tmp_path / "in" / "train", tmp_path / "x", "--source-split", "test"
    ).stderr  # fmt: skip
    assert "a saved set, which has none" in run(
        "convert", tmp_path / "in" / "train", tmp_path / "x", "--source-config", "c"
    ).stderr  # fmt: skip


def test_rows_selected_and_shuffled_are_saved_in_their_order(tmp_path: Path) -> None:
    chosen = datasets.Dataset.from_dict({"n": list(range(100))}).shuffle(seed=1).select(range(20))
    chosen.save_to_disk(str(tmp_path / "in"))
    convert(str(tmp_path / "in"), str(tmp_path / "out"))
    assert [row["n"] for row in rows(tmp_path / "out")] == chosen["n"][:]


def test_documents_are_tokenized(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["ab", "c"]}).save_to_disk(str(tmp_path / "in"))
    result = run("convert", tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes")
    assert result.exit_code == 0, result.output
    assert StreamingDataset(str(tmp_path / "out"), shuffle=False)[0]["tok"].tolist()[1:3] == [97, 98]


# ----------------------------------------------------------------------------------------------- hostile folders


def damaged(tmp_path: Path, **changes: object) -> str:
    hf(tmp_path / "in", 6)
    path = tmp_path / "in/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return str(tmp_path / "in")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_data_files": [{"filename": "../../etc/passwd"}]}, "expected files in this folder"),
        ({"_data_files": [{"filename": ".."}]}, "expected files in this folder"),
        ({"_data_files": [{"filename": 3}]}, "expected files in this folder"),
        ({"_data_files": []}, "expected files in this folder"),
        ({"_data_files": ["x"]}, "expected files in this folder"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
    ],
)
def test_state_that_leads_elsewhere_is_refused(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        convert(damaged(tmp_path, **changes), str(tmp_path / "out"))
    assert "state.json" in str(caught.value)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    source = damaged(tmp_path)
    for name, content in (("state.json", "{"), ("state.json", "[]"), ("dataset_dict.json", '{"splits": ["../x"]}')):
        (tmp_path / "in" / name).write_text(content)
        with pytest.raises(DataError, match=name):
            convert(source, str(tmp_path / "out"))


@pytest.mark.parametrize("cut", [1, 8, 9, 500, 100_000])
def test_an_arrow_file_that_was_cut(tmp_path: Path, cut: int) -> None:
    source = damaged(tmp_path)
    file = tmp_path / "in/data-00001-of-00002.arrow"
    data = file.read_bytes()
    file.write_bytes(data[: max(0, len(data) - cut)])
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: .*ends early"):
        convert(source, str(tmp_path / "out"))


def test_flipped_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    """Offsets that lead out of a batch must not be followed."""
    source = damaged(tmp_path)
    file = tmp_path / "in/data-00000-of-00002.arrow"
    data = bytearray(file.read_bytes())
    refused = 0
    for at in range(16, len(data) - 8, max(1, len(data) // 60)):
        changed = bytearray(data)
        changed[at] ^= 0xFF
        file.write_bytes(changed)
        try:
            convert(source, str(tmp_path / "out"), options=ConvertOptions(overwrite=True, workers=1))
        except (DataError, ConfigError):
            refused += 1
    assert refused > 0


# ------------------------------------------------------------------------------------------------------ builders


def test_local_builders_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"n": [1, 2], "text": ["a", "b"]}), tmp_path / "in/train-0.parquet")
    pq.write_table(pa.table({"n": [3], "text": ["c"]}), tmp_path / "in/test-0.parquet")
    result = run("convert", tmp_path / "in", tmp_path / "out", "--from", "hf", "--source-split", "train")
    assert result.exit_code == 0, result.output
    assert rows(tmp_path / "out") == [{"n": 1, "text": "a"}, {"n": 2, "text": "b"}]
    again = run("convert", tmp_path / "in", tmp_path / "out", "--from", "hf", "--source-split", "train")
    assert again.exit_code == 0
    (tmp_path / "pictures/cat").mkdir(parents=True)
    (tmp_path / "pictures/dog").mkdir()
    (tmp_path / "pictures/cat/1.jpg").write_bytes(picture(1))
    (tmp_path / "pictures/dog/2.jpg").write_bytes(picture(2))
    report = convert(str(tmp_path / "pictures"), str(tmp_path / "images"), options=HF)
    assert (report.num_samples, report.classes) == (2, {"cat": 0, "dog": 1})
    assert members(tmp_path / "images")["000000000.jpg"] == picture(1)


def test_no_code_of_a_set_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (folder / "data.pkl").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(ConfigError, match=r"--from hf .*evil"):
        convert(str(folder), str(tmp_path / "out"), options=HF)
    assert not (tmp_path / "ran").exists()
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a.pickle"))
    (tmp_path / "tars").mkdir()
    (tmp_path / "in.tar").rename(tmp_path / "tars/in.tar")
    with pytest.raises(ConfigError, match=r"made by .*webdataset.*, which is not run"):
        convert(str(tmp_path / "tars"), str(tmp_path / "out"), options=HF)


def test_names_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--from hf no-such-set: datasets cannot make it"):
        convert("no-such-set", str(tmp_path / "out"), options=HF)
    with pytest.raises(NotFoundError, match=r"no state\.json or dataset_dict\.json"):
        convert("memory://nothing/there/", str(tmp_path / "out"), options=HF)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'shardstream\[hf\]'"):
        convert("no-such-set", str(tmp_path / "out"), options=HF)


# -------------------------------------------------------------------------------------- dates, times and decimals

STAMP = 1_700_000_000
VALUES: list[tuple[str, Any, Any]] = [
    ("s", pa.array([STAMP], pa.timestamp("s")), "2023-11-14T22:13:20"),
    ("ms", pa.array([STAMP * 1000 + 5], pa.timestamp("ms")), "2023-11-14T22:13:20.005000"),
    ("us_zone", pa.array([STAMP * 10**6], pa.timestamp("us", "Europe/Berlin")), "2023-11-14T23:13:20+01:00"),
    ("us_offset", pa.array([STAMP * 10**6], pa.timestamp("us", "+05:30")), "2023-11-15T03:43:20+05:30"),
    ("ns", pa.array([STAMP * 10**9], pa.timestamp("ns")), "2023-11-14T22:13:20"),
    ("ns_fine", pa.array([STAMP * 10**9 + 7], pa.timestamp("ns")), "2023-11-14T22:13:20.000000007"),
    ("ns_zone", pa.array([-1], pa.timestamp("ns", "Europe/Berlin")), "1970-01-01T00:59:59.999999999+01:00"),
    ("day", pa.array([dt.date(2024, 2, 29)]), "2024-02-29"),
    ("day64", pa.array([86_400_000], pa.date64()), "1970-01-02"),
    ("time", pa.array([1], pa.time64("us")), "00:00:00.000001"),
    ("time_fine", pa.array([1], pa.time64("ns")), "00:00:00.000000001"),
    ("took", pa.array([1_500_000], pa.duration("us")), 1.5),
    ("took_ns", pa.array([1_500_000_001], pa.duration("ns")), 1.500000001),
    ("price", pa.array([decimal.Decimal("1.50")]), "1.50"),
    ("prices", pa.array([[decimal.Decimal("1.50"), None]]), ["1.50", None]),
    ("times", pa.array([[7, None, 0]], pa.list_(pa.timestamp("ns"))),
     ["1970-01-01T00:00:00.000000007", None, "1970-01-01T00:00:00"]),
    ("fixed", pa.array([[7, 8]], pa.list_(pa.duration("ns"), 2)), [7e-09, 8e-09]),
    ("inner", pa.array([{"at": 7, "price": decimal.Decimal(2)}],
                       pa.struct([("at", pa.timestamp("ns")), ("price", pa.decimal128(4, 1))])),
     {"at": "1970-01-01T00:00:00.000000007", "price": "2.0"}),
    ("spread", pa.array([[("a", decimal.Decimal(1))]], pa.map_(pa.string(), pa.decimal128(3, 1))), [["a", "1.0"]]),
    ("nothing", pa.array([None], pa.timestamp("ns")), None),
]  # fmt: skip


WITHOUT_PANDAS = """
import sys
class NoPandas:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, NoPandas())
from shard_tools.make.convert import convert
convert(*sys.argv[1:])
"""


@pytest.mark.parametrize("without_pandas", [False, True])
def test_times_and_decimals_are_text_and_numbers(tmp_path: Path, *, without_pandas: bool) -> None:
    pq.write_table(pa.table({name: array for name, array, _ in VALUES}), tmp_path / "in.parquet")
    if without_pandas:
        paths = [str(tmp_path / "in.parquet"), str(tmp_path / "out")]
        subprocess.run([sys.executable, "-c", WITHOUT_PANDAS, *paths], check=True)
    else:
        columns = tuple(name for name, _, value in VALUES if isinstance(value, (str, float)))
        convert(str(tmp_path / "in.parquet"), str(tmp_path / "out"), options=ConvertOptions(columns=columns))
        where = "ns_fine = '2023-11-14T22:13:20.000000007' and took_ns > 1.5 and day >= '2024-02-01' and price = '1.50'"
        assert len(StreamingDataset(str(tmp_path / "out"), where=where)) == 1
    assert rows(tmp_path / "out") == [{name: value for name, _, value in VALUES}]


def test_times_beyond_python_are_refused_by_name(tmp_path: Path) -> None:
    for number, kind in enumerate((pa.timestamp("s"), pa.date32())):
        when = pa.array([2**31 - 1 if number else 10**15], kind)
        pq.write_table(pa.table({"n": [1], "when": when}), tmp_path / "a.pq")
        with pytest.raises(DataError, match=r"a\.pq, row group 0: column 'when', .*years 1 to 9999"):
            convert(str(tmp_path / "a.pq"), str(tmp_path / "out"))
