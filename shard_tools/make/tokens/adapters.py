"""Encode texts with tokenizers of other libraries, or as bytes: one class per kind, with one interface, `Tokenizer`."""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from streaming.errors import ConfigError

Ids: TypeAlias = npt.NDArray[np.uint32]
"""Token ids of one text, ``[num_tokens]``."""

_UNKNOWN = "\ufffd"  # replaces a token without text
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
_CL100K += r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
_O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K += r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K += r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "r50k_base": (_GPT2, {"<|endoftext|>": 50256}),
    "p50k_base": (_GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": (_CL100K, {"<|endoftext|>": 100257, "<|endofprompt|>": 100276}),
    "o200k_base": (_O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""Data missing from files of tiktoken ranks: the split before merging, and special tokens (of tiktoken 0.14)."""


class Tokenizer(Protocol):
    """Turn texts into ids, deterministically; add neither beginning nor end tokens. For one thread at a time."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text."""

    def pieces(self, ids: Ids) -> list[str]:
        """Return the text of each token, for people. Joined, they are the text if tokens cut no character."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name, or None if there is none."""

    def ends(self) -> tuple[str | None, str | None]:
        """Return the names of the beginning and end tokens, as far as the file specifies them."""


class BytesTokenizer:
    """Use every byte of the UTF-8 text as a token, 0 to 255; needs no file and no package."""

    SPECIAL = {"<bos>": 256, "<eos>": 257, "<pad>": 258}  # noqa: RUF012  (a constant)

    def __init__(self, *, special: bool) -> None:
        self._special = re.compile("(" + "|".join(self.SPECIAL) + ")") if special else None
        self.vocab_size = 259

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> Ids:
        parts = [text] if self._special is None else self._special.split(text)
        whole = [
            np.array([self.SPECIAL[part]], np.uint32) if number % 2 else np.frombuffer(part.encode(), np.uint8)
            for number, part in enumerate(parts)  # every second part is a separator: a special token
        ]
        return np.concatenate(whole).astype(np.uint32)

    def pieces(self, ids: Ids) -> list[str]:
        """Return characters, each at its last byte, and the names of special tokens."""
        names = {number: name for name, number in self.SPECIAL.items()}
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        return [reader.decode(bytes([one])) if one < 256 else names.get(one, _UNKNOWN) for one in ids.tolist()]

    def id_of(self, token: str) -> int | None:
        """Return the id of a special token."""
        return self.SPECIAL.get(token)

    def ends(self) -> tuple[str | None, str | None]:
        """Return ``<bos>`` and ``<eos>``."""
        return "<bos>", "<eos>"


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the library ``tokenizers``; any padding and truncation it specifies is disabled."""

    _BOS = ("<|begin_of_text|>", "<bos>", "<s>", "[BOS]")
    _EOS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]")

    def __init__(self, content: bytes, *, special: bool) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise _missing("tokenizers") from error
        try:
            self._library = Library.from_buffer(content)
        except Exception as error:  # the package raises Exception itself
            raise ConfigError(f"--tokenizer: not a tokenizer.json of the library tokenizers: {error}") from error
        self._library.no_padding()
        self._library.no_truncation()
        self._library.encode_special_tokens = not special
        self._vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text, with as many threads as the library uses."""
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [_of_list(one.ids) for one in encoded]

    def pieces(self, ids: Ids) -> list[str]:
        """Return the text of each token."""
        return [self._library.decode([one], skip_special_tokens=False) or _UNKNOWN for one in ids.tolist()]

    def id_of(self, token: str) -> int | None:
        """Return the id of a token."""
        return self._vocabulary.get(token)

    def ends(self) -> tuple[str | None, str | None]:
        """Return the usual names, if the file has these special tokens."""
        there = {token.content for token in self._library.get_added_tokens_decoder().values() if token.special}
        return next(filter(there.__contains__, self._BOS), None), next(filter(there.__contains__, self._EOS), None)


class SentencePieceTokenizer:
    """A model of the library ``sentencepiece``."""

    def __init__(self, content: bytes, *, special: bool) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise _missing("sentencepiece") from error
        if special:
            raise ConfigError(
                "--messages-field: sentencepiece takes special tokens in a text as plain text, so that a chat template "
                "cannot place them; give the same tokenizer as tokenizer.json"
            )
        try:
            self._library = SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise ConfigError(
                "--tokenizer: unknown format, expected a tokenizer.json, a model of sentencepiece, or a file of "
                f"tiktoken ranks ({error})"
            ) from error
        self.vocab_size = int(self._library.get_piece_size())

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text."""
        return [_of_list(ids) for ids in self._library.encode(list(texts), out_type=int, num_threads=1)]

    def pieces(self, ids: Ids) -> list[str]:
        """Return each piece, with spaces instead of the model's mark."""
        known = (self._library.id_to_piece(one) if one < self.vocab_size else _UNKNOWN for one in ids.tolist())
        return [piece.replace("\u2581", " ") for piece in known]

    def id_of(self, token: str) -> int | None:
        """Return the id of a piece."""
        found = int(self._library.piece_to_id(token))
        return found if self._library.id_to_piece(found) == token else None

    def ends(self) -> tuple[str | None, str | None]:
        """Return the pieces that the model names."""
        ids = (self._library.bos_id(), self._library.eos_id())
        bos, eos = (self._library.id_to_piece(found) if found >= 0 else None for found in ids)
        return bos, eos


class RanksTokenizer:
    """A file of tiktoken ranks: one line per token, with its bytes in base64 and its rank.

    Args:
        content: The file.
        special: Whether names of special tokens in texts become these tokens.
        name: Name of the file without its extension; may be one of ``ENCODINGS``.
        pattern: One of ``ENCODINGS``, or the regular expression that splits text before merging; default: by ``name``.
    """

    def __init__(self, content: bytes, *, special: bool, name: str, pattern: str | None) -> None:
        try:
            from tiktoken import Encoding
        except ImportError as error:
            raise _missing("tiktoken") from error
        known = ENCODINGS.get(pattern or name)
        pattern, self._tokens = known or (pattern, dict[str, int]())
        if pattern is None:
            raise ConfigError(
                f"--tokenizer: ranks of tiktoken do not say how text is cut, and {name!r} is none of "
                f"{', '.join(ENCODINGS)}: give one of these, or a regular expression, with --pattern"
            )
        ranks = _read_ranks(content)
        try:
            self._library = Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._tokens)
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"--pattern {pattern!r}: not a regular expression that tiktoken takes: {error}"
            ) from error
        self._encode: Any = getattr(self._library, "encode_to_numpy", None)
        token, number = next(iter(self._tokens.items()), ("", -1))
        if self._encode is None or number in self._encode(token, allowed_special=frozenset(), disallowed_special=()):
            raise ConfigError(
                "--tokenizer: this release of tiktoken is too old: up to 0.10 it takes the names of special tokens in "
                "texts for these tokens. pip install 'tiktoken>=0.11'"
            )
        self._allowed: frozenset[str] = frozenset(self._tokens if special else ())
        self.vocab_size = int(self._library.max_token_value) + 1

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Return the ids of each text."""
        encode, allowed = self._encode, self._allowed
        return [encode(text, allowed_special=allowed, disallowed_special=()).astype(np.uint32) for text in texts]

    def pieces(self, ids: Ids) -> list[str]:
        """Return the text of each token."""
        return [self._piece(one) for one in ids.tolist()]

    def _piece(self, one: int) -> str:
        try:
            return str(self._library.decode([one], errors="replace"))
        except (KeyError, OverflowError):
            return _UNKNOWN

    def id_of(self, token: str) -> int | None:
        """Return the id of a special token."""
        return self._tokens.get(token)

    def ends(self) -> tuple[str | None, str | None]:
        """Return ``<|endoftext|>`` as the end, if the encoding has it."""
        return None, "<|endoftext|>" if "<|endoftext|>" in self._tokens else None


def _of_list(ids: list[int]) -> Ids:
    """Convert ids to an array, in a third of the time that NumPy takes for a list."""
    return np.frombuffer(array("I", ids), np.uint32)


def _read_ranks(content: bytes) -> dict[bytes, int]:
    try:
        pairs = (line.split() for line in content.splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise ConfigError(f"--tokenizer: not a file of tiktoken ranks: {error}") from error


def _missing(package: str) -> ConfigError:
    return ConfigError(
        f"--tokenizer: this file needs the package {package!r}, which is not installed; pip install 'shardstream[text]'"
    )
