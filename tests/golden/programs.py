"""Programs of five models under six plans each, as text, with their results: a refactoring must not change them.

Each step is captured as on the device, from the same weights and batch every time. Source lines are numbered in the
order in which a step meets them, so that no text changes when code moves in a file, or to another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import starmap
from pathlib import Path

import torch

from moaic.capture.trace_only import take_call
from moaic.check.proof import CapturedStep, loss_at, step_of
from moaic.check.workers import with_tangent_of_loss_alone
from moaic.ir.graph import Function, Location, Module, Op
from moaic.ir.printer import render
from moaic.ir.verify import check_made
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.lowering.programs import Programs
from moaic.passes.transforms.symbolic_zeros import drop_zeros
from moaic.passes.transforms.to_float64 import promote
from moaic.planner.request import parse_request
from moaic.runtime.interpreter import run_ranks
from moaic.runtime.rounding import rounding_by_shape
from tests.exact.example import Example
from tests.exact.models import EXAMPLES
from tests.models.zoo import MODELS, t5, translation

FOLDER = Path(__file__).parent

TABLE = FOLDER / "programs.txt"

ALONE = "dp=1"
"""The plan whose text is kept whole."""

SHARDED = "dp=2,micro_batches=2,distribute_param=step"

GOLDEN: Mapping[str, tuple[Example, tuple[str, ...]]] = {
    "llama": (
        MODELS["llama"],
        (ALONE, "dp=2", "tp=2", SHARDED, "pp=2,micro_batches=4,schedule=zero-bubble,recompute=full", "cp=2"),
    ),
    "qwen2_moe": (
        MODELS["qwen2_moe"],
        (ALONE, "dp=2", "tp=2", SHARDED, "pp=2,micro_batches=2,recompute=full", "ep=2"),
    ),
    "bert_dropout": (
        MODELS["bert_dropout"],
        (ALONE, "dp=2", "tp=2", SHARDED, "pp=2,micro_batches=4,recompute=full", "dp=2,tp=2,distribute_param=use"),
    ),
    "resnet": (
        EXAMPLES["resnet"],
        (ALONE, "dp=2", "tp=2", "dp=2,distribute_param=step", "pp=2,recompute=full", "dp=4,distribute_param=optimizer"),
    ),
    "t5": (
        Example(partial(t5, layers=1), translation),
        (ALONE, "dp=2", "tp=2", SHARDED, "pp=2,micro_batches=2,recompute=full", "dp=2,micro_batches=2,loss_chunks=2"),
    ),
}
"""A decoder, experts, an encoder with masks and dropout, batch norms, and a sequence from another; each with plans."""


@dataclass(frozen=True, slots=True)
class Row:
    """What is kept of one program."""

    model: str
    plan: str
    ops: int
    digest: str
    """SHA-256 of the text."""
    loss: float
    gradients: float
    """The square root of the sum of the squares of all gradients."""

    def __str__(self) -> str:
        return f"{self.model} {self.plan} {self.ops} {self.digest} {self.loss!r} {self.gradients!r}"

    @staticmethod
    def parse(line: str) -> Row:
        model, plan, ops, digest, loss, gradients = line.split()
        return Row(model, plan, int(ops), digest, float(loss), float(gradients))


def versions() -> str:
    """What else decides which graph is captured, and which of equally good layouts and cuts is taken."""
    found = {name: version(name).partition("+")[0] for name in ("torch", "transformers", "scipy", "networkx")}
    return ", ".join(map(" ".join, found.items()))


def text_file(model: str) -> Path:
    """Where the program for one device is kept whole."""
    return FOLDER / f"{model}.moai"


def kept() -> tuple[str, dict[tuple[str, str], Row]]:
    """The versions that the table is of, and its rows by model and plan."""
    head, *lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = map(Row.parse, lines)
    return head.removeprefix("# "), {(row.model, row.plan): row for row in rows}


PAIRS = tuple((model, plan) for model, (_, plans) in GOLDEN.items() for plan in plans)


@dataclass(frozen=True)
class Captured:
    """A step in float32, the builder of its plans, and its inputs in float64."""

    module: Module
    builder: Builder
    exact: CapturedStep


@cache
def captured(model: str) -> Captured:
    example, _ = GOLDEN[model]
    torch.compiler.reset()
    batch = {name: tensor.to("moai") for name, tensor in example.batch().items()}
    taken = take_call(example.model().to("moai"), batch)
    function = _numbered(taken.captured.function)
    roles = [function.param_role(index) for index in range(len(function.params))]
    # As in a training loop, where `loss.backward()` gives the loss a tangent and nothing else.
    zero = [i for i, role in enumerate(roles) if role.kind == "tangent" and function.params[i].type.shape]
    module = drop_zeros(Module((function,)), zero)
    return Captured(module, Builder(module), with_tangent_of_loss_alone(step_of(taken)))


def _numbered(function: Function) -> Function:
    """`function` with its source lines numbered in the order in which they come, and no names of files."""
    numbers: dict[tuple[str, int], int] = {}

    def numbered(op: Op) -> Op:
        if not op.loc.file:
            return op
        number = numbers.setdefault((op.loc.file, op.loc.line), len(numbers) + 1)
        return replace(op, loc=Location("source", number, op.loc.module, op.loc.side))

    return replace(function, ops=tuple(map(numbered, function.ops)))


def config_of(plan: str) -> Config:
    request = parse_request(plan)
    given = {name: value for name in Config.__slots__ if (value := getattr(request, name)) is not None}
    return replace(Config(), **given)


@cache
def programs(model: str, plan: str) -> Programs:
    """The programs of a plan; that for the whole step is well formed."""
    made = captured(model).builder.build(config_of(plan)).programs
    check_made(made.joint, "lower")
    return made


def text_of(model: str, plan: str) -> str:
    return render(programs(model, plan).joint)


def row_of(model: str, plan: str) -> Row:
    """What a program is and computes: in float64 on virtual ranks, by the reference interpreter."""
    made, inputs = programs(model, plan), captured(model).exact.inputs
    main = made.joint.main
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with rounding_by_shape():
            results = run_ranks(promote(made.joint), [inputs[index] for index in made.joint_params])
    finally:
        torch.set_num_threads(threads)
    loss = loss_at(main)
    assert loss is not None, f"{model} has no loss"
    squares = sum(float(results[index].square().sum()) for index in main.gradients)
    ops = sum(len(function.ops) for function in made.joint.functions)
    digest = hashlib.sha256(text_of(model, plan).encode()).hexdigest()
    return Row(model, plan, ops, digest, float(results[loss]), squares**0.5)


def rows() -> Iterator[Row]:
    return starmap(row_of, PAIRS)
