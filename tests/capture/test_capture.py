from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from moaic.capture.aot import capture_backend
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.program import FxProgram
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Role
from moaic.ir.ops import OPS
from moaic.ir.parser import parse
from moaic.ir.printer import render
from moaic.ir.verify import verify
from moaic.runtime.interpreter import run_function

# Raised by PyTorch's own modules when they are imported or used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

KEY = torch.tensor([7, 11])


@dataclass(eq=False)
class Call:
    """What a forward was given."""

    copies: list[Tensor]


class Interpreted:
    """An engine that runs every function through the reference interpreter."""

    def __init__(self, program: FxProgram) -> None:
        self.program = program
        self.calls = weakref.WeakSet[Call]()

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], Call]:
        captured = instance.closed
        copies = [argument.detach().clone() for argument in arguments]
        call = Call(copies)
        self.calls.add(call)
        zeros = [
            torch.zeros_like(value)
            for value in (torch.empty(param.type.shape) for param in params(captured.function, "tangent"))
        ]
        return run(captured, copies, zeros)[: captured.forward_results], call

    def backward(self, instance: Instance, call: Call, tangents: list[Tensor]) -> Sequence[Tensor]:
        captured = instance.closed
        return run(captured, call.copies, tangents)[captured.forward_results :]

    def run_op_by_op(self, reason: Diagnostic) -> None:
        raise reason


def params(function: Function, kind: str) -> list[Any]:
    return [value for value, role in zip(function.params, function.param_roles, strict=True) if role.kind == kind]


def labels(roles: Sequence[Role], kind: str) -> set[str]:
    return {role.label for role in roles if role.kind == kind}


def run(captured: Captured, arguments: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    function = captured.function
    kinds = {value: value.type.dtype for value in params(function, "tangent")}
    assert len(kinds) == len(tangents)
    # What the forward alone is asked for must not depend on the tangents' element type.
    given = [tensor.to(DTYPES[kind]) for tensor, kind in zip(tangents, kinds.values(), strict=True)]
    key = [KEY] if captured.has_key else []
    module = Module((function,))
    verify(module)
    return [result.clone() for result in run_function(module, "step", [*arguments, *given, *captured.constants, *key])]


DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}


class Compiler:
    """Compiles models for `Interpreted`, and keeps what was captured."""

    def __init__(self) -> None:
        self.engines: list[Interpreted] = []

    def __call__(self, model: Any, **settings: Any) -> Any:
        def make(program: FxProgram) -> Interpreted:
            self.engines.append(Interpreted(program))
            return self.engines[-1]

        def backend(graph: Any, examples: Sequence[Any]) -> Callable[..., Any]:
            return capture_backend(graph, examples, make)

        return torch.compile(model, backend=backend, **settings)

    def function(self, index: int = -1) -> Function:
        return self.captured(index).function

    def captured(self, index: int = -1) -> Captured:
        return self.engines[index].program.instantiate().closed


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield Compiler()
    torch.compiler.reset()


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: dict[str, Any] = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "use_cache": False}


def text(batch: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Padded sequences."""
    ids = torch.randint(0, 64, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded() -> dict[str, Tensor]:
    """Without a mask attention is a flag, and several heads of queries may share one of keys."""
    padded = text()
    return {"input_ids": padded["input_ids"], "labels": padded["input_ids"]}


def pictures(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(0, 5, (4,))}


def llama(**changes: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, **changes}))


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED))


def mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=6))


def gpt2(dropout: float = 0.0) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    drops: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, use_cache=False))
    model.loss_type = "ForCausalLM"
    return model


NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, **NO_DROPOUT, intermediate_size=48, max_position_embeddings=16))


def vit() -> nn.Module:
    sizes: dict[str, Any] = {**SMALL, "intermediate_size": 48, "image_size": 16, "patch_size": 4, "num_labels": 5}
    del sizes["vocab_size"]
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **NO_DROPOUT))


class ResNet(nn.Module):
    """Strides, a shortcut, batch and group norms, a bias where it matters, pooling, label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.shortcut = nn.Conv2d(8, 16, 1, 2, bias=False)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(pixel_values)
        x = torch.relu(self.norm(self.body(x) + self.shortcut(x)))
        logits = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "llama": (llama, text),
    "llama_without_padding": (llama, unpadded),
    "llama_with_a_cache": (lambda: llama(use_cache=True), unpadded),
    "llama_eager_attention": (lambda: llama(attn_implementation="eager"), text),
    "qwen2": (qwen2, text),
    "mistral": (mistral, text),
    "gpt2": (gpt2, text),
    "bert": (bert, text),
    "vit": (vit, pictures),
    "resnet": (ResNet, pictures),
}


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


@pytest.mark.parametrize("name", MODELS)
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
    model = llama()
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


def test_dropout_draws_from_one_key(compiler: Compiler) -> None:
    model = gpt2(0.5)
    loss = compiler(model)(**text()).loss
    again = compiler(model)(**text()).loss
    loss.backward()
    assert loss.isfinite()
    assert again.isfinite()
    function = compiler.function(0)
    assert function.param_roles[-1].kind == "key"
    folds = [op for op in function.ops if op.name == "moai.fold_key"]
    assert [op.attrs["instance"] for op in folds] == list(range(len(folds)))
    assert len(folds) == 1 + 2 * 3
    assert all(op.loc.module == "" for op in folds)
    assert not [op.name for op in function.ops if "rand" in op.name and op.name != "moai.rand"]


def test_dropout_keeps_its_share_and_scales_it(compiler: Compiler) -> None:
    x = torch.ones(64, 1024, requires_grad=True)
    y = compiler(nn.Dropout(0.25))(x)
    y.sum().backward()
    assert y.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    torch.testing.assert_close(x.grad, y)


def test_random_tensors(compiler: Compiler) -> None:
    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.empty_like(x).uniform_(-3, 5),
            torch.randn_like(x),
            torch.rand(512, 8),
            torch.randint(3, 7, (512,)),
            torch.bernoulli(torch.full_like(x, 0.2)),
        )

    spread, normal, uniform, whole, coin = compiler(draw)(torch.zeros(1 << 14))
    assert spread.min() >= -3
    assert spread.max() < 5
    assert spread.mean().item() == pytest.approx(1, abs=0.1)
    assert normal.mean().item() == pytest.approx(0, abs=0.05)
    assert normal.std().item() == pytest.approx(1, abs=0.05)
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.05)
    assert set(whole.tolist()) == {3, 4, 5, 6}
    assert coin.mean().item() == pytest.approx(0.2, abs=0.02)


def test_distributions_are_those_of_pytorch(compiler: Compiler) -> None:
    """Their cumulative shares at a few places; what is exponential is never zero, nor is the number of tries."""

    def draw(x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.empty_like(x).exponential_(2.0),
            torch.empty_like(x).geometric_(0.3),
            torch.empty_like(x).cauchy_(1.0, 2.0),
            torch.empty_like(x).log_normal_(0.5, 0.25),
            torch.empty_like(x).normal_(3.0, 2.0),
        )

    torch.manual_seed(0)
    ours, theirs = compiler(draw)(torch.zeros(1 << 16)), draw(torch.zeros(1 << 16))
    for found, expected in zip(ours, theirs, strict=True):
        places = expected.quantile(torch.tensor([0.1, 0.5, 0.9]))
        share, wanted = ((each[:, None] <= places).float().mean(0) for each in (found, expected))
        torch.testing.assert_close(share, wanted, atol=0.01, rtol=0)
        assert found.dtype == expected.dtype
        assert not found.isnan().any()
    assert ours[0].min() > 0
    assert ours[1].min() == 1


def test_orders_are_permutations_and_each_as_likely(compiler: Compiler) -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.stack([torch.randperm(3) for _ in range(len(x))])

    torch.manual_seed(0)
    orders = compiler(draw)(torch.zeros(240))
    assert orders.dtype == torch.int64
    assert torch.equal(orders.sort(1).values, torch.arange(3).expand(240, 3))
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert counts.min() > 20


def test_slopes_of_a_random_relu_are_drawn_once(compiler: Compiler) -> None:
    x = torch.full((1 << 12,), -1.0, requires_grad=True)
    y = compiler(nn.RReLU(0.1, 0.3))(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, -y.detach())
    assert y.max() <= -0.1
    assert y.min() >= -0.3
    assert y.mean().item() == pytest.approx(-0.2, abs=0.01)
    assert torch.equal(compiler(nn.RReLU().eval())(x), nn.RReLU().eval()(x))


def test_random_numbers_of_another_kind_are_refused(compiler: Compiler) -> None:
    def draw(x: Tensor) -> Tensor:
        return torch.poisson(x) * x

    with pytest.raises(Exception, match="would depend on the plan"):
        compiler(draw)(torch.ones(4))


def test_a_second_backward_reaches_the_engine(compiler: Compiler) -> None:
    model = nn.Linear(4, 3)
    loss = compiler(model)(torch.randn(2, 4)).square().sum()
    loss.backward(retain_graph=True)
    assert model.weight.grad is not None
    once = model.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)


def test_a_call_ends_with_its_graph(compiler: Compiler) -> None:
    model = nn.Linear(4, 3)
    compiled = compiler(model)
    kept, lost = compiled(torch.randn(2, 4)), compiled(torch.randn(2, 4))
    calls = compiler.engines[0].calls
    assert len(calls) == 2
    del lost
    assert len(calls) == 1
    kept.sum().backward()
    assert len(calls) == 0


def test_a_call_lives_while_its_graph_is_retained(compiler: Compiler) -> None:
    loss = compiler(nn.Linear(4, 3))(torch.randn(2, 4)).sum()
    loss.backward(retain_graph=True)
    assert len(compiler.engines[0].calls) == 1
    loss.backward()
    assert len(compiler.engines[0].calls) == 0


def test_an_inference_keeps_no_call(compiler: Compiler) -> None:
    with torch.no_grad():
        result = compiler(nn.Linear(4, 3))(torch.randn(2, 4))
    assert result.shape == (2, 3)
    assert len(compiler.engines[0].calls) == 0


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
