"""Name entries by a hash of URL, version and range, so that no name reveals a secret and none collides."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass

from streaming.errors import ConfigError
from streaming.storage import HTTP_SCHEMES, local_path, scheme_of

DIGEST_BYTES = 32
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_SIGNED_PREFIXES = ("x-amz-", "x-goog-")
# Parameters of signed URLs whose names could mean something else: dropped only together with their signature.
_SIGNED_WITH = {
    "signature": {"signature", "expires", "awsaccesskeyid", "googleaccessid", "policy", "key-pair-id"},
    "sig": {
        "sig", "se", "sip", "ske", "skoid", "sks", "skt", "sktid", "skv", "sp", "spr", "sr", "srt", "ss", "st", "sv",
    },
}  # fmt: skip
_NAME = re.compile(r"[0-9a-f]{32}-([0-9a-f]{1,16})")
_PART_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{1,16}(\.[0-9a-f]{16})?\.part")


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryKey:
    """Identity of one cached range.

    Attributes:
        digest: Hash of URL, version, start and length, ``DIGEST_BYTES`` long; also stored in the entry.
        num_bytes: Length of the range.
    """

    digest: bytes
    num_bytes: int

    @classmethod
    def of(cls, url: str, version: str, start: int, num_bytes: int) -> EntryKey:
        """Return the key of bytes [start, start + num_bytes) of that version of the object at ``url``.

        Raises:
            ConfigError: The range is invalid.
        """
        if start < 0 or num_bytes < 0:
            raise ConfigError(f"cache: expected a range of bytes, got start {start} and length {num_bytes}")
        text = json.dumps([normalized(url), version, start, num_bytes])  # a list: no two inputs give the same text
        return cls(digest=hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest(), num_bytes=num_bytes)

    @property
    def name(self) -> str:
        """File name of the entry: half of the digest, and the length, in hexadecimal digits."""
        return f"{self.digest[:16].hex()}-{self.num_bytes:x}"


def is_entry_name(name: str) -> bool:
    """Return whether a file of this name in the directory of entries is ours."""
    return _NAME.fullmatch(name) is not None


def is_part_name(name: str) -> bool:
    """Return whether a file of this name in the directory of unfinished entries is ours."""
    return _PART_NAME.fullmatch(name) is not None


def normalized(url: str) -> str:
    """Return ``url`` without parts that are secret or may differ between two ways to reach the same object.

    Local paths become absolute. User, password, fragment, default port and the parameters of signed URLs (AWS, Google,
    CloudFront, Azure SAS) are dropped; scheme and host become lower case. All other parameters stay, since they may
    identify the object.
    """
    scheme = scheme_of(url)
    if scheme == "file":
        return os.path.abspath(local_path(url))
    if scheme not in HTTP_SCHEMES:
        head, _, rest = url.partition("://")
        bucket, slash, path = rest.partition("/")
        return f"{head.lower()}://{bucket.rpartition('@')[2] if ':' in bucket else bucket}{slash}{path}"
    _, _, rest = url.partition("#")[0].partition("://")
    place, _, query = rest.partition("?")
    host, _, path = place.partition("/")
    host = host.rpartition("@")[2].lower().removesuffix(_DEFAULT_PORTS[scheme])
    return f"{scheme}://{host}/{path}?{_unsigned(query)}"


def _unsigned(query: str) -> str:
    fields = query.split("&") if query else []
    names = [field.partition("=")[0].lower() for field in fields]
    dropped = {name for name in names if name.startswith(_SIGNED_PREFIXES)}
    for signature, companions in _SIGNED_WITH.items():
        if signature in names:
            dropped |= companions
    return "&".join(field for field, name in zip(fields, names, strict=True) if name not in dropped)
