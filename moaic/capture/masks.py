"""Attention masks replaced by a flag where the flag says the same.

transformers computes the causal mask even for a batch without padding, and masks by document even where a row is one
document. Masks that depend on constants alone are computed here, once: a mask that hides nothing is dropped, and one
that hides the later keys of every row becomes `is_causal`. Kernels then skip half of the work, and the fastest ones of
GPUs take no other mask:

    %m = aten.le.Tensor(%keys, %rows) : bool[1, 1, 8, 8]
    %o = moai.sdpa(%q, %k, %v, %m) {is_causal=false, …}
  becomes
    %o = moai.sdpa(%q, %k, %v) {is_causal=true, …}
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, cast

import torch
from torch import Tensor

from moaic.ir.attention import ATTENTION, is_causal, mask_of, query_key_value
from moaic.ir.backward_slice import backward_slice
from moaic.ir.graph import Function, Op, Value
from moaic.ir.ops import OPS, Kind, kind_of
from moaic.ir.specialize import Specializer
from moaic.ir.symbols import Numbers, Symbols
from moaic.ir.types import FLOATING
from moaic.runtime.codegen.lower_to_fx import CPU, operand_of, run_op

LIMIT: Final = 2**22
"""The largest value that is computed element by element: the mask of 2,048 tokens."""


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


_ELEMENTWISE: Final = _aten(
    """eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar
    ge.Scalar add.Tensor sub.Tensor bitwise_and.Tensor bitwise_or.Tensor bitwise_not logical_and logical_or logical_not
    where.self _to_copy clone alias"""
)
_FILLED: Final = _aten("full zeros ones")
_BOTH: Final = _aten("bitwise_and.Tensor logical_and")
_REARRANGED: Final = _aten("expand slice.Tensor view clone alias")
_ALONG: Final = _aten("slice.Tensor cat cumsum")
"""Ops along one dim, the attribute `dim`: in any other all elements of a result are equal if those of operands are."""
_ARBITRARY: Final = _aten("empty.memory_format")
_UP_TO: Final[Mapping[str, tuple[int, bool]]] = {
    "aten.le.Tensor": (0, True),
    "aten.lt.Tensor": (0, False),
    "aten.ge.Tensor": (1, True),
    "aten.gt.Tensor": (1, False),
}
"""Comparisons: the index of the operand that must be the smaller one, and whether both may be equal."""


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A mask above `LIMIT` that shows a number of first keys per row."""

    shown: Tensor


_Known = Tensor | _Prefix
"""A constant value; a tensor has size 1 in each dim along which all elements are equal."""


def with_flags(function: Function, constants: Mapping[Value, Tensor], symbols: Symbols) -> Function:
    """`function` with masks replaced by a flag or dropped; the ops that made the masks stay.

    The program then requires of its sizes that the masks say the same.
    """
    masks = {mask for op in function.ops if (mask := mask_of(op)) is not None}
    if not masks:
        return function
    # A model may be captured without its weights; its constants are then fake tensors too.
    known = {v: tensor for v, tensor in constants.items() if type(tensor) is Tensor and tensor.is_cpu}
    attention = [op for op in function.ops if mask_of(op) is not None]
    made = [function.ops[index] for index in sorted(backward_slice(function, masks))]
    causal = _flags_at(symbols.example_numbers(), attention, made, known)
    if any(flag is not None for flag in causal):
        symbols.check(lambda numbers: _flags_at(numbers, attention, made, known) == causal)
    flags = dict(zip(attention, causal, strict=True))
    return replace(function, ops=tuple(_with_flag(op, flags.get(op)) for op in function.ops))


def _with_flag(op: Op, causal: bool | None) -> Op:
    if causal is None:
        return op
    attrs = {**op.attrs, "is_causal": causal or is_causal(op)}
    return replace(op, operands=(*op.operands[: ATTENTION[op.name]], None), attrs=attrs)


def _flags_at(
    numbers: Numbers, attention: Sequence[Op], made: Sequence[Op], constants: Mapping[Value, Tensor]
) -> list[bool | None]:
    """For each op of attention whether its mask is causal or hides nothing (False); None if it says something else.

    `made` are the ops that make the masks, `numbers` those of the symbols.
    """
    at = Specializer(numbers)
    ops = at.ops((*made, *attention))
    # The user may have set another default device.
    with torch.no_grad(), CPU:
        known = _Constants({at.value(value): tensor for value, tensor in constants.items()})
        for op in ops[: len(made)]:
            known.add(op)
        return [_flag(op, known) for op in ops[len(made) :]]


def _flag(op: Op, known: _Constants) -> bool | None:
    mask = mask_of(op)
    found = None if mask is None else known.of(mask)
    if found is None:
        return None
    query, key, _ = query_key_value(op)
    rows, keys = query.type.shape[2], key.type.shape[2]
    shown = _shown(found, keys)
    if shown is None:
        return None
    causal = rows == keys and torch.equal(shown, torch.arange(1, rows + 1))
    return None if not causal and bool((shown < keys).any()) else causal


def _shown(mask: _Known, keys: int) -> Tensor | None:
    """The number of first keys that each row shows; None if it shows other keys, or batches or heads differ."""
    if isinstance(mask, _Prefix):
        return mask.shown
    looks = mask if mask.dtype == torch.bool else mask == 0
    if mask.dim() < 2 or prod(mask.shape[:-2]) > 1 or not bool((looks | _hides(mask)).all()):
        return None
    looks = looks.reshape(looks.shape[-2:]).expand(-1, keys)
    shown = looks.sum(-1)
    return shown if torch.equal(looks, torch.arange(keys) < shown.unsqueeze(-1)) else None


class _Constants:
    """The values that depend on constants alone, computed op by op in program order."""

    def __init__(self, constants: Mapping[Value, Tensor]) -> None:
        self._known: dict[Value, _Known] = {value: _collapsed(tensor) for value, tensor in constants.items()}
        self._same: dict[Value, Value] = {}
        self._made: dict[Hashable, Sequence[Value]] = {}

    def of(self, value: Value) -> _Known | None:
        return self._known.get(self._same.get(value, value))

    def add(self, op: Op) -> None:
        """Compute an op; equal ops are computed once, as every layer makes its mask by the same ops."""
        op = op.with_operands(self._same)
        key = (op.name, op.operands, tuple(sorted(op.attrs.items())), tuple(value.type for value in op.results))
        made = self._made.setdefault(key, op.results)
        if made is not op.results:
            self._same.update(zip(op.results, made, strict=True))
        elif op.name in OPS and kind_of(op) is not Kind.HEAVY and all(value in self._known for value in op.inputs()):
            results = _computed(op, self._known)
            self._known.update(zip(op.results, results, strict=False))


def _computed(op: Op, known: Mapping[Value, _Known]) -> Sequence[_Known]:
    """The results of an op; empty if they are not known."""
    tensors = {value: found for value in op.inputs() if isinstance(found := known[value], Tensor)}
    result = op.results[0].type
    if not all(value in tensors for value in op.inputs()):
        return _of_prefixes(op, [known[value] for value in op.inputs()])
    if op.name in _FILLED:
        return run_op(replace(op, attrs={**op.attrs, "size": (1,) * len(result.shape)}), [])
    if op.name == "aten.expand":
        (tensor,), rank = tensors.values(), len(result.shape)
        return [tensor.reshape((1,) * (rank - tensor.dim()) + tuple(tensor.shape))]
    if op.name in _ELEMENTWISE:
        inputs = [operand_of(each, tensors) for each in op.operands]
        if torch.broadcast_tensors(*tensors.values())[0].numel() <= LIMIT:
            return [_collapsed(made) for made in run_op(op, inputs)]
        return _compared(op, *inputs) if op.name in _UP_TO else []
    if op.name in _ARBITRARY:
        return []
    dim, rank = op.attrs.get("dim", 0), len(result.shape)
    if op.name in _ALONG and isinstance(dim, int) and rank > 0 and {each.dim() for each in tensors.values()} == {rank}:
        tensors = _whole_along(dim, tensors)
    elif _is_lookup(op):
        tensors = _at_first(op, tensors)
    elif any(value.type.elements() > LIMIT for value in op.results):
        return []
    else:
        tensors = {value: tensor.expand(value.type.shape) for value, tensor in tensors.items()}
    if any(tensor.numel() > LIMIT for tensor in tensors.values()):
        return []
    return [_collapsed(made) for made in run_op(op, [operand_of(each, tensors) for each in op.operands])]


def _whole_along(dim: int, tensors: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """The operands of an op along `dim`: whole in this dim, and in others as large as any of them is known."""
    shapes = [tensor.shape for tensor in tensors.values()]
    at = dim % len(shapes[0])
    known = cast("torch.Size", torch.broadcast_shapes(*((*shape[:at], 1, *shape[at + 1 :]) for shape in shapes)))
    return {
        value: tensor.expand((*known[:at], value.type.shape[at], *known[at + 1 :])) for value, tensor in tensors.items()
    }


def _is_lookup(op: Op) -> bool:
    """Whether an op looks up single elements of a table by a position in each dim."""
    values = [*op.inputs()]
    distinct = len(set(values)) == len(values)
    whole = len(values) == 1 + len(values[0].type.shape) if values else False
    return (
        op.name == "aten.index.Tensor" and distinct and whole and all(each.type.dtype == "i64" for each in values[1:])
    )


def _at_first(op: Op, tensors: Mapping[Value, Tensor]) -> dict[Value, Tensor]:
    """The operands of a lookup: in a dim along which all elements are equal any position means the first."""
    table, *positions = op.inputs()
    first = {
        value: torch.zeros((1,) * tensors[value].dim(), dtype=torch.int64)
        for value, size in zip(positions, tensors[table].shape, strict=True)
        if size == 1
    }
    return {**tensors, **first}


def _compared(op: Op, one: Tensor, other: Tensor) -> Sequence[_Known]:
    """The mask by comparison of a key's number with a row's, as a prefix per row."""
    smaller_at, equal_too = _UP_TO[op.name]
    keys, rows = (other, one) if smaller_at else (one, other)
    if keys.max() < rows.min() or (equal_too and keys.max() == rows.min()):
        return [torch.ones((1,) * len(op.results[0].type.shape), dtype=torch.bool)]
    lie_along = keys.numel() == keys.shape[-1] and rows.dim() > 1 and rows.numel() == rows.shape[-2]
    keys, rows = keys.flatten(), rows.flatten()
    if not lie_along or keys.dtype != rows.dtype or bool((keys[1:] < keys[:-1]).any()):
        return []
    return [_Prefix(torch.searchsorted(keys, rows, right=equal_too))]


def _of_prefixes(op: Op, inputs: Sequence[_Known]) -> Sequence[_Known]:
    """The result of an op on masks above `LIMIT`; empty if it is not a prefix."""
    first, *rest = inputs
    before, after = next(op.inputs()).type, op.results[0].type
    if op.name in _BOTH:
        return _both(first, *rest)
    if op.name == "aten.where.self" and isinstance(first, _Prefix):
        looks, hides = map(_single, rest)
        turns = looks is not None and hides is not None and bool(looks == 0) and bool(_hides(hides))
        return [first] if turns else []
    is_cast = op.name == "aten._to_copy" and {before.dtype, after.dtype} <= FLOATING
    is_rearranged = op.name in _REARRANGED and before.shape[-2:] == after.shape[-2:]
    return [first] if is_cast or is_rearranged else []


def _both(one: _Known, other: _Known) -> Sequence[_Known]:
    if isinstance(one, _Prefix) and isinstance(other, _Prefix):
        return [_Prefix(torch.minimum(one.shown, other.shown))]
    prefix, rest = (one, _single(other)) if isinstance(one, _Prefix) else (other, _single(one))
    return [prefix] if rest is not None and bool(rest) else []


def _single(known: _Known) -> Tensor | None:
    """The tensor, if all its elements are equal."""
    return known if isinstance(known, Tensor) and known.numel() == 1 else None


def _hides(mask: Tensor) -> Tensor:
    """Where a mask hides a key: false, or the lowest number of its type and below."""
    if mask.is_floating_point():
        return mask <= torch.finfo(mask.dtype).min
    return ~mask if mask.dtype == torch.bool else torch.zeros_like(mask, dtype=torch.bool)


def _collapsed(tensor: Tensor) -> Tensor:
    """The tensor with size 1 in every dim along which all elements are equal."""
    for dim, size in enumerate(tensor.shape):
        first = tensor.narrow(dim, 0, min(size, 1))
        if size > 1 and bool((tensor == first).all()):
            tensor = first
    return tensor
