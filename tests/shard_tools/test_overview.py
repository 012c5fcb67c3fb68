"""The first page of ``show``: over every kind of set, it says what ``stats`` says; sampled first, then refined."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from shard_tools import ShardWriter
from shard_tools.cli import cli
from shard_tools.look.show.overview import page as overview
from shard_tools.look.show.table import PAGES
from shard_tools.look.stats import survey
from shard_tools.look.stats.run import stats
from shard_tools.look.stats.survey import Survey
from streaming import StreamingDataset
from streaming.storage import Storage
from tests.support.processes.waiting import PATIENCE_S
from tests.support.servers.on_loopback import MiniS3Server, fresh_name
from tests.support.servers.show_pages import Shown
from tests.support.sets.tars import write_tar
from tests.support.sources import streams

Sample = dict[str, Any]


def image(number: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (8 + number % 5, 6 + number), 100).save(out, "JPEG")
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write(folder: Path, samples: Iterable[Sample], *, per_shard: int = 7, columns: Any = None) -> Path:
    with ShardWriter(f"{folder}/{{:03d}}.tar", max_samples=per_shard, columns=columns) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{number:04d}", **sample})
    return folder


def images(folder: Path) -> Path:
    return write(folder, ({"jpg": image(n, "L" if n == 5 else "RGB"), "cls": n % 3} for n in range(30)))


def texts(folder: Path) -> Path:
    samples = ({"txt": "words " * (n % 5), "json": {"n": n}} for n in range(33))
    return write(folder, samples, columns={"n": "json.n", "lang": lambda one: "en" if one["json"]["n"] % 3 else None})


def conversations(folder: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so " * n}]}
        for n in range(1, 20)
    ]
    (folder.parent / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template = folder.parent / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    given = ["convert", f"{folder.parent}/in.jsonl", str(folder), "--tokenizer", "bytes"]
    given += ["--messages-field", "messages", "--chat-template", str(template)]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    return folder


def sounds(folder: Path) -> Path:
    made = [streams.sound("wav", 0.25), streams.sound("flac", 0.5, rate=8000), streams.sound("wav", 0.25, channels=2)]
    return write(folder, ({"wav": made[n % 3]} for n in range(12)))


def arrays(folder: Path) -> Path:
    return write(folder, ({"npy": npy(np.zeros((n + 1, 3), np.float32)), "blob": bytes(n)} for n in range(20)))


def unindexed(folder: Path) -> Path:
    write_tar(folder / "0.tar", [(f"{n % 9:03d}.txt", b"%d" % n) for n in range(12)])
    return folder


def hostile(folder: Path) -> Path:
    riff = b"RIFF\xff\xff\xff\xffWAVEfmt \xff\xff\xff\xff"
    heads = [b"", b"\xff\xd8\xff" + bytes(40), riff, b"[" * 50_000, b"OggS" * 99]
    names = ("jpg", "wav", "json", "mp4", "webm", "mp3", "npy", "txt", "<b>x")
    files = [(f"<i>{n}.{name}", heads[(n + at) % 5]) for n in range(10) for at, name in enumerate(names)]
    write_tar(folder / "0.tar", files)
    assert CliRunner().invoke(cli, ["index", str(folder)]).exit_code == 0
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "images": images, "texts": texts, "conversations": conversations, "sounds": sounds, "arrays": arrays,
    "unindexed": unindexed, "hostile": hostile,
}  # fmt: skip
TABS: dict[str, list[str]] = {kind: ["Overview", "Samples", "Step"] for kind in KINDS}
TABS |= {kind: ["Overview", "Samples", "Columns", "Step"] for kind in ("texts", "conversations")}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_says_what_stats_says(tmp_path: Path, kind: str) -> None:
    """One computation, two views; the HTML has the same numbers, and tabs only for what there is."""
    folder = str(KINDS[kind](tmp_path / "d"))
    with Shown((folder,)) as shown:
        answer = shown.json("/overview", whole=1)
        html = shown.get("/overview").text
    told = json.loads(json.dumps(stats([folder], storage=Storage()).as_dict()))
    mine = {name: answer.pop(name) for name in ("source", "done", "epoch", "versions")}
    assert answer == told
    assert (mine["source"], mine["done"], mine["versions"]) == ("", True, None)
    assert mine["epoch"]["shards"] == told["shards"]
    assert mine["epoch"]["bytes"] <= told["bytes"]
    assert f"<dd>{told['samples']:,}</dd>" in html
    assert html.count('class="surprise"') == len(told["surprises"])
    assert "data-refresh" not in html
    assert not re.search(r"<(script(?! src=\"/show.js\" defer>)|b>x|i>\d)", html)
    tabs = re.findall(r'<a href="[^"]*"(?: aria-current="page")?>([^<]*)</a>', html.partition("</nav>")[0])
    assert tabs == TABS[kind]


def test_a_sample_that_shows_a_surprise_is_a_click_away(tmp_path: Path) -> None:
    with Shown((str(images(tmp_path / "d")),)) as shown:
        (gray,) = [one for one in shown.json("/overview", whole=1)["surprises"] if "gray" in one["what"]]
        assert gray["samples"] == [["0005"]]
        html = shown.get("/overview").text
        (link,) = re.findall(r'<a href="(/sample\?number=\d+)"><code>0005</code>', html)
        assert shown.get(link.replace("&amp;", "&")).status == 200
        assert shown.json(link)["key"] == "0005"
    with Shown((str(unindexed(tmp_path / "u")),)) as shown:
        told = shown.json("/overview", whole=1)["surprises"]
        found = [one for one in told if one["what"].startswith("duplicate keys")]
        assert found[0]["samples"] == [["000", "000"], ["001", "001"], ["002", "002"]]
        html = shown.get("/overview").text
        assert re.findall(r'<a href="/sample\?number=(\d+)"><code>000</code></a> =', html) == ["0"]


def test_a_filtered_set_is_that_of_its_samples(tmp_path: Path) -> None:
    folder = str(texts(tmp_path / "d"))
    with Shown((folder,), {"where": "n >= 20"}) as shown:
        answer = shown.json("/overview", whole=1)
    assert (answer["samples"], answer["columns"]["n"]["min"], answer["shards"]) == (13, 20, 3)


def test_it_begins_with_shards_spread_over_the_set_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_THREADS", 2)
    monkeypatch.setattr(overview, "SECONDS", 0.0)
    folder = write(tmp_path / "d", ({"txt": f"{n}"} for n in range(64)), per_shard=4)
    with Shown((str(folder),)) as shown:
        pages = [shown.get("/overview").text for _ in range(8)]
        seen = [re.findall(r"Seen: (\d+) of 64 samples", page) for page in pages]
        assert seen == [[str(count)] for count in range(8, 64, 8)] + [[]]
        assert ["data-refresh" in page for page in pages] == [True] * 7 + [False]
        assert all("<dd>64</dd>" in page for page in pages)
        assert shown.json("/overview")["done"]


def test_every_beginning_of_the_order_is_spread(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "d", ({"txt": "x"} for _ in range(40)), per_shard=1))
    with Shown((folder,)) as shown:
        shown.json("/overview", whole=1)
        made: Survey = shown.subject.keep("survey of ", lambda: None)
        order = made._order
    assert sorted(order) == list(range(40))
    for count in (2, 4, 8, 16, 32):
        gaps = np.diff([0, *sorted(order[:count]), 40])
        assert gaps.max() <= 2 * 40 / count


def test_work_is_bounded_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "d", ({"txt": f"{n}"} for n in range(64)), per_shard=4)
    original = Survey.__init__
    monkeypatch.setattr(Survey, "__init__", lambda self, subject: original(self, subject, 10))
    with Shown((str(folder),)) as shown:
        answer = shown.json("/overview", whole=1)
        assert (answer["done"], answer["read"]["seen"], answer["samples"]) == (True, 12, 64)
        said = "12 of 64 samples by the index, 12 of them by their bytes, in 3 of 16 shards"
        assert said in shown.get("/overview").text


def test_a_shard_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", ({"txt": f"{n}"} for n in range(64)), per_shard=4)
    (folder / "_shardstream/samples/003.tar.parquet").write_bytes(b"no parquet")
    with Shown((str(folder),)) as shown:
        answer = shown.json("/overview", whole=1)
    assert answer["read"]["seen"] == 60
    assert any("4 samples cannot be read" in one["what"] for one in answer["surprises"])


def test_a_mixture_has_an_overview_of_each_source(tmp_path: Path) -> None:
    for name in ("images", "texts"):
        KINDS[name](tmp_path / name)
    file = tmp_path / "mix.json"
    sources = {name: str(tmp_path / name) for name in ("images", "texts")}
    file.write_text(json.dumps({"sources": sources, "weights": dict.fromkeys(sources, 1.0)}))
    with Shown((str(file),)) as shown:
        for name, url in sources.items():
            answer = shown.json("/overview", source=name, whole=1)
            told = stats([url + "/"], storage=Storage()).as_dict()
            assert answer["fields"] == json.loads(json.dumps(told["fields"]))
        html = shown.get("/overview", source="texts").text
        assert ">Mixture</a>" in html
        assert 'href="/overview?source=images"' in html


def test_versions_are_listed(tmp_path: Path) -> None:
    folder = str(texts(tmp_path / "d"))
    for given in (["delete", folder, "--where", "n = 3"], ["version", "tag", folder, "clean"]):
        done = CliRunner().invoke(cli, given)
        assert done.exit_code == 0, done.output
    with Shown((folder,)) as shown:
        versions = shown.json("/overview", whole=1)["versions"]
        assert versions["read"] == 2
        assert "clean" in versions["kept"]


def test_it_reads_from_a_store_writes_nothing_and_is_where_a_browser_begins(mini_s3: MiniS3Server) -> None:
    bucket, options = mini_s3.create_bucket(fresh_name()), mini_s3.storage_options
    with ShardWriter(f"{bucket}/d/{{:03d}}.tar", max_samples=10, storage_options=options) as writer:
        for number in range(40):
            writer.write({"__key__": f"{number:03d}", "jpg": image(number)})
    mini_s3.clear_log()
    with Shown((f"{bucket}/d/",), {"storage_options": options}) as shown:
        assert shown.json("/overview", whole=1)["read"]["all"]
        first = shown.ask(f"/?token={shown.access.token}", {"Accept": "text/html"})
        assert (first.status, first.headers["location"].rpartition("/")[2]) == (303, "overview")
    assert {entry["method"] for entry in mini_s3.log()} <= {"GET", "HEAD"}


def test_pages_are_listed_once_and_have_a_first() -> None:
    assert PAGES[0].path == "/overview"
    assert len({page.path for page in PAGES}) == len(PAGES)
    assert PATIENCE_S > overview.WHOLE_SECONDS


@pytest.mark.thorough
def test_tokens_and_their_supervised_share_are_told(tmp_path: Path) -> None:
    folder = str(conversations(tmp_path / "d"))
    masks = [bytes(sample["mask"]) for sample in StreamingDataset(folder, decode=None)]
    supervised, of = sum(sum(mask) for mask in masks), sum(map(len, masks))
    assert 0 < supervised < of
    with Shown((folder,)) as shown:
        answer = shown.json("/overview", whole=1)
        assert answer["supervised"] == {"tokens": supervised, "of": of}
        assert answer["tokens"] == of
        assert f"<dd>{supervised / of:.1%}</dd>" in shown.get("/overview").text


def test_sounds_are_told_by_rate_channels_codec_and_length(tmp_path: Path) -> None:
    with Shown((str(sounds(tmp_path / "d")),)) as shown:
        answer = shown.json("/overview", whole=1)
        html = shown.get("/overview").text
    told = answer["fields"]["wav"]
    assert told["rate"]["top"] == [[16000, 8], [8000, 4]]
    assert told["channels"]["top"] == [[1, 8], [2, 4]]
    assert told["codec"]["top"] == [["PCM 16 bits", 8], ["FLAC", 4]]
    assert told["seconds"]["max"] == pytest.approx(0.5, abs=0.01)
    assert "<dt>length of wav</dt><dd>about 4.0 s</dd>" in html
    assert {"mixed sampling rates", "mixed numbers of channels"} <= {
        one["what"].partition(" in field")[0] for one in answer["surprises"]
    }
