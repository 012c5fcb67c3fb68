"""Fields whose size differs from sample to sample: values end to end and their borders, on every way to the loop."""

from __future__ import annotations

import io
import logging
import pickle
import sys
from collections import UserDict, UserList
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils import _pytree as pytree

from infra import DeviceMesh
from shard_tools import ShardWriter
from streaming import DataLoader, DevicePrefetcher, Jagged, Mixture, OrdinaryDataset, StreamingDataset
from streaming.build.batches.collate import default_collate, empty_like
from streaming.build.batches.jagged import checked_jagged
from streaming.errors import ConfigError
from streaming.integrations.gpu_decoders import DaliSource, arrays, code_streams
from streaming.others.remote import wire
from streaming.run.device.copiers import Copied, CpuCopier, CudaCopier, map_tensors
from streaming.run.engine.batch_bytes import tensor_bytes, weigh
from streaming.run.engine.workers.pool import WorkerPool
from streaming.run.replicas import batch_codec
from tests.support.processes.page_lock_account import Account

pytestmark = pytest.mark.usefixtures("one_fork_server")

NUM_SAMPLES = 21
NVIMGCODEC_DEVICE_CPU_ONLY = -99999  # of its header; Python has no name for it


def audio_of(number: int) -> np.ndarray:
    return (np.arange(2 * (number * 7 % 5)) + 100 * number).astype(np.float32).reshape(-1, 2)


def image_of(number: int) -> np.ndarray:
    return np.full((1 + number % 3, 2 + number % 4, 3), number, np.uint8)


def payload_of(number: int) -> bytes:
    return bytes([number]) * (number * 13 % 700)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("jagged")
    with ShardWriter(f"{folder}/{{:04d}}.tar", max_samples=8) as writer:
        for number in range(NUM_SAMPLES):
            tokens = np.arange(number % 4, dtype="<u2") + number
            sample = {"__key__": f"{number:03d}", "jpg": payload_of(number), "tok": tokens.tobytes(), "cls": number}
            sample |= {"audio.npy": audio_of(number), "image.npy": image_of(number)}
            if number % 5:
                sample["caption.txt"] = f"sample {number}".encode()
            writer.write(sample)
    return f"{folder}/"


def dataset(url: str, **options: Any) -> StreamingDataset:
    options.setdefault("decode", {"jpg": None, "tok": "array:uint16->int64", "caption.txt": None})
    return StreamingDataset(url, **options)


ALL = {"jpg": "values", "tok": "values", "audio.npy": "nested", "image.npy": "flat", "caption.txt": "values"}


def check(batch: dict[str, Any], *, of: Any = int) -> list[int]:
    """Every field of a batch against what the samples hold; their numbers."""
    numbers = [int(key) for key in batch["__key__"]]
    jpg, tok, image, audio = (batch[name] for name in ("jpg", "tok", "image.npy", "audio.npy"))
    assert jpg.values.dtype == torch.uint8
    assert jpg.offsets.dtype == torch.int64
    assert jpg.offsets[0] == 0
    assert [row.numpy().tobytes() for row in jpg.rows()] == [payload_of(n) for n in numbers]
    assert tok.values.dtype == torch.int64
    assert [row.tolist() for row in tok.rows()] == [list(range(n, n + n % 4)) for n in numbers]
    said = [b"" if n % 5 == 0 else f"sample {n}".encode() for n in numbers]
    found = batch["caption.txt"].rows() if "caption.txt" in batch else [torch.empty(0)] * len(numbers)
    assert [row.numpy().tobytes() for row in found] == said
    for row, n in zip(image.rows(), numbers, strict=True):
        np.testing.assert_array_equal(row.numpy(), image_of(n))
    assert audio.layout is torch.jagged
    assert audio.shape[0] == len(numbers)
    for row, n in zip(audio.unbind(), numbers, strict=True):
        np.testing.assert_array_equal(row.numpy(), audio_of(n))
    return numbers


@pytest.mark.parametrize("transform", [None, dict], ids=["columns", "rows"])
def test_every_form_by_columns_and_by_rows(url: str, transform: Any) -> None:
    with DataLoader(dataset(url, transform=transform), 4, jagged=ALL, last_batch="partial") as loader:
        seen = [number for batch in loader for number in check(batch)]
    assert sorted(seen) == list(range(NUM_SAMPLES))


@pytest.mark.thorough
def test_worker_processes_build_them_in_their_slots(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "start_if_up", lambda *_: True)  # else threads may build the first batches
    account = Account()
    with DataLoader(dataset(url, transform=dict), 4, jagged=ALL, num_workers=1) as loader:
        loader.page_lock(account)
        for batch in loader:
            check(batch)
            parts = [
                *batch["jpg"][:2],
                *batch["image.npy"][:2],
                batch["audio.npy"].values(),
                batch["audio.npy"].offsets(),
            ]
            assert all(account.holds(part) for part in parts if part.numel())
            del batch, parts


@pytest.mark.parametrize("fields", [None, ("jpg",)], ids=["threads", "consumer"])
def test_this_process_builds_them_in_page_locked_memory(url: str, fields: tuple[str, ...] | None) -> None:
    account = Account()
    with DataLoader(dataset(url, fields=fields), 2, jagged=ALL if fields is None else fields) as loader:
        loader.page_lock(account)
        for batch in loader:
            assert all(account.holds(part) for part in batch["jpg"][:2])
            assert [row.numpy().tobytes() for row in batch["jpg"].rows()] == [
                payload_of(int(k)) for k in batch["__key__"]
            ]
            assert fields is not None or account.holds(batch["audio.npy"].values())


def test_a_prefetcher_and_broadcast_pass_them_on(url: str) -> None:
    with DataLoader(dataset(url), 4, jagged=ALL) as loader:
        for batch in DevicePrefetcher(loader, "cpu"):
            check(batch)
            again = batch_codec.decode(batch_codec.encode(batch, lambda size: torch.empty(size, dtype=torch.uint8)))
            assert type(again["jpg"]) is Jagged
            assert check(again) == check(batch)
            sent = wire.pack({name: batch[name] for name in ("jpg", "__key__")})
            assert wire.num_rows(sent) == 4
            assert wire.unpack(sent)["jpg"].values.equal(batch["jpg"].values)


def parts_of(batch: dict[str, Any]) -> list[torch.Tensor]:
    """What of every form is to be page-locked: values and offsets, where there are any."""
    audio = batch["audio.npy"]
    laid = [part for name in ("jpg", "tok", "image.npy") for part in batch[name][:2]]
    return [part for part in (*laid, audio.values(), audio.offsets()) if part.numel()]


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ])],
)  # fmt: skip
def test_a_prefetcher_copies_every_form_out_of_page_locked_memory(
    url: str, monkeypatch: pytest.MonkeyPatch, device: str, num_workers: int
) -> None:
    monkeypatch.setattr(WorkerPool, "start_if_up", lambda *_: True)  # else threads may build the first batches
    copier: Any = CpuCopier() if device == "cpu" else CudaCopier(torch.device("cuda", torch.cuda.current_device()))
    if device == "cpu":
        copier.page_locker = Account()
    is_locked = copier.page_locker.holds if device == "cpu" else torch.Tensor.is_pinned
    locked, numbers, issue = [], [], copier.issue

    def noting(batch: Any) -> Copied:
        locked.append(all(map(is_locked, parts_of(batch))))
        return issue(batch)

    copier.issue = noting
    options: dict[str, Any] = {"jagged": ALL, "num_workers": num_workers, "last_batch": "partial"}
    with DataLoader(dataset(url, transform=dict), 4, **options) as loader:
        for batch in DevicePrefetcher(loader, device, depth=2, copier=copier):
            if device == "cuda":
                torch.cuda._sleep(5_000_000)  # the device is behind the host, which builds the next batches meanwhile
            assert {part.device.type for part in parts_of(batch)} == {device}
            numbers += check(map_tensors(batch, torch.Tensor.cpu))
            del batch
    assert sorted(numbers) == list(range(NUM_SAMPLES))
    assert locked == [True] * 6


def test_copiers_and_lockers_see_the_parts_of_a_nested_tensor() -> None:
    nested, seen = Jagged.of([audio_of(1), audio_of(2)]).nested(), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((tensor.layout, tensor.shape))
        return tensor.clone()

    made = map_tensors({"audio": nested}, note)["audio"]
    assert seen == [(torch.strided, nested.values().shape), (torch.strided, (3,))]
    assert made.layout is torch.jagged
    assert made.values().equal(nested.values())
    assert made.values().data_ptr() != nested.values().data_ptr()
    with_holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(6.0), torch.tensor([0, 3, 6]), torch.tensor([1, 2])
    )
    map_tensors(with_holes, note)
    assert seen[2][0] is torch.jagged  # whole: its parts alone do not make it


def test_a_rank_without_rows_gets_the_same_entries_of_none(url: str) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=4, rank=0)
    few = dataset(url)[:9]
    with DataLoader(few, 2, jagged=ALL, last_batch="partial", device_mesh=mesh) as loader:
        batches = list(loader)
    assert [len(check(batch)) for batch in batches] == [2, 0]
    last = batches[-1]
    assert (last["jpg"].offsets.tolist(), last["jpg"].values.dtype) == ([0], torch.uint8)
    assert last["audio.npy"].shape[0] == 0
    assert last["image.npy"].shapes.shape == (0, 3)


def test_a_mixture_lays_what_sources_decode_differently(url: str) -> None:
    as_bytes = dataset(
        url, decode={"jpg": lambda data: np.frombuffer(data, np.uint8)[::-1], "tok": None}, fields=("jpg",)
    )
    both = Mixture({"a": dataset(url, fields=("jpg",)), "b": as_bytes})
    with DataLoader(both, 6, jagged=("jpg",), last_batch="partial") as loader:
        for batch in loader:
            for row, key, source in zip(batch["jpg"].rows(), batch["__key__"], batch["__source__"], strict=True):
                wanted = payload_of(int(key))
                assert row.numpy().tobytes() == (wanted[::-1] if source == "b" else wanted)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    trailing=st.lists(st.integers(1, 3), max_size=2),
    kind=st.sampled_from(["<i4", ">i4", "<f8", "|u1", "tensor", "bfloat16"]),
)
def test_rows_are_the_values(lengths: list[int], trailing: list[int], kind: str) -> None:
    rng = np.random.default_rng(0)
    values: list[Any] = [rng.integers(0, 9, (length, *trailing)) for length in lengths]
    if kind in ("tensor", "bfloat16"):
        values = [torch.from_numpy(value).to(torch.bfloat16 if kind == "bfloat16" else torch.int64) for value in values]
    else:
        values = [value.astype(kind)[::-1] for value in values]
    batch = default_collate([{"x": value} for value in values], jagged={"x": "values"})["x"]
    assert isinstance(batch, Jagged)
    assert batch.offsets.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert (batch.num_rows, batch.lengths.tolist()) == (len(lengths), lengths)
    wanted = [
        torch.as_tensor(v) if torch.is_tensor(v) else torch.from_numpy(v.astype(v.dtype.newbyteorder("=")))
        for v in values
    ]
    for row, value in zip(batch.rows(), wanted, strict=True):
        assert row.dtype == value.dtype
        assert row.equal(value)
        assert not row.numel() or batch.values.data_ptr() <= row.data_ptr()
    padded = batch.padded(7)
    assert padded.shape == (len(lengths), max(lengths), *trailing)
    assert all(one[: len(v)].equal(v) and (one[len(v) :] == 7).all() for one, v in zip(padded, wanted, strict=True))
    assert batch.nested().values().data_ptr() == batch.values.data_ptr()
    assert tensor_bytes({"x": batch}) >= batch.values.nbytes + batch.offsets.nbytes
    assert weigh({"x": batch}) >= tensor_bytes({"x": batch})
    some = batch.first(len(lengths) - 1)
    assert all(one.equal(v) for one, v in zip(some.rows(), wanted[:-1], strict=True))
    assert not some.values.numel() or some.values.data_ptr() != batch.values.data_ptr(), "a copy"
    none = empty_like({"x": batch, "n": batch.nested()})
    assert (none["x"].num_rows, none["x"].values.shape) == (0, (0, *trailing))
    assert none["n"].shape[0] == 0
    assert none["x"].padded().shape[0] == 0


def test_a_collate_fn_lays_fields_by_itself(url: str) -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "image": Jagged.of([one["image.npy"] for one in samples], "flat"),
            "keys": [s["__key__"] for s in samples],
        }

    with DataLoader(dataset(url), 4, collate_fn=collate) as loader:
        for batch in loader:
            for row, key in zip(batch["image"].rows(), batch["keys"], strict=True):
                np.testing.assert_array_equal(row.numpy(), image_of(int(key)))


def test_ordinary_data_sets_too() -> None:
    rows = [{"x": torch.arange(n), "y": n} for n in range(1, 7)]
    with DataLoader(OrdinaryDataset(rows, shuffle=False), 3, jagged=("x",)) as loader:
        batches = list(loader)
    assert [batch["x"].values.tolist() for batch in batches] == [[0, 0, 1, 0, 1, 2], [*range(4), *range(5), *range(6)]]
    assert [batch["x"].lengths.tolist() for batch in batches] == [[1, 2, 3], [4, 5, 6]]
    with DataLoader([torch.arange(n) for n in (1, 2)], 2) as loader, pytest.raises(RuntimeError) as caught:
        next(iter(loader))
    assert "Jagged.of" in "".join(caught.value.__notes__)
    tensors = [torch.arange(2)] * 2
    with (
        DataLoader(tensors, 2, jagged=("x",)) as loader,
        pytest.raises(ConfigError, match="that are dicts, got samples of type"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([np.zeros((2, 3)), np.zeros((2, 4))], r"sample 'b' is float64 \[2, 4\].*write jagged=\{field: \"flat\"\}"),
        ([np.zeros(2), np.zeros(2, np.float32)], r"sample 'b' is float32 \[2\].*convert them in transform"),
        ([np.zeros(2), torch.zeros(2, dtype=torch.bfloat16)], r"sample 'b' is torch.bfloat16"),
        ([b"", "text"], r"sample 'b' is str; expected bytes.*decode=\{field: None\}"),
        ([np.float32(1), np.float32(2)], r"sample 'a' is float32 \[\]"),
        ([None, None], r"none of the 2 samples has a value"),
    ],
)
def test_what_cannot_be_laid_is_named_with_the_cure(values: list[Any], said: str) -> None:
    """A sample without a key, which a transform may have left out, is named by its place in the batch."""
    samples = [{"__key__": key, "x": value} for key, value in zip("ab", values, strict=True)]
    with pytest.raises(ConfigError, match=said):
        default_collate(samples, jagged={"x": "values"})
    without_keys = [{"x": value} for value in values]
    with pytest.raises(ConfigError, match=said.replace("sample 'a'", "row 0").replace("sample 'b'", "row 1")):
        default_collate(without_keys, jagged={"x": "values"})


def test_wrong_options_are_refused(url: str, caplog: pytest.LogCaptureFixture) -> None:
    whole = dataset(url, fields=("jpg",))
    for wrong in ("jpg", {"jpg": "padded"}, {1: "values"}, 3):
        with pytest.raises(
            ConfigError, match=r"jagged: expected names of fields (or a form for each, got|with one of)"
        ):
            DataLoader(whole, 4, jagged=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"jagged=.*with a collate_fn.*Jagged\.of"):
        DataLoader(whole, 4, jagged=("jpg",), collate_fn=list)
    with pytest.raises(ConfigError, match=r"jagged: field 'tok' is not among the fields read, fields=\('jpg',\)"):
        DataLoader(whole, 4, jagged=("tok",))
    with caplog.at_level(logging.WARNING):
        DataLoader(dataset(url), 4, jagged=("jqg",)).close()
    assert "jagged: no sample of" in caplog.text
    assert "did you mean 'jpg'?" in caplog.text
    for method in ("nested", "padded"):
        with pytest.raises(ConfigError, match="several axes; use rows"):
            getattr(Jagged.of([image_of(1), image_of(2)], "flat"), method)()


# --- decoders of images on a GPU: what they are handed, with stand-ins for the libraries


def test_payloads_are_views_of_the_batch(url: str) -> None:
    with DataLoader(dataset(url), 4, jagged=("jpg",)) as loader:
        batch = next(iter(loader))
    shown = arrays(batch["jpg"])
    assert [one.tobytes() for one in shown] == [payload_of(int(key)) for key in batch["__key__"]]
    assert all(
        one.dtype == np.uint8 and (not one.size or np.shares_memory(one, batch["jpg"].values.numpy())) for one in shown
    )
    for wrong in (batch["__key__"], Jagged.of([audio_of(1)]), Jagged.of([b"1"])._replace(values=torch.zeros(1))):
        with pytest.raises(ConfigError, match="expected a jagged field of bytes"):
            arrays(wrong)
    with pytest.raises(ConfigError, match="the bytes are on meta"):
        arrays(batch["jpg"]._replace(values=batch["jpg"].values.to("meta")))


class CodeStream:
    """As nvImageCodec has it: of a path, bytes, or an array uint8 [n] that it reads in place."""

    def __init__(self, source: Any) -> None:
        assert isinstance(source, np.ndarray)
        assert (source.dtype, source.ndim, source.flags.c_contiguous) == (np.uint8, 1, True)
        self.source = source


def test_code_streams_of_nvimagecodec(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = Jagged.of([payload_of(3), payload_of(4)])
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"nvImageCodec, which is not installed: pip install nvidia-nvimgcodec"):
        code_streams(field)
    codec = ModuleType("nvidia.nvimgcodec")
    codec.CodeStream = CodeStream  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", codec)
    made = code_streams(field)
    assert [one.source.tobytes() for one in made] == [payload_of(3), payload_of(4)]
    assert np.shares_memory(made[1].source, field.values.numpy())


def feed(source: Any, num_outputs: int | None) -> list[Any]:
    """What ``fn.external_source`` does of an epoch with ``batch=True``: each output a list of arrays, all as long."""
    epoch = []
    for data in iter(source):
        outputs = [data] if num_outputs is None else data
        assert num_outputs is None or (isinstance(data, tuple) and len(data) == num_outputs)
        for output in outputs:
            assert isinstance(output, list)
            assert all(isinstance(one, np.ndarray) for one in output)
            assert len({(one.dtype, one.ndim) for one in output}) == 1
        assert len(set(map(len, outputs))) == 1
        epoch.append(outputs)
    return epoch


def test_dali_is_fed_an_epoch_at_a_time(url: str) -> None:
    with DataLoader(dataset(url), 4, jagged={"jpg": "values", "image.npy": "flat"}) as loader:
        both = DaliSource(loader, "jpg", "cls")
        for _ in range(2):
            epoch = feed(both, 2)
            assert len(epoch) == len(loader)
            for jpegs, labels in epoch:
                assert [one.tobytes() for one in jpegs] == [payload_of(int(label[0])) for label in labels]
        images = feed(DaliSource(loader, "image.npy"), None)
        assert {one.ndim for (batch,) in images for one in batch} == {3}
        with pytest.raises(ConfigError, match="no entry 'png'; there are __key__"):
            feed(DaliSource(loader, "png"), None)
        with pytest.raises(ConfigError, match=r"field 'audio\.npy' is a list"):
            feed(DaliSource(loader, "audio.npy"), None)
    with pytest.raises(ConfigError, match="name the fields"):
        DaliSource([])


def test_a_list_of_encoded_images_for_decode_jpeg(tmp_path: Path) -> None:
    """torchvision takes a list of 1-D uint8 CPU tensors; a decoder of ours stands in for it."""
    with ShardWriter(f"{tmp_path}/{{:04d}}.tar") as writer:
        for number in range(4):
            out = io.BytesIO()
            Image.fromarray(np.full((8 + number, 9, 3), 40 * number, np.uint8)).save(out, "png")
            writer.write({"__key__": str(number), "png": out.getvalue()})
    with DataLoader(StreamingDataset(f"{tmp_path}/", decode=None, shuffle=False), 4, jagged=("png",)) as loader:
        rows = next(iter(loader))["png"].rows()
    assert all(row.dtype == torch.uint8 and row.ndim == 1 and row.is_contiguous() for row in rows)
    decoded = [np.asarray(Image.open(io.BytesIO(row.numpy().data))) for row in rows]
    assert [one.shape for one in decoded] == [(8, 9, 3), (9, 9, 3), (10, 9, 3), (11, 9, 3)]
    assert [one.mean() for one in decoded] == [0, 40, 80, 120]


def jpegs(count: int) -> list[bytes]:
    """Images of ``8 + n`` x 9 pixels of the grey value ``10 * n``."""
    files = [io.BytesIO() for _ in range(count)]
    for number, file in enumerate(files):
        Image.fromarray(np.full((8 + number, 9, 3), 10 * number, np.uint8)).save(file, "jpeg", quality=95)
    return [file.getvalue() for file in files]


def there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not there("nvidia.nvimgcodec"), reason="nvImageCodec is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shown", [arrays, code_streams])
def test_nvimagecodec_itself_decodes_them(shown: Callable[[Jagged], list[Any]]) -> None:
    codec: Any = import_module("nvidia.nvimgcodec")
    decoder = codec.Decoder(device_id=NVIMGCODEC_DEVICE_CPU_ONLY, backends=[codec.Backend(codec.CPU_ONLY)])
    images = [np.asarray(one.cpu()) for one in decoder.decode(shown(Jagged.of(jpegs(5))))]
    assert [(one.shape, round(one.mean())) for one in images] == [((8 + n, 9, 3), 10 * n) for n in range(5)]


@pytest.mark.skipif(not there("nvidia.dali"), reason="DALI is not installed")
@pytest.mark.filterwarnings("ignore")
def test_dali_itself_decodes_two_epochs(tmp_path: Path) -> None:
    dali: Any = import_module("nvidia.dali")
    fn: Any = import_module("nvidia.dali.fn")
    with ShardWriter(f"{tmp_path}/{{:04d}}.tar") as writer:
        for number, file in enumerate(jpegs(12)):
            writer.write({"__key__": f"{number:03d}", "jpg": file, "cls": number})
    with DataLoader(StreamingDataset(str(tmp_path), decode={"jpg": None}), 4, jagged=("jpg",)) as loader:
        pipeline = dali.Pipeline(batch_size=4, num_threads=1, device_id=None)
        with pipeline:
            files, labels = fn.external_source(DaliSource(loader, "jpg", "cls"), num_outputs=2, cycle="raise")
            pipeline.set_outputs(fn.decoders.image(files, device="cpu"), labels)
        for _ in range(2):
            seen = []
            with suppress(StopIteration):
                while True:
                    images, numbers = pipeline.run()
                    for place in range(4):
                        number, image = int(np.asarray(numbers.at(place))[0]), np.asarray(images.at(place))
                        assert (image.shape, round(image.mean())) == ((8 + number, 9, 3), 10 * number)
                        seen.append(number)
            assert sorted(seen) == list(range(12))
            pipeline.reset()


def test_programs_that_copy_tuples_get_the_same_one() -> None:
    """Lightning, Accelerate and torch know named tuples; transformers gives any tuple's class one iterable."""
    laid = Jagged.of([b"ab", b"c"])
    shaped = Jagged.of([np.ones((2, 3), np.uint8)], form="flat")
    for one in (laid, shaped):
        copies = [
            type(one)(field for field in one),
            type(one)(*one),
            pickle.loads(pickle.dumps(one)),
            pytree.tree_map(lambda leaf: leaf, one),
            one._replace(values=one.values),
        ]
        for copy in copies:
            assert isinstance(copy, Jagged)
            assert [field is None for field in copy] == [field is None for field in one]
            assert all(torch.equal(a, b) for a, b in zip(copy, one, strict=True) if b is not None)
    with pytest.raises(TypeError, match="offsets are missing"):
        Jagged(laid.values)


def test_names_as_programs_for_configurations_hold_them() -> None:
    assert checked_jagged(UserList(["a", "b"])) == {"a": "values", "b": "values"}
    assert checked_jagged(UserDict({"a": "flat"})) == {"a": "flat"}
    with pytest.raises(ConfigError, match="expected names of fields or a form for each"):
        checked_jagged("audio")
