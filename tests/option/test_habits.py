"""Habits of scripts written for one GPU: TorchScript, process groups of one rank, profilers, and others."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic.ir.errors import Diagnostic

dist: Any = torch.distributed
jit: Any = torch.jit

pytestmark = [
    pytest.mark.usefixtures("mode"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::FutureWarning"),
]


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79 * (x + 0.04 * x**3)))


def looped(x: Tensor, n: int) -> Tensor:
    y = torch.zeros_like(x) + torch.ones(x.size(0), device=x.device, dtype=x.dtype)
    for i in range(n):
        y = y + x * i + torch.arange(x.size(0), device=x.device)
    return y


def test_functions_that_make_tensors_can_be_scripted() -> None:
    x = torch.randn(3)
    scripted: Any = jit.script(looped)
    there = scripted(x.cuda(), 3)
    assert there.is_cuda
    assert torch.allclose(there.cpu(), looped(x, 3))


def test_a_scripted_module_moves_and_trains() -> None:
    host = nn.Sequential(nn.Linear(4, 4), Gelu())
    model: Any = jit.script(copy.deepcopy(host)).cuda()
    x = torch.randn(2, 4)
    for each, given in ((host, x), (model, x.cuda())):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        each(given).square().sum().backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), host.parameters(), strict=True):
        assert ours.is_cuda
        assert torch.allclose(ours.cpu(), theirs, atol=1e-6)


class Assigning(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        out[:, 0] = x[:, 1]
        out[..., 2].fill_(1)
        return out


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(4, 4), Gelu()), nn.Conv1d(3, 2, 2), nn.ConvTranspose1d(3, 2, 2), Assigning()]
)
def test_a_module_that_lies_there_is_traced(model: nn.Module) -> None:
    """For all sizes of the batch: also through ops that the tracer leaves to the device's kernels to be recorded in."""
    x = torch.randn(2, 3, 4)
    expected = model(torch.cat([x, x]))
    model, x = model.cuda().eval(), x.cuda()
    traced: Any = jit.trace(model, x)
    found = traced(torch.cat([x, x]))
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("there", ["cuda", torch.device("cuda"), None, "cpu"])
def test_a_scripted_module_is_loaded_and_moves(there: Any, tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    expected = module(torch.ones(4, 3))
    jit.save(jit.script(module), tmp_path / "module.pt")
    loaded = jit.load(tmp_path / "module.pt", map_location=there)
    assert all(parameter.is_cuda is (there not in (None, "cpu")) for parameter in loaded.parameters())
    torch.testing.assert_close(loaded.to("cuda")(torch.ones(4, 3).cuda()).cpu(), expected)


def test_scripted_optimizers_of_pytorch_can_be_imported() -> None:
    for name in [name for name in sys.modules if name.startswith("torch.distributed.optim")]:
        del sys.modules[name]
    importlib.import_module("torch.distributed.optim")


def test_mapped_calls_keep_their_signatures() -> None:
    for function in (jit.script, jit.trace, dist.init_process_group):
        assert "kwargs" not in str(inspect.signature(function))
    assert torch.zeros.__name__ == "zeros"
    assert "zeros" in str(torch.zeros.__doc__)


@pytest.fixture
def group(mode: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_script_for_torchrun_trains_as_one_process() -> None:
    host = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    torch.cuda.set_device(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(host).cuda(), device_ids=[0])
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1) for each in (host, model)]
    for _ in range(3):
        x = torch.randn(8, 4)
        losses: list[float] = []
        for each, given, optimizer in zip((host, model), (x, x.cuda()), optimizers, strict=True):
            loss = each(given).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    with model.no_sync():
        model(torch.randn(8, 4).cuda()).sum().backward()
    assert model.module[0].weight.grad is not None


@pytest.mark.usefixtures("group")
def test_batch_norm_of_all_ranks_is_that_of_one() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    expected = copy.deepcopy(plain)(torch.eye(4))
    norms: Any = nn.SyncBatchNorm
    model = norms.convert_sync_batchnorm(plain)
    wrapped = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[0])
    torch.testing.assert_close(wrapped(torch.eye(4).cuda()).cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "there", "message"),
    [(4, "cpu", "Expected all tensors to be on the same device"), (5, "cuda", "same reduction dim")],
)
def test_a_wrong_batch_is_said_as_without_a_compiler(width: int, there: str, message: str) -> None:
    model = nn.Linear(4, 3).cuda()
    with pytest.raises(RuntimeError, match=message) as raised:
        model(torch.ones(2, width).to(there))
    assert "dynamo" not in f"{type(raised.value).__module__} {raised.value}".lower()
    assert model(torch.ones(2, 4).cuda()).shape == (2, 3)


class Untraceable(nn.Module):
    """A call that Dynamo refuses and PyTorch runs: an op of its own, whose shape function is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.habits.twice(self.linear(x))


def test_a_model_that_cannot_be_traced_runs_plainly_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def shape_of(x: Tensor) -> Tensor:
        raise RuntimeError("no shape")

    def twice(x: Tensor) -> Tensor:
        return 2 * x

    library = torch.library.Library("habits", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", twice, "CompositeExplicitAutograd")
    torch.library.register_fake("habits::twice", shape_of, lib=library)
    model = Untraceable().cuda().requires_grad_(requires_grad=False)
    x = torch.ones(2, 3).cuda()
    for _ in range(2):
        torch.testing.assert_close(model(x), 2 * model.linear(x))
    (warning,) = [line for line in caplog.messages if "runs op by op from now on" in line]
    assert warning.startswith("Untraceable runs op by op from now on, without a plan: ")


@pytest.mark.usefixtures("group")
def test_collectives_of_one_rank_give_its_value() -> None:
    value = torch.arange(3.0).cuda()
    made = [torch.zeros(3).cuda() for _ in range(6)]
    dist.all_reduce(value)
    dist.broadcast(value, 0)
    dist.all_gather([made[0]], value)
    dist.all_gather_into_tensor(made[1], value)
    dist.reduce_scatter_tensor(made[2], value)
    dist.all_to_all([made[3]], [value])
    dist.all_to_all_single(made[4], value)
    dist.scatter(made[5], [value], 0)
    for each in (value, *made):
        assert each.tolist() == [0.0, 1.0, 2.0]
    objects: list[Any] = [None]
    dist.all_gather_object(objects, {"a": 1})
    assert objects == [{"a": 1}]
    dist.barrier()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


def test_one_of_several_processes_is_told_to_start_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Diagnostic, match=r"(?s)one of 2.*start the script once"):
        dist.init_process_group("nccl")


def test_a_profile_of_cuda_records_the_host(capfd: pytest.CaptureFixture[str]) -> None:
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profile, torch.cuda.nvtx.range("step"):
        torch.ones(3, device="cuda").add(1).cpu()
    events: Any = profile.key_averages()
    assert any("add" in event.key for event in events)
    assert "Failed to record CUDA event" not in capfd.readouterr().err
