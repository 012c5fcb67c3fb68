"""Check the options of ``Packed``, and choose the ``RowKind`` that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streaming.build.batches.items.carried import CarriedPacks, PaddedCarried
from streaming.build.batches.items.carry import checked_carry
from streaming.build.batches.items.packs import PaddedDocuments, TokenPacks
from streaming.build.batches.items.pieces import PieceItems
from streaming.build.batches.items.whole import SampleLists, WholeSamples
from streaming.common.arguments import checked_flag, checked_int, is_list, is_whole
from streaming.errors import ConfigError, shell_word
from streaming.order.packing.layout import IGNORED, PackShape
from streaming.order.packing.rules import MAX_AMOUNT, PackRules
from streaming.order.plan.sizes import Steps, steps_of

DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_UNSET = {"ignore_id": IGNORED}
"""Defaults of options of tokens, where they are not None, False or 0."""
_ENCODED = frozenset(("npy", "npz", "json", "jsn", "msgpack", "mp", "msg", "safetensors", "sft", "gz"))


def checked_items(
    of_packs: Mapping[str, Any], of_tokens: Mapping[str, Any], *, column: Any, field: Any, dtype: Any,
    overlap_labels: Any, carry: Any, placeholder: Any,
) -> tuple[PackRules, PieceItems]:  # fmt: skip
    """Return the rules that fill rows, and the kind of rows; the dtype of tokens may be inferred later.

    Args:
        of_packs: The options of ``PackRules``, as given to ``Packed``.
        of_tokens: The options of ``PackShape`` that only apply to tokens.
        column: See ``Packed``.
        field: See ``Packed``; None: rows are made of whole samples.
        dtype: See ``Packed``.
        overlap_labels: See ``Packed``.
        carry: See ``Packed``.
        placeholder: See ``Packed``.

    Raises:
        ConfigError: An option is invalid, or conflicts with another one.
    """
    if field is None:
        _check_whole({"dtype": dtype, "stride": of_packs["stride"], **of_tokens}, of_packs)
    lengths = steps_of("length", of_packs["length"], "Schedule.steps({0: 1024, 20_000: 4096})")
    carried = checked_carry(
        carry, placeholder, of_packs, is_growing=len(lengths) > 1, of_tokens=(field, of_tokens["mask_field"]),
        pad_id=of_tokens["pad_id"],
    )  # fmt: skip
    is_cut = field is not None and not of_packs["budgets"] and carried is None
    overlong = of_packs["overlong"] or ("split" if is_cut else "drop")
    if len(lengths) > 1:
        _check_can_be_cut({**of_packs, "field": field is None and "None"})
    longest = max((length for _, length in lengths), default=0) if len(lengths) > 1 else lengths[0][1]
    is_listed = field is None and not of_packs["padded"]
    spread = bool(of_packs["spread"] or (is_listed and of_packs["budgets"]))
    rules = PackRules(**{**of_packs, "overlong": overlong, "length": longest, "spread": spread})
    parts = _checked_parts(lengths, rules)
    _check_name("column", column)
    for option in ("shift_labels", "labels_across"):
        checked_flag(option, of_tokens[option])
    checked_flag("overlap_labels", overlap_labels)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(map(repr, DTYPES))}, or None, got {dtype!r}")
    if not overlap_labels and rules.stride is None:
        raise ConfigError("overlap_labels=False applies to windows that overlap; add stride=…, or leave it out")
    if field is None:
        kind = WholeSamples if rules.padded else SampleLists
        return rules, kind(length=rules.length, multiple=rules.multiple, max_docs=rules.max_docs)
    shape = _checked_shape(rules, of_tokens, field, is_stale=not overlap_labels)
    if carried is not None:
        return rules, (PaddedCarried if rules.padded else CarriedPacks)(shape=shape, carry=carried)
    return rules, PaddedDocuments(shape=shape) if rules.padded else TokenPacks(shape=shape, parts=parts)


def _checked_shape(rules: PackRules, of_tokens: Mapping[str, Any], field: Any, *, is_stale: bool) -> PackShape:
    """Return the shape of a batch, without the dtype of tokens; ``is_stale``: tokens count in their first window only.

    Raises:
        ConfigError: An option is invalid.
    """
    for option, name in {"field": field, "mask_field": of_tokens["mask_field"]}.items():
        if name is not None:
            _check_name(option, name)
            _refuse_encoded(option, name)
    return PackShape(
        length=rules.length, field=field, dtype="", multiple=rules.multiple, max_docs=rules.max_docs,
        stale=rules.length - rules.stride if is_stale and rules.stride is not None else 0,
        **{
            **of_tokens, "pad_id": checked_int("pad_id", of_tokens["pad_id"], 0, 2**32 - 1),
            "ignore_id": _checked_ignore_id(of_tokens["ignore_id"]),
        },
    )  # fmt: skip


def _checked_ignore_id(ignore_id: Any) -> int:
    """Return the label of tokens without loss, which no token has.

    Raises:
        ConfigError: It is no integer, or a token may have it.
    """
    if is_whole(ignore_id) and ignore_id >= 0:
        raise ConfigError(
            f"ignore_id={ignore_id}: expected a negative integer, such as -100 or -1, since labels from 0 on are "
            "tokens: those with this id would have no loss. Give the loss function the same number as its ignore_index"
        )
    return checked_int("ignore_id", ignore_id, -(2**31), -1)


def _check_can_be_cut(of_packs: Mapping[str, Any]) -> None:
    """Refuse options whose packs cannot be laid out in shorter rows.

    Raises:
        ConfigError: Such an option is set.
    """
    why = {
        "padded": "a padded pack is a batch under a budget, whose rows are as long as its documents",
        "stride": "windows that overlap are not cut a second time",
        "budgets": "for part of a document its use of the other budgets is not known, so none can be cut",
        "field": "whole samples cannot be cut",
    }
    for option, reason in why.items():
        if of_packs[option]:
            raise ConfigError(
                f"length={of_packs['length']} with {option}={of_packs[option]!r}: rows of another length are made by "
                f"cutting packs, and {reason}; give length an integer, or leave {option} out"
            )


def _checked_parts(lengths: list[tuple[int, Any]], rules: PackRules) -> Steps:
    """Return the number of rows per pack for these lengths of a row, by row of the run.

    Raises:
        ConfigError: A pack cannot be cut into rows of a length.
    """
    if len(lengths) == 1:
        return Steps.constant(1)
    for row, length in lengths:
        if rules.length % length or length % rules.multiple:
            also = "" if rules.multiple == 1 else f", and a multiple of multiple={rules.multiple}"
            raise ConfigError(
                f"length: {length} from row {row:,} on: packs of the longest length, {rules.length}, are cut into "
                f"equal rows; expected a divisor of {rules.length}{also}"
            )
    return Steps(tuple((row, rules.length // length) for row, length in lengths))


def _check_whole(of_tokens: Mapping[str, Any], of_packs: Mapping[str, Any]) -> None:
    """Reject options that do not apply to whole samples.

    Raises:
        ConfigError: The samples are to be cut, or have an option for tokens.
    """
    overlong = of_packs["overlong"]
    if overlong not in (None, "drop"):
        raise ConfigError(f'overlong={overlong!r} with field=None: whole samples cannot be cut; use overlong="drop"')
    for option, value in of_tokens.items():
        if value is not None and value != _UNSET.get(option, 0):
            raise ConfigError(
                f"{option}={value!r} with field=None: it applies to tokens, and there are none; leave it out"
            )


def checked_budgets(budgets: Any, column: str) -> dict[str, tuple[str | None, int]]:
    """Return what each budget counts, and its limit per pack, by name: arithmetic, or None for the column of the name.

    Raises:
        ConfigError: ``budgets`` is not such a mapping, or names the column of tokens.
    """
    if budgets is None:
        return {}
    if not isinstance(budgets, Mapping) or not all(isinstance(name, str) and name for name in budgets):
        raise ConfigError(
            f'budgets: expected a number per column, such as {{"image_tokens": 4096}}, or per quantity, such as '
            f'{{"pairs": ("tokens * tokens", 2**26)}}, got {budgets!r}'
        )
    if column in budgets:
        raise ConfigError(f"budgets: column {column!r} is already bounded by length=; name other columns")
    return {name: _checked_budget(name, budget) for name, budget in budgets.items()}


def _checked_budget(name: str, budget: Any) -> tuple[str | None, int]:
    """Return what a budget counts, and its limit.

    Raises:
        ConfigError: It is neither a number, nor arithmetic with a number.
    """
    if callable(budget) or (is_list(budget) and any(map(callable, budget))):
        raise ConfigError(
            f"budgets: {name}: a function cannot be compared with that of another rank or of a later run. Write "
            f'arithmetic over columns, {{"{name}": ("tokens * tokens", 2**26)}}, or store its values in a column: '
            f"`shard_tools column add URL {shell_word(name)} --compute MODULE:FUNCTION`"
        )
    if not is_list(budget):
        return None, _checked_limit(name, budget)
    if len(budget) != 2 or not isinstance(budget[0], str):
        raise ConfigError(f'budgets: {name}: expected ("tokens * tokens", 2**26), a text and a number, got {budget!r}')
    return budget[0], _checked_limit(name, budget[1])


def _checked_limit(name: str, limit: Any) -> int:
    """Return the limit of a budget.

    Raises:
        ConfigError: It is not a whole number of at least 1: a pack within less holds next to nothing.
    """
    return checked_int(f"budgets: {name}", limit, 1, MAX_AMOUNT)


def checked_alike(alike: Any) -> tuple[str, ...]:
    """Return the columns in which all documents of a batch are equal.

    Raises:
        ConfigError: ``alike`` is not a list of names.
    """
    if not is_list(alike) or not all(isinstance(name, str) and name for name in alike):
        raise ConfigError(f'alike: expected names of columns, such as ("height", "width"), got {alike!r}')
    return tuple(alike)


def _check_name(option: str, name: Any) -> None:
    if not (isinstance(name, str) and name):
        raise ConfigError(f"{option}: expected a name, got {name!r}")


def _refuse_encoded(option: str, field: str) -> None:
    """Refuse a field whose extension shows that its bytes are not plain items: headers would become tokens.

    Raises:
        ConfigError: The field has such an extension.
    """
    extension = field.rpartition(".")[2].lower()
    if extension in _ENCODED:
        items = "tokens of two or four bytes each" if option == "field" else "one byte for each token"
        raise ConfigError(
            f"{option}={field!r}: a .{extension} field has a header or text around its numbers, but packs read {items} "
            "straight from the shards; write them so with `shard_tools convert URL TARGET --tokens-field FIELD "
            "[--mask-field FIELD]` (fields tok and mask, column tokens)"
        )
