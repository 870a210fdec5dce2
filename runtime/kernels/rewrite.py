"""Ops of a function replaced by kernels of our own, where these were measured to win.

Each rule finds the ops that one kernel stands for, forward or backward, by what their results are made of. What else
reads one of them goes on reading it: a rewrite replaces values, and ops that nobody reads then are dropped. One is
legal if its ops can be put in order, and if what the kernel is there to avoid is needed by nobody. A value that another
function made and kept is not known to be anything.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from moaic.ir.emit import Emitter
from moaic.ir.graph import Attr, Function, Op, Operand, Value
from moaic.ir.needed import needed
from moaic.ir.types import TensorType
from moaic.runtime.kernels.match import CAST, Found, Made, Sight, Some, made
from moaic.runtime.kernels.operators import NAMESPACE
from moaic.runtime.kernels.registry import KERNELS, Kernel, Shape, worth_using
from moaic.runtime.kernels.tiles import tile_of
from moaic.runtime.schema import DTYPES

Wins = Callable[[str, Shape, str], bool]
"""Whether a kernel is worth using at a shape, for an element type in the IR's names."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Ops of one kernel, and what they make instead of what."""

    kernel: str
    shape: Shape
    element: str
    ops: Sequence[Op]
    instead: Mapping[Value, Value]
    gone: Sequence[Value] = ()
    """What nobody may need any longer."""


Rule = Callable[[Sight, Op], Rewrite | None]
"""What becomes of the ops of which this one is the anchor."""


def measured_on(target: str, kernels: Mapping[str, Kernel] = KERNELS) -> Wins:
    """What the table of measured gains says of a GPU. They are of elements of 16 bits, and say nothing of others."""

    def wins(name: str, shape: Shape, element: str) -> bool:
        dtype = DTYPES[element]
        is_known = dtype.itemsize == torch.bfloat16.itemsize and worth_using(kernels[name], target, shape)
        return is_known and tile_of(name, target, shape, dtype) is not None

    return wins


def with_kernels(function: Function, wins: Wins) -> Function:
    """`function`, of local types, with kernels where they win."""
    for rule in RULES:
        sight = Sight(function)
        for anchor in [result for op in function.ops for result in op.results[:1]]:
            op = sight.makers.get(anchor)
            found = None if op is None else rule(sight, op)
            if found is not None and wins(found.kernel, found.shape, found.element):
                sight = Sight(_applied(sight.function, found) or sight.function)
        function = sight.function
    return function


def _applied(function: Function, rewrite: Rewrite) -> Function | None:
    """None where the rewrite is not legal."""
    ops = _in_order([*rewrite.ops, *(op.with_operands(rewrite.instead) for op in function.ops)])
    if ops is None:
        return None
    results = tuple(rewrite.instead.get(result, result) for result in function.results)
    whole = replace(function, ops=tuple(ops), results=results)
    live = needed(whole, results)
    rest = replace(whole, ops=tuple(op for at, op in enumerate(ops) if at in live))
    return None if {*rest.values()} & {*rewrite.gone} else rest


def _in_order(ops: Sequence[Op]) -> list[Op] | None:
    """Ops after those that they read from, otherwise as they are; None where some wait for each other."""
    makers = {result: at for at, op in enumerate(ops) for result in op.results}
    waiting = [{makers[value] for value in op.inputs() if value in makers} for op in ops]
    readers: dict[int, list[int]] = defaultdict(list)
    for at, needs in enumerate(waiting):
        for need in needs:
            readers[need].append(at)
    ready = [at for at, needs in enumerate(waiting) if not needs]
    ordered: list[Op] = []
    while ready:
        at = heapq.heappop(ready)
        ordered.append(ops[at])
        for reader in readers[at]:
            waiting[reader].discard(at)
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return ordered if len(ordered) == len(ops) else None


# What rules write.


@dataclass(slots=True)
class _Work(Emitter):
    def call(self, name: str, operands: Sequence[Operand], kinds: Sequence[TensorType], **attrs: Attr) -> list[Value]:
        """All results of an operator."""
        results = tuple(Value(kind) for kind in kinds)
        self.ops.append(Op(f"{NAMESPACE}.{name}", tuple(operands), results, attrs, self.loc))
        return list(results)

    def like(self, value: Value, other: Value) -> Value:
        """`value` with the shape and the element type of another one."""
        kind = other.type
        if value.type.shape != kind.shape:
            value = self.emit("aten.view", [value], replace(value.type, shape=kind.shape), size=kind.shape)
        return value if value.type == kind else self.emit(CAST, [value], kind, dtype=kind.dtype)


def _wide(kind: TensorType, *shape: int) -> TensorType:
    """Of what kernels keep of a value of this type."""
    return TensorType("f64" if kind.dtype == "f64" else "f32", shape)


def _ways(sight: Sight, pattern: Made, anchor: Op) -> Iterator[Found]:
    """In which the op makes its result as the pattern says."""
    return sight.matches(pattern, anchor.results[0]) if anchor.name == pattern.op else iter(())


def _first(sight: Sight, pattern: Made, found: Found, holds: Callable[[Found], bool] = lambda _: True) -> Found | None:
    """The first way in which any value of the function is made as the pattern says; it is called `result` there."""
    named = replace(pattern, name="result")
    start = replace(found, values={name: value for name, value in found.values.items() if name != "result"})
    ways = (each for value in sight.makers for each in sight.matches(named, value, start))
    return next(filter(holds, ways), None)


# A linear layer and the cross entropy of what it makes.

_NO_NUMBER: Final = made("aten.full", size=(), fill_value=0)
_COUNTS: Final = made("aten.ne.Scalar", Some("labels"), other=-100)
_CHOSEN: Final = made("aten.where.self", _COUNTS, Some("labels"), _NO_NUMBER, views=True)
_LOGARITHMS: Final = made(
    "aten._log_softmax",
    made("aten.mm", Some("x"), made("aten.permute", Some("weight"), dims=(1, 0)), name="logits", views=True),
    name="logarithms",
    dim=1,
    half_to_float=False,
)
_LOSSES: Final = made(
    "aten.where.self",
    _COUNTS,
    made("aten.neg", made("aten.gather", Some("logarithms"), _CHOSEN, dim=1, views=True)),
    _NO_NUMBER,
)
_ABOVE: Final = made("aten.where.self", _COUNTS, Some("grad"), _NO_NUMBER, name="above")
_SPREAD: Final = made(
    "aten.mul.Tensor",
    made("aten.scatter.value", made("aten.full", size=Some("size"), fill_value=0), _CHOSEN, dim=1, value=-1),
    _ABOVE,
)
_DELTA: Final = made(
    "aten.sub.Tensor",
    _SPREAD,
    made(
        "aten.mul.Tensor",
        made("aten.exp", Some("logarithms")),
        made("aten.sum.dim_IntList", _SPREAD, dim=(1,), keepdim=True),
    ),
)
_OF_X: Final = made("aten.mm", Some("delta"), Some("weight"))
_OF_WEIGHT: Final = made("aten.mm", made("aten.permute", Some("delta"), dims=(1, 0)), Some("x"))


def _cross_entropy(sight: Sight, anchor: Op) -> Rewrite | None:
    found = next(_ways(sight, _LOGARITHMS, anchor), None)
    if found is None or found["logits"].type.shape != found["logarithms"].type.shape:
        return None
    losses = _first(sight, _LOSSES, found)
    if losses is None or len(losses["result"].type.shape) != 1:
        return None
    x, weight, labels, loss = found["x"], found["weight"], losses["labels"], losses["result"]
    work = _Work(loc=anchor.loc)
    labels = work.like(labels, Value(replace(labels.type, shape=loss.type.shape)))
    kind = _wide(x.type, *loss.type.shape)
    given, logsumexp = work.call("linear_cross_entropy", [x, weight, labels], [kind, kind])
    instead = {loss: work.like(given, loss)}
    delta = _first(sight, _DELTA, losses)
    if delta is not None:
        grad = work.like(delta["above"], Value(kind))
        kinds = [_wide(each.type, *each.type.shape) for each in (x, weight)]
        operands = [x, grad, weight, labels, logsumexp]
        gradients = work.call("linear_cross_entropy_backward", operands, kinds)
        known = Found({**found.values, "delta": delta["result"]})
        for pattern, gradient in zip((_OF_X, _OF_WEIGHT), gradients, strict=True):
            wanted = _first(sight, pattern, known)
            if wanted is not None:
                instead[wanted["result"]] = work.like(gradient, wanted["result"])
    shape = (x.type.shape[0], weight.type.shape[0], x.type.shape[1])
    gone = (found["logits"], found["logarithms"])
    return Rewrite("linear_cross_entropy", shape, x.type.dtype, work.ops, instead, gone)


# RMSNorm.

_SCALE: Final = made(
    "aten.rsqrt",
    made(
        "aten.add.Tensor",
        made(
            "aten.div.Tensor",
            made(
                "aten.sum.dim_IntList",
                made("aten.pow.Tensor_Scalar", Some("x"), exponent=2),
                dim=Some("dim"),
                keepdim=True,
            ),
            None,
            other=Some("width"),
        ),
        None,
        other=Some("eps"),
    ),
    name="scale",
)
_NORMED: Final = made("aten.mul.Tensor", Some("x"), Some("scale"))
_WEIGHED: Final = made("aten.mul.Tensor", Some("weight"), _NORMED)
_SLOPE: Final = made("aten.mul.Tensor", Some("grad"), Some("weight"))
_ALONG: Final = made(
    "aten.mul.Tensor",
    made(
        "aten.mul.Tensor",
        made("aten.sum.dim_IntList", made("aten.mul.Tensor", _SLOPE, Some("x")), dim=Some("dim"), keepdim=True),
        None,
        other=-0.5,
    ),
    made("aten.pow.Tensor_Scalar", Some("scale"), exponent=3),
)
_ACROSS: Final = made("aten.mul.Tensor", _SLOPE, Some("scale"))
_BACK: Final = made(
    "aten.mul.Tensor",
    made("aten.div.Tensor", made("aten.expand", _ALONG, size=Some("size")), None, other=Some("width")),
    made("aten.mul.Tensor", made("aten.pow.Tensor_Scalar", Some("x"), exponent=1), None, other=2),
)
_OF_NORM: Final = (
    made("aten.add.Tensor", _ACROSS, _BACK),
    made("aten.add.Tensor", made("aten.add.Tensor", Some("through"), _ACROSS), _BACK),
)
"""Alone, and added up with what comes another way, as it is where nothing is cast."""
_OF_NORMS_WEIGHT: Final = made(
    "aten.sum.dim_IntList", made("aten.mul.Tensor", Some("grad"), _NORMED), dim=Some("rows"), keepdim=Some("kept")
)


def _norm(sight: Sight, anchor: Op) -> Rewrite | None:
    found = next(_ways(sight, _SCALE, anchor), None)
    weighed = None if found is None else _first(sight, _WEIGHED, found, _is_norm)
    if weighed is None:
        return None
    x, scale, y = sight.before(weighed["x"], CAST), weighed["scale"], weighed["result"]
    eps = weighed.attrs["eps"]
    if x.type != y.type or not isinstance(eps, float):
        return None
    work, weight = _Work(loc=anchor.loc), weighed["weight"]
    added = _summands(sight, x)
    if added is None:
        y_new, scale_new = work.call("rms_norm", [x, weight], [y.type, scale.type], eps=eps)
        instead = {y: y_new, scale: scale_new}
    else:
        kinds = [y.type, x.type, scale.type]
        y_new, total, scale_new = work.call("rms_norm_of_sum", [*added, weight], kinds, eps=eps)
        instead = {y: y_new, x: total, scale: scale_new}
    return Rewrite("norm", _rows(x), x.type.dtype, work.ops, instead)


def _norm_backward(sight: Sight, anchor: Op) -> Rewrite | None:
    ways = (found for pattern in _OF_NORM for found in _ways(sight, pattern, anchor))
    found = next(filter(_is_norm, ways), None)
    if found is None:
        return None
    x, scale, weight, grad = sight.before(found["x"], CAST), found["scale"], found["weight"], found["grad"]
    if grad.type != x.type:
        return None
    every = tuple(range(len(x.type.shape) - 1))
    of_weight = _first(sight, _OF_NORMS_WEIGHT, found, lambda each: each.attrs["rows"] == every)
    if of_weight is None:
        return None
    result, through = anchor.results[0], found.values.get("through")
    if through is None:
        result, through = _with_other_way(sight, _as(sight, result, x.type))
    work = _Work(loc=anchor.loc)
    kinds = [x.type, _wide(weight.type, *weight.type.shape)]
    dx, dweight = work.call("rms_norm_backward", [x, scale, weight, grad, through], kinds)
    ends = ((result, dx), (of_weight["result"], dweight))
    return Rewrite("norm", _rows(x), x.type.dtype, work.ops, {old: work.like(new, old) for old, new in ends})


def _is_norm(found: Found) -> bool:
    """Whether the shapes are those of a norm over the last dim."""
    *rows, width = found["x"].type.shape
    like_x = [found[name] for name in ("grad", "through", "result") if name in found.values]
    return (
        found.attrs["dim"] == (len(rows),)
        and found.attrs["width"] == width
        and found["scale"].type.shape == (*rows, 1)
        and found["weight"].type.shape == (width,)
        and all(value.type.shape == (*rows, width) for value in like_x)
    )


def _summands(sight: Sight, value: Value) -> tuple[Value, Value] | None:
    """Two values of one type whose sum it is."""
    op = sight.makers.get(value)
    if op is None or op.name != "aten.add.Tensor" or op.attrs:
        return None
    one, other = op.operands
    if not isinstance(one, Value) or not isinstance(other, Value) or not one.type == other.type == value.type:
        return None
    return one, other


def _as(sight: Sight, value: Value, kind: TensorType) -> Value:
    """The value cast to a type, where that is all that anybody does with it."""
    readers = sight.readers.get(value, ())
    is_cast = len(readers) == 1 and readers[0].name == CAST and readers[0].results[0].type == kind
    return readers[0].results[0] if is_cast and value not in sight.function.results else value


def _with_other_way(sight: Sight, value: Value) -> tuple[Value, Value | None]:
    """The sum of a gradient and that which comes another way, and the latter; or the gradient alone."""
    readers = sight.readers.get(value, ())
    summands = _summands(sight, readers[0].results[0]) if len(readers) == 1 else None
    if summands is None or value in sight.function.results or summands[0] is summands[1]:
        return value, None
    one, other = summands
    return readers[0].results[0], other if one is value else one


def _rows(x: Value) -> Shape:
    *_, width = x.type.shape
    return x.type.elements() // max(width, 1), width


# SwiGLU.

_SHARE: Final = made("aten.sigmoid", Some("gate"))
_ACTED: Final = made("aten.mul.Tensor", Some("gate"), _SHARE)
_GATED: Final = made("aten.mul.Tensor", _ACTED, Some("up"))
_OF_UP: Final = made("aten.mul.Tensor", Some("grad"), _ACTED)
_UNDER: Final = made("aten.mul.Tensor", Some("grad"), Some("up"))


def _slope(rest: Made) -> Made:
    """1 + gate (1 - share), where `rest` is what is in brackets."""
    return made("aten.add.Tensor", made("aten.mul.Tensor", Some("gate"), rest), None, other=1)


_OF_GATE: Final = (
    made(
        "aten.mul.Tensor",
        made("aten.mul.Tensor", _UNDER, _SHARE),
        _slope(made("aten.sub.Tensor", None, _SHARE, self=1)),
    ),
    made(
        "aten.mul.Tensor",
        _UNDER,
        made(
            "aten.mul.Tensor",
            _SHARE,
            _slope(made("aten.sub.Tensor", made("aten.full", size=Some("size"), fill_value=1), _SHARE)),
        ),
    ),
)
"""As it is taken apart in float32, and in shorter types."""


def _gated(sight: Sight, anchor: Op) -> Rewrite | None:
    found = next(filter(_is_gated, _ways(sight, _GATED, anchor)), None)
    if found is None:
        return None
    gate, up, (y,) = sight.before(found["gate"], CAST), found["up"], anchor.results
    work = _Work(loc=anchor.loc)
    (new,) = work.call("swiglu", [gate, up], [gate.type])
    return Rewrite("gated", _rows(gate), gate.type.dtype, work.ops, {y: work.like(new, y)})


def _gated_backward(sight: Sight, anchor: Op) -> Rewrite | None:
    """The gradient of `up` is found by that of the gate, which names both."""
    ways = (found for pattern in _OF_GATE for found in _ways(sight, pattern, anchor))
    for found in filter(_is_gated, ways):
        of_up = _first(sight, _OF_UP, found)
        if of_up is not None:
            gate, up, grad = sight.before(found["gate"], CAST), found["up"], found["grad"]
            work = _Work(loc=anchor.loc)
            dgate, dup = work.call("swiglu_backward", [gate, up, grad], [gate.type, up.type])
            ends = ((anchor.results[0], dgate), (of_up["result"], dup))
            instead = {old: work.like(new, old) for old, new in ends}
            return Rewrite("gated", _rows(gate), gate.type.dtype, work.ops, instead)
    return None


def _is_gated(found: Found) -> bool:
    """Whether all are of one shape."""
    return len({value.type.shape for value in found.values.values()}) == 1


RULES: Final[Sequence[Rule]] = (_cross_entropy, _norm, _norm_backward, _gated_backward, _gated)
"""In this order: the gradient of what a gate lets pass is itself something that a gate lets pass."""
