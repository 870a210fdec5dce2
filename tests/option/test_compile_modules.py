"""Models on the accelerator are compiled when they are called, and keep their identity."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_hook
from transformers import LlamaConfig, LlamaForCausalLM

from moaic.option import disable_advanced_parallelization, enable_advanced_parallelization
from moaic.option.compile_modules import CompiledCall

_dynamo: Any = torch._dynamo  # pyright: ignore[reportPrivateUsage]
checkpoints: Any = torch.utils.checkpoint

pytestmark = pytest.mark.usefixtures("mode")


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def is_compiled(module: nn.Module) -> bool:
    return isinstance(vars(module).get("_compiled_call_impl"), CompiledCall)


def losses(model: nn.Module, device: str) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 8, generator=generator).to(device), torch.randint(4, (6,), generator=generator).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: list[float] = []
    for _ in range(3):
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_model_trains_as_on_the_cpu_and_keeps_its_keys() -> None:
    wanted = losses(small(), "cpu")
    model = small().cuda()
    keys = list(model.state_dict())
    called: list[int] = []

    def note(*_: object) -> None:
        called.append(1)

    model.register_forward_hook(note)
    assert losses(model, "cuda") == pytest.approx(wanted, rel=1e-5)
    assert is_compiled(model)
    assert not any(is_compiled(part) for part in model.children())
    assert type(model) is nn.Sequential
    assert list(model.state_dict()) == keys
    assert called


def test_copies_and_pickles_are_plain() -> None:
    model = small().cuda()
    x = torch.ones(2, 8, device="cuda")
    wanted = model(x).tolist()
    other = copy.deepcopy(model)
    assert not is_compiled(other)
    assert other(x).tolist() == wanted
    assert is_compiled(other)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert not is_compiled(torch.load(file, weights_only=False))


def test_parts_may_be_called_and_moved_later() -> None:
    model: Any = small().cuda()
    x = torch.ones(2, 8, device="cuda")
    part: Tensor = model[0](x).detach()
    assert is_compiled(model[0])
    torch.testing.assert_close(model(x).cpu(), model[2](model[1](part)).cpu())
    grown = nn.Sequential(model, nn.Linear(4, 2).cuda())
    assert grown(x).shape == (2, 2)
    assert is_compiled(grown)


def test_back_on_the_cpu_it_runs_there() -> None:
    model = small().cuda()
    there = model(torch.ones(2, 8, device="cuda")).cpu()
    model.cpu()
    here = model(torch.ones(2, 8))
    assert here.device.type == "cpu"
    torch.testing.assert_close(here, there)


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


def test_models_of_one_class_share_no_limit() -> None:
    """PyTorch compiles a function eight times and no more, whichever models it is for."""
    models = [Wide(width).cuda() for width in (8, 8, 9, 10)]
    x = torch.ones(2, 4, device="cuda")
    before = _dynamo.utils.counters["stats"]["unique_graphs"]
    with _dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        assert all(model(x).shape == (2, 1) for model in models)
    assert _dynamo.utils.counters["stats"]["unique_graphs"] == before + 3, "the two that are alike share one"


def test_what_the_person_compiled_stays() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = small().cuda()
    x = torch.ones(2, 8, device="cuda")
    torch.compile(model, backend=backend)(x)
    assert len(graphs) == 1
    assert not is_compiled(model)


def test_switched_off_models_are_plain_again() -> None:
    model = small().cuda()
    x = torch.ones(2, 8, device="cuda")
    wanted = model(x).tolist()
    disable_advanced_parallelization()
    assert not is_compiled(model)
    assert model(x).tolist() == wanted


class Labelled(Tensor):
    """A class of a person's own."""


@pytest.mark.parametrize("kind", ["class", "nested"])
def test_tensors_of_other_classes_run_op_by_op(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moaic")

    def called(model: nn.Module, device: str) -> Tensor:
        rows: list[Tensor] = [torch.linspace(0, 1, 8 * count).view(count, 8) for count in (3, 5)]
        if kind == "class":
            return model(rows[0].as_subclass(Labelled).to(device))
        return model(torch.nested.nested_tensor(rows, layout=torch.jagged).to(device)).values()

    wanted, model = small(), small().cuda()
    for _ in range(2):
        expected, found = called(wanted, "cpu"), called(model, "cuda")
        assert type(found) is type(expected)
        torch.testing.assert_close(found.cpu(), expected)
        found.sum().backward()
        expected.sum().backward()
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu() if ours.grad is not None else None, theirs.grad)
    assert caplog.text.count("runs op by op for tensors of class") == 1


def seen_by_hooks(model: nn.Module, device: str) -> list[float]:
    """What hooks see and change that come and go while a model is used."""
    x = torch.linspace(-1, 1, 16).view(2, 8).to(device)
    parts, seen = [*model.children()], [model(x).sum().item()]

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        seen.append(output.sum().item())

    def triple(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return 3 * output

    def note_gradient(_: nn.Module, __: Any, gradients: Any) -> None:
        seen.append(gradients[0].sum().item())

    for install in (
        lambda: parts[0].register_forward_hook(note),
        lambda: parts[0].register_forward_hook(triple),
        lambda: parts[1].register_full_backward_hook(note_gradient),
        lambda: register_module_forward_hook(note),
    ):
        hook = install()
        for _ in range(2):
            result = model(x).sum()
            result.backward()
            seen.append(result.item())
        hook.remove()
        seen.append(model(x).sum().item())
    return seen


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_hooks_that_come_and_go() -> None:
    """Also after the model was compiled, and those that PyTorch calls for every module."""
    wanted = seen_by_hooks(small(), "cpu")
    assert seen_by_hooks(small().cuda(), "cuda") == pytest.approx(wanted, rel=1e-4)
    assert len(wanted) == 25


def test_hooks_get_what_each_op_saves() -> None:
    def half(tensor: Tensor) -> Tensor:
        return tensor.half() if tensor.is_floating_point() else tensor

    def gradient(model: nn.Module, device: str) -> Tensor:
        x = torch.linspace(-1, 1, 16).view(2, 8).to(device)
        with torch.autograd.graph.saved_tensors_hooks(half, Tensor.float):
            loss = model(x).square().sum()
        loss.backward()
        found = next(model.parameters()).grad
        assert found is not None
        return found.cpu()

    whole = small()
    whole(torch.linspace(-1, 1, 16).view(2, 8)).square().sum().backward()
    found = gradient(small().cuda(), "cuda")
    torch.testing.assert_close(found, gradient(small(), "cpu"))
    exact = next(whole.parameters()).grad
    assert exact is not None
    assert (found - exact).abs().max() > 1e-5


def test_what_fx_traces_is_not_compiled() -> None:
    model, x = small().cuda(), torch.ones(2, 8).cuda()

    def positive(x: Tensor) -> Tensor:
        return model(x).relu()

    graph: Any = make_fx(positive)(x)
    torch.testing.assert_close(graph(x).cpu(), small()(torch.ones(2, 8)).relu())


def test_broken_graphs_run_right() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = small(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            torch.cuda.synchronize()
            return self.second(y) if y.is_cuda else self.second(y) * 2

    torch.manual_seed(0)
    model = Broken()
    with torch.no_grad():
        half = model(torch.ones(2, 8)) / 2
        found = model.cuda()(torch.ones(2, 8, device="cuda"))
    torch.testing.assert_close(found.cpu(), half)


class Annealed(nn.Module):
    """Each call changes a number of Python that the next one computes with."""

    def __init__(self, change: Callable[[float], float]) -> None:
        super().__init__()
        self.linear, self.change, self.weight = nn.Linear(8, 4), change, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.weight = self.change(self.weight)
        return self.linear(x) + self.weight


def bounded(weight: float) -> float:
    return min(0.12, weight + 0.05)


def scaled(weight: float) -> float:
    return (weight + 0.1) * 0.9


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.arange(1.0, 65.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


class Recomputed(nn.Module):
    """Its parts are computed again in the backward, in turn or all, where the graph breaks for a value."""

    def __init__(self, reentrant: bool, in_turn: bool) -> None:
        super().__init__()
        self.parts, self.reentrant, self.in_turn = nn.Sequential(Scale(), nn.Dropout(), nn.Tanh()), reentrant, in_turn

    def all(self, x: Tensor) -> Tensor:
        assert x.detach().abs().max().item() < 2
        return self.parts(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_turn:
            return checkpoints.checkpoint_sequential(self.parts, 2, x, use_reentrant=self.reentrant)
        return checkpoints.checkpoint(self.all, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("reentrant", "in_turn"), [(False, True), (False, False), (True, False)])
def test_what_a_backward_computes_again_runs_as_it_did(reentrant: bool, in_turn: bool) -> None:
    """With the same dropout, so that the gradient is that of the output."""
    model = Recomputed(reentrant, in_turn).cuda()
    x = torch.full((1, 64), 0.01, device="cuda").requires_grad_(reentrant)
    y = model(x)
    assert 0 < (y == 0).sum().item() < 64
    y.sum().backward()
    dropped = torch.where(y == 0, 0.0, 2.0)
    torch.testing.assert_close(model.parts[0].by.grad, ((1 - y**2) * dropped * x)[0].detach())
    assert not any(is_compiled(part) for part in model.parts.modules())


def test_lazy_modules_are_compiled_once_they_have_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)).to("cuda").cuda()
    x = torch.ones(2, 6, device="cuda")
    first = model(x)
    assert not is_compiled(model)
    assert torch.allclose(model(x), first, atol=1e-6)
    assert is_compiled(model)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("change", [bounded, scaled])
def test_a_number_that_each_call_changes(change: Callable[[float], float], caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    plain = Annealed(change)
    model = copy.deepcopy(plain).cuda()
    for _ in range(4):
        torch.testing.assert_close(model(torch.ones(2, 8, device="cuda")).cpu(), plain(torch.ones(2, 8)))
        assert model.weight == plain.weight
    # On symbols PyTorch rounds the second otherwise than Python does, and then its own guard fails.
    assert ("runs op by op from now on" in caplog.text) == (change is scaled)


def test_memory_that_a_call_replaces() -> None:
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast, self.slow = small(), small().requires_grad_(requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                    slow.data = slow.data * 0.5 + fast.data
                target = self.slow(x)
            return self.fast(x) * target

    plain = Momentum()
    model = copy.deepcopy(plain).cuda()
    assert losses(model, "cuda") == pytest.approx(losses(plain, "cpu"), rel=1e-5)
    torch.testing.assert_close(dict(model.cpu().state_dict()), dict(plain.state_dict()))


class Reversed(nn.Module):
    """Reads its values as NumPy's, through a reversed view, and writes through one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        values = self.linear(x).detach().cpu().numpy()
        backwards = values[..., ::-1].copy()
        last = backwards[::-1]
        last[0] = 7
        return torch.from_numpy(backwards).to(x.device)


def test_numpy_runs_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = Reversed(), torch.randn(2, 5, 3)
    wanted = model(x)
    torch.testing.assert_close(model.cuda()(x.cuda()).cpu(), wanted)


def test_mixed_precision_is_autocast_around_the_forward() -> None:
    enable_advanced_parallelization(compile=False, mixed_precision=True)
    model = small().cuda()
    out = model(torch.ones(2, 8, device="cuda"))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(out.cpu(), small()(torch.ones(2, 8)), rtol=2e-2, atol=2e-2)


def llama() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, bos_token_id=None, eos_token_id=None, **sizes)).eval()


@pytest.mark.exact
def test_a_language_model_generates() -> None:
    model, ids = llama(), torch.randint(1, 64, (2, 5))
    wanted = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.cuda()
    assert torch.equal(model.generate(ids.cuda(), max_new_tokens=3, do_sample=False).cpu(), wanted)


@pytest.mark.exact
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("where", ["cuda", "auto"])
def test_what_was_loaded_there_takes_lora(where: str, tmp_path: Path) -> None:
    model, ids = llama(), torch.randint(1, 64, (2, 5))
    model.cuda().save_pretrained(tmp_path)
    loaded: Any = LlamaForCausalLM.from_pretrained(tmp_path, device_map=where)
    assert loaded.device.type == "moai"
    adapted: Any = get_peft_model(loaded, LoraConfig(r=2, target_modules=["q_proj"]))
    loss = adapted(ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    assert loss.item() == pytest.approx(model.cpu()(ids, labels=ids).loss.item(), rel=1e-5)
    assert is_compiled(adapted)
    assert not is_compiled(loaded)
