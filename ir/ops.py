"""Ops: one declaration each. Name, rule, linear operands, kind and FLOPs are all that passes know of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from moaic.ir.attention import causal_divisor, is_causal
from moaic.ir.collectives import COLLECTIVES
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Op, Value
from moaic.ir.ring import RING, RING_BACKWARD, ring_rule
from moaic.ir.rules import Dims, LinearSet, Rule, refine, refine_empty, rule_from_text
from moaic.ir.sums import ACCUMULATE, ADD_TO
from moaic.ir.types import DTYPE_BYTES, FLOATING, TensorType

SEND = "moai.send"
"""The instruction that brings a value from the one rank of an axis that holds it to another."""


def takes_part(op: Op, at: Mapping[str, int]) -> bool:
    """Whether ranks at these coordinates have something to do with an op: it runs where its results are.

    A send also runs where its operand is.
    """
    sends = op.name == SEND and next(op.inputs()).type.layout.holds(at)
    return sends or all(value.type.layout.holds(at) for value in op.results)


class Kind(Enum):
    """What an op costs and how it may be moved."""

    NULLARY = "nullary"
    """Made from its attributes alone: built where it is needed."""
    VIEW = "view"
    """Metadata only."""
    LIGHT = "light"
    """Bound by memory; Inductor fuses it."""
    HEAVY = "heavy"
    """Bound by arithmetic, never recomputed lightly."""
    INSTRUCTION = "instruction"
    """Run by the worker itself, never inside compiled code."""


RuleMaker = Callable[[Op], Rule]


@dataclass(frozen=True, slots=True)
class OpDecl:
    """One op: its rule (factors and linear operands), its kind and its FLOPs."""

    name: str
    make_rule: RuleMaker
    kind: Kind = Kind.LIGHT
    flops: Callable[[Op], int] | None = None


def rule_of(op: Op) -> Rule:
    """The rule of one op instance; an op that nobody declared holds every dim whole."""
    declaration = OPS.get(op.name)
    return whole_rule(op) if declaration is None else declaration.make_rule(op)


def kind_of(op: Op) -> Kind:
    declaration = OPS.get(op.name)
    return Kind.LIGHT if declaration is None else declaration.kind


def flops_of(op: Op) -> int:
    """Floating-point operations of the unsplit op; light ops count one per result element."""
    declaration = OPS.get(op.name)
    if declaration is not None and declaration.flops is not None:
        return declaration.flops(op)
    if kind_of(op) is not Kind.LIGHT:
        return 0
    return sum(result.type.elements() for result in op.results)


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


def linear_sets(op: Op, linear: Iterable[tuple[int, ...]]) -> tuple[LinearSet, ...]:
    """Linear sets over the flattened operands, given over the schema's positions.

    A set with an absent position is none: a literal in its place makes the op affine.
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

    def spec(type_: TensorType) -> Dims:
        dims: list[tuple[str, ...]] = []
        for size in type_.shape:
            name = f"w{len(sizes)}"
            sizes[name] = size
            dims.append((name,))
        return tuple(dims)

    operands = tuple(spec(t) for t in operand_types(op))
    results = tuple(spec(t) for t in result_types(op))
    return Rule(operands, results, sizes, frozenset(sizes))


def _from_text(text: str, *linear: tuple[int, ...]) -> RuleMaker:
    return lambda op: rule_from_text(text, operand_types(op), result_types(op), linear_sets(op, linear))


def _names(count: int, prefix: str = "d") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def _make(op: Op, operands: list[list[str]], results: list[list[str]], *linear: tuple[int, ...]) -> Rule:
    """A rule from one factor name per dim (a trailing `!` marks it whole)."""
    types, out = operand_types(op), result_types(op)
    whole = frozenset(n[:-1] for dims in (*operands, *results) for n in dims if n.endswith("!"))
    sizes: dict[str, int] = {}

    def bind(dims: list[str], type_: TensorType) -> Dims:
        assert len(dims) == len(type_.shape), (op.name, operands, results, type_)
        spec: list[tuple[str, ...]] = []
        for name, size in zip(dims, type_.shape, strict=True):
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


def _elementwise(*linear: tuple[int, ...]) -> RuleMaker:
    """Dims aligned from the right; an operand's dim of size one is broadcast."""

    def make(op: Op) -> Rule:
        rank = len(op.results[0].type.shape)
        names = _names(rank)
        operands = [names[rank - len(t.shape) :] for t in operand_types(op)]
        return _make(op, operands, [names] * len(op.results), *linear)

    return make


def _masked_fill(op: Op) -> Rule:
    """Zeros may be put into every part of a sum."""
    return _elementwise(*([(0,)] if op.attrs.get("value") in (0, 0.0) else []))(op)


def _cast(op: Op) -> Rule:
    source, target = op.operands[0], op.results[0].type.dtype
    assert isinstance(source, Value)
    widens = {source.type.dtype, target} <= FLOATING and DTYPE_BYTES[target] > DTYPE_BYTES[source.type.dtype]
    return _elementwise(*([(0,)] if widens or source.type.dtype == target else []))(op)


def _nullary(op: Op) -> Rule:
    return _make(op, [], [_names(len(t.shape)) for t in result_types(op)])


def _whole_nullary(op: Op) -> Rule:
    return whole_rule(op)


def _view(op: Op) -> Rule:
    source, target = operand_types(op)[0].shape, op.results[0].type.shape
    left, right, sizes, whole = refine(source, target) if 0 not in source else refine_empty(source, target)
    return Rule((left,), (right,), sizes, whole, linear_sets(op, [(0,)]))


def _normal(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _permute(op: Op) -> Rule:
    rank = len(op.results[0].type.shape)
    names = _names(rank)
    if op.name == "aten.permute":
        order = [_normal(d, rank) for d in attr_ints(op, "dims")]
    else:
        order = list(range(rank))
        if rank > 1:
            a, b = _normal(attr_int(op, "dim0"), rank), _normal(attr_int(op, "dim1"), rank)
            order[a], order[b] = b, a
    return _make(op, [names], [[names[i] for i in order]], (0,))


def _transpose_2d(op: Op) -> Rule:
    names = _names(len(op.results[0].type.shape))
    return _make(op, [names], [names[::-1]], (0,))


def _expand(op: Op) -> Rule:
    return _elementwise((0,))(op)


def _as_complex(op: Op) -> Rule:
    """Pairs along the last dim become one number each. Sums of parts are added up before, as real numbers."""
    names = _names(len(op.results[0].type.shape))
    return _make(op, [[*names, "p!"]], [names])


def _as_real(op: Op) -> Rule:
    names = _names(len(operand_types(op)[0].shape))
    return _make(op, [names], [[*names, "p!"]], (0,))


def reduced_dims(op: Op) -> tuple[int, ...]:
    """Dims that a reduction removes or keeps at size one."""
    return _dims_of(op, attr_ints(op, "dim"))


def _dims_of(op: Op, dims: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(operand_types(op)[0].shape)
    return tuple(_normal(d, rank) for d in dims) if dims else tuple(range(rank))


def _reduction(*linear: tuple[int, ...], sums: bool = False, default: int | None = None) -> RuleMaker:
    """Over some dims or over `default`, or all; only where it sums can these be split."""

    def make(op: Op) -> Rule:
        shape = operand_types(op)[0].shape
        dims = reduced_dims(op) if default is None or "dim" in op.attrs else _dims_of(op, (default,))
        mark = "" if sums else "!"
        names = [f"d{i}{mark}" if i in dims else f"d{i}" for i in range(len(shape))]
        kept = len(op.results[0].type.shape) == len(shape)
        out = [f"u{i}" if i in dims else f"d{i}" for i in range(len(shape)) if kept or i not in dims]
        return _make(op, [names], [out] * len(op.results), *linear)

    return make


def _histogram(op: Op) -> Rule:
    """Counts of parts add up."""
    return _make(op, [_names(len(operand_types(op)[0].shape))], [["b!"]])


def _whole_dim(*linear: tuple[int, ...], default: int = 0) -> RuleMaker:
    """Tensors of one rank; the dim that the op names is whole, and its size may differ between tensors."""

    def make(op: Op) -> Rule:
        return _whole_dims(op, {attr_int(op, "dim", default)}, *linear)

    return make


def _whole_dims(op: Op, dims: Iterable[int], *linear: tuple[int, ...]) -> Rule:
    rank = len(op.results[0].type.shape)
    whole = {_normal(dim, rank) for dim in dims}

    def spec(types: list[TensorType], side: str) -> list[list[str]]:
        return [[f"{side}{k}d{i}!" if i in whole else f"d{i}" for i in range(rank)] for k, _ in enumerate(types)]

    return _make(op, spec(operand_types(op), "l"), spec(result_types(op), "r"), *linear)


def _flip(op: Op) -> Rule:
    return _whole_dims(op, attr_ints(op, "dims"), (0,))


def _batched(operands: tuple[int, ...], results: tuple[int, ...], *linear: tuple[int, ...]) -> RuleMaker:
    """One call for each of many matrices: so many dims at the end of each tensor are whole, those before are batches.

    Batches are broadcast. Where a tensor has fewer dims, as results that nobody asked for do, all is whole.
    """

    def make(op: Op) -> Rule:
        sides = ((operand_types(op), operands), (result_types(op), results))
        pairs = [list(zip(types, inner, strict=True)) for types, inner in sides]
        spans = [len(tensor.shape) - inner for side in pairs for tensor, inner in side]
        if min(spans) < 0 or set(spans[len(operands) :]) != {max(spans)}:
            return whole_rule(op)
        names = _names(max(spans), "b")
        left, right = (
            [
                [*names[len(names) + inner - len(tensor.shape) :], *(f"{side}{at}x{i}!" for i in range(inner))]
                for at, (tensor, inner) in enumerate(each)
            ]
            for side, each in zip("lr", pairs, strict=True)
        )
        return _make(op, left, right, *linear)

    return make


def _solved(op: Op) -> Rule:
    """Right sides are matrices, or vectors if there is one for each matrix on the left and nothing more."""
    left, right = (kind.shape for kind in operand_types(op))
    sides = 1 if right == left[:-1] else 2
    return _batched((2, sides), (sides, 2, 1, 0))(op)


def _diagonal(op: Op) -> Rule:
    """The two dims are whole; what runs along both comes last."""
    rank = len(operand_types(op)[0].shape)
    taken = {_normal(attr_int(op, "dim1", 0), rank), _normal(attr_int(op, "dim2", 1), rank)}
    names = [f"x{i}!" if i in taken else f"d{i}" for i in range(rank)]
    along = [*(name for name in names if not name.endswith("!")), "y!"]
    operands = [names, along][: len(operand_types(op))]
    return _make(op, operands, [along] if len(operands) == 1 else [names], tuple(range(len(operands))))


def _transformed(op: Op) -> Rule:
    """Fourier transforms. Sums of parts are added up before, where they may be real numbers."""
    return _whole_dims(op, attr_ints(op, "dim"))


def _unsqueeze(op: Op) -> Rule:
    """Dims of size one carry no factor, so the others are matched in order."""
    source, target = operand_types(op)[0].shape, op.results[0].type.shape
    names = iter(_names(len(source)))
    left = [next(names) if size != 1 else "u" for size in source]
    kept = iter(name for name in left if name != "u")
    right = [next(kept) if size != 1 else "u" for size in target]
    return _make(op, [left], [right], (0,))


def _equal_parts(op: Op, dim: int, whole: TensorType, part: int) -> tuple[Dims, Dims, dict[str, int]]:
    """Dims of a tensor cut into equal parts along `dim`, and of one part: `a (p! r)` and `a r`."""
    sizes = {f"d{i}": size for i, size in enumerate(whole.shape) if i != dim and size != 1}
    sizes |= {"p": whole.shape[dim] // part, "r": part}
    outer: list[tuple[str, ...]] = [(f"d{i}",) if size != 1 else () for i, size in enumerate(whole.shape)]
    inner = list(outer)
    outer[dim] = tuple(f for f in ("p", "r") if sizes[f] != 1)
    inner[dim] = ("r",) if part != 1 else ()
    return tuple(outer), tuple(inner), sizes


def _slice(op: Op) -> Rule:
    source, target = operand_types(op)[0], op.results[0].type
    dim = _normal(attr_int(op, "dim"), len(source.shape))
    part, start = target.shape[dim], attr_int(op, "start") if op.attrs.get("start") is not None else 0
    size = source.shape[dim]
    start = max(start + size, 0) if start < 0 else start
    if attr_int(op, "step", 1) == 1 and part and size % part == 0 and start % part == 0:
        left, right, sizes = _equal_parts(op, dim, source, part)
        return Rule((left,), (right,), sizes, frozenset({"p"}), linear_sets(op, [(0,)]))
    return _whole_dim((0,))(op)


def _split(op: Op) -> Rule:
    source = operand_types(op)[0]
    dim = _normal(attr_int(op, "dim"), len(source.shape))
    parts = {t.shape[dim] for t in result_types(op)}
    if len(parts) == 1 and 0 not in parts:
        left, right, sizes = _equal_parts(op, dim, source, parts.pop())
        return Rule((left,), (right,) * len(op.results), sizes, frozenset({"p"}), linear_sets(op, [(0,)]))
    return _whole_dim((0,))(op)


def _cat(op: Op) -> Rule:
    target = op.results[0].type
    dim = _normal(attr_int(op, "dim"), len(target.shape))
    if any(len(t.shape) != len(target.shape) for t in operand_types(op)):
        return whole_rule(op)
    parts = {t.shape[dim] for t in operand_types(op)}
    if len(parts) == 1 and 0 not in parts:
        whole, part, sizes = _equal_parts(op, dim, target, parts.pop())
        return Rule((part,) * len(operand_types(op)), (whole,), sizes, frozenset({"p"}), linear_sets(op, [(0,)]))
    return _whole_dim((0,))(op)


def _select(op: Op) -> Rule:
    shape = operand_types(op)[0].shape
    dim = _normal(attr_int(op, "dim"), len(shape))
    names = _names(len(shape))
    cut = [f"{n}!" if i == dim else n for i, n in enumerate(names)]
    return _make(op, [cut], [[n for i, n in enumerate(names) if i != dim]], (0,))


def _pad(op: Op) -> Rule:
    source, target = operand_types(op)[0].shape, op.results[0].type.shape
    pads = attr_ints(op, "pad")
    rank = len(source)
    padded = {rank - 1 - i // 2 for i, pad in enumerate(pads) if pad}
    linear = [(0,)] if op.attrs.get("value", 0.0) in (0, 0.0, None) else []
    left = [f"l{i}!" if i in padded else f"d{i}" for i in range(len(source))]
    right = [f"r{i}!" if i in padded else f"d{i}" for i in range(len(target))]
    return _make(op, [left], [right], *linear)


def _gather(op: Op) -> Rule:
    """`aten.gather` and the scatters: dims other than the indexed one match where all their sizes do.

    The indexed dim splits too where each rank can tell what is its own: what is looked up elsewhere counts as zero, and
    what is written elsewhere is left out.
    """
    types = [*operand_types(op), *result_types(op)]
    rank = max(len(t.shape) for t in types)
    if any(len(t.shape) != rank for t in types):
        return whole_rule(op)
    indexed = _normal(attr_int(op, "dim"), rank)
    same = [i != indexed and len({t.shape[i] for t in types}) == 1 for i in range(rank)]
    specs = [[f"d{i}" if same[i] else f"t{k}d{i}!" for i in range(rank)] for k, _ in enumerate(types)]
    if op.name == "aten.gather" and rank:
        # Each element that is looked up is found by itself.
        specs[1][indexed] = specs[2][indexed] = "g"
        specs[0][indexed] = "v" if types[0].dtype != "bool" else "v!"
    elif rank and all(same[i] for i in range(rank) if i != indexed) and _writes_apart(op, types, indexed):
        specs[0][indexed] = specs[-1][indexed] = "v"
    count = len(operand_types(op))
    linear = {"aten.gather": [(0,)], "aten.scatter_add": [(0, 2)]}.get(op.name, [])
    return _make(op, specs[:count], specs[count:], *linear)


def _writes_apart(op: Op, types: list[TensorType], indexed: int) -> bool:
    """Whether a part of the base can be written by itself: sums can, other writes where one index stands alone."""
    if op.name == "aten.scatter_add":
        return len({t.shape[indexed] for t in types[1:-1]}) == 1
    return all(t.shape[indexed] == 1 for t in types[1:-1])


def index_dims(op: Op) -> tuple[list[str], list[str], list[list[str]]] | None:
    """Factor names of (data, indexed result, indices) for advanced indexing; None where only the whole rule holds."""
    data, indices = op.operands[0], op.operands[1]
    assert isinstance(data, Value)
    assert isinstance(indices, tuple)
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if any(index.type.dtype == "bool" for _, index in given):
        return None
    rank = max(len(index.type.shape) for _, index in given)
    shared = _names(rank, "i")
    names = [f"v{i}" if any(i == at for at, _ in given) else f"d{i}" for i in range(len(data.type.shape))]
    positions = [at for at, _ in given]
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    kept = [n for n in names if n.startswith("d")]
    before = len([n for n in names[: positions[0]] if n.startswith("d")]) if adjacent else 0
    out = [*kept[:before], *shared, *kept[before:]]
    return names, out, [shared[rank - len(index.type.shape) :] for _, index in given]


def _held_indexed(names: list[str]) -> list[str]:
    return [f"{name}!" if name.startswith("v") else name for name in names]


def _index(op: Op) -> Rule:
    """A split of an indexed dim is a look-up that finds zero for what is elsewhere; truth values are no sums."""
    found = index_dims(op)
    if found is None:
        return whole_rule(op)
    names, out, indices = found
    if operand_types(op)[0].dtype == "bool":
        names = _held_indexed(names)
    return _make(op, [names, *indices], [out], (0,))


def _index_put(op: Op) -> Rule:
    """Accumulating: the index dims are summed over, so base and values are pending sums together."""
    found = index_dims(op)
    values = op.operands[2]
    assert isinstance(values, Value)
    if found is None:
        return whole_rule(op)
    names, out, indices = found
    accumulate = bool(op.attrs.get("accumulate", False))
    if not accumulate:
        names = _held_indexed(names)
        free = {n for n in names if not n.endswith("!")}
        out = [n if n in free else f"{n}!" for n in out]
        indices = [[f"{n}!" for n in index] for index in indices]
    rank = len(values.type.shape)
    rule = _make(op, [names, *indices, out[len(out) - rank :]], [names], *([(0, 2)] if accumulate else []))
    if not accumulate:
        return rule
    # Splitting an index dim would add the base once per rank: that takes a pending base, which no factor can say.
    summed = {n for index in indices for n in index}
    return Rule(rule.operands, rule.results, rule.sizes, rule.whole | summed, rule.linear)


def _embedding_backward(op: Op) -> Rule:
    """A gradient that is divided by how often its row was looked up needs to see every look-up."""
    counts = bool(op.attrs.get("scale_grad_by_freq", False))
    ids = [f"i{i}!" if counts else f"i{i}" for i, _ in enumerate(operand_types(op)[1].shape)]
    return _make(op, [[*ids, "d"], ids], [["v!" if counts else "v", "d"]], (0,))


def _embedding(op: Op) -> Rule:
    """A split table is looked up in parts, each of which finds zero for the rows of the others."""
    ids = _names(len(operand_types(op)[1].shape), "i")
    return _make(op, [["v", "d"], ids], [[*ids, "d"]], (0,))


def _layer_norm(op: Op) -> Rule:
    count = len(attr_ints(op, "normalized_shape"))
    rank = len(operand_types(op)[0].shape)
    outer, inner = _names(rank - count, "a"), [f"d{i}!" for i in range(count)]
    stats = [*outer, *[f"u{i}" for i in range(count)]]
    return _make(op, [[*outer, *inner], *([inner] * (len(operand_types(op)) - 1))], [[*outer, *inner], stats, stats])


def _layer_norm_backward(op: Op) -> Rule:
    count = len(attr_ints(op, "normalized_shape"))
    rank = len(operand_types(op)[0].shape)
    outer, inner = _names(rank - count, "a"), [f"d{i}!" for i in range(count)]
    full, stats = [*outer, *inner], [*outer, *[f"u{i}" for i in range(count)]]
    operands = [full, full, stats, stats, *([inner] * (len(operand_types(op)) - 4))]
    return _make(
        op, operands, [spec for spec, wanted in zip([full, inner, inner], _wanted(op), strict=True) if wanted], (0,)
    )


def _wanted(op: Op) -> tuple[bool, ...]:
    """Which gradients the op gives; the others are no results."""
    mask = op.attrs["output_mask"]
    assert isinstance(mask, tuple)
    return tuple(bool(wanted) for wanted in mask)


def _conv_specs(op: Op, spatial: int) -> tuple[list[str], list[str], list[str]]:
    """Factors of input, weight and output of a convolution with `spatial` window dims."""
    xs, ks, ys = ([f"{p}{i}!" for i in range(spatial)] for p in "xky")
    split = "" if attr_int(op, "groups", 1) == 1 else "!"
    if split:
        return ["n", "ci!", *xs], ["wo!", "wi!", *ks], ["n", "co!", *ys]
    weight = ["i", "o", *ks] if op.attrs.get("transposed", False) else ["o", "i", *ks]
    return ["n", "i", *xs], weight, ["n", "o", *ys]


def _convolution(op: Op) -> Rule:
    """With a bias the input channels are whole: it would be added once per part."""
    x, w, y = _conv_specs(op, len(operand_types(op)[0].shape) - 2)
    if len(operand_types(op)) == 2:
        return _make(op, [x, w], [y], (0,), (1,))
    x, w = _held("i", x, w)
    return _make(op, [x, w, [y[1]]], [y], (0, 2), (1, 2))


def _held(factor: str, *specs: list[str]) -> list[list[str]]:
    """The specs with one factor marked whole."""
    return [[f"{name}!" if name == factor else name for name in dims] for dims in specs]


def _convolution_backward(op: Op) -> Rule:
    """With the gradient of a bias the output channels are whole: an attribute says how many they are."""
    x, w, y = _conv_specs(op, len(operand_types(op)[0].shape) - 2)
    if _wanted(op)[2]:
        x, w, y = _held("o", x, w, y)
    specs = [x, w, [y[1]]]
    reads = [frozenset({0, 2}), frozenset({0, 1}), frozenset({0})]
    chosen = [i for i, wanted in enumerate(_wanted(op)) if wanted]
    rule = _make(op, [y, x, w], [specs[i] for i in chosen], (0,))
    return Rule(rule.operands, rule.results, rule.sizes, rule.whole, rule.linear, tuple(reads[i] for i in chosen))


def _pool(*linear: tuple[int, ...], dims: int = 2) -> RuleMaker:
    """The last dims are windowed, those before them free."""
    return lambda op: _whole_dims(op, range(-dims, 0), *linear)


_PIXELS = ["x!", "y!", "z!"]
_POINTS = ["p", "q", "r"]


def _sampled(dims: int) -> RuleMaker:
    """Points, each with its place in the picture."""

    def make(op: Op) -> Rule:
        points = _POINTS[:dims]
        return _make(op, [["b", "c", *_PIXELS[:dims]], ["b", *points, "at!"]], [["b", "c", *points]], (0,))

    return make


def _sampled_backward(dims: int) -> RuleMaker:
    """What a picture gets is summed over points, what a place gets over channels; places get theirs in any case."""

    def make(op: Op) -> Rule:
        points = _POINTS[:dims]
        picture, places = ["b", "c", *_PIXELS[:dims]], ["b", *points, "at!"]
        given = [picture, places] if _wanted(op)[0] else [places]
        return _make(op, [["b", "c", *points], picture, places], given, (0,))

    return make


def _sdpa(op: Op) -> Rule:
    """Each row of queries looks at all keys by itself."""
    operands = [["b", "h", "q", "d!"], ["b", "h", "k!", "d!"], ["b", "h", "k!", "e!"]]
    return _make(op, [*operands, *_mask(op, 3)], [["b", "h", "q", "e!"], ["b", "h", "q"]])


def _mask(op: Op, at: int) -> list[list[str]]:
    types = operand_types(op)[at:]
    return [["b", "h", "q", "k!"][4 - len(t.shape) :] for t in types]


def _sdpa_backward(op: Op) -> Rule:
    q, k, v = ["b", "h", "q", "d!"], ["b", "h", "k!", "d!"], ["b", "h", "k!", "e!"]
    out, stats = ["b", "h", "q", "e!"], ["b", "h", "q"]
    return _make(op, [out, q, k, v, out, stats, *_mask(op, 6)], [q, k, v], (0,))


def _grouped_mm(op: Op) -> Rule:
    """Every row is multiplied by the matrix that it names.

    With a leading dim the matrices fall into as many blocks, and a row is zero in all blocks but its own. A split of
    the matrices leaves the rows of the others zero.
    """
    x, weight, _ = operand_types(op)
    if len(x.shape) == 2:
        return _make(op, [["s", "d"], ["e", "f", "d"], ["s"]], [["s", "f"]], (0,), (1,))
    return _in_blocks(op, op.results[0].type.shape[0], weight, "p s d, (p e) f d, s -> p s f")


def _grouped_outer(op: Op) -> Rule:
    """The gradient of the matrices of `moai.grouped_mm`."""
    grad, x, _ = operand_types(op)
    if len(x.shape) == 2:
        return _make(op, [["s", "f"], ["s", "d"], ["s"]], [["e", "f", "d"]], (0,), (1,))
    blocks = max(grad.shape[0], x.shape[0])
    return _in_blocks(op, blocks, op.results[0].type, "p s f, p s d, s -> (p e) f d")


def _in_blocks(op: Op, blocks: int, matrices: TensorType, text: str) -> Rule:
    sizes = {"p": blocks, "e": matrices.shape[0] // blocks}
    sizes = {name: size for name, size in sizes.items() if size != 1}
    return rule_from_text(text, operand_types(op), result_types(op), linear_sets(op, [(0,), (1,)]), sizes)


CHECKED = "moai.checked"
"""The first operand, once the second says that nothing is wrong; else an error of the words in `message` is raised.

The second is bools that must all be true, or the codes that routines of linear algebra give, which must all be zero;
then `message` is the name of the routine, and PyTorch says what each code means.
"""


def _checked(op: Op) -> Rule:
    """What belongs to the first dims of the value is asked where they are, anything else everywhere."""
    value, said = (kind.shape for kind in operand_types(op))
    names = _names(len(value))
    belongs = value[: len(said)] == said
    asked = names[: len(said)] if belongs else [f"{name}!" for name in _names(len(said), "s")]
    return _make(op, [names, asked], [names], (0,))


SCALED_MM = "moai.scaled_mm"
"""A product of matrices of eight-bit floats: `(left @ right) * left_scale * right_scale`, in the type `dtype`.

A scale is of one element, or there is one for each row of the left and each column of the right matrix.
"""

SCALED_BLOCK = 16
"""Columns of both matrices come in blocks of so many, on every rank: GPUs take no others."""


def _scaled_mm(op: Op) -> Rule:
    (_, k), (_, n) = (kind.shape for kind in operand_types(op)[:2])
    sizes = _blocks("k", k) | _blocks("n", n)
    text = "m (ko ki!), (ko ki!) (no ni!), m u, u (no ni!) -> m (no ni!)"
    return rule_from_text(text, operand_types(op), result_types(op), sizes=sizes)


def _blocks(factor: str, size: int) -> dict[str, int]:
    """Sizes of the two factors of a dim that is split in blocks alone; what is no number of blocks stays whole."""
    count, block = (size // SCALED_BLOCK, SCALED_BLOCK) if size % SCALED_BLOCK == 0 else (1, size)
    return {f"{factor}{name}": size for name, size in (("o", count), ("i", block)) if size != 1}


def _flops_grouped(op: Op) -> int:
    """Each row meets one matrix."""
    left, right, ids = operand_types(op)
    shape = right.shape[-2:] if op.name == "moai.grouped_mm" else (left.shape[-1], right.shape[-1])
    return 2 * ids.elements() * prod(shape)


def _rand(op: Op) -> Rule:
    """Every element is a function of the key and its own index, so any dim splits; key and coordinates stay whole."""
    shape = op.results[0].type.shape
    _, *coordinates = operand_types(op)
    return _make(op, [["key!"], *([f"at{i}!"] * len(t.shape) for i, t in enumerate(coordinates))], [_names(len(shape))])


def _flops_of_factors(op: Op) -> int:
    return 2 * prod(rule_of(op).sizes.values())


def _flops_sdpa(op: Op) -> int:
    q, k, v = operand_types(op)[:3]
    b, h, rows, width = q.shape
    return 2 * b * h * rows * k.shape[2] * (width + v.shape[3]) // causal_divisor(is_causal(op))


def _flops_sdpa_backward(op: Op) -> int:
    q, k, v = operand_types(op)[1:4]
    b, h, rows, width = q.shape
    return 5 * b * h * rows * k.shape[2] * (width + v.shape[3]) // causal_divisor(is_causal(op))


def _flops_convolution(op: Op) -> int:
    """Every element of the result, or of the input of a transposed one, meets every weight of its group once."""
    x, w = operand_types(op)[:2]
    points = x if op.attrs.get("transposed", False) else op.results[0].type
    return 2 * points.elements() * (prod(w.shape) // w.shape[0])


def _flops_convolution_backward(op: Op) -> int:
    """Two convolutions' worth: the gradients of the input and of the weight."""
    y, x, w = operand_types(op)[:3]
    points = x if op.attrs.get("transposed", False) else y
    return 2 * sum(_wanted(op)[:2]) * points.elements() * (prod(w.shape) // w.shape[0])


def _declare(*declarations: OpDecl) -> dict[str, OpDecl]:
    table: dict[str, OpDecl] = {}
    for declaration in declarations:
        assert declaration.name not in table, f"{declaration.name} is declared twice"
        table[declaration.name] = declaration
    return table


def _same(names: str, make: RuleMaker, kind: Kind = Kind.LIGHT) -> list[OpDecl]:
    return [OpDecl(f"aten.{name}", make, kind) for name in names.split()]


_NONLINEAR = """abs acos acosh add.Scalar angle asin asinh atan atan2 atanh bitwise_and.Scalar bitwise_and.Tensor
    bitwise_not bitwise_or.Scalar bitwise_or.Tensor bitwise_xor.Scalar bitwise_xor.Tensor ceil clamp clamp.Tensor
    clamp_max clamp_min complex cos cosh div.Scalar_mode div.Tensor_mode elu eq.Scalar eq.Tensor erf erfinv exp
    exp2 expm1 floor floor_divide fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor hardsigmoid
    hardswish hardtanh isfinite isinf isnan le.Scalar le.Tensor leaky_relu log log10 log1p log2 log_sigmoid_forward
    logical_and logical_not logical_or logical_xor lt.Scalar lt.Tensor maximum minimum mish nan_to_num ne.Scalar
    ne.Tensor polar pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal relu remainder.Scalar
    remainder.Tensor round round.decimals rsqrt rsub.Scalar sgn sigmoid sign silu sin sinh softplus sqrt square
    sub.Scalar tan tanh trunc signbit fmin fmax copysign.Tensor hypot ldexp.Tensor nextafter gcd lcm frexp.Tensor
    erfc lgamma digamma polygamma igamma igammac i0 special_i0e special_i1 special_i1e special_erfcx special_ndtri
    special_zeta special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_airy_ai
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p"""

_LINEAR_IN_GRADIENT = """gelu_backward tanh_backward sigmoid_backward threshold_backward silu_backward elu_backward
    hardtanh_backward leaky_relu_backward native_dropout_backward"""

OPS: dict[str, OpDecl] = _declare(
    *_same(_NONLINEAR, _elementwise()),
    *_same(_LINEAR_IN_GRADIENT, _elementwise((0,))),
    *_same("neg clone alias detach mul.Scalar div.Scalar lift_fresh_copy", _elementwise((0,))),
    *_same("mul.Tensor", _elementwise((0,), (1,))),
    *_same("add.Tensor sub.Tensor", _elementwise((0, 1))),
    *_same("div.Tensor", _elementwise((0,))),
    *_same("where.self", _elementwise((1, 2))),
    *_same("copy", _elementwise((1,))),
    *_same("masked_fill.Scalar", _masked_fill),
    *_same("full_like zeros_like ones_like", _elementwise()),
    *_same("_to_copy", _cast),
    *_same("full zeros ones empty.memory_format scalar_tensor", _nullary, kind=Kind.NULLARY),
    *_same("arange arange.start arange.start_step", _nullary, kind=Kind.NULLARY),
    *_same("tril_indices triu_indices", _whole_nullary, kind=Kind.NULLARY),
    *_same("view", _view, kind=Kind.VIEW),
    *_same("permute transpose.int", _permute, kind=Kind.VIEW),
    *_same("t", _transpose_2d, kind=Kind.VIEW),
    *_same("expand", _expand, kind=Kind.VIEW),
    *_same("view_as_complex", _as_complex, kind=Kind.VIEW),
    *_same("view_as_real", _as_real, kind=Kind.VIEW),
    *_same("conj_physical", _elementwise((0,))),
    *_same("unsqueeze squeeze.dim squeeze.dims squeeze", _unsqueeze, kind=Kind.VIEW),
    *_same("slice.Tensor", _slice, kind=Kind.VIEW),
    *_same("split_with_sizes split.Tensor", _split, kind=Kind.VIEW),
    *_same("select.int", _select, kind=Kind.VIEW),
    *_same("cat", _cat),
    *_same("sum sum.dim_IntList", _reduction((0,), sums=True)),
    *_same("mean mean.dim", _reduction((0,))),
    *_same(
        "amax amin any any.dim any.dims all all.dim argmax argmin max.dim min.dim prod prod.dim_int "
        "var.correction var_mean.correction logsumexp",
        _reduction(),
    ),
    *_same("median.dim nanmedian.dim kthvalue mode", _reduction(default=-1)),
    *_same("histc", _histogram),
    *_same("_softmax _log_softmax", _whole_dim()),
    *_same("topk sort sort.stable", _whole_dim(default=-1)),
    *_same("flip", _flip),
    *_same("cumsum _softmax_backward_data _log_softmax_backward_data", _whole_dim((0,))),
    *_same("cumprod logcumsumexp cummax cummin", _whole_dim()),
    *_same("slice_scatter", _whole_dim((0, 1))),
    *_same("diagonal", _diagonal, kind=Kind.VIEW),
    *_same("diagonal_scatter", _diagonal),
    *_same("_fft_r2c _fft_c2c _fft_c2r", _transformed),
    *_same("linalg_solve_triangular", _batched((2, 2), (2,), (1,))),
    *_same("linalg_lu_solve", _batched((2, 1, 2), (2,), (2,))),
    *_same("linalg_cholesky_ex linalg_inv_ex", _batched((2,), (2, 0))),
    *_same("linalg_qr", _batched((2,), (2, 2))),
    *_same("linalg_lu_factor_ex", _batched((2,), (2, 1, 0))),
    *_same("_linalg_solve_ex", _solved),
    *_same("_linalg_det", _batched((2,), (0, 2, 1))),
    *_same("_linalg_slogdet", _batched((2,), (0, 0, 2, 1))),
    *_same("_linalg_svd", _batched((2,), (2, 1, 2))),
    *_same("_linalg_eigh", _batched((2,), (1, 2))),
    *_same("constant_pad_nd", _pad),
    *_same("gather scatter.value scatter.src scatter_add", _gather),
    *_same("index.Tensor", _index),
    *_same("index_put", _index_put),
    *_same("native_layer_norm", _layer_norm),
    *_same("native_layer_norm_backward", _layer_norm_backward),
    *_same("embedding", _embedding),
    *_same("embedding_dense_backward", _embedding_backward),
    *_same("max_pool2d_with_indices adaptive_max_pool2d", _pool()),
    *_same(
        "max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward adaptive_max_pool2d_backward "
        "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward replication_pad2d_backward reflection_pad2d_backward",
        _pool((0,)),
    ),
    *_same("max_pool3d_with_indices adaptive_max_pool3d", _pool(dims=3)),
    *_same(
        "max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward adaptive_max_pool3d_backward "
        "_adaptive_avg_pool3d _adaptive_avg_pool3d_backward replication_pad3d_backward reflection_pad3d_backward",
        _pool((0,), dims=3),
    ),
    *_same("replication_pad1d_backward reflection_pad1d_backward", _pool((0,), dims=1)),
    *_same("grid_sampler_2d", _sampled(2)),
    *_same("grid_sampler_3d", _sampled(3)),
    *_same("grid_sampler_2d_backward", _sampled_backward(2)),
    *_same("grid_sampler_3d_backward", _sampled_backward(3)),
    OpDecl("aten.mm", _from_text("m k, k n -> m n", (0,), (1,)), kind=Kind.HEAVY, flops=_flops_of_factors),
    OpDecl("aten.bmm", _from_text("b m k, b k n -> b m n", (0,), (1,)), kind=Kind.HEAVY, flops=_flops_of_factors),
    OpDecl("aten.convolution", _convolution, kind=Kind.HEAVY, flops=_flops_convolution),
    OpDecl("aten.convolution_backward", _convolution_backward, kind=Kind.HEAVY, flops=_flops_convolution_backward),
    OpDecl("moai.sdpa", _sdpa, kind=Kind.HEAVY, flops=_flops_sdpa),
    OpDecl("moai.sdpa_backward", _sdpa_backward, kind=Kind.HEAVY, flops=_flops_sdpa_backward),
    OpDecl(RING, ring_rule, kind=Kind.INSTRUCTION, flops=_flops_sdpa),
    OpDecl(RING_BACKWARD, ring_rule, kind=Kind.INSTRUCTION, flops=_flops_sdpa_backward),
    OpDecl("moai.grouped_mm", _grouped_mm, kind=Kind.HEAVY, flops=_flops_grouped),
    OpDecl("moai.grouped_outer", _grouped_outer, kind=Kind.HEAVY, flops=_flops_grouped),
    OpDecl(SCALED_MM, _scaled_mm, kind=Kind.HEAVY, flops=_flops_of_factors),
    OpDecl("moai.rand", _rand),
    OpDecl(CHECKED, _checked),
    OpDecl(ADD_TO, _elementwise((0, 1))),
    OpDecl("moai.fold_key", whole_rule, kind=Kind.NULLARY),
    *[OpDecl(name, _elementwise((0,)), kind=Kind.INSTRUCTION) for name in COLLECTIVES],
    *[OpDecl(name, whole_rule, kind=Kind.INSTRUCTION) for name in ("moai.part", ACCUMULATE, "moai.join", SEND, "call")],
)
"""Every op that moaic knows by name."""


_RANDOM = (
    "_cudnn_init_dropout_state", "_fused_dropout", "_sample_dirichlet", "_standard_gamma", "alpha_dropout", "bernoulli",
    "binomial", "cauchy", "dropout", "exponential", "feature_", "geometric", "log_normal", "multinomial",
    "native_dropout", "normal", "poisson", "rand", "rrelu", "uniform",
)  # fmt: skip
"""How the names of random ops begin."""


def check_known(op: Op) -> None:
    """An op without a rule is planned whole, but a random or mutating one must not be guessed at."""
    if op.name in OPS:
        return
    base = op.name.split(".")[1] if "." in op.name else op.name
    in_place = base.startswith("__i") if base.startswith("__") else base.endswith("_")
    if base.startswith(_RANDOM) or in_place:
        raise Diagnostic(f"{op.name} has no sharding rule and is random or writes in place: it cannot be planned")
