"""Compiled graphs with several scatters give correct values, whatever Inductor fuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moaic.capture.trace_only import take_call
from moaic.ir.graph import Module
from moaic.runtime.codegen.compile import compile_function
from moaic.runtime.interpreter import run_function

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Upscaled(nn.Module):
    """Interpolation below a convolution with a bias: four scatters, whose sum two kernels read."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        return functional.interpolate(self.convolution(image), scale_factor=2, mode="bilinear").pow(2).mean()


def test_what_reads_a_scattered_sum_comes_after_the_scatter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    taken = take_call(Upscaled(), {"image": torch.randn(4, 4, 7, 7)})
    function = taken.captured.function
    inputs = [torch.randn(param.type.shape) for param in function.params]
    expected = run_function(Module((function,)), function.name, inputs)
    for one, other in zip(compile_function(function, compiled=True)(list(inputs)), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
