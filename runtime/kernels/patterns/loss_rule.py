"""A linear layer and the cross entropy of what it makes, found forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moaic.ir.graph import Op, Value
from moaic.runtime.kernels.patterns.match import AnyPattern, Found, Sight, made
from moaic.runtime.kernels.patterns.rule import Replacement, Work, first, ways, wide

_NO_NUMBER: Final = made("aten.full", size=(), fill_value=0)
_COUNTS: Final = made("aten.ne.Scalar", AnyPattern("labels"), other=-100)
_CHOSEN: Final = made("aten.where.self", _COUNTS, AnyPattern("labels"), _NO_NUMBER, views=True)
_LOGARITHMS: Final = made(
    "aten._log_softmax",
    made(
        "aten.mm", AnyPattern("x"), made("aten.permute", AnyPattern("weight"), dims=(1, 0)), name="logits", views=True
    ),
    name="logarithms",
    dim=1,
    half_to_float=False,
)
_LOSSES: Final = made(
    "aten.where.self",
    _COUNTS,
    made("aten.neg", made("aten.gather", AnyPattern("logarithms"), _CHOSEN, dim=1, views=True)),
    _NO_NUMBER,
)
_ABOVE: Final = made("aten.where.self", _COUNTS, AnyPattern("grad"), _NO_NUMBER, name="above")
_SPREAD: Final = made(
    "aten.mul.Tensor",
    made("aten.scatter.value", made("aten.full", size=AnyPattern("size"), fill_value=0), _CHOSEN, dim=1, value=-1),
    _ABOVE,
)
_DELTA: Final = made(
    "aten.sub.Tensor",
    _SPREAD,
    made(
        "aten.mul.Tensor",
        made("aten.exp", AnyPattern("logarithms")),
        made("aten.sum.dim_IntList", _SPREAD, dim=(1,), keepdim=True),
    ),
)
_OF_X: Final = made("aten.mm", AnyPattern("delta"), AnyPattern("weight"))
_OF_WEIGHT: Final = made("aten.mm", made("aten.permute", AnyPattern("delta"), dims=(1, 0)), AnyPattern("x"))


def forward_and_backward(sight: Sight, anchor: Op) -> Replacement | None:
    found = next(ways(sight, _LOGARITHMS, anchor), None)
    if found is None or found["logits"].type.shape != found["logarithms"].type.shape:
        return None
    losses = first(sight, _LOSSES, found)
    if losses is None or len(losses["result"].type.shape) != 1:
        return None
    x, weight, labels, loss = found["x"], found["weight"], losses["labels"], losses["result"]
    work = Work(loc=anchor.loc)
    labels = work.like(labels, Value(replace(labels.type, shape=loss.type.shape)))
    kind = wide(x.type, *loss.type.shape)
    given, logsumexp = work.call("linear_cross_entropy", [x, weight, labels], [kind, kind])
    instead = {loss: work.like(given, loss)}
    delta = first(sight, _DELTA, losses)
    if delta is not None:
        grad = work.like(delta["above"], Value(kind))
        kinds = [wide(each.type, *each.type.shape) for each in (x, weight)]
        operands = [x, grad, weight, labels, logsumexp]
        gradients = work.call("linear_cross_entropy_backward", operands, kinds)
        known = Found({**found.values, "delta": delta["result"]})
        for pattern, gradient in zip((_OF_X, _OF_WEIGHT), gradients, strict=True):
            wanted = first(sight, pattern, known)
            if wanted is not None:
                instead[wanted["result"]] = work.like(gradient, wanted["result"])
    shape = (x.type.shape[0], weight.type.shape[0], x.type.shape[1])
    gone = (found["logits"], found["logarithms"])
    return Replacement("linear_cross_entropy", shape, x.type.dtype, work.ops, instead, gone)
