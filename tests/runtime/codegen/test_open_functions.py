"""Functions with open sizes are compiled once and run at many sizes; where the compiler cannot, once more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moaic.ir.parser import parse
from moaic.ir.specialize import Specializer, symbols_of
from moaic.runtime.codegen.compile import OpenFunctions, compile_function, prepare_functions

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

TEXT = """// moai 1
sizes s0 = 36, s1 = 8

func @step(
    %x: f32[s1/2, s0, 8],
    %w: f32[8, 4],
    %g: f32[4],
    %key: i64[2] key
) -> (f32[s0*s1/2, 4], f32[s1/2, s0], f32[s1/2, s0]) {
  %v = aten.view %x {size = [s0*s1/2, 8]} : f32[s0*s1/2, 8]
  %m = aten.mm %v, %w : f32[s0*s1/2, 4]
  %r = aten.relu %m : f32[s0*s1/2, 4]
  %a = aten.add.Tensor %r, %g : f32[s0*s1/2, 4]
  %s = aten.sum.dim_IntList %x {dim = [2]} : f32[s1/2, s0]
  %d = aten.div.Tensor %s, _ {other = s0} : f32[s1/2, s0]
  %e = aten.mul.Tensor %d, _ {other = ratio[s0*s1, s0*s1 - 1]} : f32[s1/2, s0]
  %p = aten.constant_pad_nd %e {pad = [1, s0 - 1]} : f32[s1/2, 2*s0]
  %q = aten.slice.Tensor %p {dim = 1, start = 1, end = s0 + 1} : f32[s1/2, s0]
  %u = moai.rand %key : f32[s1/2, s0]
  return %a, %q, %u
}
"""

NUMBERS = [(36, 8), (40, 6), (16, 4), (37, 10), (2, 2), (3, 2), (36, 2)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_runs_at_all_sizes(compiled: bool) -> None:
    module = parse(TEXT)
    symbols = symbols_of(module)
    assert symbols is not None
    (at,) = prepare_functions([module.main], symbols, compiled=compiled)
    for given in NUMBERS:
        numbers = symbols.numbers(given)
        function = Specializer(numbers).function(module.main)
        *floats, _ = function.params
        inputs = [*(torch.randn(param.type.shape) for param in floats), torch.tensor([1, 2])]
        expected = compile_function(function, compiled=False)(list(inputs))
        for found, wanted in zip(at(numbers)(list(inputs)), expected, strict=True):
            torch.testing.assert_close(found, wanted)


def test_one_kernel_serves_many_sizes() -> None:
    module = parse(TEXT)
    symbols = symbols_of(module)
    assert symbols is not None
    functions = OpenFunctions([module.main], symbols)
    for given in NUMBERS[:4]:
        functions.at(0, symbols.numbers(given))
    assert functions.kernels == 1
    functions.at(0, symbols.numbers((2, 2)))
    assert functions.kernels == 2


TWO = """// moai 1
sizes s0 = 36

func @half(%x: f32[s0/2, 8]) -> (f32[s0/2, 8]) {
  %y = aten.tanh %x : f32[s0/2, 8]
  return %y
}
func @whole(%x: f32[s0, 8]) -> (f32[s0, 8]) {
  %y = aten.sin %x : f32[s0, 8]
  return %y
}
func @main(%x: f32[s0, 8]) -> (f32[s0, 8]) {
  %y = call @whole %x : f32[s0, 8]
  return %y
}
"""


def test_a_kernel_depends_on_its_function_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module = parse(TWO)
    symbols = symbols_of(module)
    assert symbols is not None
    half, whole, _ = module.functions
    OpenFunctions([half, whole], symbols)
    kept = set(tmp_path.glob("fxgraph/*/*"))
    OpenFunctions([whole], symbols)
    assert len(kept) == 2
    assert set(tmp_path.glob("fxgraph/*/*")) == kept
