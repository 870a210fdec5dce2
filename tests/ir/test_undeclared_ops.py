"""Ops that nobody declared: held whole, and refused where they draw numbers or write in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Op, Value
from moaic.ir.ops import OPS, Kind, check_known, flops_of, kind_of, rule_of
from moaic.ir.types import TensorType
from moaic.runtime.protocol.aten_schema import op_name

ANYTHING = Op("aten.never_heard_of", (Value(TensorType("f32", (8, 6))), None), (Value(TensorType("f32", (8,))),))


def test_an_unknown_op_is_held_whole() -> None:
    check_known(ANYTHING)
    rule = rule_of(ANYTHING)
    assert rule.whole == frozenset(rule.sizes)
    assert not rule.linear
    assert not list(rule.contiguous(2))
    assert kind_of(ANYTHING) is Kind.LIGHT
    assert flops_of(ANYTHING) == 8


DRAWS_INSIDE = (
    "_cudnn_attention",
    "_cudnn_rnn",
    "_efficient_attention",
    "_flash_attention",
    "_fused_sdp_choice",
    "_lstm_mps",
    "_nested_tensor",
    "_scaled_dot_product",
    "_triton_scaled_dot_attention",
    "scaled_dot_product_attention",
    "miopen_rnn",
    "gru",
    "lstm",
    "rnn_",
)
"""Ops of PyTorch that draw numbers only if an argument asks for dropout."""


def overloads() -> list[Any]:
    """Every overload of aten that PyTorch knows, whoever has used it before."""
    schemas: list[Any] = torch._C._jit_get_all_schemas()  # pyright: ignore[reportPrivateUsage]
    names = sorted({schema.name.removeprefix("aten::") for schema in schemas if schema.name.startswith("aten::")})
    packets: list[Any] = [getattr(torch.ops.aten, name, None) for name in names]
    return [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]


def must_be_refused(overload: Any) -> bool:
    name = op_name(overload)
    in_place = overload._schema.is_mutable and name.split(".")[1].endswith("_") and not name.endswith("out")
    draws = torch.Tag.nondeterministic_seeded in overload.tags
    return in_place or (draws and not name.removeprefix("aten.").startswith(DRAWS_INSIDE))


def test_unknown_ops_that_draw_or_write_are_refused() -> None:
    names = [op_name(overload) for overload in overloads() if must_be_refused(overload)]
    assert len(names) > 300
    assert [name for name in names if not is_refused(name)] == []


def is_refused(name: str) -> bool:
    try:
        check_known(replace(ANYTHING, name=name))
    except Diagnostic as error:
        return name in str(error) and "random or writes in place" in str(error)
    return False


def test_known_and_pure_ops_are_not_refused() -> None:
    for name in (*OPS, "aten.__and__.Tensor", "aten.cholesky"):
        check_known(replace(ANYTHING, name=name))
