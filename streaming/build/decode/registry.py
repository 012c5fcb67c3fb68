"""Choose the decoder of a field: by its extension, a name such as "rgb8:224x224", a type, or a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from streaming.build.decode import arrays, images, values
from streaming.build.decode.by_set import BySet, Renumbered
from streaming.build.decode.sound import Sound
from streaming.build.decode.video import Video
from streaming.common.arguments import format_bytes, unpacked_name
from streaming.common.inflate import MAX_GZIP_RATIO
from streaming.errors import ConfigError, DecodeError
from streaming.storage import redact
from streaming.types import Decoder, ReadBuffer

FieldSpec: TypeAlias = "str | type | np.dtype[np.generic] | Callable[..., object] | FieldDecoder | None"
DecodeSpec: TypeAlias = "str | Mapping[str, FieldSpec] | FieldDecoder | None"


@runtime_checkable
class FieldDecoder(Protocol):
    """Provide the decoder of every field. Thread-safe; picklable if its decoders are."""

    def decoder_for(self, field: str, /) -> Decoder:
        """Return the decoder of ``field`` (an extension without the leading dot), the same object on every call.

        The functions ``streaming.decode.raw`` and ``view`` themselves mean the stored bytes and a view of them, so an
        engine can recognize them and need not copy the bytes first.

        Raises:
            ConfigError: The field must not or cannot be decoded; the message names a cure.
        """


_IMAGES = frozenset(
    (
        *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"),
        *("avif", "jp2", "j2k", "j2c", "jpx"),
    )
)
_NPZ = arrays.npz()
_RGB8 = images.image("rgb8")
BY_EXTENSION: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), values.text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id", "int"), values.integer),
    "float": values.number,
    **dict.fromkeys(("json", "jsn"), values.json),
    "npy": arrays.npy,
    "npz": _NPZ,
    **dict.fromkeys(("msgpack", "mp", "msg"), values.msgpack),
    **dict.fromkeys(("safetensors", "sft"), arrays.safetensors),
}
_REFUSED = {
    **dict.fromkeys(("pyd", "pickle", "pkl"), "a pickle runs code on loading"),
    **dict.fromkeys(("pth", "pt"), "a torch file is a pickle, which may run code on loading"),
    **dict.fromkeys(("ten", "tb"), "tenbin is webdataset's own format"),
}
BY_NAME: dict[str, Decoder] = {
    **dict.fromkeys(("raw", "bytes"), values.raw),
    "view": values.view,
    "text": values.text,
    "int": values.integer,
    "float": values.number,
    "json": values.json,
    "npy": arrays.npy,
    "npz": _NPZ,
    "msgpack": values.msgpack,
    "safetensors": arrays.safetensors,
    "sound": Sound(),
    "video": Video(),
}
_TYPES: dict[type, Decoder] = {int: values.integer, float: values.number, str: values.text, bytes: values.raw}
_NEEDS: dict[Decoder, tuple[tuple[str, str], ...]] = {  # decoder: (module, extra), …
    values.msgpack: (("msgpack", "msgpack"),),
    arrays.safetensors: (("safetensors.numpy", "safetensors"),),
}
_MAKERS = (images.image, images.random_crop, images.center_crop, arrays.array, arrays.npz)
Tables: TypeAlias = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Tables of numbers by the directory of a set and the path in the value; see ``Renumbered``."""
_ARRAY = re.compile(r"array:([a-z0-9]+)(?:->([a-z0-9]+))?(?::(\d+(?:x\d+)*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOnBytes:
    """A user's function as decoder: it gets ``bytes`` that it may keep."""

    function: Callable[[bytes], object]

    accepts_buffer = True

    def __call__(self, data: ReadBuffer) -> object:
        """Return the function's result."""
        return self.function(bytes(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class RawFields:
    """Every field as ``bytes``."""

    def decoder_for(self, field: str, /) -> Decoder:  # noqa: ARG002 - the protocol's argument
        """Return ``raw``, always."""
        return values.raw


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoFields:
    """Fields decoded by the last component of their extension, except those in ``given``.

    A field is looked up in ``given`` unchanged, then in lower case, then as ``*.png`` (its last component), then as
    ``*`` (anything else); then in ``described``.

    A field such as ``json.gz`` is unpacked, then decoded as ``json``: by the decoder ``given`` for it, or for its
    content (``json``, ``*.json``), or by extension. ``raw``, ``view`` and functions that are given for ``json.gz``
    itself, ``*.gz`` or ``*`` get the stored bytes.

    Attributes:
        given: Decoders by field or pattern; a ``FieldDecoder`` chooses the decoder of the field.
        image: Decoder of all images that are not ``given``.
        described: Decoders of fields whose content the dataset itself describes.
        renumbered: Translations of class numbers, by field and by the directory of the set.
        max_gzip_ratio: Maximum ratio of inflated to stored size of a ``.gz`` field; fields below 64 MiB may exceed it.
    """

    given: Mapping[str, Decoder | FieldDecoder] = field(default_factory=dict)
    image: Decoder = _RGB8
    described: Mapping[str, Decoder | FieldDecoder] = field(default_factory=dict)
    renumbered: Mapping[str, Tables] = field(default_factory=dict)
    max_gzip_ratio: float = MAX_GZIP_RATIO
    _known: dict[str, Decoder] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[object, ...]:
        """Return the constructor and its arguments. Cached look-ups are left out, so use does not change the pickle."""
        return _auto_fields, (self.given, self.image, self.described, self.renumbered, self.max_gzip_ratio)

    def decoder_for(self, field: str, /) -> Decoder:
        """Return the decoder of ``field``.

        Raises:
            ConfigError: The kind of field is refused (pickles), or needs a missing package.
        """
        decoder = self._known.get(field)
        if decoder is None:
            decoder = self._known.setdefault(field, self._renumbered(field, self._find(field)))
        return decoder

    def _renumbered(self, field: str, decoder: Decoder) -> Decoder:
        """Return a decoder that also translates the field's numbers.

        Raises:
            ConfigError: The decoder does not return the stored numbers.
        """
        tables = self.renumbered.get(field.lower())
        if tables is None:
            return decoder
        stored = decoder.below if isinstance(decoder, values.Unpacked) else decoder
        if stored not in (values.integer, values.json):
            raise ConfigError(
                f'decode: field {field!r} holds numbers of classes that classes="union" translates, so they must be '
                'decoded as "int" (in "json"); leave it out of decode=, or write classes="own"'
            )
        made = {home: Renumbered(below=decoder, tables=table) for home, table in tables.items()}
        return BySet(decoders=made, otherwise=decoder)

    def _find(self, field: str) -> Decoder:
        given, inner = self._given(field), unpacked_name(field)
        if given is None and inner is not None:
            within = self._given(inner)
            if within is not None:
                return self._unpacking(within.decoder_for(inner) if isinstance(within, FieldDecoder) else within)
        if given is None:
            given = self.given.get("*")
        if isinstance(given, FieldDecoder):
            return given.decoder_for(field)
        if given is not None:
            return self._unpacking(given) if inner is not None and _reads_content(given) else given
        described = self.described.get(field.lower())
        if described is not None:
            return described.decoder_for(field) if isinstance(described, FieldDecoder) else described
        found = self._by_extension(field, field if inner is None else inner)
        return found if inner is None else self._unpacking(found)

    def _given(self, field: str) -> Decoder | FieldDecoder | None:
        lowered = field.lower()
        names = (field, lowered, f"*.{lowered.rpartition('.')[2]}")
        return next((one for one in map(self.given.get, names) if one is not None), None)

    def _unpacking(self, decoder: Decoder) -> Decoder:
        return values.Unpacked.before(decoder, self.max_gzip_ratio)

    def _by_extension(self, field: str, name: str) -> Decoder:
        """Return the decoder of the content with the extension ``name``, for the field ``field``.

        Raises:
            ConfigError: The content is refused, or needs a missing package.
        """
        last = name.lower().rpartition(".")[2]
        if last in _REFUSED:
            raise ConfigError(
                f"field {field!r} is not decoded: {_REFUSED[last]}. Take it as bytes with "
                f"decode={{{field!r}: None}}, leave it out with fields=, or name your own function: "
                f"decode={{{field!r}: function}}"
            )
        return self.image if last in _IMAGES else _checked(BY_EXTENSION.get(last, values.raw))


def _reads_content(decoder: Decoder) -> bool:
    """Return whether a decoder takes the inflated content of a gzip field; ``raw``, ``view`` and functions do not."""
    return is_ours(decoder) and decoder is not values.raw and decoder is not values.view


def bounded(decoders: FieldDecoder, max_gzip_ratio: float) -> FieldDecoder:
    """Return decoders that refuse gzip fields which inflate to more than ``max_gzip_ratio`` times their size."""
    if not isinstance(decoders, AutoFields):
        return decoders
    given = {
        name: bounded(one, max_gzip_ratio) if isinstance(one, FieldDecoder) else one
        for name, one in decoders.given.items()
    }
    return replace(decoders, given=given, max_gzip_ratio=max_gzip_ratio)


def _auto_fields(
    given: Mapping[str, Decoder | FieldDecoder], image: Decoder, described: Mapping[str, Decoder | FieldDecoder],
    renumbered: Mapping[str, Tables], max_gzip_ratio: float,
) -> AutoFields:  # fmt: skip
    return AutoFields(
        given=given, image=image, described=described, renumbered=renumbered, max_gzip_ratio=max_gzip_ratio
    )


def resolve_decoders(spec: DecodeSpec = "auto") -> FieldDecoder:
    """Return the decoders specified by a user's ``decode=``.

    Args:
        spec: ``"auto"``: by extension. None, ``"raw"`` or ``"bytes"``: every field as bytes. An image mode such as
            ``"rgb8:224x224"`` or ``"pil"``: by extension, images in that mode. ``"view"``: every field as a read-only
            view of its bytes. A mapping of field to name, type, NumPy type, function or None (bytes): these fields as
            given, the rest by extension; a key may be ``*.png`` (every field with that ending) or ``*`` (all other
            fields). A ``FieldDecoder``: itself.

    Raises:
        ConfigError: The spec is none of these, or needs a missing package.
    """
    if spec is None or spec in ("raw", "bytes"):
        return RawFields()
    if isinstance(spec, str):
        if spec == "auto":
            return AutoFields()
        if spec == "view":
            return AutoFields(given={"*": values.view})
        _check_view(spec, "")
        mode = images.parse_image_spec(spec)
        if mode is None:
            raise ConfigError(
                f'decode={spec!r}: expected "auto", "raw", "view", an image mode ({", ".join(images.MODES)}), '
                f'sized "rgb8:224x224" or cropped "rgb8:crop224x224", a mapping of field to decoder, or None'
            )
        return AutoFields(image=mode)
    if isinstance(spec, Mapping):
        return AutoFields(given={name: decoder_of(given, field=name) for name, given in spec.items()})
    if isinstance(spec, FieldDecoder):
        return spec
    raise ConfigError(f"decode={spec!r}: expected a string, a mapping of field to decoder, or None")


def with_described(
    decoders: FieldDecoder, types: Mapping[str, Mapping[str, str]], tables: Mapping[str, Tables]
) -> FieldDecoder:
    """Return ``decoders`` that also follow the sets' descriptions of their fields, where they decode by extension.

    Args:
        decoders: The decoders that the user chose.
        types: Decoder names of the fields that a set describes, by the directory of the set.
        tables: Translations of class numbers, by field.

    Raises:
        ConfigError: Numbers must be translated, but the user chose bytes.
    """
    if tables and not isinstance(decoders, AutoFields):
        raise ConfigError(
            'classes="union" translates numbers that are decoded by extension; leave decode= out, or give a mapping of '
            'the fields that differ, or write classes="own"'
        )
    if not (tables or any(types.values())) or not isinstance(decoders, AutoFields):
        return decoders
    described: dict[str, Decoder | FieldDecoder] = {}
    for name in dict.fromkeys(name for said in types.values() for name in said):
        by_set = {home: decoder_of(said[name], field=name) for home, said in types.items() if name in said}
        first, *others = by_set.values()
        is_one = all(one == first for one in others)
        described[name.lower()] = first if is_one else BySet(decoders=_plain(by_set), otherwise=values.raw)
    return replace(decoders, described=described, renumbered=tables)


def _plain(decoders: Mapping[str, Decoder | FieldDecoder]) -> dict[str, Decoder]:
    return {home: one for home, one in decoders.items() if not isinstance(one, FieldDecoder)}


def decoder_of(spec: FieldSpec, *, field: str) -> Decoder | FieldDecoder:  # noqa: PLR0911 - one per kind
    """Return the decoder that ``spec`` specifies for ``field``.

    Args:
        spec: A name (``"int"``, ``"rgb8:224x224"``, ``"array:uint16->int64"``, ``"auto"``, …), ``int``, ``float``,
            ``str``, ``bytes``, a NumPy type (raw little-endian array), None (bytes), a ``FieldDecoder``, or a function.
            A function gets a copy as ``bytes``, unless its attribute ``accepts_buffer`` is true: then it follows the
            contract of :class:`streaming.types.Decoder` and gets the buffer.
        field: For messages.

    Raises:
        ConfigError: The spec is invalid, or needs a missing package.
    """
    if spec is None:
        return values.raw
    if isinstance(spec, str):
        return _decoder_of_name(spec, field)
    if isinstance(spec, type) and spec in _TYPES:
        return _TYPES[spec]
    if isinstance(spec, np.dtype) or (isinstance(spec, type) and issubclass(spec, np.generic)):
        return arrays.array(spec)
    if isinstance(spec, FieldDecoder):
        return spec
    if spec is Sound or spec is Video:
        name = spec.__name__
        raise ConfigError(f"decode={{{field!r}: {name}}}: write {name}(), or {name}(seconds=2.0) with its arguments")
    if not callable(spec):
        raise ConfigError(f"decode={{{field!r}: {spec!r}}}: expected a name, a type, a function or None")
    if any(spec is one for one in _MAKERS):
        name = cast("Callable[..., object]", spec).__name__
        raise ConfigError(f"decode={{{field!r}: {name}}}: {name} makes a decoder; call it, as in {name}()")
    if getattr(spec, "accepts_buffer", False) is True or spec in BY_NAME.values():
        return _checked(cast("Decoder", spec))
    return CallOnBytes(function=spec)


def _decoder_of_name(name: str, field: str) -> Decoder | FieldDecoder:
    if name == "auto":
        return AutoFields()
    _check_view(name, field)
    found = BY_NAME.get(name) or images.parse_image_spec(name)
    if found is not None:
        return _checked(found)
    match = _ARRAY.fullmatch(name)
    if match is not None:
        shape = tuple(int(size) for size in match[3].split("x")) if match[3] else None
        return arrays.array(match[1], match[2], shape)
    raise ConfigError(
        f"decode={{{field!r}: {name!r}}}: no such decoder; known are auto, {', '.join(BY_NAME)}, "
        f'{", ".join(images.MODES)}, sized "rgb8:224x224", cropped "rgb8:crop224x224" or "rgb8:center224x224", and '
        f'"array:uint16->int64"'
    )


def _check_view(name: str, field: str) -> None:
    """Refuse arguments of a view.

    Raises:
        ConfigError: There are arguments.
    """
    if not name.startswith("view") or not name.removeprefix("view"):
        return
    given = f"{{{field!r}: {name!r}}}" if field else repr(name)
    raise ConfigError(
        f'decode={given}: a view shows the bytes as they are stored and takes no arguments; write "view", and '
        'np.frombuffer(view, dtype) where it is used, or "array:uint16" or "rgb8:224x224", which decode'
    )


def _checked(decoder: Decoder) -> Decoder:
    """Return ``decoder`` after checking that the packages it needs are installed."""
    needs = getattr(decoder, "needs", None) or next((needs for one, needs in _NEEDS.items() if one is decoder), ())
    for module, extra in needs:
        values.require(module, extra=extra)
    return decoder


def draws_numbers(decoder: object) -> bool:
    """Return whether the decoder draws random numbers, that is, has ``with_rng``."""
    return hasattr(decoder, "with_rng")


def is_ours(decoder: Decoder) -> bool:
    """Return whether the decoder runs no user code."""
    known = (arrays.ArrayDecoder, arrays.NpzDecoder, images.ImageDecoder, images.RandomCropDecoder, Sound, Video, BySet)
    if isinstance(decoder, values.Unpacked):
        return is_ours(decoder.below)
    return isinstance(decoder, known) or any(decoder is one for one in BY_NAME.values())


def decodes_images(decoder: Decoder) -> bool:
    """Return whether this is one of our image decoders, which work without the interpreter lock."""
    return isinstance(decoder, (images.ImageDecoder, images.RandomCropDecoder))


def gives_bytes(decoders: FieldDecoder) -> bool:
    """Return whether every field, whatever its name, is returned as bytes or as a view."""
    if isinstance(decoders, AutoFields):
        return decoders.given.get("*") is values.view and set(decoders.given.values()) == {values.view}
    return isinstance(decoders, RawFields)


def hands_out_views(decoders: FieldDecoder) -> bool:
    """Return whether some field may be returned as a view; the names of the fields are not needed."""
    return isinstance(decoders, AutoFields) and any(
        hands_out_views(one) if isinstance(one, FieldDecoder) else one is values.view for one in decoders.given.values()
    )


def ranged_fields(decoders: FieldDecoder) -> Callable[[str], bool] | None:
    """Return a predicate for fields whose large members are read in ranges; None: no field.

    Decoders from a user's ``FieldDecoder`` are assumed not to read ranges.
    """
    return partial(_reads_ranges, decoders) if _may_read_ranges(decoders) else None


def _may_read_ranges(decoders: object) -> bool:
    if isinstance(decoders, AutoFields):
        known = (*decoders.given.items(), *decoders.described.items())
        return any(_may_read_ranges(one) or _wants_ranges(one, name) for name, one in known)
    return False


def _wants_ranges(decoder: object, field: str) -> bool:
    """Return whether a decoder reads ranges of a field, by its ``reads_ranges`` (all fields) or ``reads_ranges_of``."""
    of_field: Callable[[str], bool] | None = getattr(decoder, "reads_ranges_of", None)
    return getattr(decoder, "reads_ranges", False) is True if of_field is None else of_field(field)


def _reads_ranges(decoders: FieldDecoder, field: str) -> bool:
    try:
        return _wants_ranges(decoders.decoder_for(field), field)
    except ConfigError:  # a refused field: decoding it raises the error
        return False


def runs_code_of_user(decoders: FieldDecoder) -> bool:
    """Return whether user code may decode some field."""
    if isinstance(decoders, AutoFields):
        return any(
            runs_code_of_user(one) if isinstance(one, FieldDecoder) else not is_ours(one)
            for one in (*decoders.given.values(), decoders.image)
        )
    inner = getattr(decoders, "wraps", None)  # ours, around those of the user
    if isinstance(inner, FieldDecoder):
        return runs_code_of_user(inner)
    return not isinstance(decoders, RawFields)


def decode_field(decoder: Decoder, data: ReadBuffer, *, url: str, key: str, field: str) -> object:
    """Return ``decoder(data)``, adding context to its errors.

    Args:
        decoder: The decoder of ``field``.
        data: The field's bytes.
        url: Shard, for the message.
        key: Sample, for the message.
        field: Field, for the message.

    Raises:
        DecodeError: Wraps the error of the decoder; the message names shard, key, field and size. Not wrapped:
            ``ConfigError``, which concerns every sample, and ``MemoryError``, which is not the sample's fault.
    """
    try:
        return decoder(data)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # boundary to foreign decoders
        size = format_bytes(len(data))
        raise DecodeError(
            f"{redact(url)}: sample {key!r}: field {field!r} ({size}) does not decode: "
            f"{type(error).__name__}: {error}. Look at the bytes with `shard_tools cat`, take the "
            f"field as bytes with decode={{{field!r}: None}}, or skip the sample with "
            f'on_error="substitute" or "skip"'
        ) from error
