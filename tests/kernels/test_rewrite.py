"""Kernels in place of ops: matches in captured steps, the condition for their use, and equal results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moaic.capture.trace_only import ModelSource, Sample, take_model
from moaic.ir.graph import Attr, Function, Module, Op, Value
from moaic.ir.verify import load
from moaic.passes.registry import run_passes
from moaic.predict.kernel_report import called_in, program_of
from moaic.runtime.codegen.cross_compile import generated
from moaic.runtime.codegen.lower_to_fx import run_ops
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.gpu_specs import TARGETS
from moaic.runtime.kernels.dispatch import measured_on, with_measured_kernels
from moaic.runtime.kernels.gains import IN_FUNCTIONS, KernelShape, winning_in_functions
from moaic.runtime.kernels.patterns.match import DefUse
from moaic.runtime.kernels.patterns.rewrite import RULES, with_kernels
from moaic.runtime.kernels.patterns.rule import KernelRule, Replacement

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Inductor imports what warns of itself."""

VOCABULARY = 40

LLAMA = ModelSource(
    "llama",
    {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    },
)
GPT2 = ModelSource(
    "gpt2",
    {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": VOCABULARY,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    },
)
SIZES = {**LLAMA.settings, "head_dim": 8}
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": ModelSource("qwen3", SIZES),
    "gemma": ModelSource("gemma", SIZES),
    "gemma, exact": ModelSource("gemma", {**SIZES, "hidden_act": "gelu"}),
}
SAMPLE = Sample(batch=2, sequence=9)
TOKENS = SAMPLE.batch * SAMPLE.sequence

RMS = {"moai.rms_norm": 1, "moai.rms_norm_of_sum": 4, "moai.rms_norm_backward": 5}
ROTARY = {"moai.rotary": 4, "moai.rotary_backward": 4}
SWIGLU = {"moai.swiglu": 2, "moai.swiglu_backward": 2}
GEGLU = {"moai.geglu": 2, "moai.geglu_backward": 2}
EXPECTED = {
    "llama": RMS | ROTARY | SWIGLU,
    "gpt2": {"moai.layer_norm": 1, "moai.layer_norm_of_sum": 4, "moai.layer_norm_backward": 5},
    "qwen3": {**RMS, "moai.rms_norm": 5, "moai.rms_norm_backward": 9} | ROTARY | SWIGLU,
    "gemma": RMS | ROTARY | GEGLU,
    "gemma, exact": RMS | ROTARY | GEGLU,
}


COUNTED = 7

NORM_WINS = {"norm": {"sm_90": {(1024, 1024): 1.2}}}
"""Gains of one kernel on one GPU."""


def always(name: str, shape: KernelShape, element: str) -> bool:
    return True


@pytest.fixture(scope="module")
def llama() -> Function:
    return without_logits(LLAMA)


def without_logits(source: ModelSource) -> Function:
    """A step of which nobody reads the logits."""
    function = take_model(source, SAMPLE).captured.function
    kept = [at for at, result in enumerate(function.results) if not is_logits(result)]
    results, roles = (tuple(some[at] for at in kept) for some in (function.results, function.result_roles))
    (alone,) = run_passes(Module((replace(function, results=results, result_roles=roles),)), "zero").functions
    return alone


def widened(function: Function) -> Function:
    """The function with float64 in the place of float32."""

    def wide(attr: Attr) -> Attr:
        return "f64" if attr == "f32" else attr

    values = {
        value: replace(value, type=replace(value.type, dtype=str(wide(value.type.dtype))))
        for value in function.values()
    }
    ops = [
        replace(
            op.with_operands(values),
            results=tuple(values[result] for result in op.results),
            attrs={name: wide(attr) for name, attr in op.attrs.items()},
        )
        for op in function.ops
    ]
    params, results = (tuple(values[value] for value in some) for some in (function.params, function.results))
    return replace(function, params=params, ops=tuple(ops), results=results)


def inputs_of(function: Function, most: int) -> list[Tensor]:
    """Drawn numbers; whole ones below `most`, of which every third is no label. A single one is a count."""
    random = torch.Generator().manual_seed(0)

    def drawn(value: Value) -> Tensor:
        dtype, shape = DTYPES[value.type.dtype], value.type.shape
        if dtype.is_floating_point:
            return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)
        if dtype == torch.bool:
            return torch.rand(shape, generator=random) > 0.5
        if not shape:
            return torch.tensor(COUNTED)
        whole = torch.randint(most, shape, generator=random)
        is_labels = "labels" in value.name
        return torch.where(torch.arange(whole.numel()).view(shape) % 3 == 0, -100, whole) if is_labels else whole

    return [drawn(param) for param in function.params]


def is_logits(value: Value) -> bool:
    return value.type.elements() == TOKENS * VOCABULARY and value.type.shape[-1] == VOCABULARY


def kernels_in(function: Function) -> Counter[str]:
    names = (op.name for op in function.ops if op.name.startswith("moai."))
    return Counter(name for name in names if "sdpa" not in name)


def assert_same(function: Function, rewritten: Function, most: int = VOCABULARY) -> None:
    inputs = inputs_of(function, most)
    for got, want in zip(run_ops(rewritten, inputs), run_ops(function, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_a_step_with_kernels_computes_the_same(llama: Function) -> None:
    check_step("llama", llama)


@pytest.mark.exact
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama"])
def test_so_does_one_with_other_norms_gates_and_heads(name: str) -> None:
    """GPT-2's first matrix is its last, too."""
    check_step(name, without_logits(MODELS[name]))


def check_step(name: str, step: Function) -> None:
    function = widened(step)
    rewritten = with_kernels(function, always)
    assert kernels_in(rewritten) == EXPECTED[name]
    assert_same(function, rewritten)


def functions_of(step: Function) -> list[Function]:
    """What one of two workers runs, in float64."""
    planned = run_passes(Module((step,)), "outline,recompute=saved,dp=2")
    return [widened(function) for function, _ in called_in(program_of(planned))]


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("gemma", marks=pytest.mark.exact)])
def test_so_do_the_functions_of_a_plan(name: str) -> None:
    """Every kernel is found in them, as a backward makes again what is cheap to make and reads the rest."""
    found = Counter[str]()
    for function in functions_of(without_logits(MODELS[name])):
        rewritten = with_kernels(function, always)
        if rewritten is not function:
            # Of what lies on one rank, the only row is asked for.
            assert_same(function, rewritten, most=1)
        found += kernels_in(rewritten)
    assert {*found} >= {*EXPECTED[name]}


def test_a_kernel_is_used_where_it_was_measured_to_win(llama: Function) -> None:
    function, asked = llama, list[tuple[str, KernelShape, str]]()

    def norms_win(name: str, shape: KernelShape, element: str) -> bool:
        asked.append((name, shape, element))
        return name == "norm"

    found = kernels_in(with_kernels(function, norms_win))
    assert found == {name: count for name, count in EXPECTED["llama"].items() if "norm" in name}
    assert {*asked} == {
        ("norm", (TOKENS, 16), "f32"),
        ("gated", (TOKENS, 24), "f32"),
        ("rotary", (2, 2, 9, 8), "f32"),
    }


def test_the_table_is_of_16_bits_on_one_gpu_and_of_shapes_that_a_tile_is_for() -> None:
    wins = measured_on("sm_90", NORM_WINS)
    assert wins("norm", (2048, 4096), "bf16")
    assert not wins("norm", (2048, 4096), "f32")
    assert not wins("norm", (512, 4096), "bf16")
    assert not wins("norm", (2048, 1 << 20), "bf16")
    assert not measured_on("sm_80", NORM_WINS)("norm", (2048, 4096), "bf16")


def test_the_kernels_in_functions_have_rules() -> None:
    assert {*IN_FUNCTIONS} == {*RULES}


def test_nothing_is_used_that_does_not_win(llama: Function) -> None:
    for target in TARGETS:
        if not winning_in_functions(target):
            assert with_measured_kernels(llama, target) is llama


def test_what_nobody_measured_is_not_looked_for(llama: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def rule(name: str) -> KernelRule:
        def look(uses: DefUse, op: Op) -> Replacement | None:
            looked.append(name)
            return None

        return look

    monkeypatch.setattr("moaic.runtime.kernels.patterns.rewrite.RULES", {name: (rule(name),) for name in RULES})
    assert with_measured_kernels(llama, "sm_80", NORM_WINS) is llama
    assert not looked
    assert with_measured_kernels(llama, "sm_90", NORM_WINS) is llama
    assert {*looked} == {"norm"}


NORM = """\
func @norm(%x: f64[3, 4], %residual: f64[3, 4], %w: f64[4]) -> (f64[3, 4], f64[3, 4], f64[3, 4]) {
  %h = aten.add.Tensor %x, %residual : f64[3, 4]
  %square = aten.pow.Tensor_Scalar %h {exponent = 2} : f64[3, 4]
  %sum = aten.sum.dim_IntList %square {dim = [1], keepdim = true} : f64[3, 1]
  %mean = aten.div.Tensor %sum, _ {other = 4} : f64[3, 1]
  %more = aten.add.Tensor %mean, _ {other = 1e-05} : f64[3, 1]
  %scale = aten.rsqrt %more : f64[3, 1]
  %normed = aten.mul.Tensor %h, %scale : f64[3, 4]
  %y = aten.mul.Tensor %w, %normed : f64[3, 4]
  %z = aten.mul.Tensor %h, %y : f64[3, 4]
  return %y, %normed, %z
}
"""


TURNED = """\
func @turned(%x: f64[2, 3, 5, 4{more}], %cos: f64[1, 1, 5, 4{more}], %sin: f64[1, 1, 5, 4{more}])
    -> (f64[2, 3, 5, 4{more}]) {{
  %second = aten.slice.Tensor %x {{dim = 3, start = 2, end = 4}} : f64[2, 3, 5, 2{more}]
  %first = aten.slice.Tensor %x {{dim = 3, start = 0, end = 2}} : f64[2, 3, 5, 2{more}]
  %away = aten.neg %second : f64[2, 3, 5, 2{more}]
  %across = aten.cat [%away, %first] {{dim = 3}} : f64[2, 3, 5, 4{more}]
  %a = aten.mul.Tensor %x, %cos : f64[2, 3, 5, 4{more}]
  %b = aten.mul.Tensor %across, %sin : f64[2, 3, 5, 4{more}]
  %y = aten.add.Tensor %a, %b : f64[2, 3, 5, 4{more}]
  return %y
}}
"""


@pytest.mark.parametrize(("more", "found"), [("", {"moai.rotary": 1}), (", 4", {})])
def test_only_what_turns_along_the_last_of_four_dims_is_rotary(more: str, found: dict[str, int]) -> None:
    function = load(TURNED.format(more=more)).main
    rewritten = with_kernels(function, always)
    assert kernels_in(rewritten) == found
    assert_same(function, rewritten)


def test_what_else_is_read_stays() -> None:
    function = load(NORM).main
    rewritten = with_kernels(function, always)
    assert [op.name for op in rewritten.ops] == ["moai.rms_norm_of_sum", *["aten.mul.Tensor"] * 2]
    assert_same(function, rewritten)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{other = 4}", "{other = 5}"),
        ("{exponent = 2}", "{exponent = 3}"),
        ("%w, %normed", "%x, %normed"),
    ],
)
def test_what_is_made_otherwise_is_left(old: str, new: str) -> None:
    assert old in NORM
    function = load(NORM.replace(old, new)).main
    assert with_kernels(function, always) is function


@pytest.mark.exact
def test_inductor_takes_kernels_for_a_gpu_that_is_not_here(llama: Function) -> None:
    """Each is one call, of which the fake tensors of a GPU say what it gives."""
    rewritten = with_kernels(llama, always)
    made = Counter(kernel.name for kernel in generated(rewritten, TARGETS["sm_90"]) for _ in range(kernel.calls))
    for name, count in EXPECTED["llama"].items():
        assert made[f"torch.ops.{name}.default"] == count
