"""Recurrent layers run as one op forward and one backward, and equal PyTorch's on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from moaic.runtime.controller import session

MOAI = "moai"
checkpoint: Any = getattr(torch.utils.checkpoint, "checkpoint")  # noqa: B009 untyped
rnn: Any = nn.utils.rnn

CASES: Mapping[str, tuple[Any, dict[str, Any], bool]] = {
    "lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, False),
    "batch first": (nn.LSTM, {"batch_first": True, "bias": False}, False),
    "packed lstm": (nn.LSTM, {"num_layers": 2, "bidirectional": True}, True),
    "packed, batch first": (nn.LSTM, {"batch_first": True, "bias": False}, True),
    "projected": (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True}, False),
    "packed, projected": (nn.LSTM, {"proj_size": 3}, True),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}, False),
    "packed gru": (nn.GRU, {"batch_first": True}, True),
    "tanh": (nn.RNN, {"num_layers": 2}, False),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}, False),
    "packed relu": (nn.RNN, {"nonlinearity": "relu", "bias": False, "batch_first": True}, True),
}

pytestmark = [
    pytest.mark.usefixtures("accelerator"),
    # PyTorch's, of a kernel that it does not have.
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported"),
]


def states_of(module: Any, batch: int, device: str) -> Any:
    """First states that want gradients."""
    torch.manual_seed(1)
    count = module.num_layers * (1 + module.bidirectional)
    sizes = [module.proj_size or module.hidden_size, *([module.hidden_size] if module.mode == "LSTM" else [])]
    made = [torch.randn(count, batch, size, dtype=module.weight_ih_l0.dtype) for size in sizes]
    states = tuple(state.to(device).requires_grad_() for state in made)
    return states if module.mode == "LSTM" else states[0]


def several(states: Any) -> Sequence[Tensor]:
    return [states] if isinstance(states, Tensor) else states


def ran(module: nn.RNNBase, x: Tensor, device: str, *, is_packed: bool) -> list[Tensor]:
    """Outputs, last states, and the gradients of input, first states and parameters."""
    module = copy.deepcopy(module).to(device)
    x = x.clone().to(device).requires_grad_()
    states = states_of(module, 3, device)
    lengths = [6, 4, 2]
    given = rnn.pack_padded_sequence(x, lengths, batch_first=module.batch_first) if is_packed else x
    out, last = module(given, states)
    if is_packed:
        out, _ = rnn.pad_packed_sequence(out, batch_first=module.batch_first)
    results = [out, *several(last)]
    sum((result * (result + 1)).sum() for result in results).backward()  # pyright: ignore[reportAttributeAccessIssue]
    leaves = [x, *several(states), *module.parameters()]
    return [*results, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def sequence(module: nn.RNNBase, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((3, 6, 4) if module.batch_first else (6, 3, 4), dtype=dtype)


@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_strides_are_the_cpus(case: str) -> None:
    kind, arguments, is_packed = CASES[case]
    module = kind(4, 5, **arguments)
    x = sequence(module)
    expected = ran(module, x, "cpu", is_packed=is_packed)
    found = ran(module, x, MOAI, is_packed=is_packed)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert other.stride() == one.stride()
        torch.testing.assert_close(other.cpu(), one, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_number_of_commands_does_not_depend_on_the_length(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    accelerator = session.accelerator()
    launch = accelerator.launch

    def counted(op: str, *args: Any) -> None:
        launched.append(op)
        launch(op, *args)

    monkeypatch.setattr(accelerator, "launch", counted)
    module = nn.LSTM(4, 5, num_layers=2, bidirectional=True)
    for _ in range(2):
        ran(module, sequence(module), MOAI, is_packed=is_packed)
    assert [op for op in launched if op.startswith("moai.")] == ["moai.recurrent", "moai.recurrent_backward"] * 2
    assert not [op for op in launched if "sigmoid" in op or "mm" in op]


def second(module: nn.RNNBase, x: Tensor, device: str) -> list[Tensor]:
    module = copy.deepcopy(module).to(device)
    x = x.to(device).requires_grad_()
    out, _ = module(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [
        slope.detach().cpu(),
        *(parameter.grad.cpu() for parameter in module.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_second_derivatives(kind: Any) -> None:
    module = kind(4, 5, num_layers=2, batch_first=True).double()
    x = sequence(module, torch.float64)
    torch.testing.assert_close(second(module, x, MOAI), second(module, x, "cpu"))


def written(module: nn.RNNBase, x: Tensor) -> Tensor:
    """A program may overwrite the output of layers that are not oneDNN's."""
    out, _ = module(x)
    return out.mul_(2)


def kept_on_the_host(module: nn.RNNBase, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return module(x)[0]


def checkpointed(module: nn.RNNBase, x: Tensor) -> Tensor:
    return checkpoint(module, x, use_reentrant=False)[0]


def of_a_frozen_layer(module: nn.RNNBase, x: Tensor) -> Tensor:
    module.get_parameter("weight_hh_l0").requires_grad_(False)
    return module(x)[0]


def of_the_last_state(module: nn.RNNBase, x: Tensor) -> Tensor:
    return module(x)[1][-1]


def from_what_is_expanded(module: nn.RNNBase, x: Tensor) -> Tensor:
    return module(x[:, :1].expand(-1, 3, -1), module.get_parameter("weight_hh_l0").sum().expand(1, 3, 5))[0]


def one_by_one(module: nn.RNNBase, x: Tensor) -> Tensor:
    """Backpropagation truncated in the middle."""
    out, last = module(x[:3])
    return torch.cat([out, module(x[3:], last.detach())[0]])


def differentiated_by_functions(module: nn.RNNBase, x: Tensor) -> Tensor:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,))[0].sum()

    slopes = torch.func.grad(loss)({name: p.detach() for name, p in module.named_parameters()}, x.detach())
    return module(x)[0] + sum(slope.sum() for slope in slopes.values())


WAYS: Sequence[Callable[[nn.RNNBase, Tensor], Tensor]] = [
    written,
    kept_on_the_host,
    checkpointed,
    of_a_frozen_layer,
    of_the_last_state,
    from_what_is_expanded,
    one_by_one,
    differentiated_by_functions,
]


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_use_a_layer(way: Callable[[nn.RNNBase, Tensor], Tensor]) -> None:
    layer = nn.GRU(4, 5)
    x = sequence(layer)
    found: list[list[Tensor]] = []
    for device in ("cpu", MOAI):
        module, there = copy.deepcopy(layer).to(device), x.clone().to(device).requires_grad_()
        out = way(module, there)
        for _ in range(2):
            out.square().sum().backward(retain_graph=True)
        leaves = [there, *module.parameters()]
        found.append([out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves if leaf.grad is not None)])
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_dropout_between_layers_is_that_of_the_device() -> None:
    stack = nn.LSTM(4, 5, num_layers=2, dropout=0.5).to(MOAI)
    x = sequence(stack).to(MOAI)
    torch.manual_seed(3)
    out, (hidden, _) = stack(x)
    first, rest = nn.LSTM(4, 5).to(MOAI), nn.LSTM(5, 5).to(MOAI)
    for index, layer in enumerate((first, rest)):
        layer.load_state_dict(
            {
                name.replace(f"_l{index}", "_l0"): value
                for name, value in stack.state_dict().items()
                if name.endswith(f"_l{index}")
            }
        )
    torch.manual_seed(3)
    below, (ended, _) = first(x)
    expected, _ = rest(torch.dropout(below, 0.5, train=True))
    assert (out == 0).sum().item() == 0
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(hidden[:1], ended)
    stack.eval()
    assert torch.equal(stack(x)[0], stack(x)[0])


def test_a_layer_that_nothing_is_recorded_of() -> None:
    module = nn.LSTM(4, 5).to(MOAI)
    x = sequence(module).to(MOAI)
    recorded = module(x)[0]
    with torch.no_grad():
        unrecorded = module(x)[0]
    with torch.inference_mode():
        inferred = module(x)[0]
    assert recorded.requires_grad
    assert not unrecorded.requires_grad
    assert torch.equal(recorded.cpu(), unrecorded.cpu())
    assert torch.equal(recorded.cpu(), inferred.cpu())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_mixed_precision(kind: Any) -> None:
    module = kind(4, 5)
    x = sequence(module)
    expected = module(x)[0]
    module.to(MOAI)
    with torch.autocast(MOAI, torch.bfloat16):
        out = module(x.to(MOAI))[0]
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    torch.testing.assert_close(out.float().cpu(), expected, atol=2e-2, rtol=2e-2)


def test_what_does_not_fit_is_refused_in_pytorchs_words() -> None:
    module: Any = nn.LSTM(4, 5).to(MOAI)
    x = torch.randn(6, 3, 4, device=MOAI)
    state = torch.zeros(1, 3, 5, device=MOAI)
    with pytest.raises(RuntimeError, match=r"input.size"):
        module(x[..., :3])
    with pytest.raises(RuntimeError, match="Expected hidden"):
        module(x, (state, state[:, :2]))
    with pytest.raises(RuntimeError, match="length"):
        module(x[:0])
    for wrong in (state.double(), state.cpu()):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            module(x, (wrong, wrong))[0].cpu()


def many_gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    last = module(x)[0][-1].flatten()
    every = torch.eye(len(last), device=x.device)

    def slope(grad: Tensor) -> Tensor:
        return torch.autograd.grad(last, x, grad, retain_graph=True)[0]

    def ended(x: Tensor) -> Tensor:
        return module(x)[0][-1]

    batched = torch.autograd.grad(last, x, every, is_grads_batched=True, retain_graph=True)
    rows: Any = torch.autograd.functional.jacobian(ended, x, vectorize=True)
    return [batched[0].cpu(), torch.vmap(slope)(every).cpu(), rows.cpu()]


@pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning")  # of plain PyTorch's LSTM
@pytest.mark.parametrize("kind", [nn.LSTM, nn.RNN])
def test_many_gradients_at_once(kind: Any) -> None:
    module = kind(4, 5)
    x = sequence(module)
    expected = many_gradients(module, x.clone().requires_grad_())
    found = many_gradients(module.to(MOAI), x.to(MOAI).requires_grad_())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by PyTorch's own rules
@pytest.mark.parametrize("is_recorded", [False, True])
def test_forward_mode(is_recorded: bool) -> None:
    module = nn.RNN(4, 5)
    x = sequence(module)
    found: list[Tensor] = []
    for device in ("cpu", MOAI):
        there, given = copy.deepcopy(module).to(device), x.to(device)
        with torch.set_grad_enabled(is_recorded), forward_ad.dual_level():
            out = there(forward_ad.make_dual(given, torch.ones_like(given)))[0]
            tangent = forward_ad.unpack_dual(out).tangent
        assert tangent is not None
        found.append(tangent.detach().cpu())
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_an_empty_batch(kind: Any) -> None:
    module = kind(4, 5, bidirectional=True).to(MOAI)
    out, _ = module(torch.randn(6, 0, 4, device=MOAI))
    out.sum().backward()
    assert out.shape == (6, 0, 10)
    assert all(not parameter.grad.any() for parameter in module.parameters())


def test_a_dispatch_mode_sees_the_ops_that_pytorch_composes() -> None:
    module = nn.GRU(4, 5).to(MOAI)
    with FlopCounterMode(display=False) as counter:
        module(sequence(module).to(MOAI))
    assert counter.get_total_flops() == 2 * 6 * 3 * 15 * (4 + 5)
