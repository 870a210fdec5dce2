"""The functions of the vendors' libraries are those of PyTorch."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._inductor.codegen import triton as codegen

from moaic.runtime.emulation.device_functions import FUNCTIONS, called

RARE = {
    # Reached by no op of the IR.
    "fast_tanhf",
    "mul_rn",
}


def used() -> set[str]:
    """What Inductor may write into a kernel."""
    text = Path(inspect.getfile(codegen)).read_text(encoding="utf-8")
    return set(re.findall(r"libdevice\.(\w+)", text)) - RARE


def symbols(vendor: str, name: str) -> list[str]:
    """The symbols behind a function of a vendor's library."""
    library: Any = importlib.import_module(f"triton.language.extra.{vendor}.libdevice")
    member = getattr(library, name, None)
    if member is None:
        return []
    return re.findall(r"\"(__(?:nv|ocml)_\w+)\"", inspect.getsource(inspect.unwrap(member)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("vendor", ["cuda", "hip"])
def test_every_function_that_inductor_writes_is_known(vendor: str) -> None:
    unknown: set[str] = set()
    for symbol in {symbol for name in used() for symbol in symbols(vendor, name)}:
        base = re.sub(r"^__(nv|ocml)_|_f(32|64)$", "", symbol)
        if base not in FUNCTIONS and base[:-1] not in FUNCTIONS:
            unknown.add(symbol)
    assert not unknown


def rounded(x: Tensor) -> Tensor:
    return torch.round(x).long()


OF_ONE_ARGUMENT: list[tuple[str, Any]] = [
    ("__nv_erff", torch.erf),
    ("__nv_exp", torch.exp),
    ("__nv_rsqrtf", torch.rsqrt),
    ("__ocml_tanh_f32", torch.tanh),
    ("__ocml_log1p_f64", torch.log1p),
    ("__nv_nearbyintf", torch.round),
    ("__nv_isnanf", torch.isnan),
    ("__nv_signbitd", torch.signbit),
    ("__nv_llrintf", rounded),
]


@pytest.mark.parametrize(("symbol", "expected"), OF_ONE_ARGUMENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_function_is_that_of_pytorch(symbol: str, expected: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 0.5, 1.5, 2.5, 7.0], dtype=dtype)
    made = torch.from_numpy(called(symbol, [x.numpy()]))
    assert made.dtype == expected(x).dtype
    torch.testing.assert_close(made, expected(x), rtol=2e-7, atol=0)


def test_functions_of_several_arguments() -> None:
    x, y = numpy.array([2.0, -8.0], numpy.float32), numpy.array([3.0, 2.0], numpy.float32)
    assert called("__nv_powf", [x, y]).tolist() == [8.0, 64.0]
    assert called("__ocml_fmod_f32", [x, y]).tolist() == [2.0, 0.0]
    assert called("__nv_fmaf", [x, y, x]).tolist() == [8.0, -24.0]
    assert called("__nv_ldexpf", [x, numpy.array([1, 2], numpy.int32)]).tolist() == [4.0, -32.0]


def test_another_function_is_named() -> None:
    with pytest.raises(NotImplementedError, match="__nv_normcdfinvf is not known to the emulation"):
        called("__nv_normcdfinvf", [numpy.zeros(1, numpy.float32)])
