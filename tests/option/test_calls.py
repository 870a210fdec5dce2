"""The table of mapped calls: complete, documented, and fully undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moaic.device import torch_module, torch_private
from moaic.option import calls, cuda, disable_advanced_parallelization, enable_advanced_parallelization
from moaic.option.compile_modules import AutoCompile
from moaic.option.page import with_table
from moaic.options import Choices
from moaic.runtime.protocol.aten_schema import signature_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cuda.md"
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
IS_PINNED = f"torch=={torch.__version__.partition('+')[0]}" in PINS


def everything() -> dict[tuple[str, str], Any]:
    """Every attribute of every owner of a mapped call, mapped or not."""
    owners = {id(mapping.point.owner): mapping.point.owner for mapping in calls.mappings(AutoCompile(Choices()))}
    held: list[tuple[Any, dict[str, Any]]] = [(owner, owner.__dict__) for owner in owners.values()]
    return {
        (repr(owner), name): value
        for owner, attributes in held
        for name, value in attributes.items()
        if not name.startswith("__") or name in ("__init__", "__call__", "__new__")
    }


def test_switched_off_everything_is_what_it_was() -> None:
    torch_module.init()
    torch_private.read_tables_of_functions()
    before = everything()
    mapped = [mapping.point for mapping in calls.mappings(AutoCompile(Choices()))]
    enable_advanced_parallelization()
    enable_advanced_parallelization(dp=1)
    try:
        between = everything()
        for key in ((repr(point.owner), point.name) for point in mapped):
            assert between[key] is not before.get(key), key
    finally:
        disable_advanced_parallelization()
    after = everything()
    assert before.keys() == after.keys()
    changed = [key for key, value in before.items() if value is not after[key]]
    assert not changed


@pytest.mark.skipif(not IS_PINNED, reason="the page tells the calls of the PyTorch that constraints.txt pins")
def test_the_page_has_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "write it anew: python -m moaic.option.page docs/cuda.md"


def test_every_function_that_takes_a_device_is_mapped() -> None:
    mapped = {mapping.call for mapping in calls.mappings(AutoCompile(Choices()))}
    wanted: set[str] = set()
    for name in torch_private.aten_ops():
        packet = name.partition(".")[0].removeprefix("aten::")
        overload = torch_private.overload_of(name)
        if overload is None or packet.startswith("_"):
            continue
        if signature_of(overload).takes_device:
            wanted |= {f"torch.{packet}"} if hasattr(torch, packet) else set()
            wanted |= {f"torch.Tensor.{packet}"} if hasattr(torch.Tensor, packet) else set()
    # Names of the CPU alone: a file in memory, quantized tensors; and pinning, which the device answers.
    ours = {"torch.from_file", "torch.empty_quantized", "torch.Tensor.pin_memory", "torch.Tensor.is_pinned"}
    assert wanted - ours <= mapped


def test_every_name_of_torch_cuda_is_mapped_refused_or_kept() -> None:
    mapped = {mapping.call for mapping in calls.mappings(AutoCompile(Choices()))}
    for name in torch.cuda.__all__:
        assert (f"torch.cuda.{name}" in mapped) != (name in cuda.KEPT), name
