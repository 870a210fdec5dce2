"""Helpers that families share to make rules: factor names for dims, linear sets over operands.

A rule maker names a factor for each dim; dims of one name are tied together, and a trailing `!` marks a factor whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod

from moaic.ir.graph import Op
from moaic.ir.ops.declaration import RuleMaker
from moaic.ir.rules import Dims, LinearSet, Rule, rule_from_text
from moaic.ir.types import TensorType


def operand_types(op: Op) -> list[TensorType]:
    return [value.type for value in op.inputs()]


def result_types(op: Op) -> list[TensorType]:
    return [value.type for value in op.results]


def attr_int(op: Op, name: str, default: int = 0) -> int:
    value = op.attrs.get(name, default)
    assert isinstance(value, int), (op.name, name, value)
    return value


def attr_ints(op: Op, name: str) -> tuple[int, ...]:
    """A list of integers; a single integer counts as a list of one, an absent one as empty."""
    value = op.attrs.get(name, ())
    if isinstance(value, int):
        return (value,)
    if value is None:
        return ()
    assert isinstance(value, tuple), (op.name, name, value)
    return tuple(v for v in value if isinstance(v, int))


def wanted_gradients(op: Op) -> tuple[bool, ...]:
    """Per gradient of `output_mask` whether the op returns it; the others are no results."""
    mask = op.attrs["output_mask"]
    assert isinstance(mask, tuple)
    return tuple(bool(wanted) for wanted in mask)


def from_front(dim: int, rank: int) -> int:
    """`dim` counted from the front; a negative one counts from the end."""
    return dim + rank if dim < 0 else dim


def linear_sets(op: Op, linear: Iterable[tuple[int, ...]]) -> tuple[LinearSet, ...]:
    """Linear sets over the flattened operands, given over the schema's positions.

    A set with an absent position is dropped: a literal in its place makes the op affine.
    """
    starts: list[tuple[int, ...]] = []
    count = 0
    for operand in op.operands:
        width = (
            0 if operand is None else len([v for v in operand if v is not None]) if isinstance(operand, tuple) else 1
        )
        starts.append(tuple(range(count, count + width)))
        count += width
    return tuple(
        frozenset(i for p in positions for i in starts[p])
        for positions in linear
        if all(p < len(starts) and starts[p] for p in positions)
    )


def whole_rule(op: Op) -> Rule:
    """The rule that lets nothing be split."""
    sizes: dict[str, int] = {}

    def spec(tensor: TensorType) -> Dims:
        dims: list[tuple[str, ...]] = []
        for size in tensor.shape:
            name = f"w{len(sizes)}"
            sizes[name] = size
            dims.append((name,))
        return tuple(dims)

    operands = tuple(spec(t) for t in operand_types(op))
    results = tuple(spec(t) for t in result_types(op))
    return Rule(operands, results, sizes, frozenset(sizes))


def from_text(text: str, *linear: tuple[int, ...]) -> RuleMaker:
    """A maker of the rule that `text` spells, `m k, k n -> m n`, with these linear sets."""
    return lambda op: rule_from_text(text, operand_types(op), result_types(op), linear_sets(op, linear))


def factor_names(count: int, prefix: str = "d") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def rule_of_factors(op: Op, operands: list[list[str]], results: list[list[str]], *linear: tuple[int, ...]) -> Rule:
    """A rule from one factor name per dim (a trailing `!` marks it whole)."""
    types, out = operand_types(op), result_types(op)
    whole = frozenset(n[:-1] for dims in (*operands, *results) for n in dims if n.endswith("!"))
    sizes: dict[str, int] = {}

    def bind(dims: list[str], tensor: TensorType) -> Dims:
        assert len(dims) == len(tensor.shape), (op.name, operands, results, tensor)
        spec: list[tuple[str, ...]] = []
        for name, size in zip(dims, tensor.shape, strict=True):
            factor = name.rstrip("!")
            if size == 1:
                spec.append(())
                continue
            assert sizes.setdefault(factor, size) == size, (op.name, operands, results, factor, size, sizes)
            spec.append((factor,))
        return tuple(spec)

    specs = tuple(bind(dims, t) for dims, t in zip(operands, types, strict=True))
    outs = tuple(bind(dims, t) for dims, t in zip(results, out, strict=True))
    return Rule(specs, outs, sizes, whole, linear_sets(op, linear))


def elementwise(*linear: tuple[int, ...]) -> RuleMaker:
    """Dims aligned from the right; an operand's dim of size one is broadcast."""

    def make(op: Op) -> Rule:
        rank = len(op.results[0].type.shape)
        names = factor_names(rank)
        operands = [names[rank - len(t.shape) :] for t in operand_types(op)]
        return rule_of_factors(op, operands, [names] * len(op.results), *linear)

    return make


def whole_dim(*linear: tuple[int, ...], default: int = 0) -> RuleMaker:
    """Tensors of one rank; the dim that the attribute `dim` names is whole, and its size may differ between tensors."""

    def make(op: Op) -> Rule:
        return whole_dims(op, {attr_int(op, "dim", default)}, *linear)

    return make


def whole_dims(op: Op, dims: Iterable[int], *linear: tuple[int, ...]) -> Rule:
    """Tensors of one rank; `dims` are whole, the others elementwise."""
    rank = len(op.results[0].type.shape)
    whole = {from_front(dim, rank) for dim in dims}

    def spec(types: list[TensorType], side: str) -> list[list[str]]:
        return [[f"{side}{k}d{i}!" if i in whole else f"d{i}" for i in range(rank)] for k, _ in enumerate(types)]

    return rule_of_factors(op, spec(operand_types(op), "l"), spec(result_types(op), "r"), *linear)


def flops_by_factors(make_rule: RuleMaker) -> Callable[[Op], int]:
    """FLOPs of a contraction: a multiplication and an addition per element of the product of all factors."""
    return lambda op: 2 * prod(make_rule(op).sizes.values())
