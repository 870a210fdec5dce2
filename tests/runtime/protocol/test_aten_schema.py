"""One description of each overload serves the reader of graphs, the kernels of the device and the workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moaic.runtime.protocol.aten_schema import ArgKind, Signature, call_arguments, signature, signature_of


def kind(op: str, name: str) -> ArgKind:
    return signature(op).by_name[name]


def overloads() -> list[Signature]:
    """Every overload of aten that PyTorch knows."""
    schemas: list[Any] = torch._C._jit_get_all_schemas()  # pyright: ignore[reportPrivateUsage]
    names = sorted({schema.name.removeprefix("aten::") for schema in schemas if schema.name.startswith("aten::")})
    packets: list[Any] = [getattr(torch.ops.aten, name, None) for name in names]
    listed = [packet for packet in packets if hasattr(packet, "overloads")]
    return [signature_of(getattr(packet, overload)) for packet in listed for overload in packet.overloads()]


def test_a_name_and_its_overload_have_one_description() -> None:
    assert signature("aten.add.Tensor") is signature_of(torch.ops.aten.add.Tensor)
    assert signature("aten.add.Tensor").name == "aten.add.Tensor"


def test_memory_format_is_no_attribute_but_decides_strides() -> None:
    assert kind("aten.clone", "memory_format") is ArgKind.MEMORY_FORMAT
    assert not signature("aten.clone").arguments[1].is_attribute


@pytest.mark.parametrize("name", ["device", "layout", "pin_memory"])
def test_placement_is_no_attribute(name: str) -> None:
    assert kind("aten.empty.memory_format", name) is ArgKind.PLACEMENT
    assert not any(argument.is_attribute for argument in signature("aten.empty.memory_format").arguments[2:])


def test_a_scalar_beside_tensors_is_a_number() -> None:
    assert kind("aten.add.Tensor", "alpha") is ArgKind.NUMBER
    assert kind("aten.norm.Scalar", "p") is ArgKind.NUMBER
    assert kind("aten._foreach_mul.ScalarList", "scalars") is ArgKind.NUMBERS


def test_a_scalar_that_decides_a_shape_is_a_literal() -> None:
    assert kind("aten.arange.start_step", "end") is ArgKind.LITERAL


def test_a_dtype_is_not_taken_for_the_integer_that_its_type_is() -> None:
    assert kind("aten.sum", "dtype") is ArgKind.DTYPE
    assert kind("aten.sum.dim_IntList", "dim") is ArgKind.LITERAL


def test_tensors_and_lists_of_them_are_operands() -> None:
    assert signature("aten.index.Tensor").kinds == (ArgKind.TENSOR, ArgKind.TENSORS)
    assert [argument.name for argument in signature("aten.cat").operands] == ["tensors"]


def test_results_that_are_arguments_are_told_from_new_ones() -> None:
    assert signature("aten.add_.Tensor").returns == (0,)
    assert signature("aten.max.dim_max").returns == (3, 4)
    assert signature("aten.topk").returns == (None, None)
    assert signature("aten.view").returns == (None,)


def test_written_arguments_are_named_by_position_and_name() -> None:
    assert signature("aten.exp.out").written == (1,)
    assert signature("aten.exp.out").written_keys == {1, "out"}
    assert signature("aten._foreach_add_.List").written == (0,)


def test_out_tensors_are_written_but_not_every_written_tensor_is_one() -> None:
    outs = [argument.name for argument in signature("aten.max.dim_max").arguments if argument.is_out]
    assert outs == ["max", "max_values"]
    assert not any(argument.is_out for argument in signature("aten.add_.Tensor").arguments)


def test_an_op_with_a_generator_is_random_without_the_tag() -> None:
    assert "nondeterministic_seeded" not in signature("aten._no_grad_normal_").tags
    assert signature("aten._no_grad_normal_").is_random
    assert signature("aten.dropout").is_random
    assert not signature("aten.add.Tensor").is_random


def test_an_op_that_reads_no_tensor_is_nullary() -> None:
    assert signature("aten.full").nullary
    assert signature("aten.full").takes_device
    assert not signature("aten.full.out").nullary


def test_an_argument_of_a_call_is_found_by_position_or_name() -> None:
    called = signature("aten.exp.out")
    assert called.argument(0, ("x",), {"out": "y"}) == "x"
    assert called.argument(1, ("x",), {"out": "y"}) == "y"
    assert called.argument(1, ("x",), {}) is None


def test_a_call_gets_no_memory_format_and_the_device_only_without_tensors() -> None:
    device = torch.device("meta")
    assert call_arguments(signature("aten.clone"), ["x"], {}, device) == (["x"], {"memory_format": None})
    _, named = call_arguments(signature("aten.full"), [], {"size": (2,), "fill_value": 1, "dtype": "f32"}, device)
    assert named == {"dtype": torch.float32, "layout": None, "device": device, "pin_memory": None}


def test_every_overload_of_aten_can_be_described() -> None:
    described = overloads()
    assert len(described) > 3000
    assert all(argument.is_written for called in described for argument in called.arguments if argument.is_out)
    formats = [argument for called in described for argument in called.arguments if argument.name == "memory_format"]
    assert {argument.kind for argument in formats} == {ArgKind.MEMORY_FORMAT}
