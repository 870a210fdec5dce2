"""Rule for a linear layer with the cross entropy of its output, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moaic.ir.graph import Op, Value
from moaic.runtime.kernels.patterns.match import AnyPattern, DefUse, Match, result_of
from moaic.runtime.kernels.patterns.rule import KernelBuilder, Replacement, first, matches, wide

_NO_NUMBER: Final = result_of("aten.full", size=(), fill_value=0)
_COUNTS: Final = result_of("aten.ne.Scalar", AnyPattern("labels"), other=-100)
_CHOSEN: Final = result_of("aten.where.self", _COUNTS, AnyPattern("labels"), _NO_NUMBER, views=True)
_LOGARITHMS: Final = result_of(
    "aten._log_softmax",
    result_of(
        "aten.mm",
        AnyPattern("x"),
        result_of("aten.permute", AnyPattern("weight"), dims=(1, 0)),
        name="logits",
        views=True,
    ),
    name="logarithms",
    dim=1,
    half_to_float=False,
)
_LOSSES: Final = result_of(
    "aten.where.self",
    _COUNTS,
    result_of("aten.neg", result_of("aten.gather", AnyPattern("logarithms"), _CHOSEN, dim=1, views=True)),
    _NO_NUMBER,
)
_ABOVE: Final = result_of("aten.where.self", _COUNTS, AnyPattern("grad"), _NO_NUMBER, name="above")
_SPREAD: Final = result_of(
    "aten.mul.Tensor",
    result_of(
        "aten.scatter.value", result_of("aten.full", size=AnyPattern("size"), fill_value=0), _CHOSEN, dim=1, value=-1
    ),
    _ABOVE,
)
_DELTA: Final = result_of(
    "aten.sub.Tensor",
    _SPREAD,
    result_of(
        "aten.mul.Tensor",
        result_of("aten.exp", AnyPattern("logarithms")),
        result_of("aten.sum.dim_IntList", _SPREAD, dim=(1,), keepdim=True),
    ),
)
_OF_X: Final = result_of("aten.mm", AnyPattern("delta"), AnyPattern("weight"))
_OF_WEIGHT: Final = result_of("aten.mm", result_of("aten.permute", AnyPattern("delta"), dims=(1, 0)), AnyPattern("x"))


def forward_and_backward(uses: DefUse, anchor: Op) -> Replacement | None:
    found = next(matches(uses, _LOGARITHMS, anchor), None)
    if found is None or found["logits"].type.shape != found["logarithms"].type.shape:
        return None
    losses = first(uses, _LOSSES, found)
    if losses is None or len(losses["result"].type.shape) != 1:
        return None
    x, weight, labels, loss = found["x"], found["weight"], losses["labels"], losses["result"]
    work = KernelBuilder(loc=anchor.loc)
    labels = work.like(labels, Value(replace(labels.type, shape=loss.type.shape)))
    kind = wide(x.type, *loss.type.shape)
    given, logsumexp = work.call("linear_cross_entropy", [x, weight, labels], [kind, kind])
    instead = {loss: work.like(given, loss)}
    delta = first(uses, _DELTA, losses)
    if delta is not None:
        grad = work.like(delta["above"], Value(kind))
        kinds = [wide(each.type, *each.type.shape) for each in (x, weight)]
        operands = [x, grad, weight, labels, logsumexp]
        gradients = work.call("linear_cross_entropy_backward", operands, kinds)
        known = Match({**found.values, "delta": delta["result"]})
        for pattern, gradient in zip((_OF_X, _OF_WEIGHT), gradients, strict=True):
            wanted = first(uses, pattern, known)
            if wanted is not None:
                instead[wanted["result"]] = work.like(gradient, wanted["result"])
    shape = (x.type.shape[0], weight.type.shape[0], x.type.shape[1])
    gone = (found["logits"], found["logarithms"])
    return Replacement("linear_cross_entropy", shape, x.type.dtype, work.ops, instead, gone)
