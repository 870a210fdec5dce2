from __future__ import annotations

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Role
from moaic.ir.layout import Layout, Mesh, Sharded
from moaic.ir.localize import local_type, localize
from moaic.ir.parser import parse
from moaic.ir.printer import render_function
from moaic.ir.types import TensorType
from moaic.ir.verify import load

MESH = "mesh [dp=2, tp=2]\n"


def local(params: str, ops: str) -> str:
    """The ops of `func @f(params) { ops }` as one rank runs them, without indentation."""
    module = parse(f"{MESH}func @f({params}) -> () {{\n{ops}\nreturn }}")
    text = render_function(localize(module.main, module.mesh), module.mesh)
    return "\n".join(line.strip() for line in text.splitlines()[1:-2] if line.startswith("  ") and "=" in line)


@pytest.mark.parametrize(
    ("params", "op", "wanted"),
    [
        (
            "%x: f32[8{dp}, 4, 6{tp}]",
            "%y = aten.view %x {size = [32, 6]} : f32[32{dp}, 6{tp}]",
            "%y = aten.view %x {size = [16, 3]} : f32[16, 3]",
        ),
        (
            "%x: f32[1, 6{tp}]",
            "%y = aten.expand %x {size = [8, -1]} : f32[8{dp}, 6{tp}]",
            "%y = aten.expand %x {size = [4, 3]} : f32[4, 3]",
        ),
        ("", "%y = aten.full {size = [8], fill_value = 0} : f32[8{dp}]", "{size = [4], fill_value = 0} : f32[4]"),
        ("%x: f32[]", "%y = aten.new_zeros %x {size = [8]} : f32[8{dp}]", "aten.new_zeros %x {size = [4]} : f32[4]"),
        (
            "%x: f32[12{tp:2}, 3]",
            "%y = aten.slice.Tensor %x {start = 4, end = 8} : f32[4{tp}, 3]",
            "{start = 2, end = 4} : f32[2, 3]",
        ),
        (
            "%x: f32[3, 12{tp:2}]",
            "%y = aten.slice.Tensor %x {dim = -1, start = -4, end = 9223372036854775807} : f32[3, 4{tp}]",
            "{dim = -1, start = 4, end = 6} : f32[3, 2]",
        ),
        (
            "%x: f32[12, 4{tp}]",
            "%y = aten.slice.Tensor %x {start = 4, end = 9, step = 2} : f32[3, 4{tp}]",
            "{start = 4, end = 9, step = 2} : f32[3, 2]",
        ),
        (
            "%x: f32[4{dp}, 12{tp:2}]",
            "%a, %b, %c = aten.split_with_sizes %x {split_sizes = [4, 4, 4], dim = 1} "
            ": f32[4{dp}, 4{tp}], f32[4{dp}, 4{tp}], f32[4{dp}, 4{tp}]",
            "{split_sizes = [2, 2, 2], dim = 1} : f32[2, 2], f32[2, 2], f32[2, 2]",
        ),
        (
            "%x: f32[8{tp:2}]",
            "%a, %b = aten.split.Tensor %x {split_size = 4} : f32[4{tp}], f32[4{tp}]",
            "{split_size = 2} : f32[2], f32[2]",
        ),
        (
            "%x: f32[2{tp}, 1]",
            "%y = aten.squeeze.dims %x {dim = [0, 1]} : f32[2{tp}]",
            "%y = aten.view %x {size = [1]} : f32[1]",
        ),
        (
            "%g: f32[8{dp}, 4{tp}], %i: i64[8{dp}]",
            "%y = aten.embedding_dense_backward %g, %i {num_weights = 10, padding_idx = -1} : f32[10, 4{tp}] +dp",
            "{num_weights = 10, padding_idx = -1} : f32[10, 2]",
        ),
        (
            "%x: f32[8{dp}, 4]",
            "%y = aten.select.int %x {dim = 1, index = 3} : f32[8{dp}]",
            "{dim = 1, index = 3} : f32[4]",
        ),
        ("", "%y = aten.arange {end = 8} : i64[8]", "aten.arange {end = 8} : i64[8]"),
        (
            "%k: i64[2]",
            "%r = moai.rand %k : f32[8{dp, tp}, 3]",
            "%r = moai.rand %k, %dp, %tp {global_shape = [8, 3], splits = [[0, 4, 2], [0, 2, 2]]} : f32[2, 3]",
        ),
        ("%k: i64[2]", "%r = moai.rand %k : f32[8]", "%r = moai.rand %k {global_shape = [8], splits = []} : f32[8]"),
    ],
)
def test_attributes_follow_the_part(params: str, op: str, wanted: str) -> None:
    assert local(params, op).endswith(wanted)


def test_coordinates_come_in_as_parameters() -> None:
    module = load(
        f"{MESH}func @f(%x: f32[8], %k: i64[2] key) -> () {{\n"
        "%r = moai.rand %k : f32[8{tp}]\n%s = moai.rand %k : f32[4{tp}, 4{dp}]\nreturn }"
    )
    function = localize(module.main, module.mesh)
    assert [function.param_role(i) for i in range(4)] == [
        Role(),
        Role("key"),
        Role("coordinate", "dp"),
        Role("coordinate", "tp"),
    ]


def test_axes_can_go_one_after_the_other() -> None:
    module = load(
        "mesh [dp=2, mb=3]\nfunc @f(%x: f32[24{dp, mb}], %k: i64[2] key) -> (f32[24{dp, mb}], f32[24{mb, dp}]) {\n"
        "  %y = aten.view %x {size = [24, 1]} : f32[24{dp, mb}, 1]\n"
        "  %r = moai.rand %k : f32[24{dp, mb}]\n"
        "  %s = moai.rand %k : f32[24{mb, dp}]\n"
        "  return %r, %s\n}"
    )
    part = localize(module.main, module.mesh, ["mb"])
    space = Mesh((("dp", 2),))
    assert render_function(part, space).splitlines() == [
        'func @f(%x: f32[8{dp}], %k: i64[2] key, %mb: i64[] coordinate "mb") -> (f32[8{dp}], f32[8{dp}]) {',
        "  %y = aten.view %x {size = [8, 1]} : f32[8{dp}, 1]",
        "  %r = moai.rand %k, %mb {global_shape = [24], splits = [[0, 4, 3]]} : f32[8{dp}]",
        "  %s = moai.rand %k, %mb {global_shape = [24], splits = [[0, 8, 3]]} : f32[8{dp}]",
        "  return %r, %s",
        "}",
    ]
    assert [op.attrs.get("splits") for op in localize(part, space).ops] == [
        None,
        ((0, 4, 3), (0, 12, 2)),
        ((0, 8, 3), (0, 4, 2)),
    ]


def test_a_part_of_a_split_type() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2), ("mb", 3)))
    layout = Layout(partial=("tp",)).with_state("dp", Sharded(0, 12)).with_state("mb", Sharded(0, 4))
    part = local_type(TensorType("f32", (24,), layout), mesh, ["mb"])
    assert part == TensorType("f32", (8,), Layout(partial=("tp",)).with_state("dp", Sharded(0, 4)))
    assert local_type(part, mesh, ["tp", "dp"]) == TensorType("f32", (4,))


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("%y = aten.tril_indices {row = 2, col = 4} : i64[2, 8{dp}]", "its values depend on where the part lies"),
        ("%y = aten.unheard_of %x : f32[8{dp}]", "it has no rule"),
    ],
)
def test_what_cannot_be_made_in_parts_is_refused(op: str, why: str) -> None:
    module = parse(f'{MESH}func @f(%x: f32[8]) -> () {{ {op} at "model.py":7 return }}')
    with pytest.raises(Diagnostic, match=why) as caught:
        localize(module.main, module.mesh)
    assert '"model.py":7' in str(caught.value)
