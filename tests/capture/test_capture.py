"""A captured step is the step: its values, gradients, names, places and open sizes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.ops import OPS
from moaic.ir.parser import parse
from moaic.ir.printer import render
from tests.capture.compiler import WARNINGS, Compiler, labels, params
from tests.capture.models import MODELS, ResNet, gpt2, llama, pictures, text, unpadded

pytestmark = WARNINGS


def norm(tensor: Tensor) -> float:
    return float(tensor.pow(2).sum().sqrt().item())


def agree(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Every gradient within `tolerance` of its norm, with a floor from the largest one; every buffer too."""
    wanted: dict[str, Tensor | None] = {name: p.grad for name, p in reference.named_parameters()}
    found: dict[str, Tensor | None] = {name: p.grad for name, p in model.named_parameters()}
    floor = 1e-3 * max(norm(grad) for grad in wanted.values() if grad is not None)
    for name, grad in wanted.items():
        other = found[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert norm(other - grad) <= tolerance * max(norm(grad), floor), name
    for (name, one), other in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


ALIKE = ("llama_without_padding", "qwen2", "mistral", "vit")
"""Of which tests/models proves as much, or whose forms the others have."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exact) if name in ALIKE else name for name in MODELS]
)
def test_a_captured_step_is_the_step(compiler: Compiler, name: str) -> None:
    make, sample = MODELS[name]
    model = make().train()
    reference, inputs = copy.deepcopy(model), sample()
    if name == "resnet":  # Batch norms over few values are badly conditioned in float32.
        model, reference = model.double(), reference.double()
        inputs["pixel_values"] = inputs["pixel_values"].double()
    loss = compiler(model)(**inputs)["loss"]
    loss.backward()
    expected = reference(**inputs)["loss"]
    expected.backward()
    assert len(compiler.engines) == 1
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    agree(model, reference, 1e-10 if name == "resnet" else 1e-5)

    function = compiler.function()
    # A parameter that two modules share goes by one of its names.
    names = dict(reference.named_parameters(remove_duplicate=False))
    with_grad = {id(p) for p in names.values() if p.grad is not None}
    assert {id(names[label]) for label in labels(function.param_roles, "param")} == {id(p) for p in names.values()}
    assert {id(names[label]) for label in labels(function.result_roles, "grad")} == with_grad
    assert labels(function.result_roles, "output") >= ({"loss", "logits"} if name != "bert" else {"masked_lm_loss"})
    assert labels(function.param_roles, "input") <= set(inputs)
    assert {op.name for op in function.ops} <= set(OPS)
    printed = render(Module((function,)))
    assert render(parse(printed)) == printed


def test_every_op_says_where_it_is_from(compiler: Compiler) -> None:
    compiler(llama())(**text()).loss.backward()
    ops = compiler.function().ops
    assert all(op.loc.file and op.loc.line and op.loc.side for op in ops)
    assert {op.loc.file for op in ops} >= {"modeling_llama.py", "loss_utils.py"}
    products = [op.loc for op in ops if op.name == "aten.mm"]
    for side, count in (("forward", 1), ("backward", 2)):
        paths = [loc.module for loc in products if loc.side == side]
        assert paths.count("model.layers.1.self_attn.q_proj") == count
        assert paths.count("lm_head") == count


def test_no_copies_and_no_biases_inside_products(compiler: Compiler) -> None:
    for make, sample in ((gpt2, text), (ResNet, pictures)):
        compiler(make())(**sample())["loss"].backward()
    names = {op.name for engine in compiler.engines for op in engine.program.instantiate().closed.function.ops}
    assert not names & {
        "aten.clone",
        "aten.detach",
        "aten.alias",
        "aten.addmm",
        "aten.mean.dim",
        "aten.var_mean.correction",
    }
    convolutions = [op for op in compiler.function().ops if op.name.startswith("aten.convolution")]
    assert all(op.operands[-1] is None for op in convolutions if op.name == "aten.convolution")
    masks = [op.attrs["output_mask"] for op in convolutions if op.name.endswith("backward")]
    assert all(isinstance(mask, tuple) and mask[2] is False for mask in masks)


def test_an_empty_cache_adds_nothing(compiler: Compiler) -> None:
    """Models keep one unless told otherwise. What is joined with a tensor of no rows could not be split."""
    compiler(llama(use_cache=True).train())(**unpadded())
    joined = [op for op in compiler.function().ops if op.name == "aten.cat"]
    assert joined
    assert all(value.type.elements() for op in joined for value in op.inputs())


def test_attention_stays_one_op(compiler: Compiler) -> None:
    compiler(llama())(**text()).loss.backward()
    names = [op.name for op in compiler.function().ops]
    assert names.count("moai.sdpa") == names.count("moai.sdpa_backward") == 2


def test_sizes_stay_open_and_are_instantiated(compiler: Compiler) -> None:
    model = llama(num_hidden_layers=1)
    reference, compiled = copy.deepcopy(model), compiler(model)
    for batch, length in ((2, 12), (2, 9), (3, 10), (3, 14), (2, 9)):
        inputs = text(batch, length)
        loss, expected = compiled(**inputs).loss, reference(**inputs).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        model.zero_grad()
        reference.zero_grad()
        loss.backward()
        expected.backward()
        agree(model, reference, 1e-5)
    assert len(compiler.engines) <= 3
    assert any(engine.program.symbols for engine in compiler.engines)


class Grids(nn.Module):
    """Rows of several grids, whose sizes it compares with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4)

    def forward(self, x: Tensor, grids: list[tuple[int, int]]) -> Tensor:
        rows = sum(height * width for height, width in grids)
        torch._check(rows == x.shape[1])  # pyright: ignore[reportPrivateUsage]
        return self.projection(x).square().sum()


def test_checks_of_sizes_are_left_to_dynamo(compiler: Compiler) -> None:
    model = Grids()
    compiled = compiler(model)
    for grids in ([(2, 3), (1, 2)], [(2, 4), (3, 2)], [(5, 4), (3, 2)]):
        x = torch.randn(2, sum(height * width for height, width in grids), 4)
        torch.testing.assert_close(compiled(x, grids), model(x, grids))
    assert any(engine.program.symbols for engine in compiler.engines)
    with pytest.raises(Exception, match="Expected cond to be True, but got False"):
        compiled(torch.randn(2, 7, 4), [(5, 4), (3, 2)])


def test_inference(compiler: Compiler) -> None:
    model = llama().eval()
    inputs = text()
    with torch.no_grad():
        out, expected = compiler(model)(**inputs), model(**inputs)
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(out.logits, expected.logits)
    assert not compiler.engines[0].program.is_training
    assert {role.kind for role in compiler.function().result_roles} == {"output"}


class Counter(nn.Module):
    """Writes a buffer and an input in place, breaks the graph, makes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        h = self.one(x.clone())
        torch._dynamo.graph_break()  # pyright: ignore[reportPrivateUsage]
        before = x.clone()
        x.add_(1)
        return self.two(h) * torch.tensor([3.0, 4.0]), before.view(-1)


def test_updates_constants_and_graph_breaks(compiler: Compiler) -> None:
    model = Counter()
    reference, x = copy.deepcopy(model), torch.randn(5, 4)
    ours, theirs = x.clone(), x.clone()
    results, expected = compiler(model)(ours), reference(theirs)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(ours, theirs)
    results[0].sum().backward()
    expected[0].sum().backward()
    agree(model, reference, 1e-6)
    first, second = compiler.captured(0), compiler.captured(1)
    assert [role.label for role in first.function.result_roles if role.kind == "update"] == ["steps"]
    assert [role.label for role in second.function.result_roles if role.kind == "update"] == ["x"]
    for captured in (first, second):
        (written,) = captured.updates
        assert captured.function.param_roles[written].label in {"steps", "x"}
    assert [tensor.tolist() for tensor in second.constants] == [[3.0, 4.0]]


def test_results_share_no_memory(compiler: Compiler) -> None:
    """What the person writes in place must change nothing else: inputs, other outputs, other gradients."""
    a, b = (torch.zeros(4, requires_grad=True) for _ in range(2))

    def twice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2 + a + b
        return y, y.clone(), x.clone().view(2, 2)

    outputs = compiler(twice)(torch.randn(4))
    torch.stack([output.sum() for output in outputs]).sum().backward()
    copies = [op for op in compiler.function().ops if op.name == "aten.clone"]
    assert len(copies) == 3
    results = compiler.function().results
    assert len(set(results)) == len(results)


def test_half_precision_and_autocast(compiler: Compiler) -> None:
    model = llama()
    reference, inputs = copy.deepcopy(model), text()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, expected = compiler(model)(**inputs).loss, reference(**inputs).loss
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
    agree(model, reference, 2e-2)


class Slices(nn.Module):
    """Ops whose gradients put a part into zeros, and others with a spelling of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 1:-2] + x[:, -3:] * x[:, 2].unsqueeze(1)
        z = (x @ self.w).repeat(2, 3).mean() + x[::2].var() + x.index_select(1, torch.tensor([0, 2, 2])).std(0).sum()
        pair = torch.stack([x[0], x[1]]).transpose(0, 1).reshape(-1).roll(2)
        product = torch.addmm(x[0, 0], x, self.w, beta=0.5, alpha=2)
        return y.sum() + z + pair.square().mean() + nn.functional.normalize(product).sum()


def test_gradients_of_slices_and_statistics(compiler: Compiler) -> None:
    model, x = Slices().double(), torch.randn(6, 6, dtype=torch.float64)
    x = torch.cat([x], 1)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    reference = copy.deepcopy(model)
    model_loss, expected = compiler(model)(ours), reference(theirs)
    torch.testing.assert_close(model_loss, expected)
    model_loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    agree(model, reference, 1e-10)


def test_a_factor_of_a_sum_is_a_product(compiler: Compiler) -> None:
    """Inductor loses `alpha` where it makes one product of a sum with a product."""

    def moved(mean: Tensor, x: Tensor) -> Tensor:
        return mean.mul(0.9).add_(x @ x.t(), alpha=0.1)

    mean, x = torch.ones(3, 3), torch.arange(6.0).view(3, 2)
    torch.testing.assert_close(compiler(moved)(mean, x), moved(mean, x))
    assert not any("alpha" in op.attrs for op in compiler.function().ops)


def test_a_look_up_of_rows_has_the_gradient_of_an_embedding(compiler: Compiler) -> None:
    """Whose rule splits over the look-ups; rows may count from the end, and some are looked up twice."""
    rows = torch.tensor([[0, -1, 4], [4, 2, -6]])
    ours, theirs = (torch.arange(48.0).view(6, 4, 2).requires_grad_() for _ in range(2))

    def look_up(table: Tensor) -> Tensor:
        return table[rows].square().sum()

    compiler(look_up)(ours).backward()
    look_up(theirs).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert "aten.embedding_dense_backward" in {op.name for op in compiler.function().ops}


def test_a_size_that_depends_on_values_is_refused(compiler: Compiler) -> None:
    def choose(x: Tensor) -> Tensor:
        return x[x > 0] * 2

    with (
        torch._dynamo.config.patch(  # pyright: ignore[reportPrivateUsage]
            capture_dynamic_output_shape_ops=True
        ),
        pytest.raises(Exception, match="depends on values") as raised,
    ):
        compiler(choose, fullgraph=True)(torch.randn(8))
    assert isinstance(raised.value, Diagnostic) or isinstance(raised.value.__cause__, Diagnostic)


def test_what_a_plan_reads_is_what_was_captured(compiler: Compiler) -> None:
    """Unused parameters stay parameters: positions are AOTAutograd's."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(requires_grad=False)

        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return self.frozen(self.used(x)) + 0 * unused.sum().detach()

    model = Half()
    y = compiler(model)(torch.randn(2, 3), torch.randn(4))
    y.sum().backward()
    captured = compiler.captured()
    assert len(captured.arguments) == len(params(captured.function, "param")) + len(params(captured.function, "input"))
    assert [slot is None for slot in captured.grads].count(False) == 2
    assert replace(captured.function).name == "step"
