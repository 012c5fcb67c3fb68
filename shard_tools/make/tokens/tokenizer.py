"""Open the tokenizer that the user names: its file, its kind, and the tokens that begin and end a document."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from dataclasses import dataclass, field

from shard_tools.make.tokens.adapters import (
    BytesTokenizer,
    HuggingFaceTokenizer,
    RanksTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from streaming.common.arguments import did_you_mean
from streaming.errors import ConfigError, NotFoundError
from streaming.storage import Storage, join_url, local_path, redact, scheme_of, split_url

BYTES = "bytes"
_NAMES = ("tokenizer.json", "tokenizer.model")
_RANK = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")
_NO_END = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer in the form sent to other processes and machines.

    Attributes:
        url: Location of the file; ``"bytes"`` for the tokenizer of bytes.
        kind: ``"huggingface"``, ``"sentencepiece"``, ``"tiktoken"`` or ``"bytes"``.
        sha256: Digest of the file.
        special: Whether names of special tokens in texts become these tokens, as chat templates need. Otherwise they
            are plain text, so that no document can end itself.
        pattern: Split of texts before tiktoken merges, if the user specifies it.
        content: The file; None: read it from ``url``, a path of this machine.
    """

    url: str
    kind: str
    sha256: str
    special: bool
    pattern: str | None = None
    content: bytes | None = field(default=None, repr=False, compare=False)


def find_tokenizer(spec: str, storage: Storage, *, special: bool, pattern: str | None = None) -> TokenizerFile:
    """Read the tokenizer that ``spec`` names: a file, a directory with ``tokenizer.json``, or ``"bytes"``.

    Raises:
        ConfigError: There is no such file, or ``pattern`` is given for something other than tiktoken ranks.
    """
    if spec == BYTES:
        url, content, kind = BYTES, b"", BYTES
    else:
        url, content = _read(spec, storage)
        kind = _kind_of(content)
    if pattern is not None and kind != "tiktoken":
        raise ConfigError(f"--pattern is for files of tiktoken ranks; {redact(spec)} is of kind {kind!r}: leave it out")
    sha256 = hashlib.sha256(content).hexdigest()
    return TokenizerFile(url=url, kind=kind, sha256=sha256, special=special, pattern=pattern, content=content)


def _read(spec: str, storage: Storage) -> tuple[str, bytes]:
    if scheme_of(spec) == "file" and os.path.isdir(local_path(spec)):
        names = [name for name in _NAMES if os.path.exists(os.path.join(local_path(spec), name))]
        if not names:
            raise ConfigError(f"--tokenizer {spec}: the folder has neither {' nor '.join(_NAMES)}; name the file")
        spec = join_url(spec, names[0])
    try:
        return spec, bytes(storage.read(spec))
    except NotFoundError as error:
        raise ConfigError(
            f"--tokenizer {redact(spec)}: no such file; give a tokenizer.json, a model of sentencepiece, a file of "
            f"tiktoken ranks, or {BYTES!r}"
        ) from error


def _kind_of(content: bytes) -> str:
    if content.lstrip()[:1] == b"{":
        return "huggingface"
    return "tiktoken" if _RANK.match(content) else "sentencepiece"


@functools.lru_cache(maxsize=2)  # a worker opens the same one repeatedly
def open_tokenizer(file: TokenizerFile) -> Tokenizer:
    """Make the tokenizer, ready to encode.

    Raises:
        ConfigError: Its package is missing, the file is invalid, or it changed since the conversion began.
    """
    if file.kind == BYTES:
        return BytesTokenizer(special=file.special)
    content = file.content
    if content is None:
        content = bytes(Storage().read(file.url))
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise ConfigError(
                f"--tokenizer {redact(file.url)}: the file changed while it was used; run the command again"
            )
    if file.kind == "huggingface":
        return HuggingFaceTokenizer(content, special=file.special)
    if file.kind == "sentencepiece":
        return SentencePieceTokenizer(content, special=file.special)
    name = split_url(file.url)[1].partition(".")[0]
    return RanksTokenizer(content, special=file.special, name=name, pattern=file.pattern)


def load_config(file: TokenizerFile, storage: Storage) -> dict[str, object]:
    """Return ``tokenizer_config.json`` beside a ``tokenizer.json``, and the template beside it; {} if there is neither.

    Raises:
        ConfigError: The file exists, but is not JSON.
    """
    if file.kind != "huggingface":
        return {}
    home = split_url(file.url)[0] or "."
    config: dict[str, object] = {}
    url = join_url(home, "tokenizer_config.json")
    if storage.exists(url):
        try:
            config = dict(json.loads(bytes(storage.read(url))))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{redact(url)}: not a JSON object: {error}") from error
    url = join_url(home, "chat_template.jinja")
    if storage.exists(url):
        config["chat_template"] = bytes(storage.read(url)).decode()
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The tokens before and after every document, and the size of the vocabulary with them."""

    bos: int | None
    eos: int | None
    vocab_size: int

    @property
    def width(self) -> int:
        """Bytes per token: 2, or 4 if an id needs them."""
        return 2 if self.vocab_size <= 2**16 else 4

    @property
    def dtype(self) -> str:
        """NumPy's name of the tokens' type, little-endian."""
        return f"uint{8 * self.width}"


def find_ends(
    file: TokenizerFile, config: dict[str, object], *, bos: str | None, eos: str | None, by_default: bool
) -> Ends:
    """Determine which tokens begin and end a document.

    Args:
        file: The tokenizer.
        config: The content of ``tokenizer_config.json``.
        bos: A name, an id, ``"none"``, or None for the default.
        eos: The same for the end.
        by_default: Whether the default is the tokenizer's own tokens; a begin token that is also the end token is left
            out. Otherwise the default is none.

    Raises:
        ConfigError: There is no such token, or the vocabulary does not fit 32 bits.
    """
    tokenizer = open_tokenizer(file)
    own_bos, own_eos = tokenizer.ends()
    own_bos, own_eos = token_name(config, "bos_token", own_bos), token_name(config, "eos_token", own_eos)
    if not by_default:
        own_bos = own_eos = None
    if own_bos == own_eos or config.get("add_bos_token") is False:
        own_bos = None
    size = tokenizer.vocab_size
    begin = _id_of("--bos", own_bos if bos is None else bos, file, tokenizer)
    end = _id_of("--eos", own_eos if eos is None else eos, file, tokenizer)
    size = max(size, *(found + 1 for found in (begin, end) if found is not None), 0)
    if size > 2**32:
        raise ConfigError(
            f"--tokenizer {redact(file.url)}: the vocabulary has {size:,} ids; tokens have at most 32 bits"
        )
    return Ends(bos=begin, eos=end, vocab_size=size)


def token_name(config: dict[str, object], name: str, otherwise: str | None) -> str | None:
    """Return a special token's name as ``tokenizer_config.json`` writes it: a text, or an object with ``content``."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else otherwise


def id_below(bound: int, option: str, given: str | None) -> int | None:
    """Return the id that an option gives without a tokenizer to look up names; None: none.

    Raises:
        ConfigError: It is not an id below ``bound``.
    """
    if given is None or given == _NO_END:
        return None
    if not given.isdecimal() or int(given) >= bound:
        raise ConfigError(
            f"{option} {given!r}: expected an id below {bound:,}, or {_NO_END!r}; a name needs --tokenizer FILE, where "
            "it is looked up"
        )
    return int(given)


def _id_of(option: str, given: str | None, file: TokenizerFile, tokenizer: Tokenizer) -> int | None:
    if given is None or given == _NO_END:
        return None
    found = tokenizer.id_of(given)
    if found is not None:
        return found
    if given.isdecimal():
        # A file of ranks does not list its special tokens: their ids lie above it.
        if int(given) < tokenizer.vocab_size or (file.kind == "tiktoken" and int(given) < 2**32):
            return int(given)
        raise ConfigError(
            f"{option} {given}: the vocabulary has ids below {tokenizer.vocab_size:,}; see {redact(file.url)}"
        )
    hint = did_you_mean(given, filter(None, tokenizer.ends()), cutoff=0.3)
    raise ConfigError(
        f"{option} {given!r}: no such token in {redact(file.url)}{hint}; give a name, an id, or {_NO_END!r}"
    )
