"""Choose mirrors: which one is used when the primary fails, and when the primary is tried again.

A mirror is a complete copy. It is not compared with the primary; the index's checksums detect a copy that differs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from streaming.errors import ConfigError, redact
from streaming.storage.base.urls import as_url, split_url
from streaming.types import SHARD_SUFFIXES

REST_S = 30.0
"""Time for which a failed primary is not used; then one call tries the primary again, with a single attempt."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mirror:
    """A copy of everything below some prefix.

    Attributes:
        url: The prefix that replaces the primary's.
        options: Its own storage options, which override the primary's.
    """

    url: str = field(repr=False)
    options: Mapping[str, object] = field(default_factory=dict, repr=False)


def parse_mirrors(given: object) -> dict[str, tuple[Mirror, ...]]:
    """Check the option ``mirrors``: prefix → mirror or a list of them, each a URL or a dict with ``url`` and options.

    Raises:
        ConfigError: It is anything else.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"storage option mirrors: expected {{prefix: [mirror URLs]}}, got a {type(given).__name__}")
    found = {}
    for prefix, mirrors in given.items():
        listed = [mirrors] if isinstance(mirrors, (str, PathLike, Mapping)) else mirrors
        if not isinstance(prefix, (str, PathLike)) or not isinstance(listed, Sequence) or not listed:
            raise ConfigError("storage option mirrors: expected {prefix: [mirror URLs]}, with at least one mirror each")
        found[as_url(prefix).rstrip("/")] = tuple(_mirror(one) for one in listed)
    return found


def _mirror(given: object) -> Mirror:
    if isinstance(given, (str, PathLike)):
        return Mirror(url=as_url(given).rstrip("/"))
    if not isinstance(given, Mapping) or not isinstance(given.get("url"), str):
        raise ConfigError('storage option mirrors: a mirror is a URL, or a dict such as {"url": …, "endpoint_url": …}')
    options = {str(name): value for name, value in given.items() if name != "url"}
    if "mirrors" in options:
        raise ConfigError("storage option mirrors: a mirror cannot have mirrors of its own; list them side by side")
    return Mirror(url=given["url"].rstrip("/"), options=options)


def mirrors_of(urls: object, mirrors: object) -> dict[str, Sequence[object]]:
    """Return the storage option ``mirrors`` for a dataset: its directory, and the directories that mirror it.

    Args:
        urls: The URLs of the dataset as the user writes them.
        mirrors: Mirrors of the deepest directory that contains all of it.

    Raises:
        ConfigError: There is no such directory.
    """
    if isinstance(mirrors, (str, PathLike, Mapping)) or not isinstance(mirrors, Sequence):
        raise ConfigError(f'mirrors: expected a list such as ["s3://other/train/"], got a {type(mirrors).__name__}')
    specs: Sequence[Any] = urls if isinstance(urls, Sequence) and not isinstance(urls, str) else [urls]
    parts = [part for spec in specs for part in as_url(spec).split("::")]
    folders = [_folder(part).split("/") for part in parts]
    common = folders[0]
    for folder in folders[1:]:
        same = next((i for i, pair in enumerate(zip(common, folder, strict=False)) if pair[0] != pair[1]), None)
        common = common[: min(len(common), len(folder)) if same is None else same]
    prefix = "/".join(common)
    if not prefix or prefix.endswith((":/", ":")):
        raise ConfigError(
            f"mirrors: {redact(parts[0])} and the other URLs have no directory in common; say which mirrors which: "
            'storage_options={"mirrors": {"s3://bucket/train": ["s3://other/train"]}}'
        )
    return {prefix: mirrors}


def _folder(spec: str) -> str:
    """Return the directory of a URL, common to all that its braces expand to."""
    plain, brace, _ = spec.partition("{")
    names_shard = bool(brace) or plain.partition("?")[0].endswith(SHARD_SUFFIXES)
    return split_url(plain)[0] if names_shard else plain.rstrip("/")


class Route:
    """Primary and mirrors of one prefix, and whether the primary is currently avoided. Thread-safe.

    The life of a primary:

    1. It works: every call goes to it.
    2. A call fails permanently: the primary rests for ``REST_S``, and all calls go to mirrors.
    3. After the rest, one call tries it, and the others still go to mirrors. Success leads to 1, failure to 2. If the
       caller gives up for a reason of its own, the next caller makes the trial.

    ``_lock`` guards all fields that change: ``_rests_until_s``, ``_tried``, ``_warned`` and ``_has_differed``.

    Attributes:
        prefix: The primary, without a trailing slash.
        mirrors: The mirrors, in the order in which they are tried.
    """

    def __init__(self, prefix: str, mirrors: tuple[Mirror, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self.prefix = prefix
        self.mirrors = mirrors
        self._clock = clock
        self._lock = threading.Lock()
        self._rests_until_s: float | None = None
        self._tried = self._warned = self._has_differed = False

    @property
    def rests(self) -> bool:
        """Whether the primary failed and has not worked since."""
        with self._lock:
            # True only at this moment.
            return self._rests_until_s is not None

    def turn(self) -> tuple[bool, bool]:
        """Return whether this call goes to the primary, and whether it is the one trial after the primary's rest."""
        with self._lock:
            # After the rest, exactly one caller tries the primary; the others use mirrors until the trial is over.
            if self._rests_until_s is None:
                return True, False
            if self._tried or self._clock() < self._rests_until_s:
                return False, False
            self._tried = True
            return True, True

    def failed(self, error: Exception) -> None:
        """Record that the primary failed permanently: mirrors are used from now on. Warn the first time."""
        with self._lock:
            # The rest begins again, and its trial is open; one caller warns.
            self._rests_until_s, self._tried = self._clock() + REST_S, False
            first, self._warned = not self._warned, True
        if first:
            _log.warning(
                "%s failed (%s); reading from its mirror %s. It is tried again every %.0f s; mirror_reads counts them",
                redact(self.prefix), error, redact(self.mirrors[0].url), REST_S,
            )  # fmt: skip

    def differs(self, mirror: Mirror, error: Exception) -> None:
        """Record that some bytes are right at a mirror, and wrong where they were read before. Warn the first time."""
        with self._lock:
            # The primary is used as before; one caller warns, unless another mirror was read instead of the primary.
            first = not self._has_differed and self._rests_until_s is None
            self._has_differed |= first
        if first:
            _log.warning(
                "%s holds wrong bytes that its mirror %s has right (%s). They are read there, each time; mirror_reads "
                "counts them. Copy the shard back from the mirror",
                redact(self.prefix), redact(mirror.url), error,
            )  # fmt: skip

    def worked(self) -> None:
        """Record that the primary answered."""
        with self._lock:
            # All callers use the primary again.
            self._rests_until_s, self._tried = None, False

    def undecided(self) -> None:
        """Record that the caller gave up its call to the primary, for a reason of its own."""
        with self._lock:
            # The trial is open for the next caller.
            self._tried = False

    def at(self, mirror: Mirror, url: str) -> str:
        """Return the URL in ``mirror`` that corresponds to the primary's ``url``."""
        return mirror.url + url[len(self.prefix) :]

    def back(self, mirror: Mirror, url: str) -> str:
        """Return the primary's URL that corresponds to ``url`` in ``mirror``."""
        return self.prefix + url[len(mirror.url) :]


class Routes:
    """The routes of one storage.

    Attributes:
        mirrors: All mirrors.
    """

    def __init__(self, mirrors: Mapping[str, tuple[Mirror, ...]]) -> None:
        self.mirrors = [mirror for some in mirrors.values() for mirror in some]
        self._routes = [Route(prefix, mirrors[prefix]) for prefix in sorted(mirrors, key=len, reverse=True)]

    def of(self, url: Any) -> Route | None:
        """Return the route of the longest prefix of ``url``, if there is one."""
        if not self._routes:
            return None
        text = as_url(url)
        return next((one for one in self._routes if f"{text}/".startswith(f"{one.prefix}/")), None)
