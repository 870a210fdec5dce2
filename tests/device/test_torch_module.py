"""`torch.moai`, `torch.accelerator`, and the other functions of torch for a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from moaic.ir.errors import Diagnostic
from moaic.passes.perf.machine import Machine

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"
moai: Any = torch.get_device_module(MOAI)


def test_data_parallel_is_the_model_that_it_wraps() -> None:
    model = torch.nn.DataParallel(torch.nn.Linear(4, 2))
    assert model.module.weight.device.type == MOAI
    found = model(torch.ones(3, 4))
    found.sum().backward()
    assert found.shape == (3, 2)
    assert model.module.weight.grad is not None
    assert torch.equal(model.module.weight.grad.cpu(), torch.full((2, 4), 3.0))
    assert torch.equal(model(input=torch.ones(3, 4)), found)


def test_there_is_one_device() -> None:
    assert moai.is_available()
    assert moai.device_count() == 1
    assert moai.current_device() == 0
    assert torch.get_device_module(MOAI) is moai
    with moai.device(0), moai.device("moai:0"), moai.device_of(torch.ones(1, device=MOAI)):
        pass
    with pytest.raises(RuntimeError, match="there is one device moai"):
        moai.set_device(1)
    with pytest.raises(ValueError, match="expected device moai"):
        moai.synchronize("cpu")


def test_torch_accelerator() -> None:
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device(MOAI)
    assert accelerator.is_available()
    assert accelerator.device_count() == 1
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    with accelerator.device_index(0):
        accelerator.synchronize()
    accelerator.empty_cache()
    free, total = accelerator.get_memory_info()
    assert 0 < free <= total
    assert torch.float32 in accelerator.get_device_capability()["supported_dtypes"]


def test_memory() -> None:
    x = torch.ones(1024, device=MOAI) + 1
    moai.synchronize()
    assert x.sum().item() == 2048
    assert torch.accelerator.memory_allocated() >= 4096
    assert torch.accelerator.max_memory_allocated() >= torch.accelerator.memory_reserved() >= 0
    assert moai.max_memory_reserved() >= 4096
    torch.accelerator.reset_peak_memory_stats()
    moai.reset_accumulated_memory_stats()
    assert isinstance(torch.accelerator.memory_stats(), dict)
    assert moai.mem_get_info()[1] == torch.accelerator.get_memory_info()[1]


def test_seeds_and_states() -> None:
    state = moai.get_rng_state()
    one = torch.rand(3, device=MOAI)
    moai.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=MOAI).cpu(), one.cpu())
    seeds: list[Any] = [moai.manual_seed, moai.manual_seed_all, torch.manual_seed]
    for seed in seeds:
        seed(5)
        assert moai.initial_seed() == 5
    with torch.random.fork_rng(device_type=MOAI):
        inside = torch.rand(3, device=MOAI)
    assert torch.equal(torch.rand(3, device=MOAI).cpu(), inside.cpu())


def test_a_fresh_seed_can_be_set_again() -> None:
    for fresh in (moai.seed, moai.seed_all):
        seed = fresh()
        drawn = torch.rand(3, device=MOAI)
        assert moai.initial_seed() == seed
        moai.manual_seed(seed)
        assert torch.equal(torch.rand(3, device=MOAI).cpu(), drawn.cpu())
    assert moai.seed() != moai.seed()


def test_the_states_of_all_devices_are_one() -> None:
    states = moai.get_rng_state_all()
    assert len(states) == moai.device_count()
    drawn = torch.rand(3, device=MOAI)
    moai.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device=MOAI).cpu(), drawn.cpu())


def test_there_is_one_stream() -> None:
    stream, event = moai.default_stream(), moai.Event()
    assert {stream, moai.current_stream(), moai.Stream()} == {stream}
    assert stream.record_event(event) is event
    for recorded in (event, stream.record_event()):
        recorded.wait(stream)
        recorded.synchronize()
        assert recorded.query()
    stream.wait_stream(moai.current_stream())
    assert stream.query()


@pytest.mark.parametrize(("factor", "is_fast"), [(0.2, True), (1.0, True), (1.3, False)])
def test_bfloat16_is_supported_where_it_is_no_slower(
    factor: float, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowdown(self: Machine, dtype: str) -> float:
        return factor

    monkeypatch.setattr(Machine, "slowdown", slowdown)
    assert moai.is_bf16_supported() is is_fast
    assert moai.is_bf16_supported(including_emulation=True)


def test_what_it_says_of_mixed_precision_is_so() -> None:
    assert moai.is_autocast_available()
    assert moai.is_bf16_supported(including_emulation=True)
    x = torch.ones(2, 2, device=MOAI)
    for dtype in moai.get_amp_supported_dtype():
        with torch.autocast(MOAI, dtype=dtype):
            assert (x @ x).dtype == dtype


def test_the_flavor_is_chosen_before_there_are_workers(accelerator: str) -> None:
    if accelerator == "workers":
        torch.ones(2, device=MOAI).cpu()
        with pytest.raises(Diagnostic, match="already runs with 2 workers"):
            moai.set_flavor(1)


def test_peak_flops(accelerator: str) -> None:
    with pytest.raises(Diagnostic, match=r"of which torch\.int64 has none"):
        moai.peak_flops(torch.int64)
    if accelerator == "workers":
        assert moai.peak_flops() > 1e6


def test_streams_and_events() -> None:
    stream = moai.current_stream()
    start, end = moai.Event(enable_timing=True), moai.Event(enable_timing=True)
    with moai.stream(stream):
        start.record()
        torch.ones(3, device=MOAI).record_stream(torch.Stream(device=MOAI))
        end.record()
    stream.synchronize()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="enable_timing=True"):
        moai.Event().elapsed_time(end)
    torch.Stream(device=MOAI).synchronize()


def test_loading_data_with_pinned_memory() -> None:
    data: Any = torch.arange(8.0)
    batches = [batch.to(MOAI, non_blocking=True) for batch in DataLoader(data, batch_size=4, pin_memory=True)]
    assert [batch.sum().item() for batch in batches] == [6, 22]
    assert torch.ones(3).pin_memory().tolist() == [1, 1, 1]


def test_generators_of_the_host_are_untouched() -> None:
    generator = torch.Generator()
    assert isinstance(generator, torch.Generator)
    assert torch.Generator("cpu").device.type == "cpu"
