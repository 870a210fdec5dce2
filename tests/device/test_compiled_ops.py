"""Ops in compiled functions, compared with the same function in plain PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import graph_break
from torch.nn import functional
from torch.nn.utils import rnn

from moaic.device import torch_module

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="moai", options={"compile": False})


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    function(leaf).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad.cpu()


def wave(angle: Tensor) -> Tensor:
    return torch.view_as_real(torch.polar(torch.ones_like(angle), angle) * (2 + 3j))


@pytest.mark.parametrize("function", [torch.sgn, wave])
def test_gradients_that_are_zero_or_complex(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.5, -0.5, 0.25])
    torch.testing.assert_close(gradient(compiled(function), x.to("moai")), gradient(function, x))


class Steps(nn.Module):
    """A cell of a recurrent network, called for each row of a sequence."""

    def __init__(self, kind: type[nn.LSTMCell | nn.GRUCell], size: int, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.cell = kind(3, size, bias)

    def forward(self, sequence: Tensor) -> Tensor:
        state: Any = None
        rows: list[Tensor] = []
        for row in sequence:
            state = self.cell(row, state)
            rows.append(state[0] if isinstance(self.cell, nn.LSTMCell) else state)
        return torch.stack(rows)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("size", "bias"), [(5, False), (256, True)])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells_of_recurrent_networks(kind: type[nn.LSTMCell | nn.GRUCell], size: int, bias: bool) -> None:
    sequence = torch.arange(24.0).reshape(2, 4, 3).sin()
    expected, ours = Steps(kind, size, bias), Steps(kind, size, bias).to("moai")
    given = gradient(compiled(ours), sequence.to("moai"))
    torch.testing.assert_close(given, gradient(expected, sequence), atol=1e-4, rtol=1e-5)
    for found, wanted in zip(ours.parameters(), expected.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.cpu(), wanted.grad, atol=1e-4, rtol=1e-5)


class Layers(nn.Module):
    """Recurrent layers of every kind, the last over a packed sequence if lengths are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.plain = nn.RNN(3, 4, nonlinearity="relu")
        self.gru = nn.GRU(4, 5, num_layers=2, bidirectional=True)
        self.lstm = nn.LSTM(10, 6, proj_size=2, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        below, ended = self.gru(self.plain(x)[0])
        above: Any = below.transpose(0, 1)
        if lengths is not None:
            above = rnn.pack_padded_sequence(above, lengths, batch_first=True, enforce_sorted=False)
        out, (hidden, cell) = self.lstm(above)
        if lengths is not None:
            out, _ = rnn.pad_packed_sequence(out, batch_first=True)
        return out.sum() + hidden.sin().sum() + cell.square().sum() + ended.cos().sum()


@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 6, 2])])
def test_recurrent_layers(lengths: Tensor | None) -> None:
    """They are ops of the graph; only what packs a sequence breaks it."""
    torch.compiler.reset()
    expected, ours = Layers(), Layers().to("moai")
    options: Any = {"compile": "wait" if lengths is None else False}
    run: Any = torch.compile(ours, backend="moai", fullgraph=lengths is None, options=options)
    for time, rows in ((6, 3), (7, 3), (7, 3 if lengths is not None else 0)):
        x = torch.randn(time, rows, 3)
        given = gradient(partial(run, lengths=lengths), x.to("moai"))
        torch.testing.assert_close(given, gradient(partial(expected, lengths=lengths), x), atol=1e-5, rtol=1e-5)
    for found, wanted in zip(ours.parameters(), expected.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad.cpu(), wanted.grad, atol=1e-5, rtol=1e-5)


def test_products_of_eight_bit_floats_in_eight_bits() -> None:
    left, right = torch.eye(16), torch.arange(256.0).reshape(16, 16).remainder(7)
    operands = [left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t(), torch.tensor(2.0), torch.tensor(1.0)]

    def product(*operands: Tensor) -> Tensor:
        return torch.ops.aten._scaled_mm(*operands)

    given = compiled(product)(*(each.to("moai") for each in operands)).cpu()
    assert torch.equal(given.float(), product(*operands).float())


REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "vector": lambda narrow, wide: torch.mv(narrow, wide[0]),
    "matrix": lambda narrow, wide: narrow @ wide.t(),
    "operand": lambda narrow, wide: functional.linear(narrow, wide, wide[0]),
    "bias": lambda narrow, wide: functional.linear(narrow, narrow, wide[0]),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)]
)
def test_products_of_several_types_are_refused(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    narrow, wide = (torch.ones(4, 4, dtype=dtype) for dtype in dtypes)
    with pytest.raises(RuntimeError, match="same dtype"):
        REFUSED[name](narrow, wide)
    with pytest.raises(RuntimeError, match="same dtype"):
        compiled(REFUSED[name])(narrow.to("moai"), wide.to("moai")).cpu()


@pytest.mark.parametrize("device", ["cpu", "moai"])
def test_without_a_backend_each_device_has_its_own(device: str) -> None:
    def square(x: Tensor) -> Tensor:
        return x @ x

    torch.compiler.reset()
    run, x = torch.compile(square), torch.arange(4.0).view(2, 2)
    found = run(x.to(device))
    assert found.device.type == device
    assert torch.equal(found.cpu(), square(x))


def test_threads_that_name_the_backend_for_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch refuses the second registration of a name, and loading the backend takes long."""
    compiled(nn.Identity())
    registry: Any = importlib.import_module("torch._dynamo.backends.registry")
    backend = registry._COMPILER_FNS["moai"]

    class Slow:
        def load(self) -> Any:
            sleep(0.2)
            return backend

    monkeypatch.delitem(registry._COMPILER_FNS, "moai")
    monkeypatch.setitem(registry._BACKENDS, "moai", Slow())
    with ThreadPoolExecutor(2) as threads:
        assert len(list(threads.map(compiled, [nn.Identity(), nn.Identity()]))) == 2


def test_what_is_given_nested_tensors_runs_op_by_op() -> None:
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(device)
        call: Any = model if device == "cpu" else torch.compile(model, backend="moai")
        rows = [torch.randn(2, 4), torch.randn(5, 4)]
        nested: Any = torch.nested.nested_tensor(rows, layout=torch.jagged, device=device)
        call(nested).values().square().sum().backward()
        assert model.weight.grad is not None
        return [model.weight.grad.cpu()]

    torch.testing.assert_close(run("moai"), run("cpu"))


def test_functions_of_the_device_behind_a_graph_break() -> None:
    def draws(x: Tensor) -> Tensor:
        graph_break()
        torch_module.manual_seed(7)
        state = torch_module.get_rng_state()
        first = torch.rand(3, device="moai")
        torch_module.set_rng_state(state)
        return first - torch.rand(3, device="moai") + x

    x = torch.randn(3)
    assert torch.equal(compiled(draws)(x.to("moai")).cpu(), x)


def test_workers_alone_parse_the_text_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller has made it."""
    parsed: list[str] = []
    monkeypatch.setattr("moaic.runtime.controller.accelerator.parse", parsed.append)
    assert gradient(compiled(torch.neg), torch.ones(2, device="moai")).tolist() == [2.0, 2.0]
    assert not parsed


class Twice(nn.Module):
    """A weight that only an output needs which the loss does not read, for that twice."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.unread = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.read(x).sum(), self.unread(x) + self.unread(x.flip(1))


def test_gradients_of_what_the_loss_does_not_read_are_zero() -> None:
    model = Twice()
    x = torch.randn(4, 4)
    loss, hidden = compiled(model.to("moai"))(x.to("moai"))
    loss.backward()
    expected = x @ model.unread.weight.cpu().t() + x.flip(1) @ model.unread.weight.cpu().t()
    torch.testing.assert_close(hidden.cpu(), expected)
    gradient = model.unread.weight.grad
    assert gradient is None or not gradient.cpu().any()


def moved(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (x * 2).cpu(), x.to("moai") * 3, torch.arange(3) * 2


@pytest.mark.parametrize("device", ["cpu", "moai"])
def test_results_lie_where_the_program_has_them(device: str) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    found, expected = compiled(moved)(x), moved(x)
    assert [each.device.type for each in found] == [each.device.type for each in expected] == ["cpu", "moai", "cpu"]
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    (found[0].sum() + found[1].sum().cpu()).backward()
    assert x.grad is not None
    assert x.grad.device.type == device
    assert x.grad.tolist() == [5.0, 5.0, 5.0]


class Late(nn.Module):
    """A layer that is moved when it is called, as losses of detection models are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.to(x.device)
        return self.layer(x)


def test_a_module_may_be_moved_inside_a_compiled_function() -> None:
    model = Late()
    x = torch.randn(4, 3)
    expected = model(x)
    torch.testing.assert_close(compiled(model)(x.to("moai")).cpu(), expected)
    assert model.layer.weight.device.type == "moai"
