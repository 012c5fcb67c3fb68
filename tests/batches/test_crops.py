"""Parts of images: which, how close to decoding all, and the same on any number of ranks, workers and threads."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from shard_tools import ShardWriter
from streaming import DataLoader, Mixture, StreamingDataset, decode
from streaming.build.batches.build import BatchBuilder, Recipe, SourceRecipe
from streaming.build.batches.rows import FieldRange, Rows
from streaming.build.decode import crops, images
from streaming.build.decode.crops import PixelBox, RandomPart
from streaming.build.decode.upright import stored_box, turned
from streaming.errors import ConfigError, DecodeError
from tests.support.sets.data_sets import SMALL_WINDOW, mesh_of
from tests.support.sources.image_files import saved, smooth

pytestmark = pytest.mark.usefixtures("one_fork_server")

SIZE = (32, 40)
GOLDEN = [(15, 41, 350, 444), (13, 128, 282, 366), (94, 24, 260, 231)]


def textured(height, width, seed=0):
    """A picture with fine detail, on which a shift by a pixel would show."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 160, (height // 8 + 1, width // 8 + 1, 3)).repeat(8, 0).repeat(8, 1)[:height, :width]
    return (coarse // 2 + smooth(height, width) // 3 + rng.integers(0, 12, (height, width, 3))).astype(np.uint8)


def jpeg(height, width, seed=0, **options):
    return saved(textured(height, width, seed), "JPEG", **({"quality": 92} | options))


def psnr(one, other):
    error = np.mean((one.astype(float) - other) ** 2)
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def by_hand(data, box, size, mode="rgb8"):
    """Decode all, take the part, resize it."""
    pixels = box.of(decode.image(mode)(data))
    return images.resample(np.ascontiguousarray(pixels), size)


def drawn(seed, height, width, size, part=None):
    return (part or RandomPart()).drawn(np.random.default_rng(seed))(height, width).on_grid(size)


# --- which part ---


def test_parts_are_those_of_golden_values():
    """What a seed draws is a contract: resumed runs and other versions must see the same."""
    assert [RandomPart().drawn(np.random.default_rng(seed))(375, 500) for seed in range(3)] == GOLDEN


def test_parts_have_areas_and_shapes_within_bounds_and_reach_every_edge():
    boxes = [RandomPart().drawn(np.random.default_rng(seed))(300, 400) for seed in range(2000)]
    for y, x, height, width in boxes:
        assert 0 <= y <= y + height <= 300
        assert 0 <= x <= x + width <= 400
        assert 0.07 < height * width / (300 * 400) <= 1
        assert 0.74 < width / height < 1.35
    assert min(box.y for box in boxes) == 0 == min(box.x for box in boxes)
    assert max(box.y + box.height for box in boxes) == 300
    assert max(box.x + box.width for box in boxes) == 400
    areas = [box.height * box.width / (300 * 400) for box in boxes]
    assert 0.42 < np.mean(areas) < 0.46  # less than 0.54: large ones of another shape than the image do not fit


@pytest.mark.parametrize(("height", "width", "expected"), [(1, 1, (1, 1)), (1, 90, (1, 1)), (90, 2, (3, 2))])
def test_part_of_an_image_in_which_none_fits_is_its_middle(height, width, expected):
    part = RandomPart(scale=(1, 1)).drawn(np.random.default_rng(0))(height, width)
    assert (part.height, part.width) == expected
    assert part.y == (height - part.height) // 2
    assert part.x == (width - part.width) // 2


def test_center_is_that_of_resize_256_and_center_crop_224():
    assert decode.center_crop("rgb8", (224, 224)).part(256, 341) == (16, 58, 224, 224)
    assert decode.center_crop("rgb8", (224, 224), share=1).part(100, 50) == (25, 0, 50, 50)
    assert decode.center_crop("rgb8", (100, 200)).part(1, 1) == (0, 0, 1, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_part_of_the_upright_image_is_found_in_the_stored_one(orientation):
    stored = np.arange(30 * 20).reshape(30, 20)
    upright = turned(stored, orientation)
    box = PixelBox(3, 5, 7, 4)
    found = stored_box(box, orientation, *stored.shape).of(stored)
    np.testing.assert_array_equal(turned(found, orientation), box.of(upright))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_crop_of_a_turned_photograph_is_that_of_the_upright_one(orientation):
    exif = Image.Exif()
    exif[274] = orientation
    data = jpeg(150, 200, exif=exif)
    upright = decode.image("rgb8")(data)
    crop = decode.random_crop("rgb8", SIZE, scale=(0.2, 0.4)).with_rng(np.random.default_rng(3))
    expected = images.resample(crop.part(*upright.shape[:2]).of(upright), SIZE)
    assert psnr(crop(data), expected) > 35
    plain = decode.random_crop("rgb8", SIZE, scale=(0.2, 0.4), upright=False).with_rng(np.random.default_rng(3))
    stored = decode.image("rgb8", upright=False)(data)
    assert psnr(plain(data), images.resample(plain.part(*stored.shape[:2]).of(stored), SIZE)) > 35


# --- how close, and how much is decoded ---


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}])
@pytest.mark.parametrize("mode", ["rgb8", "gray8", "rgba8"])
def test_part_that_is_not_scaled_down_is_exactly_that_of_all(mode, options):
    data = jpeg(100, 130, **options)
    for seed in range(12):
        crop = decode.random_crop(mode, (90, 90)).with_rng(np.random.default_rng(seed))
        np.testing.assert_array_equal(crop(data), by_hand(data, drawn(seed, 100, 130, (90, 90)), (90, 90), mode))


@pytest.mark.parametrize(("size", "least"), [((150, 150), 38), ((75, 75), 34), ((32, 40), 30)])
def test_part_that_is_scaled_down_is_close_to_that_of_all(size, least):
    data, found = jpeg(600, 800), []
    for seed in range(12):
        crop = decode.random_crop("rgb8", size, scale=(0.3, 1)).with_rng(np.random.default_rng(seed))
        found.append(psnr(crop(data), by_hand(data, drawn(seed, 600, 800, size, RandomPart(scale=(0.3, 1))), size)))
    assert min(found) > least


def test_rows_below_the_part_and_pixels_beyond_its_size_are_not_decoded(monkeypatch):
    data, asked = jpeg(640, 640), []
    original = crops.simplejpeg.decode_jpeg

    def watched(given, **options):
        asked.append(options["buffer"].shape)
        return original(given, **options)

    monkeypatch.setattr(crops.simplejpeg, "decode_jpeg", watched)
    for box, size, shape in [
        (PixelBox(0, 0, 100, 100), (100, 100), (112, 640, 3)),
        (PixelBox(10, 10, 200, 200), (100, 100), (112, 320, 3)),
        (PixelBox(0, 0, 640, 640), (80, 80), (80, 80, 3)),
        (PixelBox(0, 0, 560, 560), (80, 80), (144, 160, 3)),
    ]:
        assert crops.jpeg_part(data, (640, 640), box, size, "RGB") is not None
        assert asked.pop() == shape
    progressive = jpeg(640, 640, progressive=True)
    assert crops.jpeg_part(progressive, (640, 640), PixelBox(0, 0, 100, 100), (100, 100), "RGB") is not None
    assert asked.pop() == (640, 640, 3)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_other_kinds_are_decoded_and_cropped_by_the_same_rule(kind):
    pixels = textured(100, 130)
    data = saved(pixels, kind, **({"lossless": True} if kind == "WEBP" else {}))
    crop = decode.random_crop("rgb8", SIZE).with_rng(np.random.default_rng(1))
    box = drawn(1, 100, 130, SIZE)
    np.testing.assert_array_equal(crop(data), images.resample(np.ascontiguousarray(box.of(pixels)), SIZE))


def test_gray_and_cmyk_jpegs_and_images_smaller_than_the_size():
    gray = saved(textured(90, 90)[:, :, 0], "JPEG", quality=95)
    crop = decode.random_crop("rgb8", SIZE).with_rng(np.random.default_rng(2))
    assert crop(gray).shape == (*SIZE, 3)
    cmyk = saved(Image.fromarray(textured(90, 90)).convert("CMYK"), "JPEG", quality=95)
    assert psnr(crop(cmyk), by_hand(cmyk, drawn(2, 90, 90, SIZE), SIZE)) > 60
    for height, width in ((1, 1), (5, 3), (31, 41), (16, 400)):
        for kind in ("JPEG", "PNG"):
            assert crop(saved(textured(height, width), kind)).shape == (*SIZE, 3)
            assert decode.center_crop("rgb8", SIZE)(saved(textured(height, width), kind)).shape == (*SIZE, 3)


def test_without_opencv_results_are_close(monkeypatch):
    data = jpeg(200, 300)
    crop = decode.random_crop("rgb8", SIZE).with_rng(np.random.default_rng(5))
    expected = crop(data)
    monkeypatch.setattr(images, "opencv", lambda: None)
    assert psnr(crop(data), expected) > 30


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.95])
def test_truncated_jpeg_is_refused_wherever_the_part_is(keep):
    data = jpeg(200, 300)
    crop = decode.random_crop("rgb8", SIZE, scale=(0.08, 0.1))
    for seed in range(10):
        with pytest.raises(OSError, match=r"(?i)truncated"):
            crop.with_rng(np.random.default_rng(seed))(data[: int(len(data) * keep)])


def test_damage_inside_the_part_is_not_taken_for_the_rows_left_out():
    data = bytearray(jpeg(400, 400))
    data[len(data) // 4 : len(data) // 4 + 2] = b"\xff\xd9"  # the end of the image, too early
    assert crops.jpeg_part(data, (400, 400), PixelBox(0, 0, 250, 250), (200, 200), "RGB") is None


def test_largest_image_is_checked_before_a_pixel_is_decoded():
    with pytest.raises(ValueError, match="raise the limit"):
        decode.random_crop("rgb8", SIZE, max_pixels=100)(jpeg(20, 20))


# --- names and arguments ---


def test_names_of_crops():
    crop = decode.resolve_decoders("rgb:crop32x40").decoder_for("jpg")
    assert crop == decode.random_crop("rgb", SIZE)
    assert (crop.shape, crop.dtype) == ((32, 40, 3), np.float32)
    assert decode.resolve_decoders({"png": "index8:center32x40"}).decoder_for("png") == decode.center_crop(
        "index8", SIZE
    )
    assert crop(jpeg(50, 50)).dtype == np.float32
    assert crop(jpeg(50, 50)).tobytes() == crop(jpeg(50, 50)).tobytes()
    picture = decode.resolve_decoders("pil:crop32x40").decoder_for("jpg")(jpeg(50, 50))
    assert (picture.size, decode.has_one_shape(decode.random_crop("pil", SIZE))) == ((40, 32), False)


@pytest.mark.parametrize("spec", ["rgb8:crop", "rgb8:crop224", "rgb8:crop0x5", "rgb8:middle2x2", "text:crop2x2"])
def test_other_names_are_refused_with_those_that_exist(spec):
    with pytest.raises(ConfigError, match=r"rgb8:crop224x224|must be \(height, width\)"):
        decode.resolve_decoders({"jpg": spec})


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (decode.random_crop, {"scale": (0, 1)}, r"scale=\(0, 1\): expected a lower and an upper bound"),
        (decode.random_crop, {"scale": (0.5, 1.1)}, "at most 1"),
        (decode.random_crop, {"scale": (0.5, 0.1)}, "scale"),
        (decode.random_crop, {"ratio": (-1, 1)}, "ratio"),
        (decode.random_crop, {"ratio": (1, math.inf)}, "ratio"),
        (decode.random_crop, {"ratio": (math.nan, 1)}, "ratio"),
        (decode.center_crop, {"share": 0}, "share=0: expected"),
        (decode.center_crop, {"share": 1.5}, "share"),
        (decode.center_crop, {"size": (0, 5)}, "size"),
        (decode.random_crop, {"mode": "cmyk"}, "cmyk"),
        (decode.random_crop, {"size": None}, "needs size"),
    ],
)
def test_wrong_arguments_are_refused(make, options, words):
    with pytest.raises(ConfigError, match=words):
        make(**options)


# --- in batches ---

COUNT = 30


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Photographs of three sizes with a mask each; sample 7's is truncated in the variant "damaged"."""
    urls = {}
    for name in ("whole", "damaged"):
        urls[name] = str(tmp_path_factory.mktemp("crops") / name)
        with ShardWriter(f"{urls[name]}/{{:06d}}.tar", max_samples=10) as writer:
            for number in range(COUNT):
                height, width = ((80, 100), (64, 64), (200, 90))[number % 3]
                data = jpeg(height, width, number)
                mask = (np.arange(height)[:, None] // 8 * 8 + np.arange(width) // 16).astype(np.uint8)
                bad = name == "damaged" and number == 7
                fields = {"jpg": data[: len(data) // 2] if bad else data, "mask.png": saved(mask, "PNG")}
                writer.write({"__key__": f"{number:03d}", **fields, "cls": number})
    return urls


MODES = {"jpg": "rgb8:crop32x40", "mask.png": "index8:crop32x40"}


def seen(batches):
    """Bytes of each key's picture and mask."""
    return {
        key: (batch["jpg"][i].numpy().tobytes(), batch["mask.png"][i].numpy().tobytes())
        for batch in batches
        for i, key in enumerate(batch["__key__"])
    }


def played(url, ranks=1, epochs=2, **options):
    """Two epochs over all ranks."""
    found = []
    dataset = StreamingDataset(url, decode=options.pop("decode", MODES), seed=3, **options.pop("dataset", {}))
    for rank in range(ranks):
        with DataLoader(dataset, device_mesh=mesh_of(ranks, rank), global_batch_size=6, **options) as loader:
            for epoch in range(epochs):
                found += [{}] if len(found) <= epoch else []
                found[epoch] |= seen(loader)
    return found


@pytest.mark.thorough
def test_crops_are_the_same_on_any_ranks_workers_and_threads_and_after_a_resume(pictures):
    first, second = played(pictures["whole"], num_threads=0)
    assert len(first) == COUNT
    assert all(first[key] != second[key] for key in first)
    assert played(pictures["whole"], ranks=3, num_threads=2) == [first, second]
    assert played(pictures["whole"], num_workers=2) == [first, second]  # the first batches are built by threads
    by_rows = played(pictures["whole"], dataset={"transform": lambda sample: sample}, num_threads=2)
    assert by_rows == [first, second]  # one by one, in place of columns
    dataset = StreamingDataset(pictures["whole"], decode=MODES, seed=3)
    with DataLoader(dataset, global_batch_size=6) as loader:
        batches = iter(loader)
        before = seen([next(batches), next(batches)])
        state = loader.state_dict()
    with DataLoader(dataset, global_batch_size=6, num_workers=1) as loader:
        loader.load_state_dict(state)
        assert before | seen(loader) == first


def test_crops_of_shards_without_an_index_are_the_same_in_threads_and_workers(pictures, tmp_path):
    for path in sorted(Path(pictures["whole"]).glob("*.tar")):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    options = {"dataset": dict(SMALL_WINDOW), "epochs": 1, "epoch_size": COUNT}
    (threads,) = played(str(tmp_path), num_threads=1, **options)
    (workers,) = played(str(tmp_path), num_workers=1, **options)
    assert len(threads) > COUNT // 2
    assert threads == workers


def test_crops_of_a_mixture_are_those_of_rows_built_one_by_one(pictures):
    found = []
    for transform in (None, lambda sample: sample):
        sources = {
            name: StreamingDataset(pictures["whole"], decode={"jpg": spec, "mask.png": None}, transform=transform)
            for name, spec in {"random": "rgb8:crop32x40", "middle": "rgb8:center32x40"}.items()
        }
        mixed = Mixture(sources, weights={"random": 1, "middle": 1}, seed=5)
        with DataLoader(mixed, batch_size=8, num_threads=0) as loader:
            found.append([next(batches)["jpg"] for batches in [iter(loader)] for _ in range(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][0].shape == (8, *SIZE, 3)


def test_fields_of_equally_large_images_get_the_same_part(tmp_path):
    url = str(tmp_path / "twins")
    with ShardWriter(f"{url}/{{:06d}}.tar") as writer:
        for number in range(12):
            data = saved(textured(90, 70, number), "PNG")
            writer.write({"__key__": str(number), "a.png": data, "b.png": data})
    with DataLoader(StreamingDataset(url, decode={"*": "rgb8:crop32x40"}), batch_size=4) as loader:
        for batch in loader:
            assert torch.equal(batch["a.png"], batch["b.png"])
            assert not torch.equal(batch["a.png"][0], batch["a.png"][1])


def test_samples_by_number_draw_by_their_number_each_time_the_same(pictures):
    dataset = StreamingDataset(pictures["whole"], decode=MODES, seed=3)
    once = [dataset[number]["jpg"].tobytes() for number in range(COUNT)]
    assert once == [dataset[number]["jpg"].tobytes() for number in range(COUNT)]
    assert once == [sample["jpg"].tobytes() for sample in dataset.__getitems__(list(range(COUNT)))]
    other = StreamingDataset(pictures["whole"], decode=MODES, seed=4)
    assert once != [other[number]["jpg"].tobytes() for number in range(COUNT)]


def test_truncated_picture_is_a_bad_sample_and_leaves_the_crops_of_others(pictures):
    first, _ = played(pictures["whole"], num_threads=0)
    (damaged,) = played(pictures["damaged"], epochs=1, num_threads=0)
    assert set(first) - set(damaged) == {"007"}
    others = [key for key in damaged if damaged[key] == first[key]]
    assert len(others) >= COUNT - 2  # all but the substitute, which may come twice
    with pytest.raises(DecodeError, match="'007'"):
        played(pictures["damaged"], epochs=1, dataset={"on_error": "raise"})


def rows_of(payloads):
    memory = b"".join(payloads)
    sizes = np.array([len(one) for one in payloads], np.int64)
    where = FieldRange(starts=np.cumsum(sizes) - sizes, sizes=sizes)
    keys = [str(number) for number in range(len(payloads))]
    return Rows(memory=memory, view=memoryview(memory), keys=keys, urls=keys, fields={"jpg": where}, damage={})


@pytest.mark.parametrize("mode", ["rgb8:32x40", "rgb8:crop32x40", "rgb:center32x40", "gray8:crop32x40", "rgb8:64x64"])
def test_images_of_one_size_are_written_into_their_rows_of_the_batch(mode):
    decoders = decode.resolve_decoders(mode)
    data = [jpeg(64, 64, number) for number in range(5)]
    made = []

    def allocate(shape, dtype):
        made.append(torch.empty(shape, dtype=dtype))
        return made[-1]

    recipe = Recipe(parts=(SourceRecipe(decoders=decoders, on_error="raise"),))
    batch = BatchBuilder(recipe, lambda _: iter(()), print, allocate).build(rows_of(data), None)
    assert batch["jpg"] is made[0]
    slow = Recipe(parts=(SourceRecipe(decoders=decoders, transform=lambda sample: sample, on_error="raise"),))
    expected = BatchBuilder(slow, lambda _: iter(()), print).build(rows_of(data), None)
    assert torch.equal(batch["jpg"], expected["jpg"])
    assert batch["jpg"].dtype == expected["jpg"].dtype


def test_batch_with_a_bad_image_is_built_in_the_memory_of_the_first_try():
    data = [jpeg(64, 64, number) for number in range(4)]
    data[2] = data[2][:300]
    given = []

    def allocate(shape, dtype):
        given.append(shape)
        return torch.empty(shape, dtype=dtype)

    recipe = Recipe(parts=(SourceRecipe(decoders=decode.resolve_decoders("rgb8:crop32x40")),))
    substitutes = rows_of([jpeg(64, 64)])
    batch = BatchBuilder(recipe, lambda _: iter((substitutes,)), lambda _: None, allocate).build(rows_of(data), None)
    assert batch["__key__"] == ["0", "1", "0", "3"]
    assert given == [(4, 32, 40, 3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: decode.random_crop("rgb8", 224),
        lambda: decode.random_crop("rgb8", (224.0, 224)),
        lambda: decode.random_crop("rgb8", (True, 224)),
        lambda: decode.random_crop("rgb8", SIZE, scale=0.5),
        lambda: decode.center_crop("rgb8", SIZE, share="a"),
        lambda: decode.resolve_decoders({"jpg": "rgb8:crop99999x99999"}),
        lambda: decode.resolve_decoders({"jpg": decode.random_crop}),
    ],
)
def test_what_is_no_size_or_share_is_refused_where_it_is_written(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=r"size|scale|share|call it"):
        make()
