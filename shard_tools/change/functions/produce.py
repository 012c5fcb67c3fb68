"""Call a user's function on inputs and encode its samples: the work of worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from shard_tools.make.write.columns import ColumnSource, ColumnValue, column_value
from shard_tools.make.write.encode import encode_field
from shard_tools.make.write.keys import check_field, check_key, number_key
from shard_tools.running.parts import Item
from shard_tools.running.process_main import dump_error
from streaming.errors import ConfigError, WorkerDiedError
from streaming.shards.tar.blocks import is_meta

_PART_DIGITS = 3


class Given(NamedTuple):
    """One input as the function gets it, or the error of reading it; and its origin, for lists of failures."""

    value: Any = None
    error: Exception | None = None
    url: str = ""
    key: str = ""
    number_in_shard: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadHere:
    """Read inputs that the part contains."""

    def __call__(self, part: Sequence[Any]) -> Iterator[Given]:
        """Yield the inputs."""
        return (Given(value=value) for value in part)


class Kind(Enum):
    """The outcome of an input."""

    SAMPLE = "sample"
    EMPTY = "empty"
    FAILED = "failed"


class Made(NamedTuple):
    """One sample, without the bytes of its fields; or the outcome of an input that gave none.

    Attributes:
        kind: The outcome.
        number: Number of its input.
        part: Number of the sample among those of its input.
        key: Key of the sample.
        fields: Its fields, in the order of their bytes.
        columns: Values of its columns.
        error: The pickled exception of a failed input.
        reason: The exception as text.
        given: Origin of a failed input: URL, key, number in the shard.
    """

    kind: Kind
    number: int
    part: int = 0
    key: str = ""
    fields: tuple[str, ...] = ()
    columns: tuple[ColumnValue, ...] = ()
    error: bytes = b""
    reason: str = ""
    given: tuple[str, str, int] = ("", "", -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Produce:
    """Apply a function to inputs. Pure if the function is, so it may be repeated in any process.

    Attributes:
        function: The function.
        read: Reads the inputs of a part (:class:`~shard_tools.change.functions.inputs.Inputs`).
        columns: Sources of the columns' values.
        name: Name of the function, for errors.
    """

    function: Callable[[Any], Any]
    read: Callable[[Any], Iterator[Given]]
    columns: Mapping[str, ColumnSource]
    name: str

    def __call__(
        self, start: int, part: Any, *, skip: int, avoid: frozenset[int], note: Callable[[int], None]
    ) -> Iterator[Item]:
        """Yield the items of a part; see :class:`shard_tools.running.parts.Work`."""
        note(start)
        for number, given in enumerate(self.read(part), start):
            note(number)
            for item in self._killed(number, given) if number in avoid else self._items(number, given):
                if skip:
                    skip -= 1
                else:
                    yield item

    def _items(self, number: int, given: Given) -> Iterator[Item]:
        """Yield an item per sample that the function returns, or one item without a sample."""
        if given.error is not None:
            yield self._failed(given.error, number, 0, given)
            return
        part = 0
        try:
            result = self.function(given.value)
            for sample, several in _samples(result):
                key = sample.get("__key__")
                if key is None:
                    key = number_key(number) + (f"-{part:0{_PART_DIGITS}d}" if several else "")
                yield self._encoded(sample, check_key(key), number, part)
                part += 1
        except (Exception, SystemExit) as error:  # noqa: BLE001  the policy for failing inputs decides
            yield self._failed(error, number, part, given)
        else:
            if not part:
                yield Item(Made(Kind.EMPTY, number), ())

    def _encoded(self, sample: Mapping[str, Any], key: str, number: int, part: int) -> Item:
        names = (name for name in sample if not (isinstance(name, str) and is_meta(name)))
        fields = tuple(sorted(check_field(name, key) for name in names))
        if not fields:
            raise ConfigError(f"sample {key!r} has no field but __key__; to leave it out return None")
        buffers = []
        for field in fields:
            pieces = encode_field(sample[field], field=field, key=key)
            buffers.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        values = tuple(column_value(sample, name, source, key) for name, source in self.columns.items())
        return Item(Made(Kind.SAMPLE, number, part, key, fields, values), buffers)

    def _failed(self, error: BaseException, number: int, part: int, given: Given) -> Item:
        reason = f"{type(error).__name__}: {error}"
        origin = (given.url, given.key, given.number_in_shard)
        return Item(
            Made(
                Kind.FAILED, number, part, error=dump_error(error, of_user=given.error is None), reason=reason,
                given=origin,
            ),
            (),
        )  # fmt: skip

    def _killed(self, number: int, given: Given) -> Iterator[Item]:
        error = WorkerDiedError(
            f"{self.name} ends worker processes at this input, each time that it is tried: it crashes in native code, "
            "or needs more memory than there is"
        )
        yield self._failed(error, number, 0, given)


def _samples(result: Any) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield each sample that a function returned, and whether it may be one of several.

    Raises:
        ConfigError: It returned a value of another type.
    """
    if result is None:
        return
    if isinstance(result, Mapping):
        yield result, False
        return
    if not isinstance(result, (list, tuple, Iterator)):
        raise ConfigError(f"{_EXPECTED}, got a {type(result).__name__}")
    known = [] if isinstance(result, Iterator) else [_checked(sample, result) for sample in result]
    for sample in known or result:
        yield _checked(sample, result), True


def _checked(sample: Any, result: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return sample
    raise ConfigError(f"{_EXPECTED}, got a {type(result).__name__} with a {type(sample).__name__} in it")


_EXPECTED = "the function: expected a sample (a dict of fields), a list or generator of samples, or None"
