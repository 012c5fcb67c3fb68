"""Pack the documents of a dataset into sequences of a fixed number of tokens: ``Packed``."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, overload

from streaming.common.arguments import checked_flag, checks_names, option_names, shows
from streaming.errors import ConfigError
from streaming.order.packing.rules import Overlong
from streaming.order.plan.schedule import Schedule
from streaming.sets.datasets.dataset import StreamingDataset
from streaming.sets.datasets.face import DataSet, Numbers, reading
from streaming.sets.sources.kinds import KindsOfPacks
from streaming.sets.sources.packs import PackCounts, PackedDocuments
from streaming.sets.sources.windows import WindowSource
from streaming.types import Sample, Transform

_AT_THE_DOCUMENTS = "it belongs to the documents; write Packed(StreamingDataset(…, {}=…), …)"
_ELSEWHERE = {name: _AT_THE_DOCUMENTS.format(name) for name in option_names(StreamingDataset)} | {
    "batch_size": "it belongs to the loader; write DataLoader(packed, batch_size=…)",
    "max_length": "write length=…",
    "max_tokens": "write length=…; with padded=True it is a budget of padded tokens for each batch",
    "overlap": "write stride=…, the tokens from the start of one window to the next: length minus the overlap",
    "window": "write length=…, and stride=… for windows that overlap",
    "seq_length": "write length=…",
    "sequence_length": "write length=…",
    "block_size": "write length=…",
    "transform": "to change whole packs use the loader's collate_fn, which gets a list of them",
}


@checks_names(_ELSEWHERE)
class Packed(DataSet[PackedDocuments | KindsOfPacks]):
    """Pack the documents of a dataset into sequences of ``length`` tokens, with almost no padding.

    A sample is a pack. The set can be given to a ``DataLoader``, which keeps all its promises (the same global batches
    on any number of ranks and workers, exact resume), or to a ``Mixture``, in which weights over packs are weights over
    tokens. Each token of each document is in exactly one pack per epoch; each epoch combines the documents differently.
    ::

        web = StreamingDataset("s3://bucket/web/", where="lang = 'en'")
        loader = DataLoader(Packed(web, length=8192), batch_size=8)
        for batch in loader:
            loss = model(**{name: batch[name].cuda() for name in ("input_ids", "labels", "position_ids")}).loss

    A batch of B packs of length T is a dict of

    - ``input_ids``, ``labels``, ``position_ids``, ``document_ids``: int64 [B, T]. Positions restart at 0 in each
      document; document ids count the documents of a pack from 0 and are -1 at padding. Labels are ``ignore_id`` at
      padding and where the loss mask is 0;
    - ``cu_seqlens``: int32 [n + 1], the offsets at which the n documents start in the batch flattened to [B * T], and
      its end; padding at the end of a pack is a sequence of its own. ``max_seqlen``: the length of the longest, an int;
    - ``num_tokens``, ``num_labels``: the number of tokens without padding, and of labels that carry loss, ints. Packs
      that fill the last batch (``last_batch="pad"``) have only the label ``ignore_id``, and neither number counts them;
    - ``__key__``: for each pack, the list of its documents' keys; ``__url__``: the shard of each pack;
    - in a mixture also ``__source__``, and ``source_ids`` int64 [B]: the same as indices into the sorted names.

    With ``padded=True`` a pack is a whole batch, for models that take one sequence per row; a rank gets one pack at a
    time (``DataLoader(packed, batch_size=1)``), or a list of several (``collate_fn=list``). For n documents of at most
    L tokens: ``input_ids``, ``labels``, ``position_ids`` and ``attention_mask`` (1: token, 0: padding), int64 [n, L];
    ``num_tokens``, ``num_labels``; ``__key__``, ``__url__`` and ``__source__``, lists of n; and ``source_ids`` int64
    [n]. A document that cannot be read leaves a row of padding with the key "".

    With ``padded=True, field=None`` samples need not be text: a pack is a batch of whole samples of similar size, such
    as images by pixels or audio by frames, which are decoded, transformed and collated like those of any
    ``StreamingDataset``. ::

        clips = StreamingDataset("s3://bucket/speech/", decode={"flac": decode_flac})
        batches = Packed(clips, length=16_000 * 600, column="frames", padded=True, field=None)
        for batch in DataLoader(batches, batch_size=1, jagged=("flac",)):
            audio = batch["flac"].padded()                     # [n, frames of the longest]: at most ten minutes

    A sample that cannot be read, or that ``transform`` drops, is replaced by another one of its batch. If no sample of
    a batch is left, a single sample of another batch takes its place, so no batch exceeds its budget. With ``alike``
    the samples of a batch have equal values in some columns, such as height and width, and so can be stacked into one
    tensor.

    With ``field=None`` alone a pack is a list of whole samples whose sizes are at most ``length`` together, within all
    ``budgets``, for programs that collate themselves: a batch is a list of such lists, or what ``collate_fn`` makes of
    it. A sample that cannot be read, or that ``transform`` drops, leaves its list. ::

        pages = Packed(StreamingDataset(url, transform=tokenized), length=8192, field=None, budgets={"patches": 4096})
        for lists in DataLoader(pages, batch_size=4):
            batch = [join(samples) for samples in lists]

    With ``carry``, packs bring other fields of their documents along, decoded by the dataset's ``decode``: images or
    sounds for the tokens that stand for them. For each field, such as ``jpg``, a batch has

    - ``jpg``: for each row, the list of its values, in the order of its documents; with ``jagged=("jpg",)``, a
      ``Jagged`` of all values of the batch, row after row;
    - ``jpg_document``: a ``Jagged`` of int64 with a row for each row: the number of each value's document;
    - ``jpg_position``, with ``placeholder``: a ``Jagged`` likewise: where in ``input_ids`` the tokens that stand for
      the value begin.

    Packs are made within *groups*: consecutive chunks of one shard that hold at least 256 packs. The number of packs in
    a group depends only on the lengths of its documents, so making the set reads only the column. A document that
    cannot be read counts as a bad sample of the dataset; with ``on_error="substitute"`` and ``"skip"`` it becomes
    padding, and with ``"skip"`` a pack without any readable document is False in ``__valid__``.

    Args:
        documents: A ``StreamingDataset`` with an index, filtered or not; each sample is a document.
        length: T, tokens per pack; or a schedule of the tokens of a row, ``Schedule.steps({0: 1024, 20_000: 4096})``: T
            is the longest, and each pack is laid out as T / length rows in batches that begin at such rows of the run.
            ``len``, batch sizes and weights count packs.
        column: Column of the sample tables, or late column, that holds the number of tokens of each document.
        field: Field that holds the tokens as little-endian integers; None: samples are not tokens, see above.
        dtype: ``"uint16"`` or ``"uint32"``; None: inferred from the sizes of the first documents.
        overlong: What to do with documents of more than T tokens: ``"split"`` them, ``"truncate"`` them to T, or
            ``"drop"`` them. None: split them. Whole samples, and documents with ``budgets``, can only be dropped. The
            log counts them.
        mask_field: Field that holds one byte per token, 0 for tokens that are excluded from the loss, as ``shard_tools
            convert`` writes it with a chat template; None: all tokens count.
        shift_labels: False: ``labels[t]`` is ``input_ids[t]``, for models that shift labels themselves (Hugging Face).
            True: ``labels[t]`` is token t + 1, for losses that compare position by position (Megatron, TorchTitan).
        labels_across: Whether the first token of a document is predicted from the last token of the document before it.
            If False, its label is ``ignore_id`` (with ``shift_labels``: the label of that last token), as it always is
            for the first token of a pack. With ``multiple``, this needs ``shift_labels``.
        pad_id: Value of ``input_ids`` at padding.
        ignore_id: Value of ``labels`` where there is no loss: at padding, where the mask is 0, and at first tokens. A
            negative integer, since other labels are tokens, and the ``ignore_index`` of the loss: -100 in torch and
            Hugging Face, -1 in nanoGPT and nanochat.
        max_docs: Maximum number of documents per pack. ``cu_seqlens`` then always has the shape int32 [B * (max_docs +
            1) + 1], filled up with B * T, and ``max_seqlen`` is T: static shapes for compiled models and CUDA graphs.
        multiple: Round the space of each document up to a multiple of this many tokens: 2 * cp for context parallelism,
            where each rank gets an equal part of each document.
        padded: Make batches by a token budget: each pack is a batch of documents of similar length, one per row, padded
            to the longest; rows times longest is at most ``length``.
        stride: Documents of more than T tokens become windows of T tokens, one every ``stride`` tokens, which overlap
            by T - ``stride``; None: pieces that do not overlap. Tokens in an overlap are delivered, and counted, more
            than once.
        overlap_labels: Whether a token contributes to the loss in every window that holds it. False: only in the first,
            so that each counts once; in later windows it is context, with the label ``ignore_id``.
        budgets: Further limits per pack: a maximum for each column named, such as ``{"image_tokens": 4096}``, or for a
            quantity: a name, arithmetic over columns and a maximum, ``{"pairs": ("tokens * tokens", 2**26)}``.
            Documents that exceed a budget, or T, are dropped.
        alike: For padded packs: columns of integers that are equal for all documents of a batch, such as ``("height",
            "width")`` of images, or a late column of bucket numbers. Each group leaves one partial batch for each
            combination of values.
        alike_across_ranks: Whether the packs of all ranks in a step are alike, too: each global batch holds packs of
            one combination of values. What fills no global batch comes first in the next epoch: the number of batches
            of a kind differs between epochs, and fewer packs of it than a global batch wait. Not in a ``Mixture``.
        carry: Fields of the documents that packs bring along, such as ``("jpg", "flac")``; or the fields of each entry
            of a batch, ``{"images": ("0.jpg", "1.jpg")}``, in their order within a document. Documents may lack them.
            Documents of more than T tokens are dropped, since a cut could take a value.
        placeholder: Token that stands for carried values, or that of each entry, ``{"jpg": 32000}``. The k-th run of
            this token in a document belongs to its k-th value; a document with another number of runs counts as a bad
            sample. These tokens carry no loss. None: no token does, and values have no position.

    Raises:
        ConfigError: An argument is invalid; or the dataset lacks such a column or field, has a ``transform`` (which
            only ``carry`` and whole samples allow), or holds nothing to pack.
        IndexMissingError: The dataset has no index, or no sample tables.
    """

    _noun = "pack"

    def __init__(  # noqa: PLR0913  the contract of API.md
        self,
        documents: StreamingDataset,
        length: int | Schedule,
        *,
        column: str = "tokens",
        field: str | None = "tok",
        dtype: str | None = None,
        overlong: Overlong | None = None,
        mask_field: str | None = None,
        shift_labels: bool = False,
        labels_across: bool = False,
        pad_id: int = 0,
        ignore_id: int = -100,
        max_docs: int | None = None,
        multiple: int = 1,
        padded: bool = False,
        stride: int | None = None,
        overlap_labels: bool = True,
        budgets: Mapping[str, int | tuple[str, int]] | None = None,
        alike: Sequence[str] = (),
        alike_across_ranks: bool = False,
        carry: Sequence[str] | Mapping[str, Sequence[str]] = (),
        placeholder: int | Mapping[str, int] | None = None,
    ) -> None:
        _check_documents(documents)
        kind = KindsOfPacks if checked_flag("alike_across_ranks", alike_across_ranks) else PackedDocuments
        self._source = kind(
            documents.source, length, column=column, field=field, dtype=dtype, overlong=overlong, mask_field=mask_field,
            shift_labels=shift_labels, labels_across=labels_across, pad_id=pad_id, ignore_id=ignore_id,
            max_docs=max_docs, multiple=multiple, padded=padded, stride=stride, overlap_labels=overlap_labels,
            budgets=budgets, alike=alike, carry=carry, placeholder=placeholder,
        )  # fmt: skip
        self._documents = documents

    def __len__(self) -> int:
        """Return the number of packs."""
        return self._source.num_readable

    @property
    def documents(self) -> StreamingDataset:
        """The data set of documents, with the fields that packs read: ``packed.documents[0]["tok"]``."""
        return reading(self._documents, self._source.documents)

    @property
    def counts(self) -> PackCounts:
        """Numbers of documents and tokens by outcome, such as ``packed.counts.split`` and ``packed.counts.dropped``."""
        return self._source.counts

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all packs, without padding: ``packed.num_tokens / len(packed)`` is the mean per pack."""
        return self._source.counts.packed

    @property
    def fill(self) -> float:
        """Fraction of token positions that hold tokens, 0 to 1: ``print(f"{packed.fill:.1%} filled")``."""
        return self._source.fill

    @overload
    def __getitem__(self, index: Numbers) -> list[Sample]: ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> Sample: ...

    @overload
    def __getitem__(self, index: builtins.slice) -> NoReturn: ...

    def __getitem__(self, index: Any) -> Any:
        """Return pack ``index`` in storage order, as laid out in epoch 0 by the set's seed: tensors [T], or a batch.

        ``packed[[3, 5]]`` returns a list of packs.

        Raises:
            IndexError: There is no such pack.
            DataError: One of its documents cannot be read.
            ConfigError: ``index`` is a slice.
        """
        return super().__getitem__(index)

    def map(self, function: Transform) -> NoReturn:
        """Raise an error: map the documents instead, ``Packed(documents.map(function), …)``, if they are whole samples.

        Raises:
            ConfigError: Always.
        """
        self._source.mapped(function)

    def _sliced(self, wanted: builtins.slice) -> NoReturn:  # noqa: ARG002  as other data sets have it
        raise ConfigError("packed[a:b]: packs cannot be sliced; slice the documents: Packed(dataset[a:b], …)")

    @shows
    def __repr__(self) -> str:
        return f"Packed({self.documents!r}, {self._source.words()})"


def _check_documents(documents: Any) -> None:
    """Check that ``documents`` is a ``StreamingDataset``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(documents, StreamingDataset):
        return
    if isinstance(documents.source if isinstance(documents, DataSet) else None, WindowSource):
        raise ConfigError(
            "Packed: expected a StreamingDataset, got a Windows, whose rows are all of one size; give it to the "
            "DataLoader as it is"
        )
    if isinstance(documents, DataSet):
        raise ConfigError(
            f"Packed: expected a StreamingDataset, got a {type(documents).__name__}; pack each data set, and mix the "
            'packs: Mixture({"web": Packed(web, length=…), "code": Packed(code, length=…)}, weights=…)'
        )
    raise ConfigError(f"Packed: expected a StreamingDataset, got {documents!r}; write Packed(StreamingDataset(…), …)")
