"""The products of experts by PyTorch's kernel for GPUs, which has a form for CPUs too, are those of plain loops."""

from __future__ import annotations

import pytest
import torch

from moaic.ir.verify import load
from moaic.runtime.codegen import gpu_grouped_mm, grouped_mm
from moaic.runtime.codegen.cross_compile import generated
from moaic.runtime.host.gpu_specs import target_of

MIXTURE = """// moai 1
func @mixture(%x: bf16[64, 32], %w: bf16[4, 48, 32], %ids: i64[64], %g: bf16[64, 48])
    -> (bf16[64, 48], bf16[4, 48, 32]) {
  %y = moai.grouped_mm %x, %w, %ids : bf16[64, 48]
  %gw = moai.grouped_outer %g, %x, %ids {count = 4} : bf16[4, 48, 32]
  return %y, %gw
}
"""

IDS = {
    "mixed": [2, 0, 1, 2, 2, 0, 1],
    "one matrix": [1] * 7,
    "none has the last": [0, 1, 0, 1, 1, 0, 0],
    "rows of no matrix": [3, 0, -1, 2, 7, 0, -5],
    "all of no matrix": [-1, 3, 4, -1, 5, 3, 3],
}

BLOCKS = """// moai 1
func @mixture(%x: bf16[1, 64, 32], %w: bf16[4, 48, 32], %ids: i64[64]) -> (bf16[2, 64, 48]) {
  %y = moai.grouped_mm %x, %w, %ids : bf16[2, 64, 48]
  return %y
}
"""


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_products_are_those_of_a_loop(ids: list[int]) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(7, 16).bfloat16(), torch.randn(7, 24).bfloat16()
    weight, rows = torch.randn(3, 24, 16).bfloat16(), torch.tensor(ids)
    torch.testing.assert_close(
        gpu_grouped_mm.grouped_mm(x, weight, rows), grouped_mm.grouped_mm(x, weight, rows), rtol=1e-2, atol=1e-2
    )
    torch.testing.assert_close(
        gpu_grouped_mm.grouped_outer(grad, x, rows, 3),
        grouped_mm.grouped_outer(grad, x, rows, 3),
        rtol=1e-2,
        atol=1e-2,
    )


def test_it_takes_rows_that_it_can_load() -> None:
    gpu = torch.device("cuda", 0)
    fits = torch.empty(3, 16, dtype=torch.bfloat16)
    assert gpu_grouped_mm.takes(gpu, fits)
    assert not gpu_grouped_mm.takes(torch.device("cpu"), fits)
    assert not gpu_grouped_mm.takes(gpu, fits.float())
    assert not gpu_grouped_mm.takes(gpu, fits, fits[:, :12])
    assert not gpu_grouped_mm.takes(gpu, fits[:0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_functions_for_gpus_call_it_once_for_all_matrices(target: str) -> None:
    kernels = generated(load(MIXTURE).main, target_of(target))
    (product,) = [kernel for kernel in kernels if "grouped" in kernel.name]
    assert product.calls == 2
    assert product.heavy == "bf16"
    assert product.flops == 2 * 64 * 48 * 32


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_functions_for_gpus_call_it_once_for_each_block() -> None:
    kernels = generated(load(BLOCKS).main, target_of("sm_90"))
    (product,) = [kernel for kernel in kernels if "grouped" in kernel.name]
    assert product.name == "extern_kernels._grouped_mm"
    assert product.calls == 2
