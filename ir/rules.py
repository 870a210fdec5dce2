"""Rules: how the dims of an op are tied together, and the legal strategies on one mesh axis.

A rule names *factors*. Each dim of each operand and result is a list of factors, outermost first: `(b s) d -> b s d`.
A factor that a result does not contain is summed over in it. A factor marked whole cannot be split. From the rule alone
follows every legal way to run the op on the shards of one axis: a `Strategy`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import prod

from moaic.ir.layout import PARTIAL, REPLICATED, Mesh, Sharded, State, is_uneven
from moaic.ir.types import TensorType

Dims = tuple[tuple[str, ...], ...]
"""Per dim of a tensor its factors, outermost first; a dim of size one has none."""

LinearSet = frozenset[int]


@dataclass(frozen=True, slots=True)
class Strategy:
    """States on one axis of all operands and results with which each rank runs the op on its own parts."""

    operands: tuple[State, ...]
    results: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of one op instance. Operands are the tensors it reads, lists flattened, absent ones left out."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[LinearSet, ...] = ()
    """Sets of operands in which the op is jointly linear: all of a set may be partial together."""
    reads: tuple[frozenset[int], ...] = field(default=())
    """Per result the operands that it depends on; empty: every result depends on all."""

    def reads_of(self, result: int) -> frozenset[int]:
        return self.reads[result] if self.reads else frozenset(range(len(self.operands)))

    def by_factor(self, factor: str, stride: int, n: int) -> Strategy | None:
        """The strategy that splits `factor` with `stride` over n ranks; None if that is not legal."""
        size = self.sizes[factor]
        if factor in self.whole or not size or (size % (stride * n) and not self._is_unevenly_split(factor, stride, n)):
            return None
        operands = tuple(self._locate(dims, factor, stride) for dims in self.operands)
        results = tuple(self._result_state(i, factor, stride, operands) for i in range(len(self.results)))
        return Strategy(operands, results)

    def _is_unevenly_split(self, factor: str, stride: int, n: int) -> bool:
        """Whether a split is uneven, and what is computed of the padding stays padding: nothing sums or merges it."""
        seen = [[factors for factors in dims if factor in factors] for dims in (*self.operands, *self.results)]
        is_alone = all(factors == (factor,) for each in seen for factors in each)
        return is_uneven(self.sizes[factor], stride, n) and is_alone and all(seen[len(self.operands) :])

    def _result_state(self, result: int, factor: str, stride: int, operands: tuple[State, ...]) -> State:
        state = self._locate(self.results[result], factor, stride)
        if state != REPLICATED:
            return state
        return PARTIAL if any(operands[i] != REPLICATED for i in self.reads_of(result)) else REPLICATED

    def _locate(self, dims: Dims, factor: str, stride: int) -> State:
        for dim, factors in enumerate(dims):
            if factor in factors:
                inner = prod(self.sizes[f] for f in factors[factors.index(factor) + 1 :])
                return Sharded(dim, stride * inner)
        return REPLICATED

    def by_linearity(self, operands: LinearSet) -> Strategy:
        """The strategy in which the operands of a linear set are partial, as are the results that read them."""
        states: tuple[State, ...] = tuple(PARTIAL if i in operands else REPLICATED for i in range(len(self.operands)))
        results: tuple[State, ...] = tuple(
            PARTIAL if self.reads_of(i) & operands else REPLICATED for i in range(len(self.results))
        )
        return Strategy(states, results)

    def replicated(self) -> Strategy:
        return Strategy((REPLICATED,) * len(self.operands), (REPLICATED,) * len(self.results))

    def factor_at(self, dims: Dims, dim: int, stride: int, n: int) -> tuple[str, int] | None:
        """The factor inside which a split of `dim` falls, and the split's stride within it."""
        inner = 1
        for factor in reversed(dims[dim]):
            size = self.sizes[factor]
            if stride % inner == 0 and (inner * size) % (stride * n) == 0:
                return factor, stride // inner
            inner *= size
        is_alone = len(dims[dim]) == 1 and is_uneven(inner, stride, n)
        return (dims[dim][0], stride) if is_alone else None

    def following(self, dims: Dims, state: State, n: int) -> Strategy | None:
        """The strategy under which a tensor with `dims` is split as `state` says."""
        if not isinstance(state, Sharded):
            return None
        found = self.factor_at(dims, state.dim, state.stride, n)
        return None if found is None else self.by_factor(*found, n)

    def contiguous(self, n: int) -> Iterator[Strategy]:
        """Every strategy that cuts one factor into n contiguous parts."""
        for factor, size in self.sizes.items():
            if size and size % n == 0 and (strategy := self.by_factor(factor, size // n, n)) is not None:
                yield strategy

    def __str__(self) -> str:
        left = ", ".join(self._text(dims) for dims in self.operands)
        right = ", ".join(self._text(dims) for dims in self.results)
        return f"{left} -> {right}"

    def _text(self, dims: Dims) -> str:
        return " ".join(self._dim_text(factors) for factors in dims)

    def _dim_text(self, factors: tuple[str, ...]) -> str:
        names = [f + "!" if f in self.whole else f for f in factors]
        return names[0] if len(names) == 1 else "(" + " ".join(names) + ")" if names else "1"


_TOKEN = re.compile(r"\(|\)|[a-z0-9]+[!@]?")


@cache
def parse_dims(text: str) -> tuple[Dims, frozenset[str]]:
    """`(b s) d! 1` as dims and the set of factors marked whole. An indexed factor (`v@`) is whole too."""
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    whole: set[str] = set()
    for token in _TOKEN.findall(text):
        if token == "(":
            group = []
        elif token == ")":
            assert group is not None
            dims.append(tuple(group))
            group = None
        elif token == "1":
            dims.append(())
        else:
            name = token.rstrip("!@")
            if name != token:
                whole.add(name)
            if group is None:
                dims.append((name,))
            else:
                group.append(name)
    return tuple(dims), frozenset(whole)


def rule_from_text(
    text: str,
    operands: Sequence[TensorType],
    results: Sequence[TensorType],
    linear: tuple[LinearSet, ...] = (),
    sizes: Mapping[str, int] | None = None,
) -> Rule:
    """The rule that `text` spells, its factors bound to the sizes of these tensors.

    Sizes of grouped factors must be given where no dim shows them alone. A dim of size one carries no factor.
    """
    left, right = text.split("->")
    sides = [[parse_dims(part) for part in side.split(",") if part.strip()] for side in (left, right)]
    whole = frozenset[str]().union(*(marked for side in sides for _, marked in side))
    bound = dict(sizes or {})
    pairs = [
        [(dims, tensor.shape) for (dims, _), tensor in zip(side, tensors, strict=True)]
        for side, tensors in zip(sides, (operands, results), strict=True)
    ]
    for dims, shape in (*pairs[0], *pairs[1]):
        _bind_sizes(dims, shape, bound)
    left_dims, right_dims = (tuple(_bound(dims, shape, bound) for dims, shape in side) for side in pairs)
    return Rule(left_dims, right_dims, bound, whole, linear)


def _bind_sizes(dims: Dims, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    assert len(dims) == len(shape), (dims, shape)
    for factors, size in zip(dims, shape, strict=True):
        if len(factors) == 1 and size != 1:
            assert sizes.setdefault(factors[0], size) == size, (dims, shape, sizes)


def _bound(dims: Dims, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Dims:
    """`dims` without the factors of size one: those that no tensor shows longer."""
    bound = tuple(
        () if size == 1 else tuple(f for f in factors if sizes.get(f, 1) != 1)
        for factors, size in zip(dims, shape, strict=True)
    )
    assert tuple(prod(sizes[f] for f in factors) for factors in bound) == shape, (dims, shape, sizes)
    return bound


def refine(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """The common refinement of two shapes of one element order: the rule of a view.

    Dims whose boundaries do not divide each other are `whole` factors up to the next common boundary.
    """
    cuts = sorted({*_cuts(left), *_cuts(right)})
    whole_spans = [span for span in _spans(_cuts(left), _cuts(right)) if not _is_chain(_within(cuts, *span))]
    free = [(lo, hi) for lo, hi in pairwise(cuts) if not any(a <= lo and hi <= b for a, b in whole_spans)]
    names = {lo: f"f{i}" for i, (lo, _) in enumerate(free)}
    sizes = {names[lo]: hi // lo for lo, hi in free}
    whole: set[str] = set()

    def spec(shape: tuple[int, ...]) -> Dims:
        dims: list[tuple[str, ...]] = []
        inner = prod(shape)
        for size in shape:
            outer, inner = inner, inner // size
            starts = [c for c in reversed(cuts) if inner <= c < outer]
            if all(c in names for c in starts):
                dims.append(tuple(names[c] for c in starts))
                continue
            name = f"w{len(sizes)}"
            sizes[name] = size
            whole.add(name)
            dims.append((name,))
        return tuple(dims)

    return spec(left), spec(right), sizes, frozenset(whole)


def refine_empty(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """`refine` for shapes without elements: the dims before the first empty one, as far as their products agree."""
    fronts = {prod(left[:count]): count for count in range(left.index(0) + 1)}
    counts = [(fronts[size], count) for count in range(right.index(0) + 1) if (size := prod(right[:count])) in fronts]
    at, to = counts[-1]
    front, other, sizes, whole = refine(left[:at], right[:to])
    rest = {f"e{index}": size for index, size in enumerate((*left[at:], *right[to:]))}
    names = [(name,) for name in rest]
    split = len(left) - at
    return (*front, *names[:split]), (*other, *names[split:]), {**sizes, **rest}, whole | frozenset(rest)


def _spans(left: list[int], right: list[int]) -> list[tuple[int, int]]:
    common = sorted({*left} & {*right})
    return list(pairwise(common))


def _within(cuts: list[int], lo: int, hi: int) -> list[int]:
    return [cut for cut in cuts if lo <= cut <= hi]


def _cuts(shape: tuple[int, ...]) -> list[int]:
    cuts = [1]
    for size in reversed(shape):
        cuts.append(cuts[-1] * size)
    return cuts


def _is_chain(cuts: list[int]) -> bool:
    return all(hi % lo == 0 for lo, hi in pairwise(cuts))


def fits(type_: TensorType, axis: str, state: State, mesh: Mesh) -> bool:
    """Whether `type_`, its other axes as they are, can also be split as `state` says over `axis`."""
    if not isinstance(state, Sharded):
        return True
    dim, stride = state
    n = mesh.size(axis)
    if type_.shape[dim] % (stride * n):
        return False
    taken = [(s.stride, s.stride * mesh.size(s.axis)) for s in type_.layout.on_dim(dim) if s.axis != axis]
    lo, hi = stride, stride * n
    return all(_disjoint(lo, hi, a, b) for a, b in taken)


def fits_unevenly(type_: TensorType, axis: str, state: Sharded, mesh: Mesh) -> bool:
    """Whether `type_` can be cut as `state` says into chunks of which the last ones are shorter: no other axis may."""
    others = [split for split in type_.layout.on_dim(state.dim) if split.axis != axis]
    return not others and is_uneven(type_.shape[state.dim], state.stride, mesh.size(axis))


def _disjoint(lo: int, hi: int, other_lo: int, other_hi: int) -> bool:
    return (lo >= other_hi and lo % other_hi == 0) or (other_lo >= hi and other_lo % hi == 0)
