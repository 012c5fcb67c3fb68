"""Describe a value of a sample in a line: tokens as text, media and arrays by size, rate and duration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shard_tools.look.stats.field_stats import look
from shard_tools.look.stats.kinds import kind_of
from shard_tools.make.tokens.tokenizer import BYTES, TokenizerFile, find_tokenizer, open_tokenizer
from streaming.build.decode import sound, video
from streaming.build.decode.images import stored_size
from streaming.common.arguments import counted
from streaming.errors import ConfigError
from streaming.shards.schema.value import Schema, SchemaField
from streaming.storage import Storage, redact

_TOKENS, _NUMBERS = 256, 16  # that are shown: as text, as numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFacts:
    """Describes values by the schema of their set.

    Attributes:
        schema: The schema of the set.
        tokenizer: Turns its tokens into text; None: no tokenizer is at hand.
    """

    schema: Schema
    tokenizer: TokenizerFile | None = None

    @classmethod
    def of(cls, schema: Schema, spec: str | None, storage: Storage) -> ValueFacts:
        """Open the tokenizer that the user names, or that of bytes, which needs no file.

        Raises:
            ConfigError: It is not the one that made the tokens.
        """
        made = [one.tokens.tokenizer for one in schema.tokens.values() if one.tokens and one.tokens.tokenizer]
        if spec is None:
            is_bytes = bool(made) and all(one.kind == BYTES for one in made)
            return cls(schema=schema, tokenizer=find_tokenizer(BYTES, storage, special=True) if is_bytes else None)
        pattern = next((one.pattern for one in made if one.pattern), None)
        given = find_tokenizer(spec, storage, special=True, pattern=pattern)
        if made and given.sha256 not in {one.sha256 for one in made}:
            raise ConfigError(
                f"--tokenizer {redact(spec)}: it did not make these tokens: its sha256 is {given.sha256[:12]}…, "
                f"expected {made[0].sha256[:12]}… ({made[0].kind}); leave it out to see numbers"
            )
        return cls(schema=schema, tokenizer=given)

    def of_fields(self, payloads: Mapping[str, bytes]) -> dict[str, str]:
        """Return a line for each field of a sample that is no text, if there is one."""
        found = {}
        for name, data in payloads.items():
            if name in self.schema.tokens:
                found[name] = self._tokens(data, self.schema.tokens[name])
                continue
            say = _SAYS.get(kind_of(name))
            if say is not None:
                try:
                    found[name] = say(name, data)
                except Exception as error:  # noqa: BLE001  of any library: a damaged value is shown as such
                    found[name] = f"{kind_of(name)} that cannot be read: {error}"
        return {name: line for name, line in found.items() if line}

    def _tokens(self, data: bytes, field: SchemaField) -> str:
        dtype = np.dtype(field.dtype).newbyteorder("<")
        ids = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype).astype(np.uint32)
        head = f"{counted(len(ids), 'token')}, {field.dtype}"
        if self.tokenizer is None:
            more = ", …" if len(ids) > _NUMBERS else ""
            hint = "" if field.tokens is None or field.tokens.tokenizer is None else "; --tokenizer FILE shows text"
            return f"{head}: {', '.join(map(str, ids[:_NUMBERS].tolist()))}{more}{hint}"
        try:
            text = "".join(open_tokenizer(self.tokenizer).pieces(ids[:_TOKENS]))
        except ConfigError as error:
            return f"{head}; no text: {error}"
        more = f" … {len(ids) - _TOKENS:,} tokens more" if len(ids) > _TOKENS else ""
        return f"{head}: {text}{more}"


def _image(name: str, data: bytes) -> str:
    height, width, orientation = stored_size(data)
    words = look("image", name, data, len(data)).words
    form = " ".join(str(words[one]) for one in ("format", "mode") if one in words)
    turned = ", turned upright by decoders" if orientation > 1 else ""
    return f"image {form + ', ' if form else ''}{width} x {height}{turned}"


def _sound(_: str, data: bytes) -> str:
    frames, rate, channels = sound.measured(data)
    return f"sound {frames / rate:.3f} s, {rate:,} Hz, {counted(channels, 'channel')}"


def _video(_: str, data: bytes) -> str:
    seconds, rate, width, height = video.measured(data)
    return f"video {seconds:.3f} s, {rate:g} frames a second, {width} x {height}"


def _tensor(name: str, data: bytes) -> str:
    found = look("tensor", name, data, len(data))
    arrays: list[Any] = [found.words["array"]] if "array" in found.words else list(found.many.get("array", ()))
    return f"array {', '.join(map(str, arrays))}" if arrays else ""


_SAYS: Final[Mapping[str, Callable[[str, bytes], str]]] = {
    "image": _image, "audio": _sound, "video": _video, "tensor": _tensor,
}  # fmt: skip
