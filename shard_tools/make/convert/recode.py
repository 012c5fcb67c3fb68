"""Re-encode the images of a source: smaller, upright, in one format. The result wraps any other source."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin

from shard_tools.make.convert.base.annotated import IMAGE_EXTENSIONS, TURNED
from shard_tools.make.convert.base.identity import Origins
from shard_tools.make.convert.base.records import Countable, Record, Skipped, Source
from shard_tools.make.write.filetypes import plain_extension
from streaming.build.decode.images import MAX_PIXELS, check_sizes, open_image, stored_size
from streaming.build.decode.upright import orientation_of, turned
from streaming.common.threads import map_threads
from streaming.errors import ConfigError

FORMATS = {"jpg": "JPEG", "webp": "WEBP", "png": "PNG"}
DEFAULT_QUALITY = 90
_LOOKED_AT = 1000  # records read to find the fields, if they are not known
_LOSSY = frozenset({"jpg", "webp"})
_UPRIGHT = "the image was turned upright, as its EXIF orientation says; the new file has no EXIF"
_DAMAGED = "the image cannot be decoded, or not encoded as asked: stored as it is"
_DEEP = "the image has more than 8 bits a channel, which re-encoding would lose: stored as it is"
_MOVING = "the image has several frames, which re-encoding would lose: stored as it is"
_LARGE = f"the image has more than {MAX_PIXELS:,} pixels, which decoders here refuse: stored as it is"
_OPAQUE = "transparency is dropped, as decoders here do, since jpg has none"
_PRINTED = "CMYK became RGB"


_DEEP_MODE = re.compile(r";1[26]|^6553|^1023$|^4095$")  # Pillow's names of pixel layouts, and PNM's


class _KeptError(Exception):
    """The reason why an image is stored unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Options for re-encoding images.

    Attributes:
        max_side: Maximum length of the longer side in pixels; smaller images are not enlarged.
        quality: For ``jpg`` and ``webp``, 1 to 100. None: 90, and files that meet the options already keep their bytes.
        format: ``jpg``, ``webp`` or ``png``; None: the format of the field's name.
        fields: The fields to re-encode; empty: the only field that holds images.
    """

    max_side: int | None = None
    quality: int | None = None
    format: str | None = None
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject options that contradict each other.

        Raises:
            ConfigError: They do.
        """
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(f"--format {self.format!r}: expected one of {', '.join(FORMATS)}")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise ConfigError(f"--quality {self.quality}: expected 1 to 100")
        if self.max_side is not None and self.max_side < 1:
            raise ConfigError(f"--image-max-side {self.max_side}: expected a number of pixels")
        if self.quality is not None and self.format == "png":
            raise ConfigError("--quality: png has none; choose --format jpg or webp, or leave --quality out")
        if self.fields and not self:
            raise ConfigError("--image-fields says what to re-encode; say how: --image-max-side, --quality or --format")

    def __bool__(self) -> bool:
        return self.max_side is not None or self.quality is not None or self.format is not None

    def identity(self) -> dict[str, object]:
        """Return the facts that determine the bytes of the result."""
        return {
            "max_side": self.max_side, "quality": self.quality, "format": self.format, "fields": list(self.fields),
        }  # fmt: skip

    def format_of(self, field: str) -> str:
        """Return the format that a field is re-encoded to.

        Raises:
            ConfigError: Its name is not a format that can be written, or ``quality`` would have no effect.
        """
        wanted = self.format or plain_extension(field.rpartition(".")[2].lower())
        if wanted not in FORMATS:
            raise ConfigError(f"field {field!r}: say what its images become: --format {'|'.join(FORMATS)}")
        if self.quality is not None and wanted not in _LOSSY:
            raise ConfigError(f"--quality: field {field!r} is png, which has none; give --format jpg or webp as well")
        return wanted

    def name_of(self, field: str) -> str:
        """Return the name of a field after it is re-encoded."""
        return field if self.format is None else field[: field.rfind(".") + 1] + self.format


@dataclass(frozen=True, slots=True, kw_only=True)
class Reencoded:
    """The records of another source with re-encoded images.

    Images that re-encoding would degrade in other ways than requested, and damaged ones, keep their bytes, with a
    remark. If a sample has one image, ``width`` and ``height`` of its metadata are those of the result.

    Attributes:
        below: The source.
        how: The options.
        num_threads: Number of threads that decode and encode.
    """

    below: Source
    how: ImageOptions
    num_threads: int

    @property
    def kind(self) -> str:
        """The kind of the source."""
        return self.below.kind

    @property
    def num_records(self) -> int | None:
        """Number of records, if the source knows it."""
        return self.below.num_records

    @property
    def num_bytes(self) -> int:
        """Bytes of the source."""
        return self.below.num_bytes

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Entries that the source left out."""
        return self.below.skipped

    @property
    def fields(self) -> Mapping[str, bool] | None:
        """The fields of the source, renamed where the format changes."""
        fields = self.below.fields
        if fields is None:
            return None
        chosen = self._chosen(fields, "the source")
        return {self.how.name_of(field) if field in chosen else field: always for field, always in fields.items()}

    def count(self, executor: Executor) -> None:
        """Let the source count its records, if it can."""
        if isinstance(self.below, Countable):
            self.below.count(executor)

    def identity(self) -> dict[str, object]:
        """Return the identity of the source."""
        return self.below.identity()

    def origins(self) -> Origins:
        """Return the inputs of the source."""
        return self.below.origins()

    def check(self) -> tuple[str, ...]:
        """Refuse options that have no effect; return the columns that re-encoding adds.

        Raises:
            ConfigError: No field holds images, as far as the source or its first records tell.
        """
        fields = self.below.fields
        if fields is None:
            fields = dict[str, bool]()
            with contextlib.closing(self.below.records(0)) as records:
                for record in itertools.islice(records, _LOOKED_AT):
                    fields |= dict.fromkeys(record.fields, False)
                    if self._chosen(fields, "the source") and {*self.how.fields} <= fields.keys():
                        break
        missing = [name for name in self.how.fields if name not in fields]
        chosen = self._chosen(fields, "the source")
        if missing or not chosen:
            what = f"no field {missing[0]!r}" if missing else "no field holds images"
            raise ConfigError(
                f"--image-max-side, --quality and --format: {what} in the source; its fields: "
                f"{', '.join(sorted(fields)) or 'none'}"
            )
        for field in chosen:
            self.how.format_of(field)
        return ("width", "height") if len(chosen) == 1 else ()

    def records(self, start: int) -> Generator[Record, None, None]:
        """Yield the records from number ``start`` on, re-encoded by several threads, in order."""
        with (
            contextlib.closing(self.below.records(start)) as records,
            contextlib.closing(map_threads(self._recode, records, self.num_threads)) as recoded,
        ):
            yield from recoded

    def _chosen(self, fields: Mapping[str, object], what: str) -> list[str]:
        named = self.how.fields or getattr(self.below, "pictures", ())
        if named:
            return [field for field in named if field in fields]
        images = [field for field in fields if field.rpartition(".")[2].lower() in IMAGE_EXTENSIONS]
        if len(images) > 1:
            raise ConfigError(
                f"{what}: several fields hold images ({', '.join(sorted(images))}); name those to re-encode with "
                "--image-fields, since masks and depths would be damaged"
            )
        return images

    def _recode(self, record: Record) -> Record:
        fields, remarks = dict[str, bytes](), record.remarks
        chosen = self._chosen(record.fields, record.where or f"sample {record.key!r}")
        metadata = dict(record.metadata)
        for field, data in record.fields.items():
            name = self.how.name_of(field) if field in chosen else field
            if name in fields or (name != field and name in record.fields):
                raise ConfigError(
                    f"{record.where}: the field {field!r} would become {name!r}, which is there already; name fewer "
                    "with --image-fields"
                )
            fields[name] = data
            if field in chosen:
                fields[name], told = self._image(data, self.how.format_of(field))
                remarks = (*(one for one in remarks if one != TURNED), *told)
                if len(chosen) == 1:
                    metadata |= _size_of(fields[name])
        return replace(record, fields=fields, metadata=metadata, remarks=remarks)

    def _image(self, data: bytes, wanted: str) -> tuple[bytes, Sequence[str]]:
        """Return the re-encoded image, and remarks."""
        try:
            return self._encoded(data, wanted)
        except _KeptError as error:
            return data, (str(error),)
        except Exception:  # noqa: BLE001  of Pillow: a damaged image is stored as it is, for readers to pass over
            return data, (_DAMAGED,)

    def _encoded(self, data: bytes, wanted: str) -> tuple[bytes, Sequence[str]]:
        check_sizes(data, _check_size)
        with open_image(data) as image:
            _check_size(image.height, image.width)
            _refuse_losses(image)
            orientation, is_turned = orientation_of(data), False
            if isinstance(image, TiffImagePlugin.TiffImageFile):
                is_turned = image.tag_v2.get(274, 1) != 1
                image.load()  # which turns it
            size = self._size(*image.size)
            is_same = image.format == FORMATS[wanted] and size == image.size and orientation == 1
            if is_same and self.how.quality is None:
                return data, ()
            if size != image.size:
                image.draft(None, (2 * size[0], 2 * size[1]))  # libjpeg scales down while it decodes, up to 8 times
            image.load()
            plain, remarks = _in_mode(image, wanted)
            resized = plain if plain.size == size else plain.resize(size, Image.Resampling.LANCZOS)
            if orientation > 1:
                resized, is_turned = Image.fromarray(turned(np.asarray(resized), orientation)), True
            if is_turned:
                remarks.append(_UPRIGHT)
            profile = image.info.get("icc_profile") if plain.mode == image.mode else None
            return _saved(resized, wanted, self.how.quality or DEFAULT_QUALITY, profile), remarks

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to scale to, never larger than the image."""
        longest, side = max(width, height), self.how.max_side
        if side is None or longest <= side:
            return width, height
        return max(1, round(width * side / longest)), max(1, round(height * side / longest))


def _check_size(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise _KeptError(_LARGE)


def _refuse_losses(image: ImageFile.ImageFile) -> None:
    """Refuse images that would lose more than detail: those with more than 8 bits, or several frames."""
    if getattr(image, "is_animated", False):
        raise _KeptError(_MOVING)
    bits: object = image.tag_v2.get(258, 8) if isinstance(image, TiffImagePlugin.TiffImageFile) else 8
    deepest = max(bits) if isinstance(bits, tuple) else bits
    stored = [str(one) for tile in image.tile for one in (tile.args if isinstance(tile.args, tuple) else (tile.args,))]
    if image.mode[0] in "IF" or (isinstance(deepest, int) and deepest > 8) or any(map(_DEEP_MODE.search, stored)):
        raise _KeptError(_DEEP)


def _in_mode(image: Image.Image, wanted: str) -> tuple[Image.Image, list[str]]:
    """Return an image in a mode that the format has (L, LA, RGB or RGBA), and remarks."""
    mode = {"1": "L", "P": "RGB", "PA": "RGBA"}.get(image.mode, image.mode)
    if "transparency" in image.info and image.mode in {"1", "L", "P", "RGB"}:
        mode = "RGBA"
    remarks = [_PRINTED] if image.mode == "CMYK" else []
    mode = mode if mode in {"L", "LA", "RGB", "RGBA"} else "RGB"
    if wanted == "jpg" and mode.endswith("A"):
        mode = mode[:-1]
        remarks.append(_OPAQUE)
    if wanted == "webp" and mode in {"L", "LA"}:
        mode = {"L": "RGB", "LA": "RGBA"}[mode]
    return (image if image.mode == mode else image.convert(mode)), remarks


def _saved(image: Image.Image, wanted: str, quality: int, profile: bytes | None) -> bytes:
    """Encode an image; only the color profile of the old file is kept."""
    out = io.BytesIO()
    image.info = {}
    options = {"quality": quality} if wanted in _LOSSY else {}
    image.save(out, FORMATS[wanted], icc_profile=profile, **options)
    return out.getvalue()


def _size_of(data: bytes) -> dict[str, object]:
    """Return width and height of an upright image, if it has a size."""
    with contextlib.suppress(Exception):
        height, width, _ = stored_size(data)
        return {"width": width, "height": height}
    return {}
