"""The kernels of a plan for GPUs that are not here: generated, compiled, counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from kernel_pages import small_llama

from moaic.capture.trace_only import Sample
from moaic.cli import main
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import load
from moaic.predict.kernel_cache import MadeKernels
from moaic.predict.kernel_report import CompiledFunction, Row, lines, made_of, program_of, summary
from moaic.runtime.codegen import cross_compile
from moaic.runtime.host.gpu_specs import TARGETS, target_of
from tests.predict.square import PLAN

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Inductor imports what warns of itself."""

FUSES_MORE = torch.__version__ >= "2.14"
"""Whether Inductor makes one kernel less of a layer than it did."""

TRITON = {
    "layers.fwd": 9 if FUSES_MORE else 10,
    "layers.bwd": 10,
    "step.0": 5,
    "step.1": 1,
    "step.2": 6,
    "step.3": 2,
}
"""Calls of Triton kernels in each function of a small Llama's data-parallel plan; one layer stands for all."""

PRODUCTS = {"layers.fwd": 8, "layers.bwd": 15, "step.2": 3}
"""Matrix products that are left to the maker's library, and attention, one call to PyTorch's."""


@pytest.fixture(scope="module")
def llama() -> Module:
    return small_llama(Sample(batch=8, sequence=128))


ONE_OF_EACH_MAKER = ("sm_90", "gfx942")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each in ONE_OF_EACH_MAKER else pytest.mark.exact) for each in sorted(TARGETS)],
)
def test_a_llama_becomes_few_kernels_and_none_spills(llama: Module, name: str) -> None:
    made = list(made_of(llama, target_of(name)))
    triton, products = Counter[str](), Counter[str]()
    for each in made:
        counts = products if each.binary is None else triton
        counts[each.row.function] += each.row.calls
        assert not each.row.spills, f"{each.row.kernel} of {each.row.function} spills"
    assert triton == TRITON
    assert products == PRODUCTS
    for each in made:
        assert_is_for(each, name)


def assert_is_for(made: CompiledFunction, name: str) -> None:
    """What was compiled is code of that GPU, and says how much of the GPU it takes."""
    row, target = made.row, TARGETS[name]
    assert row.nbytes > 0
    assert row.seconds >= row.nbytes / target.bandwidth
    if made.binary is None:
        assert row.flops > row.nbytes, "a product of matrices"
        return
    assert made.binary.code[:4] == b"\x7fELF"
    assert row.registers is not None
    assert 0 < row.registers <= 256
    assert row.shared is not None
    assert row.shared <= target.shared


def test_the_command_prints_a_table_and_writes_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOAI_CACHE", str(tmp_path / "cache"))
    plan, out = tmp_path / "plan.moai", tmp_path / "kernels"
    plan.write_text(PLAN, encoding="utf-8")
    assert main(["kernels", str(plan), "--target", "sm_80", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "run once a step\n" in printed
    assert "2 kernels, 1 of them Triton's, 0 with spills; 2 launches a step: " in printed
    table = json.loads((out / "kernels.json").read_text(encoding="utf-8"))
    product, square = table["kernels"]
    assert (table["target"], product["kernel"], product["registers"]) == ("sm_80", "extern_kernels.mm", None)
    assert product["flops"] == 2 * 32 * 32 * 48, "32 of 64 rows"
    assert square["nbytes"] == 2 * 4 * 32 * 48, "read once, written once"
    (known,) = MadeKernels(TARGETS["sm_80"], tmp_path / "cache").known.values()
    assert [kernel.nbytes for kernel in known] == [product["nbytes"], square["nbytes"]], "remembered for the planner"
    folder = out / square["function"]
    assert (folder / f"{square['kernel']}.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "tl.store" in (folder / f"{square['kernel']}.py").read_text(encoding="utf-8")


def test_the_command_says_where_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOAI_CACHE", str(tmp_path / "cache"))
    plan = tmp_path / "plan.moai"
    plan.write_text(PLAN, encoding="utf-8")
    assert main(["kernels", str(plan), "--target", "sm_80", "-o", "/proc/nowhere"]) == 2
    assert capsys.readouterr().err == "error: cannot write /proc/nowhere: No such file or directory\n"


NARROW = """\
func @narrow(%x: bf16[64, 32] input "x", %w: f8e4m3fn[32, 48] param "w", %s: f32[1, 1] param "s") -> (bf16[64, 48]) {
  %n = aten._to_copy %x {dtype = "f8e4m3fn"} : f8e4m3fn[64, 32]
  %y = moai.scaled_mm %n, %w, %s, %s {dtype = "bf16"} : bf16[64, 48]
  return %y
}
"""


def test_eight_bit_floats_need_a_gpu_that_has_them() -> None:
    program = program_of(load(NARROW))
    with pytest.raises(Diagnostic, match=r"in eight-bit floats, and NVIDIA A100 .* \(sm_80\) has none\nhint: "):
        list(made_of(program, TARGETS["sm_80"]))
    (product,) = [each.row for each in made_of(program, TARGETS["sm_90"]) if each.binary is None]
    assert (product.kernel, product.heavy) == ("extern_kernels._scaled_mm", "f8e4m3fn")
    assert product.flops == 2 * 64 * 32 * 48


ODD = """\
func @odd(%x: f8e4m3fn[32, 24] input "x", %w: f8e4m3fn[24, 48] input "w", %s: f32[1, 1] input "s") -> (bf16[32, 48]) {
  %y = moai.scaled_mm %x, %w, %s, %s {dtype = "bf16"} : bf16[32, 48]
  return %y
}
"""


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_eight_bit_products_are_over_whole_blocks(target: str) -> None:
    """As those over a batch of any size in the gradients of weights: 24 is no multiple of 16, with 8 zeros it is."""
    made = [each.row for each in made_of(program_of(load(ODD)), TARGETS[target])]
    (product,) = [row for row in made if row.heavy]
    assert product.nbytes == 32 * (32 + 48) + 4 + 2 * 32 * 48


def test_the_roofline_is_the_longer_of_arithmetic_and_traffic() -> None:
    target = TARGETS["sm_90"]
    assert target.seconds(flops=67e12, nbytes=1.0) == 1.0
    assert target.seconds(flops=1.0, nbytes=3.35e12) == 1.0
    assert target.seconds(flops=989e12, nbytes=1.0, heavy="bf16") == 1.0
    assert target.seconds(flops=1979e12, nbytes=1.0, heavy="f8e4m3fn") == 1.0


def test_a_step_is_what_its_functions_run_times_what_these_call() -> None:
    row = Row("layer", "", 3, "k", 2, ("mul",), 16, 0, 0, nbytes=1e6, flops=1e6, heavy=None, seconds=1e-3)
    assert summary([row]).endswith("6 launches a step: 6 ms at the roofline, 6.02 ms with 4 us for each launch")
    assert next(iter(lines([row]))) == "@layer, run 3 times a step"


def test_an_unknown_target_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.moai"
    plan.write_text(PLAN, encoding="utf-8")
    assert main(["kernels", str(plan), "--target", "sm_9"]) == 2
    assert "error: there is no target `sm_9`\nhint: choose one of sm_90 (NVIDIA H100 SXM)" in capsys.readouterr().err


def test_a_pytorch_that_lacks_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_compile, "NEEDED", ("torch._inductor.scheduler:has_no_such_thing",))
    program = program_of(load(PLAN))
    with pytest.raises(Diagnostic, match=r"has no torch\._inductor\.scheduler\.has_no_such_thing, by which kernels"):
        list(made_of(program, TARGETS["sm_90"]))
