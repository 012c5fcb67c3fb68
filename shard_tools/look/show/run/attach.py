"""Query the loaders of running jobs: through socket files, or metrics addresses of Prometheus.

Addresses come only from the command line. Answers are data: bounded, parsed, and never followed elsewhere.
"""

from __future__ import annotations

import glob
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from streaming.common.threads import on_threads
from streaming.errors import ConfigError
from streaming.storage import redact
from streaming.watch.metrics.server import FORMAT
from streaming.watch.metrics.table import EXPORTED

_ANSWER_S = 3.0
_MOST_BYTES = 8 << 20
_MOST_AT_ONCE = 16
_MOST_TEXT = 500  # characters of an error
_PLACES = ("world_size", "epoch", "samples_seen")
_NO_LOADER = "answers, but exports no loader: call streaming.metrics.prometheus(loader) in the job"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Answer of a loader in a running job, or why it did not answer.

    Attributes:
        address: The address queried, without secrets.
        error: Why there is no answer; "": there is one.
        taken_s: Time of the answer, by ``time.monotonic``.
        loader: Its name; "" if it has none.
        rank: Its rank.
        place: ``data_rank``, ``world_size``, ``epoch``, ``samples_seen``, ``pid``, ``host``, as far as known.
        numbers: Its numbers, by the names of ``loader.metrics()``.
        readers: The numbers of its remote readers, by data rank.
        describe: What each of its stages was doing, in lines.
    """

    address: str
    error: str = ""
    taken_s: float = field(default_factory=time.monotonic)
    loader: str = ""
    rank: int = -1
    place: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    readers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    describe: str = ""


def ask(addresses: Sequence[str]) -> list[Told]:
    """Query all addresses at once; addresses that do not answer within seconds are included, with an error.

    Args:
        addresses: Socket files, patterns of such, or http addresses.
    """
    expanded = [one for address in addresses for one in _expanded(address)]
    answers = [one for found in on_threads(_ask, expanded, _MOST_AT_ONCE) for one in found]
    return sorted(answers, key=lambda one: (bool(one.error), one.loader, one.rank, one.address))


def check_addresses(addresses: Sequence[str]) -> None:
    """Check the addresses of the command line before anything is served.

    Raises:
        ConfigError: An address is neither a path nor an HTTP address, or its library is missing.
    """
    for address in addresses:
        scheme, found, _ = address.partition("://")
        if found and scheme not in ("http", "https"):
            raise ConfigError(
                f"--run {redact(address)}: expected a socket file, a pattern such as 'run/*.sock', or a metrics "
                "address such as http://HOST:9000/metrics"
            )
        if found:
            _parser()


def _expanded(address: str) -> list[str]:
    if "://" in address or not glob.has_magic(address):
        return [address]
    return sorted(glob.glob(address)) or [address]


def _ask(address: str) -> list[Told]:
    shown = redact(address)
    try:
        return list(_from_metrics(address) if "://" in address else _from_socket(address))
    except Exception as error:  # noqa: BLE001  the border to a job, which may answer anything
        cause = getattr(error, "reason", None) or error  # the error that urllib wrapped
        why = getattr(cause, "strerror", None) or cause
        return [Told(address=shown, error=_WHY.get(type(cause), str(why))[:_MOST_TEXT])]


_WHY: Mapping[type, str] = {
    FileNotFoundError: "there is no such file; the job makes it with streaming.metrics.serve(loader)",
    ConnectionRefusedError: "no answer: the job has ended, or was killed",
    TimeoutError: f"no answer within {_ANSWER_S:.0f} s: the job is stopped, or its machine overloaded",
    PermissionError: "it belongs to another user",
}


def _from_socket(path: str) -> Iterator[Told]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(path)
        data, until_s = b"", time.monotonic() + _ANSWER_S
        while piece := connection.recv(1 << 16):
            data += piece
            if len(data) > _MOST_BYTES or time.monotonic() > until_s:
                raise ValueError(f"an answer of more than {_MOST_BYTES >> 20} MiB, or of {_ANSWER_S:.0f} s")
    if not data:
        raise ValueError("the loader has ended")
    answer = json.loads(data)
    if not isinstance(answer, dict) or answer.get("format") != FORMAT:
        raise ValueError(f"expected the answer of streaming.metrics.serve, format {FORMAT}; is it another version?")
    if "error" in answer:
        raise ValueError(f"the job says: {answer['error']}")
    readers = answer.get("readers")
    place = {name: int(answer[name]) for name in ("data_rank", "pid", *_PLACES)} | {"host": str(answer["host"])}
    yield Told(
        address=path, rank=int(answer["rank"]), place=place,
        numbers=_numbers(answer.get("numbers")), describe=str(answer.get("describe", "")),
        readers={str(rank): _numbers(one) for rank, one in readers.items()} if isinstance(readers, dict) else {},
    )  # fmt: skip


def _numbers(given: Any) -> dict[str, float]:
    items = given.items() if isinstance(given, dict) else ()
    return {str(name): float(value) for name, value in items if isinstance(value, (int, float)) and isfinite(value)}


def _from_metrics(address: str) -> Iterator[Told]:
    parse = _parser().text_string_to_metric_families
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for family in parse(_fetched(address)):
        for sample in family.samples:
            if (number := EXPORTED.get(sample.name)) is not None and isfinite(sample.value):
                of = sample.labels.get("loader", ""), sample.labels.get("rank", ""), sample.labels.get("data_rank", "")
                found.setdefault(of, {})[number.name] = float(sample.value)
    if not found:
        raise ValueError(_NO_LOADER)
    for (loader, rank, data_rank), numbers in found.items():
        if loader.endswith("/readers"):
            continue
        place = {name: int(numbers[name]) for name in _PLACES if name in numbers}
        readers = {
            at: one for (name, of, at), one in found.items() if (name, of) == (f"{loader}/readers", rank)
        }  # fmt: skip
        yield Told(
            address=redact(address), loader=loader, rank=int(rank or -1), numbers=numbers, readers=readers,
            place=place | {"data_rank": int(data_rank or -1)},
        )  # fmt: skip


class _Unfollowed(urllib.request.HTTPRedirectHandler):
    """Treat a redirect of a job's address as an answer of its own."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect."""


def _fetched(address: str) -> str:
    opener = urllib.request.build_opener(_Unfollowed, urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=_ANSWER_S) as answer:
            data: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise ValueError(f"HTTP {error.code} {error.reason}") from error
    if len(data) > _MOST_BYTES:
        raise ValueError(f"an answer of more than {_MOST_BYTES >> 20} MiB")
    return data.decode("utf-8", "replace")


def _parser() -> Any:
    """Return the parser of Prometheus's text.

    Raises:
        ConfigError: The parser is not installed.
    """
    try:
        import prometheus_client.parser  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ConfigError("--run http://…: needs prometheus-client: pip install 'shardstream[metrics]'") from error
    return prometheus_client.parser


def same_loader(one: Told, other: Told) -> bool:
    """Return whether two answers are of the same loader, without a restart between them."""
    if (one.address, one.loader, one.rank, one.place.get("pid")) != (
        other.address, other.loader, other.rank, other.place.get("pid"),
    ):  # fmt: skip
        return False
    return one.numbers.get("batches", 0) >= other.numbers.get("batches", 0)
