from __future__ import annotations

import contextlib
import gc
import math
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from moaic.ir.compare import difference, equal
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Function, Location, Module, Op, Operand, Role, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Layout, Mesh, Sharded
from moaic.ir.parser import parse, parse_with_places
from moaic.ir.printer import render, render_attr
from moaic.ir.types import DTYPE_BYTES, TensorType
from moaic.ir.verify import load

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
OP_NAMES = st.from_regex(r"[a-z_]{1,5}(\.[A-Za-z0-9_]{1,6}){1,2}", fullmatch=True)
HINTS = st.text(max_size=4) | st.sampled_from(["x", "x_1", "w.q", "0", "1"])
SCALARS: SearchStrategy[Attr] = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text(max_size=6)
)
ATTRS: SearchStrategy[Attr] = st.recursive(
    SCALARS, lambda inside: st.lists(inside, max_size=3).map(tuple), max_leaves=6
)
LOCATIONS = st.builds(
    Location,
    st.text(max_size=5),
    st.integers(0, 999),
    st.text(max_size=5),
    st.sampled_from(["", "forward", "backward"]),
)
ROLES = st.just(Role()) | st.builds(Role, WORDS, st.text(max_size=5))


@st.composite
def meshes(draw: DrawFn) -> Mesh:
    axes = draw(st.lists(WORDS, unique=True, max_size=3))
    return Mesh(tuple((axis, draw(st.integers(1, 4))) for axis in axes))


@st.composite
def types(draw: DrawFn, mesh: Mesh) -> TensorType:
    """Any dtype and shape; every axis whole, pending or splitting some dim with a stride that need not be legal."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 8, 12, 24]), max_size=3)))
    layout = Layout()
    for axis, size in mesh.axes:
        dims = range(len(shape))
        contiguous = [Sharded(dim, shape[dim] // size) for dim in dims if shape[dim] % size == 0]
        strided = [Sharded(dim, draw(st.integers(0, 12))) for dim in dims]
        layout = layout.with_state(axis, draw(st.sampled_from([REPLICATED, PARTIAL, *contiguous, *strided])))
    return TensorType(draw(st.sampled_from(sorted(DTYPE_BYTES))), shape, layout)


@st.composite
def functions(draw: DrawFn, name: str, mesh: Mesh, callees: list[str]) -> Function:
    def new() -> Value:
        return Value(draw(types(mesh)), draw(HINTS))

    params = [new() for _ in range(draw(st.integers(0, 3)))]
    known, ops = list(params), list[Op]()
    for _ in range(draw(st.integers(0, 6))):
        one: SearchStrategy[Value | None] = st.none() | st.sampled_from(known) if known else st.none()
        operand: SearchStrategy[Operand] = one | st.lists(one, max_size=3).map(tuple)
        operands = tuple(draw(st.lists(operand, max_size=3)))
        attrs = draw(st.dictionaries(WORDS, ATTRS, max_size=3))
        op_name = draw(OP_NAMES)
        if callees and draw(st.booleans()):
            op_name, attrs = "call", {**attrs, "callee": draw(st.sampled_from(callees))}
        op = Op(op_name, operands, tuple(new() for _ in range(draw(st.integers(0, 2)))), attrs, draw(LOCATIONS))
        known += op.results
        ops.append(op)
    results = draw(st.lists(st.sampled_from(known), max_size=3)) if known else []
    roles = tuple(draw(ROLES) for _ in params)
    return Function(name, tuple(params), tuple(ops), tuple(results), roles, tuple(draw(ROLES) for _ in results))


@st.composite
def modules(draw: DrawFn) -> Module:
    mesh = draw(meshes())
    made: list[Function] = []
    for name in draw(st.lists(st.text(max_size=4) | WORDS, unique=True, max_size=3)):
        made.append(draw(functions(name, mesh, [function.name for function in made])))
    return Module(tuple(made), mesh)


@given(modules())
def test_what_is_printed_reads_back_and_prints_the_same(module: Module) -> None:
    text = render(module)
    read = parse(text)
    assert difference(read, module) is None
    assert render(read) == text


@given(st.floats())
def test_floats_read_back_bit_for_bit(number: float) -> None:
    text = f"func @f() -> () {{ a.b {{x = {render_attr(number)}}} : () return }}"
    read = parse(text).main.ops[0].attrs["x"]
    assert isinstance(read, float)
    assert struct.pack("d", read) == struct.pack("d", number) or (math.isnan(read) and math.isnan(number))


TEXT = """// moai 1
mesh [dp=2, tp=2]

func @layer.fwd(%x: f32[8{dp}, 256, 384], %w.q: f32[384, 384{tp}]) -> (f32[2048{dp}, 384]) {
  %0 = aten.view %x {size = [2048, 384]} : f32[2048{dp}, 384]
  %a, %b = aten.split_with_sizes %0 {split_sizes = [192, 192], dim = 1} : f32[2048, 192], f32[2048, 192]
  %1 = aten.cat [%0, %0] {dim = 1} : f32[2048, 768]                        at "llama.py":226 in "model.0" backward
  %2 = aten.index.Tensor %1, [_, %a], _ : f32[2048{dp, tp:256}] +tp
  %3 = moai.all_reduce %2 {axis = "tp", big = 1e+22, least = -inf, none = [none, [], nan]} : f32[2048{dp:64}, 384]
  return %0
}

func @"the step"(
    %ids: i64[8, 256] input "input_ids",
    %w: f32[384] param "model.norm.weight",
    %k: i64[2] key,
    %key_1: i64[2] key
) -> (i64[8, 256] output "loss") {
  %4 = call @layer.fwd %ids, %w : f32[3]
  return %ids
}
"""


def test_the_printed_form() -> None:
    text = TEXT.replace("%4", "%0")
    assert render(parse(text)) == text


def test_comments_blanks_and_layout_of_lines_mean_nothing() -> None:
    loose = 'func@f(%x:f32[4])->(f32[4]){//why\n%y=aten.add.Tensor%x,\n%x:f32[4]at"a":1\nreturn%y}// end'
    tight = 'func @f(%x: f32[4]) -> (f32[4]) {\n  %y = aten.add.Tensor %x, %x : f32[4] at "a":1\n  return %y\n}\n'
    assert equal(parse(loose), parse(tight))


def test_names_mean_nothing() -> None:
    assert equal(parse(TEXT.replace("%w.q", "%other")), parse(TEXT))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tp=2]", "tp=4]"),
        ("%ids, %w :", "%w, %ids :"),
        ("[%0, %0]", "[%0, %a]"),
        (", _ :", " :"),
        ("1e+22", "2e+22"),
        ("1e+22", "10000000000000000000000"),
        ("+tp", ""),
        ("226", "227"),
        ("backward", "forward"),
        ('"input_ids"', '"labels"'),
        ("key,", "param,"),
        ("func @layer.fwd", "func @layer"),
        ("output", "grad"),
    ],
)
def test_everything_else_does(old: str, new: str) -> None:
    assert TEXT.replace(old, new) != TEXT
    assert not equal(parse(TEXT.replace(old, new)), parse(TEXT))


def test_places() -> None:
    parsed = parse_with_places(TEXT, "a.moai")
    span = parsed.place(parsed.module.functions[0].ops[1])
    assert (span.file, span.line, span.column) == ("a.moai", 6, 3)
    assert parsed.place(parsed.module.main).line == 13


F = "func @f(%x: f32[8]) -> (f32[8]) {"

MISTAKES = [
    ("func f() -> () { return }", 1, 6, "expected a function name such as `@step`, found `f`"),
    ("fun @f() -> () { return }", 1, 1, "expected `func`, `mesh`, `schedule`, `sizes` or the end, found `fun`"),
    ("func @f(x: f32[8]) -> () { return }", 1, 9, "expected `)` or a value such as `%x`, found `x`"),
    ("func @f(%x: f32) -> () { return }", 1, 13, "expected a type such as `f32[8, 384]`, found `f32`"),
    ("func @f(%x: f32[8) -> () { return }", 1, 18, "expected `,`, `]` or `{`, found `)`"),
    ("func @f(%x: f32[8\n) -> () { return }", 1, 18, "found the end of the line"),
    ("func @f(%x: f32[8, b]) -> () { return }", 1, 20, "expected a size such as `2*s0` or a whole number, found `b`"),
    ("func @f(%x: f32[8{2}]) -> () { return }", 1, 19, "expected a name, found `2`"),
    ("func @f(%x: float[8]) -> () { return }", 1, 13, "`float` is no element type"),
    ("func @f(%x: f32[8{tp}]) -> () { return }", 1, 19, "`tp` is no axis of the mesh: the file has no mesh"),
    ("mesh [dp=2] func @f(%x: f32[8] +tp) -> () { return }", 1, 33, "`tp` is no axis of the mesh: the mesh is [dp=2]"),
    ("mesh [dp=3] func @f(%x: f32[8{dp}]) -> () { return }", 1, 31, "axis `dp` of 3 ranks does not divide 8"),
    ("mesh [dp=2, dp=3]", 1, 13, "the mesh has two axes `dp`"),
    ("mesh [dp=0]", 1, 10, "axis `dp` needs at least one rank"),
    ("mesh [dp=two]", 1, 10, "expected a whole number, found `two`"),
    (f"{F}\n  %y = aten.neg %z : f32[8]\n  return %y\n}}", 2, 17, "`%z` is not defined above"),
    (f"{F}\n  return %y\n}}", 2, 10, "`%y` is not defined above"),
    (f"{F}\n  %x = aten.neg %x : f32[8]\n  return %x\n}}", 2, 3, "`%x` is defined twice"),
    (f"{F}\n  %y = neg %x : f32[8]\n  return %y\n}}", 2, 8, "expected `call` or an op such as `aten.mm`, found `neg`"),
    (f"{F}\n  %y = aten.neg %x\n  return %y\n}}", 3, 3, "found `return`"),
    (f"{F}\n  %y, %z = aten.neg %x : f32[8]\n  return %y\n}}", 2, 12, "`aten.neg` defines 2 names but gives 1 type"),
    (f"{F}\n  %y = call neg %x : f32[8]\n  return %y\n}}", 2, 13, "expected a function name such as `@step`"),
    (f"{F}\n  %y = aten.neg %x {{dim = }} : f32[8]\n  return %y\n}}", 2, 27, "found `}`"),
    (f"{F}\n  %y = aten.neg %x {{dim = 1 : f32[8]\n  return %y\n}}", 2, 29, "expected `,` or `}`, found `:`"),
    (f"{F}\n  %y = aten.neg %x {{dim: 1}} : f32[8]\n  return %y\n}}", 2, 24, "expected `=`, found `:`"),
    (f"{F}\n  %y = aten.neg %x {{a = 1, a = 2}} : f32[8]\n  return %y\n}}", 2, 28, "attribute `a` is given twice"),
    (f'{F}\n  %y = aten.neg %x {{a = "b}} : f32[8]\n  return %y\n}}', 2, 25, 'found `"`'),
    (f'{F}\n  %y = aten.neg %x {{a = "\\q"}} : f32[8]\n  return %y\n}}', 2, 25, "bad string: invalid \\escape"),
    (f'{F}\n  %y = aten.neg %x : f32[8] at "a"\n  return %y\n}}', 3, 3, "expected `:`, found `return`"),
    (f"{F}\n  %y = aten.neg %x : f32[8] sideways\n  return %y\n}}", 2, 29, "found `sideways`"),
    (f"{F}\n  return %x, %x\n}}", 2, 10, "the head of `@f` says 1 result, `return` gives 2"),
    ("func @f(%x: f32[8]) -> (f32[9]) {\n  return %x\n}", 2, 10, "says `f32[9]`, `%x` is `f32[8]`"),
    (f"{F} return %x }} {F} return %x }}", 1, 52, "function `@f` is defined twice"),
    (f"{F}\n  return %x\n", 2, 12, "expected `,` or `}`, found the end"),
    (f"{F}\n  %y = aten.neg $x : f32[8]", 2, 17, "found `$`"),
    ("\n// moai 2\n", 2, 9, "this is version `2` of the language, only version 1 can be read"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), MISTAKES)
def test_a_mistake_is_shown_where_it_stands(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(Diagnostic) as caught:
        parse(text, "bad.moai")
    shown = str(caught.value)
    assert shown.startswith(f"bad.moai:{line}:{column}: error: ")
    assert message in shown.splitlines()[0]
    assert shown.splitlines()[1] == f"  {text.splitlines()[line - 1]}"
    assert shown.splitlines()[2].index("^") == column + 1


WELL_FORMED = (Path(__file__).parents[1] / "data" / "print.moai").read_text(encoding="utf-8")
PIECES = [
    *'%@[]{}(),:="_+-',
    "0",
    "1",
    "8",
    "16",
    "dp",
    "tp",
    "%0",
    "%x",
    "return",
    "none",
    "mm",
    "aten.add.Tensor",
    "\n",
]


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_is_a_mistake_never_a_crash(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(WELL_FORMED)))
    end = min(len(WELL_FORMED), start + data.draw(st.integers(0, 12)))
    piece = data.draw(st.sampled_from(PIECES) | st.text(max_size=4))
    with contextlib.suppress(Diagnostic):
        load(WELL_FORMED[:start] + piece + WELL_FORMED[end:])


def test_an_unclosed_string_gets_a_hint() -> None:
    with pytest.raises(Diagnostic, match="the string is not closed on its line"):
        parse(f'{F} %y = aten.neg %x {{a = "b}} : f32[8] return %y }}')


def test_a_misspelled_value_gets_a_hint() -> None:
    with pytest.raises(Diagnostic, match="did you mean `%weight`"):
        parse("func @f(%weight: f32[8]) -> () { %y = aten.neg %wieght : f32[8] return }")


def big_module(ops: int) -> Module:
    """A program as capture makes it: every op has its own place, types and attributes repeat."""
    mesh = Mesh((("dp", 2), ("tp", 2)))
    split = Layout().with_state("dp", Sharded(0, 1024)).with_state("tp", Sharded(1, 192))
    x = Value(TensorType("f32", (2048, 384), split), "x")
    values, made = [x], list[Op]()
    for i in range(ops):
        new = Value(TensorType("f32", (2048, 384 + 2 * (i % 97)), split), f"layers.{i % 24}.h" if i % 3 else "")
        attrs: dict[str, Attr] = {"size": (2048, 384 + i % 97), "scale": i / 7} if i % 2 else {}
        place = Location("modeling_llama.py", i % 400, f"model.layers.{i % 24}.self_attn", "backward")
        made.append(Op("aten.add.Tensor", (values[i // 2], values[i]), (new,), attrs, place))
        values.append(new)
    return Module((Function("step", (x,), tuple(made), (values[-1],)),), mesh)


def test_big_programs_read_and_print_fast() -> None:
    """The bounds hold in CPU time and apart from the heap of other tests, so that neighbours do not count."""
    module = big_module(10_000)
    gc.freeze()
    start = time.process_time()
    text = render(module)
    printed = time.process_time()
    read = parse(text)
    parsed = time.process_time()
    assert printed - start < 1
    assert parsed - printed < 5
    assert equal(read, module)
