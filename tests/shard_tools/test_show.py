"""``show``: what each page answers, over every kind of set, against what training reads; ranges, searches, one file."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
import wave
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.show.base import samples
from shard_tools.look.show.data import gallery
from shard_tools.look.show.find import arranged
from streaming import Schedule, StreamingDataset
from streaming.storage import Storage
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.servers.show_pages import Shown
from tests.support.sets.meanings import say_classes

pytestmark = pytest.mark.thorough

COUNT = 300
LANGS = ("en", "de", None, "fr")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["show", *map(str, arguments)], prog_name="shard_tools")


def jpeg(width: int, height: int, shade: int = 0) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (shade % 256, 120, 40)).save(out, "JPEG")
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def sound(frames: int = 4000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(2 * frames))
    return out.getvalue()


def one_of(number: int) -> dict[str, Any]:
    lang = LANGS[number % len(LANGS)]
    made: dict[str, Any] = {
        "__key__": f"{number:06d}", "txt": f"text {number} " * (number % 7 + 1), "cls": number % 2,
        "json": {"number": number, "annotations": [{"bbox": [2, 3, 10, 12], "category_id": 1}]},
        "tokens": number * 7 % 501,
    }  # fmt: skip
    made |= {"lang": lang} if lang else {}
    if number % 3 == 0:
        made["jpg"] = jpeg(40 + number % 5, 30, number)
    if number == 4:
        made |= {"wav": sound(), "npy": npy(np.arange(600, dtype=np.float32).reshape(20, 30)), "pkl": b"\x80\x04N."}
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("show") / "d"
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=64, columns=("tokens", "lang")) as writer:
        for number in range(COUNT):
            writer.write(one_of(number))
    say_classes(folder, {"cls": ["cat", "dog"]})
    done = CliRunner().invoke(cli, ["column", "add", str(folder), "late", "--lift", "json.number"])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def shown(data: Path) -> Iterator[Shown]:
    with Shown((str(data),)) as found:
        yield found


def keys(answer: Any) -> list[str]:
    return [row["key"] for row in answer["rows"]]


# ------------------------------------------------------------------------------------------------------------ samples


def test_the_gallery_pages_through_all_samples_by_number(shown: Shown, data: Path) -> None:
    dataset = StreamingDataset(str(data), decode=None)
    found: list[Any] = []
    for page in range(COUNT // gallery.PER_PAGE + 2):
        answer = shown.json("/", page=page)
        assert answer["total"] == COUNT
        assert answer["more"] == ((page + 1) * gallery.PER_PAGE < COUNT)
        found += answer["rows"]
    assert [row["number"] for row in found] == list(range(COUNT))
    assert [row["key"] for row in found] == [f"{number:06d}" for number in range(COUNT)]
    for number in (0, 4, 63, 64, 299):
        sample, row = dataset[number], found[number]
        assert (row["key"], row["shard"]) == (sample["__key__"], sample["__url__"])
        assert row["fields"].keys() == {name for name in sample if not name.startswith("__")}
        assert row["fields"]["txt"]["bytes"] == len(sample["txt"])
        assert row["fields"]["cls"]["class"] == ("cat", "dog")[number % 2]
        assert row["columns"] == {"tokens": number * 7 % 501, "lang": LANGS[number % 4], "late": number}
    assert {name: one["kind"] for name, one in found[4]["fields"].items()} == {
        "txt": "text", "cls": "class", "json": "json", "tokens": "bytes", "lang": "bytes", "wav": "audio",
        "npy": "tensor", "pkl": "pickle",
    }  # fmt: skip


def test_html_and_json_say_the_same(shown: Shown) -> None:
    html = shown.get("/", page=1).text
    for row in shown.json("/", page=1)["rows"]:
        assert f'<a href="/sample?number={row["number"]}" data-open>{row["key"]}</a>' in html
    assert shown.get("/").text.count('loading="lazy"') == gallery.PER_PAGE // 3 + 2  # an array, and a waveform


@pytest.mark.parametrize("where", ["tokens > 250", "lang = 'de' AND late >= 100", "lang IS NULL", "tokens = -1"])
def test_a_condition_finds_what_training_would_keep(shown: Shown, data: Path, where: str) -> None:
    expected: list[str] = []
    if where != "tokens = -1":
        expected = [sample["__key__"] for sample in StreamingDataset(str(data), where=where, decode=None)]
    found, page = list[str](), 0
    while True:
        answer = shown.json("/", where=where, page=page, size=37)
        assert answer["total"] == len(expected)
        found += keys(answer)
        page += 1
        if not answer["more"]:
            break
    assert found == expected


def test_keys_are_found_by_the_index_whole_or_by_their_beginning(shown: Shown) -> None:
    assert keys(shown.json("/", key="000123")) == ["000123"]
    assert keys(shown.json("/", key="00012*")) == [f"00012{digit}" for digit in range(10)]
    assert keys(shown.json("/", key="00012*", where="tokens < 340")) == [
        f"{number:06d}" for number in range(120, 130) if number * 7 % 501 < 340
    ]
    assert shown.json("/", key="nobody")["total"] == 0
    assert "No sample matches" in shown.get("/", key="it's \" <b>").text


def test_a_search_of_a_large_set_goes_on_where_it_was(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "FEW_SAMPLES", 10)
    monkeypatch.setattr(samples, "SEARCH_SECONDS", 0.0)
    with Shown((str(data),)) as shown:
        answer = shown.json("/", where="late >= 299")
        assert (answer["total"], answer["rows"]) == (None, [])
        assert answer["progress"].startswith("looked at 0 of 5 shards")
        monkeypatch.setattr(samples, "SEARCH_SECONDS", PATIENCE_S)
        first = shown.json("/", where="late < 299", size=10)
        assert [row["number"] for row in first["rows"]] == list(range(10))
        assert keys(shown.json("/", where="late >= 299")) == ["000299"]
        assert shown.json("/", where="late >= 299")["total"] == 1


def test_a_view_and_a_range_are_shown_as_training_sees_them(data: Path) -> None:
    options = {"where": "tokens > 100", "subset": "10%..90%"}
    dataset = StreamingDataset(str(data), where="tokens > 100", subset=(0.1, 0.9), decode=None)
    with Shown((str(data),), options) as shown:
        answer = shown.json("/", page=1)
        assert answer["total"] == len(dataset)
        for row in answer["rows"]:
            assert row["key"] == dataset[row["number"]]["__key__"]
        inner = shown.json("/", where="lang = 'en'", size=200)
        assert keys(inner) == [sample["__key__"] for sample in dataset if sample.get("lang") == b"en"]
        (row,) = shown.json("/", key=inner["rows"][3]["key"])["rows"]
        assert row["number"] == inner["rows"][3]["number"]
        assert shown.get("/", key="000000", format="json").json["total"] == 0  # before the range
        assert shown.get("/sample", number=len(dataset)).status == 404


def test_a_mixture_shows_its_sources_and_packs_their_documents(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mix.json"
    schedule = Schedule.root(0.1, 1.0, over=1000).to_dict()
    sources = {
        "all": str(data), "some": {"url": str(data), "where": "tokens > 400"},
        "inner": {"sources": {"a": {"url": str(data), "subset": [0, 20]}, "b": str(data)}, "weights": {"a": 1, "b": 1}},
        "hard": {"url": str(data), "curriculum": {"metric": "tokens", "schedule": schedule}},
    }  # fmt: skip
    weights = dict.fromkeys(sources, 1.0)
    file.write_text(json.dumps({"sources": sources, "weights": weights}))
    sizes = {"all": COUNT, "hard": COUNT, "inner/a": 20, "inner/b": COUNT}
    sizes["some"] = len(StreamingDataset(str(data), where="tokens > 400"))
    with Shown((str(file),)) as shown:
        answer = shown.json("/")
        assert answer["total"] == sum(sizes.values())
        assert sorted(answer["sources"]) == sorted(sizes)
        for name, size in sizes.items():
            assert shown.json("/", source=name)["total"] == size
        found = [row["source"] for page in range(answer["total"] // 200 + 1)
                 for row in shown.json("/", page=page, size=200)["rows"]]  # fmt: skip
        assert Counter(found) == sizes
        assert Counter(row["source"] for row in shown.json("/", key="000005")["rows"]) == Counter(
            {name: 1 for name in sizes if name != "some"}
        )
        assert shown.json("/columns", source="inner/a")["columns"][0]["samples"] == 20
        assert shown.get("/", source="nobody").status == 400
    with Shown((str(data),), {"packed": {"length": 512, "field": None, "padded": True}}) as shown:
        assert shown.json("/")["total"] == COUNT


def test_sets_of_any_state(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/one/{{:03d}}.tar") as writer:
        writer.write({"__key__": "a b/ü", "txt": "x" * 200_000, "e": b""})
    with Shown((f"{tmp_path}/one",)) as shown:
        (row,) = shown.json("/")["rows"]
        assert (row["fields"]["txt"]["cut"], len(row["fields"]["txt"]["text"])) == (True, 600)
        assert len(shown.json("/sample", key="a b/ü")["fields"]["txt"]["text"]) == 64 << 10
        assert len(shown.get("/value", number=0, field="txt").body) == 200_000
        assert shown.json("/columns") == {"source": "", "read": "all 1 sample", "columns": []}
        assert "column add" in shown.get("/columns").text
        assert shown.get("/value", number=0, field="e").body == b""
    for path in (tmp_path / "one/_shardstream").rglob("*.parquet"):
        path.unlink()
    with Shown((f"{tmp_path}/one",)) as shown:  # read whole, as other tools do
        assert shown.json("/")["total"] == 1
    with ShardWriter(f"{tmp_path}/empty/{{:03d}}.tar"):
        pass
    done = run(tmp_path / "empty", "--port", "0", "--no-browser")
    assert done.exit_code != 0
    writer = ShardWriter(f"{tmp_path}/part/{{:03d}}.tar", max_samples=2)
    for number in range(5):
        writer.write({"__key__": str(number), "txt": "x"})
    done = run(tmp_path / "part", "--port", "0", "--no-browser")
    assert (done.exit_code, "--allow-unfinished" in done.stderr or "allow_unfinished" in done.stderr) == (1, True)
    writer.close()


# ------------------------------------------------------------------------------------------------------------ columns


def test_columns_say_what_brute_force_says(shown: Shown) -> None:
    told = {one["name"]: one for one in shown.json("/columns")["columns"]}
    assert sorted(told) == ["lang", "late", "tokens"]
    tokens = [number * 7 % 501 for number in range(COUNT)]
    assert (told["tokens"]["min"], told["tokens"]["max"], told["tokens"]["missing"]) == (min(tokens), max(tokens), 0)
    assert told["late"] | {"top": None} == {
        "name": "late", "type": "int64", "late": True, "samples": COUNT, "missing": 0, "min": 0, "max": COUNT - 1,
        "p50": 149.5, "mean": 149.5, "distinct": COUNT, "top": None,
    }  # fmt: skip
    assert told["lang"]["missing"] == COUNT // 4
    assert told["lang"]["top"] == [["de", 75], ["en", 75], ["fr", 75]]
    (one,) = shown.json("/columns", name="tokens", where="lang = 'en'")["columns"]
    assert one["samples"] == 75
    assert one["max"] == max(tokens[number] for number in range(0, COUNT, 4))


def links(html: str) -> list[str]:
    return [found.replace("&amp;", "&") for found in re.findall(r'href="(/\?[^"]*)"', html)]


@pytest.mark.parametrize(("most", "is_wide"), [(99.5, False), (101.5, True), (10**6, True)])
def test_an_axis_says_when_it_is_logarithmic(tmp_path: Path, most: float, is_wide: bool) -> None:
    sizes = np.geomspace(1, most, 60)
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar", columns=("size", "other")) as writer:
        for number, size in enumerate(sizes.tolist()):
            writer.write({"__key__": f"{number:03d}", "txt": "x", "size": size, "other": number})
    with Shown((f"{tmp_path}/d",)) as shown:
        for path in ("/overview?whole=1", "/columns", "/columns?name=size", "/columns?name=size&against=other"):
            assert ("logarithmic" in shown.get(path).text) == is_wide, path
        html = shown.get("/columns", name="size").text
        assert (
            re.search(r'aria-label="size: from 1 to [^"]*, logarithmic axis: a bar ends at ', html) is not None
        ) == is_wide
        assert "logarithmic" not in shown.get("/columns", name="other").text


@pytest.mark.thorough
@pytest.mark.parametrize(
    "asked",
    [
        {"name": "tokens"},
        {"name": "lang"},
        {"name": "tokens", "against": "lang"},
        {"name": "tokens", "against": "late"},
    ],
)
def test_a_click_on_each_bar_shows_as_many_samples_as_it_says(shown: Shown, asked: dict[str, str]) -> None:
    """The bars together are all samples with a value, and none is in two."""
    html = shown.get("/columns", where="late >= 20", **asked).text
    found = [link for link in links(html) if "where=" in link]
    totals = {}
    for link in found:
        where = parse_qs(urlsplit(link).query)["where"][0]
        totals[where] = shown.json("/", where=where)["total"]
    of_missing = [total for where, total in totals.items() if where.endswith("IS NULL")]
    crossed = [total for where, total in totals.items() if where.count('"') > 2 and "against" in asked]
    bars = [total for where, total in totals.items() if not where.endswith("IS NULL")]
    if crossed:
        told = shown.json("/columns", where="late >= 20", **asked)["crossed"]
        assert sum(map(sum, told["counts"])) == told["samples"]
    expected = COUNT - 20
    if "against" not in asked:
        assert sum(bars) + sum(of_missing) == expected
    elif asked["against"] == "late":
        cells = [total for where, total in totals.items() if where.count('"late"') == 2]
        assert sum(cells) == expected
    else:
        cells = [total for where, total in totals.items() if "lang" in where and "IS NULL" not in where]
        assert sum(cells) == expected - (COUNT - 20) // 4


def test_of_a_large_set_shards_spread_over_all_are_looked_at(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranged, "MOST_ROWS", 130)
    with Shown((str(data),)) as shown:
        answer = shown.json("/columns", name="late")
    assert answer["read"] == "128 of 300 samples, in 2 of 5 shards spread over all"
    (one,) = answer["columns"]
    assert (one["samples"], one["min"], one["max"]) == (128, 64, 255)


# ------------------------------------------------------------------------------------------------------------- sample


def test_a_sample_says_where_it_is_and_what_is_in_it(shown: Shown, data: Path) -> None:
    told = shown.json("/sample", key="000004", check=1)
    assert told == shown.json("/sample", number=4, check=1)
    with open(told["shard"], "rb") as file:
        shard = file.read()
    start, stop = told["bytes"]
    assert b"000004." in shard[start : start + 512]
    assert told["chunk_bytes"][0] <= start < stop <= told["chunk_bytes"][1]
    assert told["checked"]["wrong"] == ""
    assert told["pictures"]["npy"]["facts"]["arrays"] == [
        {"name": "", "dtype": "float32", "shape": [20, 30], "not_finite": 0, "min": 0.0, "max": 599.0, "mean": 299.5,
         "std": pytest.approx(173.2, abs=0.1), "zeros": 1, "first": [float(one) for one in range(12)]}
    ]  # fmt: skip
    picture = shown.json("/sample", number=3)["pictures"]["jpg"]
    assert picture["facts"] == {"format": "JPEG", "mode": "RGB", "width": 43, "height": 30}
    assert picture["boxes"] == [{"x": 2.0, "y": 3.0, "width": 10.0, "height": 12.0, "label": "dog"}]
    html = shown.get("/sample", number=4).text
    assert "a pickle, which may run code: it is not opened" in html
    assert '<audio controls preload="metadata"' in html
    assert shown.get("/value", number=4, field="pkl").headers["content-disposition"].startswith("attachment")


def test_a_check_finds_a_flipped_bit(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar") as writer:
        for number in range(20):
            writer.write({"__key__": f"{number}", "txt": f"text {number} " * 100})
    shard = tmp_path / "d/000.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"text 7 ") + 5] ^= 1
    shard.write_bytes(data)
    with Shown((f"{tmp_path}/d",)) as shown:
        told = shown.json("/sample", number=7, check=1)["checked"]
        assert "checksum" in told["wrong"].lower() or "crc" in told["wrong"].lower(), told
        assert shown.json("/sample", number=7)["checked"] is None


def test_pictures_are_small_and_upright(shown: Shown) -> None:
    found = shown.get("/value", number=3, field="jpg", view="small")
    assert found.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(found.body)).size == (43, 30)
    found = shown.get("/value", number=4, field="npy", view="small")
    picture = np.asarray(Image.open(io.BytesIO(found.body)))
    assert picture.shape[0] * 30 == picture.shape[1] * 20
    assert (picture[0, 0], picture[-1, -1]) == (0, 255)
    assert shown.get("/value", number=3, field="txt", view="small").status == 404


def test_bytes_are_sent_by_range(shown: Shown) -> None:
    whole = shown.get("/value", number=4, field="wav")
    assert (whole.body, whole.headers["content-type"]) == (sound(), "audio/wav")
    part = shown.get("/value", {"Range": "bytes=10-19"}, number=4, field="wav")
    assert (part.status, part.body, part.headers["content-range"]) == (
        206,
        sound()[10:20],
        f"bytes 10-19/{len(sound())}",
    )
    assert shown.get("/value", {"Range": "bytes=-4"}, number=4, field="wav").body == sound()[-4:]
    assert shown.get("/value", {"Range": "bytes=999999-"}, number=4, field="wav").status == 416


# ---------------------------------------------------------------------------------------------------------------- bad


def test_bad_samples_are_listed_with_the_command_that_leaves_them_out(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "it's"
    with ShardWriter(f"{copy}/{{:03d}}.tar") as writer:
        for number in range(10):
            writer.write({"__key__": f"{number}", "jpg": b"no image" if number in {3, 5} else jpeg(9, 9)})
    listed = tmp_path / "bad.jsonl"
    done = CliRunner().invoke(cli, ["verify", str(copy), "--decode", "--write-bad", str(listed)])
    assert done.exit_code == 1
    with Shown((str(copy),)) as shown:
        (command,) = shown.json("/bad")["commands"]
        assert command.startswith("shard_tools verify ")
    with Shown((str(copy),), {"bad": (str(listed),)}) as shown:
        told = shown.json("/bad")
        assert (told["total"], keys(told), told["stages"]) == (2, ["3", "5"], [["decode", 2]])
        assert shown.get(told["rows"][0]["address"]).status == 200
        (command,) = told["commands"]
        words = subprocess.run(
            ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
        ).stdout
    target = tmp_path / "good"
    parts = [str(target) if word == "TARGET/" else word for word in words.splitlines()[1:]]
    assert CliRunner().invoke(cli, parts).exit_code == 0
    assert len(StreamingDataset(str(target))) == 8


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.thorough
def test_tokens_are_text_where_their_tokenizer_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "Grüße <b>"}\n{"text": "two words"}\n')
    done = CliRunner().invoke(
        cli, ["convert", f"{tmp_path}/d.jsonl", f"{tmp_path}/bytes", "--tokenizer", "bytes", "--text-field", "text"]
    )
    assert done.exit_code == 0, done.output
    with Shown((f"{tmp_path}/bytes",)) as shown:
        assert "Grüße <b>" in shown.json("/")["rows"][0]["fields"]["tok"]["text"]
        html = shown.get("/").text
        assert "&lt;" in html
        assert "<b>Grü" not in html
    words = Tokenizer(models.WordLevel({"two": 0, "words": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    file = tmp_path / "elsewhere/tokenizer.json"
    file.parent.mkdir()
    words.save(str(file))
    done = CliRunner().invoke(
        cli, ["convert", f"{tmp_path}/d.jsonl", f"{tmp_path}/words", "--tokenizer", str(file), "--text-field", "text"]
    )
    assert done.exit_code == 0, done.output
    with Shown((f"{tmp_path}/words",)) as shown:
        assert shown.json("/")["rows"][1]["fields"]["tok"]["text"] == "0 1"
        assert "give it with --tokenizer FILE" in shown.get("/sample", number=1).text
    with Shown((f"{tmp_path}/words",), {"tokenizer": str(file)}) as shown:
        assert shown.json("/")["rows"][1]["fields"]["tok"]["text"] == "twowords"
    other = tmp_path / "other.json"
    other.write_text(file.read_text() + " ")
    for folder in ("words", "bytes"):
        done = run(tmp_path / folder, "--tokenizer", other, "--port", "0", "--no-browser")
        assert done.exit_code == 2
        assert "made no tokens of these sets" in done.stderr


# ------------------------------------------------------------------------------------------------------ store and file


@pytest.fixture
def stored(data: Path, mini_s3: MiniS3Server) -> tuple[str, MiniS3Server]:
    url = mini_s3.create_bucket(fresh_name())
    storage = Storage(mini_s3.storage_options)
    for path in sorted(data.rglob("*")):
        if path.is_file():
            storage.put(f"{url}/{path.relative_to(data)}", path.read_bytes())
    return f"{url}/", mini_s3


def test_hardly_more_is_read_than_is_shown_and_nothing_is_written(stored: tuple[str, MiniS3Server]) -> None:
    url, server = stored
    with Shown((url,), {"storage_options": server.storage_options}) as shown:
        shown.json("/")
        server.clear_log()
        answer = shown.json("/", page=1)
        asked = server.log()
        fields = [one for row in answer["rows"] for one in row["fields"].values()]
        told = sum(one["bytes"] for one in fields if "text" in one)
        pictured = sum(one["bytes"] for one in fields if one["kind"] == "image")
        read = sum(entry["bytes"] for entry in asked if entry["path"].endswith(".tar"))
        assert told <= read
        assert read + pictured <= 1.3 * (told + pictured)
        server.clear_log()
        row = next(row for row in answer["rows"] if "jpg" in row["fields"])
        assert shown.get("/value", number=row["number"], field="jpg", view="small").status == 200
        shown.get("/value", {"Range": "bytes=0-99"}, number=4, field="wav")
        sent = [entry["bytes"] for entry in server.log() if entry["path"].endswith(".tar")]
        assert sent == [row["fields"]["jpg"]["bytes"], 100]
        for path in ("/columns", "/sample?number=7&check=1", "/bad", "/?where=tokens>3", "/?key=000007"):
            shown.get(path)
        assert {entry["method"] for entry in server.log()} <= {"GET", "HEAD"}


def test_one_file_holds_the_pages_and_asks_for_nothing(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    done = run(data, "--html", target, "--where", "tokens > 10")
    assert done.exit_code == 0, done.output
    text = target.read_text()
    assert text.count("data:image/jpeg;base64,") >= gallery.PER_PAGE // 3 - 1
    assert re.findall(r'(?:src|href|action)="(?!data:|#)[^"]*"', text) == []
    assert "<form" not in text
    assert "<script" not in text
    assert "default-src &#39;none&#39;" in text
    assert 'id="page-1"' in text
    for option in (("--port", "1"), ("--no-browser",), ("--host", "127.0.0.1")):
        done = run(data, "--html", target, *option)
        assert (done.exit_code, "has no effect with --html" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give the URL of shards"),
        (("--run", "x", "--where", "a = 1"), "--where: has no effect without a URL"),
        (("DATA", "--host", "0.0.0.0"), "--expose"),
        (("DATA", "--expose"), "--expose has no effect"),
        (("DATA", "--where", "nothing = 1"), "nothing"),
        (("DATA", "--packed", "{}"), "--length"),
        (("DATA/missing",), "missing"),
    ],
)
def test_what_cannot_be_shown_is_refused(data: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run(*(one.replace("DATA", str(data)) for one in arguments), "--port", "0", "--no-browser")
    assert done.exit_code in {1, 2}
    assert said in done.stderr
    assert done.stdout == ""


def test_only_a_job_is_shown_without_a_url() -> None:
    with Shown((), {"run": "/nobody.sock"}) as shown:
        found = shown.get("/columns", format="json")
        assert (found.status, found.json["ok"]) == (404, False)
        assert "the URL of shards" in found.json["error"]["message"]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/?page=-1", 400, "page: expected a whole number, 0 or more, got &#39;-1&#39;"),
        ("/?pages=1", 400, "no parameter &#39;pages&#39; (did you mean &#39;page&#39;?)"),
        ("/?where=tokens >", 400, "where:"),
        ("/?where=nobody=1", 400, "nobody"),
        ("/?format=xml", 400, "format: expected one of"),
        ("/sample", 400, "expected either number or key"),
        ("/sample?number=300", 404, "no sample 300; there are 300"),
        ("/sample?key=none", 404, "no sample has the key"),
        ("/value?number=0&field=mp4", 404, "no field &#39;mp4&#39;; it has"),
        ("/columns?name=none", 400, "none"),
        ("/columns?against=tokens", 400, "expected name, too"),
        ("/nothing", 404, "no page"),
        ("/../etc/passwd", 404, "no page"),
        ("/%2e%2e/%2e%2e/etc/passwd", 404, "no page"),
        ("/show.css/..%2f..%2fserver.py", 404, "no page"),
    ],
)
def test_errors_say_what_was_expected(shown: Shown, path: str, status: int, said: str) -> None:
    found = shown.get(path.replace(" ", "%20").replace(">", "%3E"))
    assert (found.status, said in found.text) == (status, True), found.text
    assert "Traceback" not in found.text


@pytest.mark.thorough
def test_the_command_prints_one_line_serves_and_ends_with_0(data: Path, tmp_path: Path) -> None:
    """And it leaves nothing behind in the set, in its home, and where it was started."""
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    programs = []
    for number, end in enumerate((signal.SIGINT, signal.SIGTERM)):
        home = tmp_path / f"home{number}"
        home.mkdir()
        program = subprocess.Popen(
            [sys.executable, "-m", "shard_tools", "show", str(data), "--port", "0", "--no-browser"], cwd=home,
            env={**os.environ, "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        programs.append((program, end, home))
    for program, end, home in programs:
        assert program.stdout is not None
        line = program.stdout.readline()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}\n", line)
        with urllib.request.urlopen(line.strip()) as answer:
            assert answer.status == 200
        program.send_signal(end)
        rest, told = program.communicate(timeout=PATIENCE_S)
        assert (program.returncode, rest, told) == (0, "", "")
        assert list(home.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_a_report_stays_until_the_new_one_is_whole(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("the one before")
    for wrong in (("--state", tmp_path / "no.json"), ("--where", "nothing = 1"), ("--tokenizer", tmp_path / "no")):
        assert run(data, "--html", target, *wrong).exit_code != 0
        assert target.read_text() == "the one before"
    assert run(data, "--html", tmp_path / "nowhere/report.html").exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE)
    assert run(data, "--html", pipe).exit_code == 0
    assert "<main" in reader.communicate()[0].decode()
    assert pipe.is_fifo(), "a pipe is written to, not replaced"


def test_the_file_has_the_pages_that_there_is_something_for(data: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    record = {"url": f"{data}/000.tar", "key": "000001", "stage": "decode", "reason": "torn"}
    bad.write_text(json.dumps(record) + "\n")
    assert run(data, "--html", tmp_path / "a.html").exit_code == 0
    assert run(data, "--html", tmp_path / "b.html", "--bad", bad).exit_code == 0
    titles = [re.findall(r"<h1>([^<]*)", (tmp_path / name).read_text()) for name in ("a.html", "b.html")]
    assert not any("Bad" in title or "single set" in title for title in titles[0]), titles[0]
    assert any("ad sample" in title for title in titles[1]), titles[1]


def test_texts_keep_their_lines(tmp_path: Path) -> None:
    text = "one\n\ttwo <b>\r\nthree\x1b[31m"
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar") as writer:
        writer.write({"__key__": "a", "txt": text, "blob": bytes(range(64))})
    with Shown((f"{tmp_path}/d",)) as shown:
        for page in (shown.get("/").text, shown.get("/sample", number=0).text):
            assert "one\n\ttwo &lt;b&gt;\nthree\\x1b[31m" in page
        assert re.search(r"0000  00 01 .*\n0010  10 11 ", shown.get("/sample", number=0).text)


def test_a_state_is_looked_at_before_anything_is_served(data: Path, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"epoch": 0}')
    for state in (tmp_path / "nothing.json", tmp_path / "state.json"):
        done = run(data, "--state", state, "--port", "0", "--no-browser")
        assert (done.exit_code in {1, 2}, done.stdout) == (True, "")
