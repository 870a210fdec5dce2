"""Calls of a program to cuda, and their results."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.utils.data import DataLoader

from moaic.ir.errors import Diagnostic

pytestmark = pytest.mark.usefixtures("mode")

THERE = torch.device("moai", 0)

CUDA: Any = torch.cuda
"""With names that its types leave out."""

BOUND_EARLY = torch.zeros
"""As a script has it that says `from torch import zeros` above the line."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.ones(2, device=torch.device("cuda"), pin_memory=False),
        lambda: torch.ones(2, device=0),
        lambda: torch.arange(2, device="cuda:0"),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.as_tensor([1.0], device="cuda"),
        lambda: torch.zeros(2).new_ones(2, device="cuda"),
        lambda: torch.rand_like(torch.zeros(2), device="cuda"),
        lambda: torch.zeros(2).cuda(),
        lambda: torch.zeros(2).cuda(0, non_blocking=True),
        lambda: torch.zeros(2).cuda("cuda:0"),
        lambda: torch.zeros(2).to("cuda", torch.float16, non_blocking=True),
        lambda: torch.zeros(2).to(device=torch.device("cuda", 0)),
        lambda: torch.zeros(2).pin_memory().to("cuda"),
        lambda: torch.zeros(2).type("torch.cuda.HalfTensor"),
        lambda: CUDA.HalfTensor([1.0, 2.0]),
        lambda: nn.Linear(2, 2, device="cuda").weight,
        lambda: nn.Linear(2, 2).cuda().weight,
        lambda: nn.Linear(2, 2).to("cuda:0").bias,
        lambda: nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight,
        lambda: nn.DataParallel(nn.Linear(2, 2)).cuda()(torch.ones(1, 2)),
    ],
)
def test_it_lies_there(make: Callable[[], Tensor]) -> None:
    made = make()
    assert made.device == THERE
    assert made.is_cuda


def test_what_is_there_already_stays() -> None:
    there = torch.zeros(2, device="cuda")
    assert there.cuda() is there
    assert there.to("cuda") is there
    assert not there.cpu().is_cuda


def test_default_device() -> None:
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).device == THERE
    finally:
        torch.set_default_device(None)
    with torch.device("cuda:0"):
        assert torch.zeros(2).device == THERE
    assert torch.zeros(2).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
@pytest.mark.parametrize("kind", ["torch.cuda.DoubleTensor", CUDA.DoubleTensor])
def test_default_tensor_type(kind: Any) -> None:
    torch.set_default_tensor_type(kind)
    try:
        made = torch.ones(2), torch.tensor([1.0]), nn.Linear(2, 2).weight
        assert {(each.device, each.dtype) for each in made} == {(THERE, torch.float64)}
        numbers: Any = range(4)
        shuffled: Any = DataLoader(numbers, batch_size=2, shuffle=True)
        assert len(list(shuffled)) == 2
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert torch.ones(2).device.type == "cpu"
    assert torch.ones(2).dtype == torch.float32


def test_one_device_is_available() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device("cuda:0")
    assert "moai" in torch.cuda.get_device_name(0)
    assert torch.cuda.get_device_properties("cuda").total_memory > 0
    assert torch.cuda.get_device_capability() == (8, 0)
    current = torch.accelerator.current_accelerator()
    assert current is not None
    assert current.type == "moai"


def test_memory_time_and_streams() -> None:
    before = torch.cuda.memory_allocated()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        held = torch.zeros(1000, device="cuda") + 1
    torch.cuda.current_stream().synchronize()
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0
    assert torch.cuda.memory_allocated("cuda") - before >= held.nbytes
    assert "allocated_bytes" in torch.cuda.memory_summary()
    torch.cuda.empty_cache()


def test_random_numbers_are_those_of_the_cpu() -> None:
    wanted = torch.rand(3, generator=torch.Generator().manual_seed(5))
    drawn = torch.rand(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(5))
    assert torch.equal(drawn.cpu(), wanted)
    torch.cuda.manual_seed_all(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda").cpu()
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda").cpu(), first)


def test_autocast() -> None:
    x = torch.ones(4, 4, device="cuda")
    with torch.autocast("cuda"):
        assert (x @ x).dtype == torch.get_autocast_gpu_dtype() == torch.float16
        assert torch.is_autocast_enabled()
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.get_autocast_dtype("cuda") == torch.bfloat16
    with pytest.warns(FutureWarning, match="deprecated"), CUDA.amp.autocast(dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


def test_scaler_finds_what_is_not_finite() -> None:
    weight = torch.ones(2, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for factor in (float("inf"), 0.5):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [0.5, 0.5]
    assert scaler.get_scale() == 2.0


def as_function(storage: Any, _: str) -> Any:
    return storage.cuda()


@pytest.mark.parametrize("where", ["cuda", "cuda:0", torch.device("cuda"), {"cpu": "cuda:0"}, as_function])
def test_load(where: Any) -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.arange(3.0)}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=where)["weight"]
    assert loaded.device == THERE
    assert loaded.tolist() == [0, 1, 2]


def test_load_what_was_saved_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def tag(_: Any) -> str:
        return "cuda:0"

    file = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", tag)
        torch.save(torch.arange(3.0), file)
    file.seek(0)
    assert torch.load(file).device == THERE


def test_safetensors(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(3.0)}, tmp_path / "file.safetensors")
    loaded = load_file(tmp_path / "file.safetensors", device="cuda")["weight"]
    assert loaded.device == THERE
    assert loaded.tolist() == [0, 1, 2]


def test_loader_pins_quietly() -> None:
    data: Any = torch.arange(4.0)
    loader: DataLoader[Tensor] = DataLoader(data, batch_size=2, pin_memory=True)
    assert [batch.cuda(non_blocking=True).sum().item() for batch in loader] == [1, 5]


def test_dynamo_translates_without_a_break() -> None:
    @torch.compile(backend="moai", fullgraph=True, options={"compile": False})
    def compute(x: Tensor, y: Tensor) -> Tensor:
        if not (torch.cuda.is_available() and x.is_cuda and torch.cuda.current_device() == 0):
            return x
        with torch.autocast("cuda", dtype=torch.bfloat16):
            product = x @ x
        moved = y.cuda() + torch.arange(2).to("cuda:0") + x.new_zeros(2, device="cuda")
        return product.float() + moved + torch.ones(2, device=torch.device("cuda")) + torch.zeros_like(y, device="cuda")

    result = compute(torch.ones(2, 2, device="cuda"), torch.tensor([10.0, 20.0]))
    assert result.tolist() == [[13, 24], [13, 24]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torch.zeros(2, device="cuda:1"), "there is no device cuda:1: all devices of this program are one"),
        (lambda: torch.zeros(2).cuda(3), "there is no device cuda:3"),
        (lambda: torch.cuda.set_device(1), "there is one device moai, moai:0, not moai:1"),
        (lambda: BOUND_EARLY(2, device="cuda"), "CUDA itself.*\nhint: a function that was imported"),
    ],
)
def test_what_it_cannot_it_says(call: Callable[[], object], message: str) -> None:
    with pytest.raises((Diagnostic, RuntimeError)) as caught:
        call()
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("utilization", "`moai-smi` shows"),
        ("CUDAGraph", "leave it out"),
        ("set_sync_debug_mode", "leave the call out, or switch off with torch.moai.option.disable_advanced"),
        ("memory.caching_allocator_alloc", "leave the call out"),
    ],
)
def test_what_is_refused_gives_advice(name: str, advice: str) -> None:
    with pytest.raises(Diagnostic, match=f"torch.cuda.{name.rpartition('.')[2]} is not available") as caught:
        attrgetter(name)(torch.cuda)()
    assert caught.value.hint.startswith(advice)
