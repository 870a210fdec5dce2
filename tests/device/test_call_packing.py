"""The walk over an op's arguments agrees with taking the sent arguments apart, and its key tells forms apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moaic.device.call_packing import MixedDevices, PackedCall, form_of, packer
from moaic.device.handles import view_of
from moaic.runtime.controller.eager_call import take_apart
from moaic.runtime.protocol.aten_schema import signature

pytestmark = pytest.mark.usefixtures("accelerator")


def pack(op: str, *args: Any, **kwargs: Any) -> PackedCall:
    return packer(signature(op))(args, kwargs)


def ours(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="moai")


def sent(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return view_of(value) if value.device.type == "moai" else value
    return [sent(item) for item in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def calls() -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    a, b = ours(4, 6), ours(4, 6)
    index = ours(2, dtype=torch.int64)
    return [
        ("aten.add.Tensor", (a, b), {"alpha": 2}),
        ("aten.add.Tensor", (a, torch.tensor(1.5)), {}),
        ("aten.add.Tensor", (a, torch.tensor(True)), {}),
        ("aten.add.Tensor", (a, torch.tensor(1 + 2j)), {}),
        ("aten.add.Scalar", (a, True), {}),
        ("aten.add.Scalar", (a, 1 + 2j), {"alpha": 3.0}),
        ("aten.mm", (a, b.t()), {}),
        ("aten.mul.Tensor", (a[1:3, ::2], b[2:, 3:]), {}),
        ("aten.add.Tensor", (a.view(torch.int32), 1), {}),
        ("aten.clamp", (a, None, 2.0), {}),
        ("aten.index.Tensor", (a, [None, index]), {}),
        ("aten.cat", ([a, b[1:]], 0), {}),
        ("aten.clone", (a,), {"memory_format": torch.contiguous_format}),
        ("aten.roll", (a, [1, 2], [0, 1]), {}),
        ("aten.div.Tensor_mode", (a, b), {"rounding_mode": "floor"}),
        ("aten.sum.dim_IntList", (a, [0], True), {"dtype": torch.float64}),
        ("aten.linalg_vector_norm", (a, 3.0, [1], False), {}),
        ("aten._foreach_add_.List", ([a, b[1:]], [b, a[1:]]), {"alpha": 0.5}),
        ("aten._foreach_mul_.ScalarList", ([a, b], [1.0, 2]), {}),
        ("aten._foreach_mul_.ScalarList", ([a, b], [1.0, True]), {}),
        ("aten.arange.start_step", (0, 6.0, 2), {"dtype": torch.float32, "device": torch.device("moai:0")}),
        ("aten.exp.out", (a,), {"out": b}),
    ]


@pytest.mark.parametrize("number", range(22))
def test_the_walk_agrees_with_taking_apart(number: int) -> None:
    op, args, kwargs = calls()[number]
    packed = pack(op, *args, **kwargs)
    named = {name: sent(value) for name, value in kwargs.items() if name != "device"}
    call = take_apart(op, [sent(value) for value in args], named, ())
    assert packed[1:] == (call.buffers, call.offsets, call.scalars)
    assert form_of(signature(op), args, kwargs, ()) is call.form


def test_values_of_scalars_and_offsets_of_views_are_not_in_the_key() -> None:
    a = ours(4, 6)
    assert pack("aten.add.Scalar", a, 1.0).key == pack("aten.add.Scalar", a, 2.0).key
    assert pack("aten.neg", a[1]).key == pack("aten.neg", a[2]).key
    assert pack("aten.add.Tensor", a, torch.tensor(1.0)).key == pack("aten.add.Tensor", a, torch.tensor(2.0)).key


@pytest.mark.parametrize(
    ("op", "one", "other"),
    [
        ("aten.add.Scalar", (1,), (1.0,)),
        ("aten.add.Scalar", (True,), (False,)),
        ("aten.add.Scalar", (True,), (1,)),
        ("aten.sum.dim_IntList", ([0],), ([1],)),
        ("aten.linalg_vector_norm", (1.0,), (2.0,)),
        ("aten.add.Tensor", (torch.tensor(1.0),), (torch.tensor(1.0, dtype=torch.float64),)),
        ("aten.add.Tensor", (torch.tensor(True),), (torch.tensor(False),)),
    ],
)
def test_types_and_literals_are_in_the_key(op: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    a = ours(4, 6)
    assert pack(op, a, *one).key != pack(op, a, *other).key


def test_the_geometry_of_tensors_is_in_the_key() -> None:
    a, b = ours(4, 4), ours(4, 4, dtype=torch.int32)
    given = [a, b, a.t(), a[:2], a.view(torch.int32), ours(4, 4).as_strided((4, 4), (1, 4))]
    assert len({pack("aten.neg", tensor).key for tensor in given}) == 5
    assert pack("aten.neg", a).key == pack("aten.neg", ours(4, 4)).key


def test_equal_numbers_of_other_types_have_other_keys() -> None:
    assert len({pack("aten.linspace", 0, end, 3).key for end in (1, 1.0, True, 1 + 0j)}) == 4


def test_a_range_of_complex_numbers_leaves_a_range_of_reals_alone() -> None:
    for end in (2 + 0j, 2, 2.0):
        result = torch.linspace(0, end, 3, device="moai")
        expected = torch.linspace(0, end, 3)
        assert result.dtype == expected.dtype
        assert torch.equal(result.cpu(), expected)


def test_tensors_of_the_host_are_refused_in_lists_too() -> None:
    with pytest.raises(MixedDevices, match="moai:0 and cpu"):
        pack("aten._foreach_add_.List", [ours(2)], [torch.ones(2)])
