from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Function, Location, Module, Op, Role, Value
from moaic.ir.layout import Layout, Mesh, Split
from moaic.ir.types import TensorType
from moaic.ir.verify import Invalid, load, verify

MESH = "mesh [dp=2, tp=4]\n"
F8 = TensorType("f32", (8,))


def body(ops: str, params: str = "%x: f32[8, 16], %k: i64[2]") -> str:
    return f"{MESH}func @f({params}) -> () {{\n  {ops}\n  return\n}}\n"


PLAIN = "f32[2, 4, 8, 2], f32[2, 4, 8]"
QUERY = "%q: f32[2, 4{tp}, 8{dp}, 2]"
KEY = "%k: f32[2, 4{tp}, 16{dp}, 2]"
IN_A_RING = "f32[2, 4{tp}, 8{dp}, 2], f32[2, 4{tp}, 8{dp}]"


def ring(params: str = f"{QUERY}, {KEY}", mask: str = "_", attrs: str = 'axis = "dp"', made: str = IN_A_RING) -> str:
    return body(f"%o, %l = moai.ring_sdpa %q, %k, %k, {mask} {{{attrs}}} : {made}", params)


RECURRENT = "%x: f32[5, 8{dp}, 4], %h: f32[1, 8{dp}, 3], %w: f32[9, 4], %u: f32[9, 3]"
GRU = 'mode = "gru", batch_sizes = [], has_biases = false, num_layers = 1, bidirectional = false'


def gru(
    attrs: str = GRU, operands: str = "%x, [%h], [%w, %u]", made: str = "f32[5, 8{dp}, 3], f32[1, 8{dp}, 3]"
) -> str:
    return body(f"%y, %l = moai.recurrent {operands} {{{attrs}}} : {made}", RECURRENT)


def recorded_gru(saved: str = "24", record: str = "f32[5, 8{dp}, 24]") -> str:
    op = f"moai.recurrent %x, [%h], [%w, %u] {{{GRU}, saved = {saved}}}"
    return body(f"%y, %l, %r = {op} : f32[5, 8{{dp}}, 3], f32[1, 8{{dp}}, 3], {record}", RECURRENT)


def gru_backward(
    wanted: str = "true, false, true, false",
    grads: str = "%g, _",
    made: str = "f32[9, 4] +dp",
    record: str = "f32[5, 8{dp}, 24]",
) -> str:
    op = f"moai.recurrent_backward %r, [{grads}], %x, [%h], [%w, %u] {{{GRU}, wanted = [{wanted}]}}"
    params = f"{RECURRENT}, %g: f32[5, 8{{dp}}, 3], %r: {record}"
    return body(f"%y, %z = {op} : f32[5, 8{{dp}}, 4], {made}", params)


SOUND = [
    gru(),
    recorded_gru(),
    gru_backward(),
    gru_backward().replace("backward %r", "backward _"),
    body("%y = aten.mm %x, %w : f32[8{dp}, 4] +tp", "%x: f32[8{dp}, 16{tp}], %w: f32[16{tp}, 4]"),
    body("%y = aten.neg %x : f32[8{dp}] +tp", "%x: f32[8{dp}] +tp"),
    body("%y = aten.full {size = [8], fill_value = 1} : f32[8{dp, tp}]"),
    body("%y = aten.view %x {size = [4, -1]} : f32[4, 32]"),
    body("%y = aten.mm %x, %w : f32[8, 4]", "%x: f32[8, 16], %w: f32[16, 4]"),
    body('%y = moai.all_reduce %x {axis = "tp"} : f32[8{dp}]', "%x: f32[8{dp}] +tp"),
    body('%y = moai.reduce_scatter %x {axis = "dp"} : f32[8{dp}] +tp', "%x: f32[8] +dp +tp"),
    body('%y = moai.all_gather %x {axis = "dp"} : f32[8{tp:1}]', "%x: f32[8{dp, tp}]"),
    body('%y = moai.all_to_all %x {axis = "dp"} : f32[8, 2{dp}]', "%x: f32[8{dp}, 2]"),
    body('%y = moai.shard %x {axis = "dp"} : f32[8{dp}]', "%x: f32[8]"),
    body('%y = moai.reduce_scatter %x {axis = "dp"} : f32[9{dp:5}, 10{tp:3}]', "%x: f32[9, 10{tp:3}] +dp"),
    body("%y = aten.add.Tensor %x, %w : f32[9{dp:5}, 8{tp}]", "%x: f32[9{dp:5}, 8{tp}], %w: f32[8{tp}]"),
    body("%y = aten.mm %x, %w : f32[9{dp:5}, 4] +tp", "%x: f32[9{dp:5}, 16{tp}], %w: f32[16{tp}, 4]"),
    body('%y = moai.first %x {axis = "dp"} : f32[8] +dp', "%x: f32[8]"),
    body('%y = moai.part %x {axis = "mb", index = 1, count = 2, dim = 0, stride = 2} : f32[4{dp}]', "%x: f32[8{dp}]"),
    body("%y = moai.join %x, %x {dim = 0, stride = 4} : f32[16{dp}]", "%x: f32[8{dp}]"),
    body("%s = moai.accumulate _, %x : f32[8]\n  %y = moai.accumulate %s, %x : bf16[8]", "%x: bf16[8]"),
    body(
        "%s = moai.accumulate _, _ : f32[8{dp}] +tp\n  %y = moai.add_to %s, %x : f32[8{dp}] +tp", "%x: bf16[8{dp}] +tp"
    ),
    body("%l = moai.fold_key %k {instance = 3} : i64[2]\n  %r = moai.rand %l : f32[8{dp}, 2]"),
    body('%y = moai.checked %x, %b {message = "no"} : f32[8{dp}, 4]', "%x: f32[8{dp}, 4], %b: bool[8{dp}]"),
    body('%y = moai.checked %x, %b {message = "no"} : f32[8{dp}, 4]', "%x: f32[8{dp}, 4], %b: i32[3]"),
    body("%r = moai.rand %k, %c {global_shape = [16], splits = [[0, 8, 2]]} : f32[8]", "%k: i64[2], %c: i64[]"),
    body(
        "%o, %l = moai.sdpa %q, %k, %k, _ {is_causal = true, scale = 0.5} : f32[2, 3, 4, 8], f32[2, 3, 4]",
        "%q: f32[2, 3, 4, 8], %k: f32[2, 3, 5, 8]",
    ),
    ring(),
    ring(f"{QUERY}, {KEY}, %m: bool[8{{dp}}, 16]", "%m"),
    ring(f"{QUERY}, {KEY}, %m: f32[4{{tp}}, 1, 16]", "%m"),
    ring(f"{QUERY}, %k: f32[2, 4{{tp}}, 8{{dp}}, 2]", attrs='axis = "dp", is_causal = true'),
    f"{MESH}func @g(%x: f32[8{{dp}}]) -> (f32[8{{dp}}]) {{ return %x }}\n"
    "func @f(%x: f32[8{dp}]) -> () { %y = call @g %x : f32[8{dp}] return }",
]


@pytest.mark.parametrize("text", SOUND)
def test_a_sound_module_passes(text: str) -> None:
    load(text)


UNSOUND = [
    (body("%y = call @g %x : f32[8]"), "`call`: no function `@g` is defined above"),
    (body("%y = call @f %x : f32[8]"), "`call`: no function `@f` is defined above"),
    (body("%y = aten.view %x {size = [4, 16]} : f32[4, 16]"), "differ in their elements"),
    (body("%y = aten.view %x {size = [4, 16]} : f32[4, 32]"), "attribute `size` is `[4, 16]`, the result `f32[4, 32]`"),
    (body("%y = aten.view %x : f32[4, 32]"), "attribute `size` is `none`"),
    (body("%y = aten.full {size = [4], fill_value = 1} : f32[8]"), "attribute `size` is `[4]`, the result `f32[8]`"),
    (body("%y = aten.mm %x, %x : f32[8, 16]"), "size k is 16 in one place and 8 in another"),
    (body("%y = aten.mm %x, %x, %x : f32[8, 16]"), "it has 3 operands, not 2"),
    (body("%y = aten.mm %x, _ : f32[8, 16]"), "operand 1 is no value"),
    (body("%y = aten.neg %x : f32[8{dp:3}]"), "axis `dp`, 2 ranks at stride 3, does not divide dim 0 of 8"),
    (body("%y = aten.neg %x : f32[9{dp:6}]"), "axis `dp`, 2 ranks at stride 6, does not divide dim 0 of 9"),
    (body("%y = aten.neg %x : f32[10{tp:3, dp:1}]"), "axis `tp` cuts dim 0 unevenly, so that no other axis can"),
    (
        body("%y = aten.sum %x : f32[] +dp", "%x: f32[9{dp:5}]"),
        "over `dp` it cannot turn sharded 0:5 into partial: its rule is",
    ),
    (
        body("%y = aten.view %x {size = [18]} : f32[18{dp:9}]", "%x: f32[9{dp:5}, 2]"),
        "over `dp` it cannot turn sharded 0:5 into sharded 0:9: its rule is",
    ),
    (body("%y = aten.neg %x : f32[8{dp:0}]"), "axis `dp` splits dim 0 with stride 0"),
    (body("%y = aten.neg %x : f32[8{dp, tp:2}]"), "overlap"),
    (body("%y = aten.neg %x : f32[8{dp:1, tp:2}]"), "out of order: the larger stride stands first"),
    (body("%y = aten.neg %x : f32[8{dp}] +dp"), "axis `dp` occurs twice"),
    (body("%y = aten.neg %x : f32[8{dp}, 8{dp}]"), "axis `dp` occurs twice"),
    (body('%y = moai.all_reduce %x {axis = "pp"} : f32[8, 16]'), 'attribute `axis` is `"pp"`, no axis of the mesh'),
    (body("%y = moai.all_reduce %x : f32[8, 16]"), "attribute `axis` is `none`"),
    (
        body('%y = moai.all_reduce %x {axis = "tp"} : f32[8]', "%x: f32[8{tp}]"),
        "over `tp` it turns partial into replicated, not sharded into replicated: operand `f32[8{tp}]`, "
        "result `f32[8]`",
    ),
    (body('%y = moai.all_reduce %x {axis = "tp"} : f32[4]', "%x: f32[8] +tp"), "differ in more than their layout"),
    (body('%y = moai.all_reduce %x {axis = "tp"} : bf16[8]', "%x: f32[8] +tp"), "differ in more than their layout"),
    (body('%y = moai.all_reduce %x {axis = "tp"} : f32[8{dp}]', "%x: f32[8] +tp"), "changes more than axis `tp`"),
    (body('%y = moai.all_to_all %x {axis = "tp"} : f32[8{tp}]', "%x: f32[8{tp}]"), "it turns sharded into sharded"),
    (body('%y = moai.part %x {axis = "mb", index = 2, count = 2, dim = 0, stride = 1} : f32[4, 16]'), "no part 2 of 2"),
    (
        body('%y = moai.part %x {axis = "mb", index = 0, count = 3, dim = 0, stride = 1} : f32[4, 16]'),
        "divide into 3 parts",
    ),
    (
        body('%y = moai.part %x {axis = "mb", index = 0, count = 2, dim = 0, stride = 1} : f32[2, 16]'),
        "[2, 16], not [4",
    ),
    (body('%y = moai.part %x {axis = "mb", index = 0, count = 2, dim = 2, stride = 1} : f32[4, 16]'), "no dim 2"),
    (body('%y = moai.part %x {axis = "mb", count = 2, dim = 2, stride = 1} : f32[4, 16]'), "`index` is `none`"),
    (body("%y = moai.join %x, %x {dim = 0, stride = 8} : f32[16, 8]"), "is no part of `f32[16, 8]`"),
    (body("%y = moai.accumulate %x, %k : f32[8, 16]"), "the sum is `f32[8, 16]`, an operand `i64[2]`"),
    (body("%y = moai.accumulate %x : f32[8, 16]"), "it takes a sum, absent at first, and what is added to it"),
    (body("%y = moai.accumulate %x, _ : f32[8, 16]"), "it takes a sum, absent at first, and what is added to it"),
    (body("%y = moai.add_to %x, %x : bf16[8, 16]"), "the sum is `f32[8, 16]`, the result `bf16[8, 16]`"),
    (body("%y = moai.add_to %x, %k : f32[8, 16]"), "the sum is `f32[8, 16]`, what is added to it `i64[2]`"),
    (
        body("%y = aten.mm %x, %w : f32[8{dp}, 4] +tp", "%x: f32[8{dp}, 16{tp}], %w: f32[16, 4]"),
        "`aten.mm`: over `tp` it cannot turn sharded 1:4, replicated into partial: its rule is m k, k n -> m n",
    ),
    (
        body("%y = aten.add.Tensor %x, %w : f32[8{dp}]", "%x: f32[8{dp}], %w: f32[5]"),
        "`aten.add.Tensor`: its operands, results and attributes do not fit together (f32[8{dp}], f32[5], f32[8{dp}])",
    ),
    (
        body("%y = aten.relu %x : f32[8] +tp", "%x: f32[8] +tp"),
        "`aten.relu`: over `tp` it cannot turn partial into partial: its rule is d0 -> d0",
    ),
    (
        body("%y = aten.full {size = [8], fill_value = 1} : f32[8] +tp"),
        "`aten.full`: over `tp` it cannot turn nothing into partial",
    ),
    (body("%y = moai.fold_key %x {instance = 0} : i64[2]"), "a key is `i64[2]`, not `f32[8, 16]`"),
    (body("%y = moai.fold_key %k {instance = -1} : i64[2]"), "attribute `instance` is `-1`, not a whole number"),
    (body('%y = moai.checked %x, %x {message = "no"} : f32[8, 16]'), "what is asked is bools, or codes that are i32"),
    (body('%y = moai.checked %x, %k {message = "no"} : f32[8]'), "the result is `f32[8]`, not `f32[8, 16]`"),
    (body("%y = moai.checked %x, %b : f32[8, 16]", "%x: f32[8, 16], %b: bool[]"), "attribute `message` is no text"),
    (body("%y = moai.rand %x : f32[8]"), "the key is `i64[2]`, not `f32[8, 16]`"),
    (body("%y = moai.rand %k, %x {splits = [[0, 4, 2]]} : f32[8]"), "a coordinate is one i64, not `f32[8, 16]`"),
    (body("%y = moai.rand %k {splits = [[0, 4, 2]]} : f32[8]"), "it has 1 operands, not 2"),
    (body("%y = moai.rand %k {splits = 3} : f32[8]"), "attribute `splits` is `3`, not a list"),
    (body("%y, %z = moai.sdpa %x, %x, %x, _ : f32[8], f32[8]"), "`[8, 16]` is not of the form b, h, q, d"),
    (
        body("%y, %z = moai.sdpa %q, %q, %q, %x : f32[2, 1, 4, 3], f32[2, 1, 4]", "%x: f32[8, 9], %q: f32[2, 1, 4, 3]"),
        "the mask `f32[8, 9]` does not broadcast to [2, 1, 4, 4]",
    ),
    (
        body("%y, %z = moai.sdpa %q, %q, %q, _ {is_causal = 1} : f32[1, 1, 1, 1], f32[1, 1, 1]", "%q: f32[1, 1, 1, 1]"),
        "attribute `is_causal` is `1`, not true or false",
    ),
    (gru(operands="%x, %h, [%w, %u]"), "recurrent layers take an input, a list of states and a list of parameters"),
    (gru("num_layers = 1"), "attribute `mode` is `none`, not one of lstm, gru, rnn_tanh, rnn_relu"),
    (gru(GRU.replace("= false", "= 0")), "attributes `has_biases` and `bidirectional` are to be true or false"),
    (gru(GRU.replace("= 1", "= 0")), "attribute `num_layers` is `0`, not a number of layers"),
    (gru(GRU.replace("[]", "3")), "attribute `batch_sizes` is a list"),
    (gru(GRU.replace("gru", "lstm")), "lstm layers have 2 states, not 1"),
    (gru(operands="%x, [%h], [%w]"), "1 parameters are not 2 to 5 for each layer and direction"),
    (gru(operands="%h, [%x], [%w, %u]"), "size t is 1 in one place and 5 in another"),
    (gru(made="f32[5, 8{dp}, 3], f32[1, 7, 3]"), "size b is 8 in one place and 7 in another"),
    (gru(made="f32[5, 8, 3], f32[1, 8{dp}, 3]"), "`moai.recurrent`"),
    (recorded_gru(saved="true"), "attribute `saved` is `true`, not a number of values"),
    (recorded_gru(saved="-1"), "attribute `saved` is `-1`, not a number of values"),
    (recorded_gru(saved="0"), "it has 3 results, not 2"),
    (
        recorded_gru(record="f32[5, 8{dp}, 1]"),
        "the record of these layers is of shape `[5, 8, 24]`, not `[5, 8, 1]`",
    ),
    (gru_backward(record="f32[5, 4, 24]"), "the record of these layers is of shape `[5, 8, values]`"),
    (gru_backward(record="f32[5, 8, 24]"), "`moai.recurrent_backward`"),
    (gru_backward(grads="_, _"), "the second operand is a list of a gradient, or `_`"),
    (gru_backward(wanted="true"), "attribute `wanted` is `[true]`, not a list of a bool for each"),
    (gru_backward(wanted="true, true, true, true"), "it has 2 results, not 4"),
    (gru_backward(made="f32[9, 3] +dp"), "the gradient of `[9, 4]` is of shape `[9, 3]`"),
    (gru_backward(made="f32[9, 4]"), "`moai.recurrent_backward`"),
    (ring(attrs='axis = "pp"'), 'attribute `axis` is `"pp"`, no axis of the mesh [dp=2, tp=4]'),
    (ring(attrs="scale = 0.5"), "attribute `axis` is `none`"),
    (ring(attrs='axis = "dp", is_causal = 1'), "attribute `is_causal` is `1`, not true or false"),
    (ring(attrs='axis = "dp", stripes = 4'), "attribute `stripes` is `4`, and `dp` has 2 ranks"),
    (
        ring(attrs='axis = "dp", stripes = 2'),
        "over `dp` `f32[2, 4{tp}, 8{dp}, 2]` is to be sharded 2:1 in a ring",
    ),
    (ring(f"{QUERY}, %k: f32[2, 4{{tp}}, 16{{dp}}, 3]"), "size d is 2 in one place and 3 in another"),
    (ring().replace("dp=2", "dp=1"), "`moai.ring_sdpa`: one rank is no ring"),
    (ring(f"{QUERY}, {KEY}, %m: bool[]", "%m"), "a mask without dims has no columns: `aten.view` to size [1, 1]"),
    (ring(f"{QUERY}, %k: f32[2, 4, 15, 2]"), "8 rows and 15 keys do not fall into 2 blocks each"),
    (
        ring(attrs='axis = "dp", is_causal = true'),
        "causal attention in blocks takes as many keys as rows, not 16 for 8",
    ),
    (
        ring(f"{QUERY}, {KEY}, %m: bool[8{{dp}}, 8]", "%m"),
        "the mask `bool[8{dp}, 8]` does not broadcast to [2, 4, 8, 16]",
    ),
    (
        ring(f"{QUERY}, %k: f32[2, 4{{tp}}, 16, 2]"),
        "over `dp` `f32[2, 4{tp}, 16, 2]` is to be sharded 2:8 in a ring",
    ),
    (
        ring(f"{QUERY}, %k: f32[2, 4{{tp}}, 16{{dp:1}}, 2]"),
        "over `dp` `f32[2, 4{tp}, 16{dp:1}, 2]` is to be sharded 2:8 in a ring",
    ),
    (
        ring(f"{QUERY}, {KEY}, %m: bool[8, 16{{dp}}]", "%m"),
        "over `dp` `bool[8, 16{dp}]` is to be sharded 0:4 in a ring",
    ),
    (ring(made=PLAIN.replace("4", "4{tp}")), "over `dp` `f32[2, 4{tp}, 8, 2]` is to be sharded 2:4 in a ring"),
    (
        ring("%q: f32[2, 4, 8{dp, tp}, 2], %k: f32[2, 4, 16{dp}, 2]", made=PLAIN.replace("8", "8{dp, tp}")),
        "over `tp` it cannot turn sharded 2:1, replicated, replicated into sharded 2:1, sharded 2:1: its "
        "rule is b h (s q!) d!",
    ),
    (f"{MESH}func @f(%x: f32[8{{dp:3}}]) -> () {{ return }}", "in function `@f`: type `f32[8{dp:3}]`: axis `dp`"),
    (
        "func @f(%x: f32[8] weight) -> () { return }",
        "parameter 0 has the role `weight`; there are `buffer`, `constant`",
    ),
    (
        "func @f(%x: f32[8]) -> (f32[8] input) { return %x }",
        "result 0 has the role `input`; there are `grad`, `output`",
    ),
]


@pytest.mark.parametrize(("text", "message"), UNSOUND)
def test_what_does_not_hold_is_said(text: str, message: str) -> None:
    with pytest.raises(Diagnostic) as caught:
        load(text, "bad.moai")
    first, *rest = str(caught.value).splitlines()
    assert message in first
    assert first.startswith("bad.moai:")
    assert "^" in rest[1]


CALL = [
    ("f32[8], f32[4]", "%a, %b : f32[8]", ""),
    ("f32[8], f32[4]", "%b, %a : f32[8]", "operand 0 is `f32[4]`, `@g` takes `f32[8]`"),
    ("f32[8], f32[4]", "%a : f32[8]", "1 operands, `@g` takes 2"),
    ("f32[8], f32[4]", "%a, %b : f32[4]", "result 0 is `f32[4]`, `@g` gives `f32[8]`"),
    ("f32[8], f32[4]", "%a, [%b] : f32[8]", "a call takes values, no lists and no absent operands"),
    ("f32[8{dp}], f32[4]", "%a, %b : f32[8{dp}]", "operand 0 is `f32[8]`, `@g` takes `f32[8{dp}]`"),
]


@pytest.mark.parametrize(("params", "call", "message"), CALL)
def test_calls_match_their_callee(params: str, call: str, message: str) -> None:
    one, other = params.split(", ")
    callee = f"func @g(%x: {one}, %y: {other}) -> ({one}) {{ return %x }}\n"
    text = f"{MESH}{callee}func @f(%a: f32[8], %b: f32[4]) -> () {{ %r = call @g {call} return }}"
    if message:
        with pytest.raises(Diagnostic) as caught:
            load(text)
        assert message in str(caught.value)
    else:
        load(text)


def of(*ops: Op, params: tuple[Value, ...] = (), results: tuple[Value, ...] = (), mesh: Mesh | None = None) -> Module:
    return Module((Function("f", params, ops, results),), mesh or Mesh())


def unsound(module: Module) -> str:
    with pytest.raises(Invalid) as caught:
        verify(module)
    return str(caught.value)


def test_what_text_cannot_say_is_checked_too() -> None:
    x, y = Value(F8, "x"), Value(F8, "y")
    neg = Op("aten.neg", (x,), (y,))
    verify(of(neg, params=(x,), results=(y,)))
    assert "operand `%x` of type `f32[8]` is not defined above" in unsound(of(neg))
    assert "a result is defined already" in unsound(of(neg, neg, params=(x,)))
    assert "a result is defined already" in unsound(of(Op("aten.neg", (x,), (x,)), params=(x,)))
    assert "a result is defined already" in unsound(of(Op("aten.neg", (), (x, x))))
    assert "result 0, `%y`, is not defined" in unsound(of(params=(x,), results=(y,)))
    assert "two parameters are one value" in unsound(of(params=(x, x)))
    assert "an op is called `namespace.name`, or `call`" in unsound(of(replace(neg, name="neg"), params=(x,)))
    assert "another function has this name" in unsound(Module((*of(params=(x,)).functions, *of().functions)))


def test_attributes_are_literals() -> None:
    lists: dict[str, Attr] = {"dims": [1, 2]}  # pyright: ignore[reportAssignmentType]
    assert "attribute `dims` is `[1, 2]`, which is no literal" in unsound(of(Op("aten.a", attrs=lists)))
    assert "`two words` is no name for an attribute" in unsound(of(Op("aten.a", attrs={"two words": 1})))
    assert "its side is `left`" in unsound(of(Op("aten.a", loc=Location(side="left"))))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (TensorType("f31", (8,)), "there is no element type `f31`"),
        (TensorType("f32", (-1,)), "a size is negative"),
        (TensorType("f32", (8,), Layout((Split("tp", 0, 4),))), "`tp` is no axis of the mesh [dp=2]"),
        (TensorType("f32", (8,), Layout((Split("dp", 1, 4),))), "axis `dp` splits dim 1, but there are 1 dims"),
        (TensorType("f32", (8,), Layout((), ("tp",))), "`tp` is no axis of the mesh [dp=2]"),
    ],
)
def test_types_are_legal(tensor: TensorType, message: str) -> None:
    assert message in unsound(of(params=(Value(tensor),), mesh=Mesh((("dp", 2),))))


def test_roles_fit_what_they_describe() -> None:
    x = Value(F8)
    function = Function("f", (x,), (), (x,))
    assert "1 parameters have 2 roles" in unsound(Module((replace(function, param_roles=(Role(), Role())),)))
    assert 'the label "w" but no role' in unsound(Module((replace(function, result_roles=(Role("", "w"),)),)))


def test_meshes_are_legal() -> None:
    assert "two axes of one name" in unsound(Module((), Mesh((("dp", 2), ("dp", 3)))))
    assert "has no ranks" in unsound(Module((), Mesh((("dp", 0),))))


def test_the_neighborhood_is_shown() -> None:
    x = Value(F8, "x")
    values = [Value(F8) for _ in range(9)]
    ops = [Op("aten.neg", (x,), (value,)) for value in values]
    ops[5] = Op("moai.rand", (x,), (values[5],))
    assert unsound(of(*ops, params=(x,))) == (
        "error: in function `@f`: `moai.rand`: the key is `i64[2]`, not `f32[8]`\n"
        "    … 2 ops\n"
        "    %2 = aten.neg %x : f32[8]\n"
        "    %3 = aten.neg %x : f32[8]\n"
        "    %4 = aten.neg %x : f32[8]\n"
        "  > %5 = moai.rand %x : f32[8]\n"
        "    %6 = aten.neg %x : f32[8]\n"
        "    %7 = aten.neg %x : f32[8]\n"
        "    %8 = aten.neg %x : f32[8]"
    )


def test_big_modules_are_checked_fast() -> None:
    x = Value(F8, "x")
    values = [x, *(Value(F8) for _ in range(25_000))]
    ops = [Op("aten.neg", (old,), (new,)) for old, new in pairwise(values)]
    start = time.process_time()
    verify(of(*ops, params=(x,)))
    assert time.process_time() - start < 1
