"""What pages of the order say beside keys: wrong addresses, states, why a sample is there, bad samples, mixtures."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from shard_tools import ShardWriter
from shard_tools.cli import cli
from streaming import DataLoader, Mixture, Packed, Schedule, StreamingDataset
from streaming.shards.catalog.build import index_shards
from streaming.storage import Storage
from tests.support.servers.show_pages import Shown
from tests.support.sets.data_sets import mesh_of

pytestmark = pytest.mark.thorough

HOSTILE = "<script>alert(1)</script>&\"'"


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets of shards of ten samples, one with a hostile key, and documents with their tokens."""
    folder = tmp_path_factory.mktemp("words")
    for name, count in (("web", 61), ("code", 40)):
        with ShardWriter(f"{folder}/{name}/{{:03d}}.tar", max_samples=10) as writer:
            for number in range(count):
                key = f"{name}{number:03d}" if number or name == "code" else HOSTILE
                writer.write({"__key__": key, "txt": "x"})
    with ShardWriter(f"{folder}/docs/{{:03d}}.tar", max_samples=20, columns={"tokens": lambda one: one["n"]}) as writer:
        for number in range(50):
            size = 1 + number % 17
            writer.write({"__key__": f"d{number:03d}", "tok": b"\0\1" * size, "n": size})
    return folder


def saved(folder: Path, dataset: Any, steps: int, size: int, **options: Any) -> tuple[str, dict[str, Any]]:
    """A state after so many steps of a loader, as a file."""
    with DataLoader(dataset, global_batch_size=size, num_threads=0, **options) as loader:
        for _ in zip(range(steps), loader, strict=False):
            pass
        state = loader.state_dict()
    path = folder / f"state-{len(list(folder.glob('state-*')))}.json"
    path.write_text(json.dumps(state))
    return str(path), state


@pytest.fixture(scope="module")
def web(sets: Path) -> Iterator[Shown]:
    with Shown((f"{sets}/web/",)) as shown:
        yield shown


@pytest.fixture(scope="module")
def mixed(sets: Path) -> Iterator[Shown]:
    with Shown((mixture_file(sets, weights={"web": 3, "code": 1}),)) as shown:
        yield shown


def mixture_file(sets: Path, **options: Any) -> str:
    path = sets / f"mixture-{len(list(sets.glob('mixture-*')))}.json"
    path.write_text(json.dumps({"sources": {name: f"{sets}/{name}/" for name in ("web", "code")}, **options}))
    return str(path)


# --- addresses


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"world": 0}, ("world", "1 to", "'0'", "number of data ranks")),
        ({"world": "two"}, ("world", "'two'")),
        ({"world": 2, "rank": 2}, ("rank", "world of 2", "got 2", "0 to 1")),
        ({"rank": 1}, ("rank", "world of 1", "world of 2 or more")),
        ({"rank": -1}, ("rank", "'-1'")),
        ({"step": 7}, ("step", "0 to 6", "got 7", "epoch 1")),
        ({"step": 9**30}, ("step", "whole number")),
        ({"epoch": 2**49}, ("epoch", "")),
        ({"seed": "lucky"}, ("seed", "'lucky'", "leave seed out")),
        ({"seed": 2**64}, ("seed", "whole number")),
        ({"global_batch_size": 0}, ("global_batch_size", "'0'")),
        ({"global_batch_size": "1:8"}, ("global_batch_size", "0:256")),
        ({"global_batch_size": "0:8,0:9"}, ("global_batch_size", "twice")),
        ({"global_batch_size": 4, "world": 8}, ("global_batch_size", "4", "8")),
        ({"global_batch_size": 62}, ("62", "last_batch")),
        ({"global_batch_size": 8, "batch_size": 8}, ("batch_size", "leave the other out")),
        ({"lanes": 0}, ("lanes", "'0'")),
        ({"shuffle": "maybe"}, ("shuffle", "'on'", "'maybe'")),
        ({"last_batch": "keep"}, ("last_batch", "'pad'", "'keep'")),
        ({"steps": 3}, ("'steps'", "did you mean 'step'")),
    ],
)
def test_wrong_addresses_are_named_with_what_is_expected(
    web: Shown, asked: dict[str, Any], words: tuple[str, ...]
) -> None:
    size = {} if "global_batch_size" in asked or "batch_size" in asked else {"global_batch_size": 8}
    found = web.get("/step", format="json", **size, **asked)
    if asked == {"epoch": 2**49}:  # far, but an epoch
        assert found.status == 200
        return
    assert found.status == 400
    message = found.json["error"]["message"]
    assert all(word in message for word in words), message
    if "steps" in asked:  # no parameter of the page
        return
    page = web.get("/step", **size, **asked)  # the form is kept, with what was filled in
    assert page.status == 400
    assert message.splitlines()[0] in html.unescape(page.text.partition('role="alert"')[2].partition("</p>")[0])
    for name, value in {**size, **asked}.items():
        assert f'name="{name}" value="{value}"' in page.text
    form = page.text.partition('<form class="ask"')[2].partition("</form>")[0]
    visible = {"epoch", "step", "rank", "world", "seed", "batch_size" if "batch_size" in asked else "global_batch_size"}
    assert set(re.findall(r'<label>[^<]*<input name="(\w+)"', form)) == visible
    wrong = re.findall(r'<input name="(\w+)"[^>]*aria-invalid', form)
    assert wrong == [message.partition(":")[0]] * (message.partition(":")[0] in visible)


def test_a_wrong_address_of_the_mixture_keeps_its_form(mixed: Shown) -> None:
    for asked in ({"until": 0}, {"until": "soon"}, {"seed": "lucky"}, {"epoch": 3}):
        page = mixed.get("/mixture", global_batch_size=8, **asked)
        ((name, value),) = asked.items()
        assert page.status == 400
        form = page.text.partition('<form class="ask"')[2].partition("</form>")[0]
        assert re.search(rf'<input name="{name}" value="{value}"[^>]*aria-invalid', form)
        assert 'name="global_batch_size" value="8"' in form
        assert name in page.text.partition('role="alert"')[2].partition("</p>")[0]


def test_empty_parameters_are_none(web: Shown) -> None:
    assert web.json("/step", world="", seed="", step="") == web.json("/step")


def test_a_rank_may_get_nothing(web: Shown) -> None:
    asked = {"global_batch_size": 8, "world": 8, "last_batch": "partial", "step": 7}  # a tail of five rows
    found = [len(web.json("/step", **asked, rank=rank)["rows"]) for rank in range(8)]
    assert (sum(found), found.count(0)) == (5, 3)
    assert "gets no row" in web.get("/step", **asked, rank=found.index(0)).text


def test_an_empty_set_says_so(tmp_path: Path) -> None:
    shard = tmp_path / "empty.tar"
    shard.write_bytes(bytes(10240))
    index_shards(Storage(), [str(shard)], parallel=1)
    with Shown((f"{tmp_path}/",)) as shown:
        for page in ("/step", "/mixture"):
            found = shown.get(page)
            assert (found.status, "the data set is empty" in found.text) == (400, True)


def test_pages_follow_each_other_over_epochs(web: Shown) -> None:
    pages, seen = "/step?global_batch_size=8", []
    while len(seen) < 16:
        text = web.get(pages).text
        seen.append(text.split("<h1>")[1].split("</h1>")[0])
        pages = text.split('rel="next"')[0].rpartition('href="')[2].partition('"')[0].replace("&amp;", "&")
    assert seen == [f"Step {step} of epoch {epoch}" for epoch in range(3) for step in range(7)][:16]


# --- states


def test_the_state_says_what_the_address_leaves_open(sets: Path) -> None:
    dataset = StreamingDataset(f"{sets}/web/", seed=9)
    state, content = saved(sets, dataset, 3, 8)
    with (
        Shown((f"{sets}/web/",), {"state_url": state}) as shown,
        DataLoader(dataset, global_batch_size=8, num_threads=0) as loader,
    ):
        loader.load_state_dict(content)
        keys = next(iter(loader))["__key__"]
        assert [row["key"] for row in shown.json("/step")["rows"]] == keys
        text = shown.get("/step").text
        assert "Step 3 of epoch 0" in text
        assert 'value="9"' in text


def test_what_contradicts_the_state_is_refused_or_told(sets: Path) -> None:
    state, _ = saved(sets, StreamingDataset(f"{sets}/web/", seed=9), 3, 8)
    with Shown((f"{sets}/web/",), {"state_url": state}) as shown:
        for asked in ({"seed": 8}, {"shuffle": "off"}, {"lanes": 3}, {"window": 1}, {"epoch_size": 10}):
            found = shown.get("/step", format="json", **asked)
            assert found.status == 400
            assert all(word in found.json["error"]["message"] for word in (*asked, "saved state", "state off"))
        assert shown.get("/step", seed=9).status == 200
        assert "from row 24 on; here they have 16" in shown.get("/step", global_batch_size=16).text
        assert "saved state is not used" in shown.get("/step", state="off", seed=8, global_batch_size=8).text
        with Shown((f"{sets}/web/",)) as other:
            assert shown.json("/step", state="off", seed=8) == other.json("/step", seed=8)
        before = shown.get("/step", global_batch_size=16, step=0, format="json")
        assert before.status == 200  # as the state records it
        assert len(before.json["rows"]) == 8


def test_states_of_other_sets_are_refused_at_the_start_and_on_each_page(sets: Path) -> None:
    of_set, _ = saved(sets, StreamingDataset(f"{sets}/code/"), 1, 8)
    of_mixture, _ = saved(sets, Mixture.from_file(mixture_file(sets, weights={"web": 3, "code": 1})), 1, 8)
    broken = sets / "state-broken.json"
    broken.write_text("[1]")
    for state, url, said in (
        (of_set, f"{sets}/web/", "fingerprint"), (of_set, mixture_file(sets), "single data set"),
        (of_mixture, f"{sets}/web/", "belongs to a mixture"), (str(broken), f"{sets}/web/", "loader.state_dict()"),
    ):  # fmt: skip
        done = CliRunner().invoke(cli, ["show", url, "--state", state, "--port", "0", "--no-browser"])
        assert (done.exit_code != 0, done.stdout, said in done.output + str(done.exception)) == (True, "", True)
        with Shown((url,), {"state_url": state}) as shown:  # nobody comes so far, but if one did
            found = shown.get("/step", format="json")
            assert (found.status, said in found.json["error"]["message"]) == (400, True)


# --- why, and when


def test_why_a_sample_is_here(web: Shown, sets: Path) -> None:
    asked = {"global_batch_size": 16, "world": 3, "rank": 1, "epoch": 2, "step": 1}
    text, rows = web.get("/step", **asked).text, web.json("/step", **asked)["rows"]
    assert "Pass 2: each pass holds every one of the 61 samples once, in an order of its own, by seed 0." in text
    assert "are cut into 3 equal parts: rank 1 gets rows 5 to 9, and this is row 5." in text
    assert {(row["pass"], row["source"]) for row in rows} == {(2, None)}
    lanes = [row["lane"] for row in rows]
    assert lanes == sorted(lanes)
    for row in rows:  # ten samples a shard, which is a chunk
        assert row["key"] == HOSTILE or int(row["key"][3:]) // 10 == row["chunk"]


def test_nothing_of_a_key_is_markup(web: Shown) -> None:
    texts = [web.get("/step", global_batch_size=61).text, web.get("/step", global_batch_size=61, epoch=1).text]
    assert all("&lt;script&gt;alert(1)" in text and "<script>alert" not in text for text in texts)
    assert HOSTILE in {row["key"] for row in web.json("/step", global_batch_size=61)["rows"]}


def keys_of(shown: Shown, **asked: Any) -> set[str]:
    return {row["key"] for row in shown.json("/step", **asked)["rows"]}


@pytest.mark.parametrize("epoch", [None, 3])
def test_a_sample_knows_its_steps(web: Shown, epoch: int | None) -> None:
    asked = {"global_batch_size": 8, "world": 2, **({} if epoch is None else {"epoch": epoch})}
    for number in (0, 17, 60):
        found = web.json("/sample", number=number, **asked)
        key, first = found["key"], epoch or 0
        steps = {
            (one, step, rank)
            for one in (first, first + 1) for step in range(7) for rank in range(2)
            if key in keys_of(web, **{**asked, "epoch": one, "step": step, "rank": rank})
        }  # fmt: skip
        assert {(one["epoch"], one["step"], one["rank"]) for one in found["steps"]["found"]} == steps


def test_documents_know_their_packs(sets: Path) -> None:
    packed = {"packed": {"length": 16}}
    with Shown((f"{sets}/docs/",), packed) as shown:
        asked = {"global_batch_size": 4, "world": 2}
        for number in (3, 16, 33):
            found = shown.json("/sample", number=number, **asked)
            for one in found["steps"]["found"]:
                rows = shown.json("/step", **asked, epoch=one["epoch"], step=one["step"], rank=one["rank"])["rows"]
                assert any(found["key"] in row["keys"] for row in rows)
            assert len(found["steps"]["found"]) >= 1


def test_a_problem_of_the_run_leaves_the_sample_as_it_is(web: Shown) -> None:
    found = web.json("/sample", number=3, global_batch_size=100)
    assert (found["key"], "last_batch" in found["steps"]["problem"]) == ("web003", True)


# --- packs


def test_bars_hold_what_a_pack_holds(sets: Path) -> None:
    with (
        Shown((f"{sets}/docs/",), {"packed": {"length": 16}}) as shown,
        DataLoader(Packed(StreamingDataset(f"{sets}/docs/"), length=16), global_batch_size=4, num_threads=0) as loader,
    ):
        batch = next(iter(loader))
        text = shown.get("/step", global_batch_size=4).text
        for ids in batch["document_ids"]:
            tokens = int((ids >= 0).sum())
            told = f'{len(set(ids[ids >= 0].tolist()))} documents, {tokens} tokens, {16 - tokens} padding"'
            assert told in text, told


# --- bad samples


def test_what_lists_name_is_marked(sets: Path, tmp_path: Path) -> None:
    shard = f"{sets}/web/001.tar"
    lines = [
        {"url": shard, "key": "web012", "sample_in_shard": 2, "stage": "decode", "reason": "<b>broken</b>"},
        {"url": f"{sets}/web/003.tar", "byte_start": 0, "byte_end": 10, "stage": "fetch", "reason": "torn"},
    ]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Shown((f"{sets}/web/",), {"bad": (str(path),)}) as shown:
        text = shown.get("/step", global_batch_size=61).text
    parts = {part.split("data-open>")[1].split("</a>")[0]: part for part in text.split('<li id="row-')[1:]}
    marked = {key for key, part in parts.items() if "is-bad" in part}
    assert marked == {"web012", *(f"web{number:03d}" for number in range(30, 40))}
    assert "decode: &lt;b&gt;broken&lt;/b&gt;" in parts["web012"]
    assert "its chunk, fetch: torn" in parts["web030"]


# --- mixtures


def test_a_single_set_is_told_to_be_none(web: Shown) -> None:
    assert web.json("/mixture") == {"is_mixture": False, "sources": []}
    assert "A single set" in web.get("/mixture").text


@pytest.mark.parametrize("quotas", ["chunks", "exact"])
def test_shares_are_those_of_a_loader(sets: Path, quotas: str) -> None:
    weights = {"0": {"web": 3, "code": 1}, "160": {"web": 1, "code": 1}}
    schedule = Schedule.steps({int(row): one for row, one in weights.items()})
    file = mixture_file(sets, weights=schedule.to_dict(), quotas=quotas)
    with DataLoader(Mixture.from_file(file), global_batch_size=8, num_threads=0) as loader:
        drawn = Counter(source for _, batch in zip(range(50), loader, strict=False) for source in batch["__source__"])
    with Shown((file,)) as shown:
        found = shown.json("/mixture", global_batch_size=8, until=50)
        text = shown.get("/mixture", global_batch_size=8, until=50).text
    by_name = {one["name"]: one for one in found["sources"]}
    assert {name: one["drawn"] for name, one in by_name.items()} == drawn
    assert by_name["web"]["target"] == pytest.approx((160 * 0.75 + 240 * 0.5) / 400)
    assert sum(one["realised"] for one in by_name.values()) == pytest.approx(1)
    assert (found["steps"][0], found["steps"][-1]) == (0, 50)
    assert {round(share, 3) for share in found["targets"]["code"]} >= {0.25, 0.5}
    assert found["ledger"][0]["words"] == [
        "shares of rows: web 75.0%, code 25.0%", "changing in 1 step up to row 160: code 50.0%, web 50.0%",
        *found["ledger"][0]["words"][2:],
    ]  # fmt: skip
    assert "web 75.0%" in text


def test_epochs_of_a_mixture_that_ends(sets: Path) -> None:
    with Shown((mixture_file(sets, repeats={"web": 1, "code": 2}),)) as shown:
        found = shown.json("/mixture", global_batch_size=8, epoch=1, last_batch="partial")
        drawn = {one["name"]: (one["drawn"], one["passes"]) for one in found["sources"]}
        assert (drawn, found["epoch"]) == ({"web": (61, 1.0), "code": (80, 2.0)}, 1)
        assert shown.get("/mixture", until=3).status == 400


def test_a_changed_run_is_told_in_words(sets: Path) -> None:
    mixture = Mixture.from_file(mixture_file(sets, weights={"web": 3, "code": 1}))
    with DataLoader(mixture, global_batch_size=8, num_threads=0, device_mesh=mesh_of(1, 0)) as loader:
        batches = iter(loader)
        next(batches)
        row = loader.set_weights({"web": 1, "code": 9})
        for _ in range(30):
            next(batches)
        state = sets / "state-changed.json"
        state.write_text(json.dumps(loader.state_dict()))
    file = mixture_file(sets, weights={"web": 3, "code": 1})
    with Shown((file,), {"state_url": str(state)}) as shown:
        found = shown.json("/mixture")
        assert [one["what"] for one in found["ledger"]] == ["the run begins", "set_weights"]
        assert found["ledger"][1]["row"] == row
        assert found["ledger"][1]["words"][0] == "shares of rows: code 90.0%, web 10.0%"
        assert "the saved state" in shown.get("/mixture").text


def test_a_sample_table_of_another_shard_names_no_sample(tmp_path: Path) -> None:
    """Keys of a set that was converted anew, or of which a file was mixed up, would be wrong ones."""
    for name, first in (("one", 0), ("other", 1000)):
        with ShardWriter(f"{tmp_path}/{name}/{{:03d}}.tar", max_samples=10) as writer:
            for number in range(40):
                writer.write({"__key__": f"{first + number:06d}", "txt": f"{first + number}"})
    stale = "_shardstream/samples/002.tar.parquet"
    shutil.copy(tmp_path / "other" / stale, tmp_path / "one" / stale)
    with Shown((f"{tmp_path}/one",)) as shown:
        refused = shown.get("/step", global_batch_size=40, format="json")
        assert refused.status == 422
        assert "002.tar: its sample table does not match the shard" in refused.json["error"]["message"]


@pytest.mark.parametrize("kind", ["samples", "packs"])
def test_padding_is_told_as_ranks_get_it(kind: str, tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/d/{{:03d}}.tar", columns={"tokens": lambda one: one["n"]}) as writer:
        for number in range(10):
            tokens = np.arange(20, dtype=np.uint16)
            writer.write({"__key__": f"{number:06d}", "tok": tokens.tobytes(), "n": 20})
    options: dict[str, Any] = {"packed": {"length": 40, "dtype": "uint16"}} if kind == "packs" else {}
    with Shown((f"{tmp_path}/d",), options) as shown:
        for step in range(2):
            for rank in range(3):
                dataset: Any = StreamingDataset(f"{tmp_path}/d/", decode=None)
                if kind == "packs":
                    dataset = Packed(dataset, 40, dtype="uint16")
                size = 4 if kind == "packs" else 7
                with DataLoader(
                    dataset, global_batch_size=size, last_batch="pad", device_mesh=mesh_of(3, rank)
                ) as loader:
                    valid = [batch["__valid__"].tolist() for batch in loader]
                if step >= len(valid):
                    continue
                asked = {"global_batch_size": size, "world": 3, "rank": rank, "step": step, "last_batch": "pad"}
                found = shown.json("/step", **asked)
                assert len(found["rows"]) == sum(valid[step])
                assert found.get("padding", 0) == len(valid[step]) - sum(valid[step])
                html = shown.get("/step", **asked).text
                assert ("of padding behind them" in html) == (not all(valid[step]))
