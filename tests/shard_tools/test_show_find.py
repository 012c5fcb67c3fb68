"""Find samples in ``show``: by text, in the order of a column, at random; as a table; their keys as a file."""

from __future__ import annotations

import gzip
import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.show.base import samples
from shard_tools.look.show.find import arranged, texts
from shard_tools.look.show.find import keys as keys_file
from shard_tools.look.show.find.arranged import shuffled
from streaming import StreamingDataset
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.show_pages import Shown
from tests.support.sets.tars import write_tar

COUNT = 200
WORDS = ("alpha", "Beta", "GRÜSSE", "delta", "it's", 'say "so"', "tab\tbed")


def one_of(number: int) -> dict[str, Any]:
    dice = random.Random(number)
    text = " ".join(dice.choices(WORDS, k=5))
    made: dict[str, Any] = {"__key__": f"{number:06d}", "txt": text, "n": number * 37 % 101, "flag": number % 2 == 0}
    made["json"] = {"word": dice.choice(WORDS), "deep": [{"say": text[::-1]}]}
    if number % 5:
        made["word"] = dice.choice(WORDS)
    if number % 7 == 0:
        made["txt.gz"] = gzip.compress(b"packed " + text.encode())
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("find") / "d"
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=32, columns=("n", "flag", "word")) as writer:
        for number in range(COUNT):
            writer.write(one_of(number))
    return folder


@pytest.fixture(scope="module")
def shown(data: Path) -> Iterator[Shown]:
    with Shown((str(data),)) as found:
        yield found


def numbers(answer: Any) -> list[int]:
    return [row["number"] for row in answer["rows"]]


def everything(shown: Shown, **asked: Any) -> list[int]:
    """The numbers on all pages, in their order."""
    found, page = list[int](), 0
    while True:
        answer = shown.json("/", page=page, size=30, **asked)
        if answer["searching"]:
            continue
        found += numbers(answer)
        page += 1
        if not answer["more"]:
            assert answer["total"] == len(found)
            return found


# --------------------------------------------------------------------------------------------------------------- text


def holds(sample: dict[str, Any], text: str) -> bool:
    wanted = text.casefold()
    inside = [sample["txt"], json.dumps(sample["json"], ensure_ascii=False), json.dumps(sample["json"])]
    inside += [gzip.decompress(sample["txt.gz"]).decode()] if "txt.gz" in sample else []
    escaped = json.dumps(text)[1:-1].casefold()
    return any(wanted in one.casefold() or escaped in one.casefold() for one in inside)


@pytest.mark.parametrize("text", [*WORDS, "grüsse", "ALPHA beta", "packed", "deep", "nobody says this", "<script>"])
@pytest.mark.parametrize("where", ["", "n < 40"])
def test_a_text_is_found_where_it_is(shown: Shown, text: str, where: str) -> None:
    expected = [number for number in range(COUNT) if holds(one_of(number), text)]
    expected = [number for number in expected if not where or number * 37 % 101 < 40]
    assert everything(shown, text=text, **({"where": where} if where else {})) == expected


def test_a_search_goes_on_at_each_request_and_the_page_asks_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "SECONDS", 0.0)
    with Shown((str(data),)) as shown:
        seen = [shown.json("/", text="packed", size=100) for _ in range(4)]
        assert [one["progress"].split(" samples")[0] for one in seen] == [
            f"searched {32 * (at + 1)} of {COUNT}" for at in range(4)
        ]
        assert all(one["searching"] and one["total"] is None for one in seen)
        found = [len(one["rows"]) for one in seen]
        assert found == sorted(found)
        assert found[0] == 5
        assert 'id="found" data-refresh' in shown.get("/", text="packed", size=100).text
        assert "data-refresh" not in shown.get("/", text="packed", size=5).text  # the page is full


def test_hits_are_bounded_and_it_says_so(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MOST_HITS", 7)
    with Shown((str(data),)) as shown:
        answer = shown.json("/", text="word")
    assert (answer["total"], numbers(answer)) == (7, list(range(7)))
    assert "the first 7 hits" in answer["progress"]
    with Shown((str(data),)) as shown:
        assert "the search is not complete: the first 7 hits" in shown.get("/keys", text="word").text


def test_only_the_beginning_of_a_value_is_searched(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar") as writer:
        writer.write({"__key__": "late", "txt": "x" * texts.TEXT_BYTES + "needle"})
        writer.write({"__key__": "early", "txt": "needle"})
        writer.write({"__key__": "bomb", "txt.gz": gzip.compress(bytes(50 << 20)), "json": b"[" * 9999})
        writer.write({"__key__": "no gzip", "txt.gz": b"needle"})
    with Shown((f"{tmp_path}/d",)) as shown:
        assert [row["key"] for row in shown.json("/", text="needle")["rows"]] == ["early"]


def test_a_mixture_is_searched_source_by_source(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "mix.json"
    sources = {"a": {"url": str(data), "subset": [0, 50]}, "b": str(data)}
    file.write_text(json.dumps({"sources": sources, "weights": {"a": 1, "b": 1}}))
    with Shown((str(file),)) as shown:
        expected = [number for number in range(COUNT) if holds(one_of(number), "packed")]
        assert everything(shown, text="packed") == [one for one in expected if one < 50] + expected
        assert sorted(everything(shown, sample=3)) == sorted([*range(50), *range(COUNT)])
        assert "give source" in shown.get("/", order="n").text
        assert everything(shown, order="-n", source="a")[0] == max(range(50), key=lambda n: n * 37 % 101)


FIELDS = {
    "text alone": ({"txt": "word"}, "Searched: txt, the first 64.0 KiB of each value. Not searched: columns (for"),
    "several": ({"txt": "word", "json": {"a": "word"}, "cls": 1, "jpg": b"word"}, "Not searched: cls (class), jpg"),
    "packed text": ({"txt.gz": gzip.compress(b"word")}, "Searched: txt.gz,"),
    "no text": ({"jpg": b"word"}, "Searched: nothing, since no field holds text or JSON. Not searched: jpg ("),
    "tokens": ({"tok": b"\1\0", "txt": "word"}, "Not searched: tok (tokens), and columns (for"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FIELDS)
def test_a_search_says_what_it_looked_into(tmp_path: Path, kind: str) -> None:
    fields, said = FIELDS[kind]
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar") as writer:
        writer.write({"__key__": "a", **fields})
    with Shown((f"{tmp_path}/d",)) as shown:
        for text in ("word", "nobody says this"):
            page = html.unescape(shown.get("/", text=text).text)
            assert said in page
            assert said in shown.json("/", text=text)["searched"]
            assert ("Text that is stored as tokens" in page) == (kind == "tokens")
        assert "Searched:" not in shown.get("/").text
        assert "searched" not in shown.json("/", where="__key__ = 'a'")


@pytest.mark.thorough
def test_text_of_tokens_is_found_by_both_cures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says, typed with names filled in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("table.jsonl").write_text("".join(json.dumps({"text": f"page {n} of the harbour"}) + "\n" for n in range(20)))
    Path("words.py").write_text("def text_of(sample):\n    return sample['tok'][:-2:2].decode()  # two bytes a token\n")
    for extra in ((), ("--field", "text=txt")):
        target = f"tokens{len(extra)}"
        done = CliRunner().invoke(cli, ["convert", "table.jsonl", target, "--tokenizer", "bytes", *extra])
        assert done.exit_code == 0, done.output
    with Shown(("tokens0/",)) as shown:
        page = html.unescape(re.sub(r"<[^>]+>", "", shown.get("/", text="harbour").text))
        assert shown.json("/", text="harbour")["total"] == 0
    convert, add = "--tokenizer FILE --field text=txt", "column add URL words --compute MODULE:FUNCTION --fields tok"
    assert convert in page
    assert add in page
    command = add.replace("URL", "tokens0/").replace("MODULE:FUNCTION", "words:text_of").split()
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    with Shown(("tokens0/",)) as shown:
        assert shown.json("/", where="words LIKE '%7 of the harbour%'")["total"] == 2
    with Shown(("tokens2/",)) as shown:
        assert shown.json("/", text="7 of the harbour")["total"] == 2


# ------------------------------------------------------------------------------------------------------------- orders


@pytest.mark.parametrize("where", ["", "n > 50"])
@pytest.mark.parametrize("order", ["n", "-n", "word", "-word", "flag", "-flag"])
def test_samples_come_in_the_order_of_a_column_those_without_a_value_last(shown: Shown, order: str, where: str) -> None:
    name = order.removeprefix("-")
    kept = [number for number in range(COUNT) if not where or one_of(number)["n"] > 50]
    there = sorted((n for n in kept if name in one_of(n)), key=lambda n: one_of(n)[name], reverse=order.startswith("-"))
    found = everything(shown, order=order, **({"where": where} if where else {}))
    assert [one_of(n).get(name) for n in found] == [one_of(n)[name] for n in there] + [None] * (len(kept) - len(there))
    assert sorted(found) == kept


def test_of_a_large_set_shards_spread_over_it_are_put_in_order(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranged, "MOST_ROWS", 64)
    with Shown((str(data),)) as shown:
        answer = shown.json("/", order="-n")
        assert answer["progress"] == "put in order: 64 of 200 samples, in 2 of 7 shards spread over all"
        assert answer["total"] == 64


@given(st.integers(1, 500), st.integers(0, 2**31))
def test_a_random_order_has_each_number_once(total: int, seed: int) -> None:
    assert sorted(shuffled(place, total, seed) for place in range(total)) == list(range(total))


@pytest.mark.thorough
def test_a_random_sample_is_that_of_its_seed(shown: Shown) -> None:
    first, again, other = (everything(shown, sample=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert sorted(first) == sorted(other) == list(range(COUNT))
    assert first != sorted(first)
    inner = everything(shown, sample=3, where="n < 40")
    assert sorted(inner) == [n for n in range(COUNT) if n * 37 % 101 < 40] != inner


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"where": "tokens >"}, "where"), ({"where": "nobody = 1"}, "nobody"), ({"order": "nobody"}, "nobody"),
        ({"text": " ", "where": "n ="}, "where"), ({"order": "n", "sample": 1}, "give one of them"),
        ({"sample": "x"}, "sample: expected a whole number"), ({"where": "n < 9 AND word > 3"}, "word"),
        ({"page": "x", "text": "a"}, "page: expected a whole number"), ({"size": 0}, "size: expected a whole number"),
        ({"view": "cards"}, "view: expected one of"),
    ],
)  # fmt: skip
def test_the_form_stays_when_what_is_asked_is_wrong(shown: Shown, asked: dict[str, Any], said: str) -> None:
    found = shown.get("/", **asked)
    assert found.status == 400
    assert said in found.text.partition('role="alert"')[2].partition("</p>")[0]
    assert "\\n" not in found.text
    assert 'role="search"' in found.text
    if "where" in asked:
        assert f'name="where" value="{asked["where"].replace(">", "&gt;").replace("<", "&lt;")}"' in found.text
        assert 'aria-invalid="true"' in found.text
        columns = shown.get("/columns", where=asked["where"])
        assert (columns.status, 'role="alert"' in columns.text) == (400, True)
    answer = shown.get("/", format="json", **asked)
    assert (answer.status, answer.json["ok"]) == (400, False)


# ---------------------------------------------------------------------------------------------------- table and keys


def test_a_table_has_the_columns_and_orders_by_a_click(shown: Shown) -> None:
    page = shown.get("/", view="table", order="n").text
    assert page.count("<tr data-row>") == 48
    assert 'href="/?order=-n&amp;view=table" aria-current="true">n ↑</a>' in page
    assert 'href="/?order=word&amp;view=table">word</a>' in page
    assert "000000</a>" in page


@pytest.mark.thorough
def test_the_keys_that_were_found_are_those_that_delete_takes(data: Path, shown: Shown, tmp_path: Path) -> None:
    for asked in ({}, {"where": "n < 40"}, {"text": "packed"}, {"order": "-n"}, {"key": "00001*"}, {"sample": 5}):
        found = shown.get("/keys", **asked)
        assert (found.status, found.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert found.headers["content-disposition"] == 'attachment; filename="keys.txt"'
        listed = found.text.splitlines()
        expected = everything(shown, **asked) if "sample" not in asked else numbers(shown.json("/", **asked))
        assert listed == [f"{number:06d}" for number in expected]
    file = tmp_path / "keys.txt"
    file.write_bytes(shown.get("/keys", text="packed").body)
    done = CliRunner().invoke(cli, ["delete", str(data), "--keys", str(file), "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["num_deleted"] == len(file.read_text().splitlines())


def test_keys_of_any_characters_come_back_as_they_are(tmp_path: Path) -> None:
    names = [
        "{a}",
        " b",
        "c d",
        'q"uote',
        b"\xff\xfe".decode("utf-8", "surrogateescape"),
        "ünder",
        "\ufeffx",
        "-",
        "#no",
    ]
    write_tar(tmp_path / "d/0.tar", [(f"{name}.txt", b"x") for name in names])
    assert CliRunner().invoke(cli, ["index", str(tmp_path / "d")]).exit_code == 0
    with Shown((f"{tmp_path}/d",)) as shown:
        (tmp_path / "keys.txt").write_bytes(shown.get("/keys").body)
    assert len(StreamingDataset(str(tmp_path / "d"), decode=None)) == len(names)
    with pytest.raises(Exception, match="none"):
        StreamingDataset(str(tmp_path / "d"), decode=None, exclude=str(tmp_path / "keys.txt"))


def test_keys_are_not_given_of_half_a_search_or_of_too_many(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "SECONDS", 0.0)
    monkeypatch.setattr(keys_file, "MOST_KEYS", 100)
    with Shown((str(data),)) as shown:
        found = shown.get("/keys", text="word")
        assert (found.status, "the search is not complete: searched 32 of 200" in found.text) == (400, True)
        found = shown.get("/keys")
        assert (found.status, "200 samples; at most 100 keys" in found.text) == (400, True)
        assert len(shown.get("/keys", sample=1, size=9).text.splitlines()) == 9


def test_a_search_by_condition_asks_again_by_itself(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "FEW_SAMPLES", 10)
    monkeypatch.setattr(samples, "SEARCH_SECONDS", 0.0)
    with Shown((str(data),)) as shown:
        assert 'id="found" data-refresh' in shown.get("/", where="n = 3").text
        monkeypatch.setattr(samples, "SEARCH_SECONDS", PATIENCE_S)
        assert "data-refresh" not in shown.get("/", where="n = 3").text


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    markup = "<script>window.ran = 1</script>\"'"
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar", columns={"m<b>": lambda _: markup}) as writer:
        writer.write({"__key__": "k<i>", "txt": markup})
    with Shown((f"{tmp_path}/d",)) as shown:
        for path in (f"/?text={quote(markup)}&view=table", f"/?where={quote(markup)}", "/?view=table&order=m<b>"):
            page = shown.get(path).text
            assert "<script>window" not in page
            assert "m<b>" not in page
