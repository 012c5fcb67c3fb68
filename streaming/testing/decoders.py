"""Test the behavior of a decoder on which loaders rely: ``DecoderTests``."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from shard_tools import ShardWriter
from streaming import DataLoader, StreamingDataset
from streaming.decode import DistantMember, FieldSpec, MemberFile, decode_field, draws_numbers, resolve_decoders
from streaming.errors import DecodeError
from streaming.testing.values import same
from streaming.types import Decoder, ReadBuffer


@dataclass(frozen=True)
class GivenDecoder:
    """A decoder, the name of the field that it decodes, and the bytes of some values."""

    spec: FieldSpec
    field: str
    values: Sequence[bytes]

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers, different ones for each value."""
        return draws_numbers(self._found)

    @property
    def decoder(self) -> Decoder:
        """The decoder as a loader calls it; random numbers are the same each time."""
        found: Any = self._found
        return cast("Decoder", found.with_rng(np.random.default_rng(3)) if self.draws else found)

    @property
    def _found(self) -> Decoder:
        return resolve_decoders({self.field: self.spec}).decoder_for(self.field)

    def decoded(self, data: ReadBuffer) -> Any:
        """Return the value of some bytes."""
        return decode_field(self.decoder, data, url="a.tar", key="k", field=self.field)


class DecoderTests:
    """Tests of a decoder; a subclass returns the decoder and the bytes of some values.

    Override :meth:`spec` and :meth:`values`, and :meth:`damaged` if there are other kinds of damage::

        class TestWav(DecoderTests):
            field = "wav"

            def spec(self):
                return wav

            def values(self):
                return [recorded(seconds) for seconds in (1, 2)]
    """

    field = "bin"
    """Name of the field, an extension without the leading dot."""

    def spec(self) -> FieldSpec:
        """Return the decoder in the form that users write: ``decode={field: spec}``."""
        raise NotImplementedError(f"{type(self).__name__}.spec: return your decoder")

    def values(self) -> Sequence[bytes]:
        """Return the bytes of some values that are not all equal."""
        raise NotImplementedError(f"{type(self).__name__}.values: return the bytes of some values")

    def damaged(self, values: Sequence[bytes]) -> Iterator[bytes]:
        """Yield bytes damaged like those of broken writers and disks; a decoder may refuse them or decode the rest."""
        yield b""
        for data in values:
            for size in {1, len(data) // 2, max(len(data) - 1, 0)}:
                yield data[:size]
            for place in range(0, len(data), max(1, len(data) // 20)):
                yield data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]

    @pytest.fixture
    def given(self) -> GivenDecoder:
        return GivenDecoder(self.spec(), self.field, self.values())

    def test_the_same_bytes_give_the_same_object_and_others_another(self, given: GivenDecoder) -> None:
        found = [given.decoded(data) for data in given.values]
        assert same([given.decoded(bytes(data)) for data in given.values], found)
        assert any(not same(one, found[0]) for one in found[1:]), "give values() that differ"

    def test_nothing_that_is_returned_lies_in_the_buffer(self, given: GivenDecoder) -> None:
        for data in given.values:
            buffer = bytearray(data)
            lent = memoryview(buffer)
            found = given.decoded(lent)
            lent.release()  # a BufferError here: the decoder, or its result, still holds a view of ``data``
            buffer.extend(b"the memory is another's by now")
            buffer[:] = bytes(len(buffer))
            assert same(found, given.decoded(data)), "the value changed with the buffer: copy what is kept of ``data``"

    def test_a_copy_in_another_process_decodes_the_same(self, given: GivenDecoder) -> None:
        copied: Decoder = pickle.loads(pickle.dumps(given.decoder))
        for data in given.values:
            assert same(decode_field(copied, data, url="a.tar", key="k", field=given.field), given.decoded(data))

    def test_several_threads_may_call_it(self, given: GivenDecoder) -> None:
        decoder, expected = given.decoder, [given.decoded(data) for data in given.values]
        if draws_numbers(resolve_decoders({given.field: given.spec}).decoder_for(given.field)):
            return  # each value has its own decoder
        with ThreadPoolExecutor(4) as threads:
            found = list(
                threads.map(lambda turn: decoder(given.values[turn % len(expected)]), range(16 * len(expected)))
            )
        assert same(found, 16 * expected)

    def test_damaged_bytes_are_decoded_or_refused(self, given: GivenDecoder) -> None:
        for data in self.damaged(given.values):
            with suppress(DecodeError):
                given.decoded(data)

    def test_a_file_gives_what_its_bytes_give(self, given: GivenDecoder) -> None:
        if not getattr(given.decoder, "reads_ranges", False):
            pytest.skip("it does not read ranges of large members")
        for data in given.values:

            def read(start: int, stop: int, *, whole: bool, data: bytes = data) -> ReadBuffer:  # noqa: ARG001
                return data[start:stop]

            file = MemberFile(DistantMember(read=read, num_bytes=len(data)))
            found = given.decoder(file)  # type: ignore[arg-type]
            assert file.failure is None
            assert same(found, given.decoded(data))

    @pytest.mark.parametrize("builders", [{"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}], ids=str)
    def test_batches_have_what_it_decodes(self, given: GivenDecoder, tmp_path: Path, builders: dict[str, int]) -> None:
        with ShardWriter(f"{tmp_path}/set/{{:06d}}.tar", max_samples=3) as writer:
            for number, data in enumerate(given.values):
                writer.write({"__key__": f"{number:03d}", given.field: data})
        dataset = StreamingDataset(f"{tmp_path}/set/", decode={given.field: given.spec}, shuffle=False)
        with DataLoader(dataset, batch_size=2, last_batch="partial", collate_fn=list, **builders) as loader:  # type: ignore[arg-type]
            found = [sample[given.field] for batch in loader for sample in batch]
        if not given.draws:  # numbers would depend on epoch and position
            assert same(found, [given.decoded(data) for data in given.values])
        assert len(found) == len(given.values)
