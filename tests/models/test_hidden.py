"""Results do not depend on hidden and future tokens, the order of rows, the length of padding, or the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moaic.capture.trace_only import take_call
from moaic.check.distance import distance
from moaic.check.proof import CapturedStep, in_halves, in_one, one_of_each_kind, plans_of, sampled, step_of
from moaic.check.workers import with_tangent_of_loss_alone
from moaic.ir.errors import Diagnostic
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.lowering.programs import lower
from moaic.runtime.interpreter import run_function
from tests.exact.example import Batch, Example
from tests.models.changes import CHANGES, DOCUMENTS, PICTURES, READS_PADDING, WHOLE_LOSS, Changed, turned
from tests.models.conftest import Zoo
from tests.models.zoo import DROPPING, LENGTH, MODELS, dropping

# Raised by PyTorch's own modules and by the models when they are imported or used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

EXACT = 1e-10
"""In float64."""

ROUNDED = 1e-5
"""In float32."""

FAINT = dropping(1e-9)
"""Takes every way that dropout takes, and drops nothing: what of a step is not the same rows' can be compared."""

CASES = [(change, name) for change, (_, names) in CHANGES.items() for name in names]

FEW = [
    ("hide", "bert_dropout"),
    ("hide", "llama_documents_dropout"),
    ("come_later", "gpt2_dropout"),
    ("come_later", "deepseek_v3"),
]
"""Tried each time."""


# As compiled, on virtual ranks.


def given(step: CapturedStep, batch: Batch) -> CapturedStep:
    """The step on another batch."""
    main, inputs, left = step.module.main, list(step.inputs), {*batch}
    for index, tensor in enumerate(step.inputs):
        label = main.param_role(index).label
        if main.param_role(index).kind == "input" and label in left:
            left.remove(label)
            inputs[index] = batch[label].to(tensor.dtype)
    assert not left, f"the step has no input {left}"
    return replace(step, inputs=tuple(inputs))


def logits_at(step: CapturedStep) -> int:
    """The place of the logits among the results."""
    main = step.module.main
    shapes = [value.type.shape for value in main.results[: step.outputs]]
    return next(index for index, shape in enumerate(shapes) if len(shape) > 1)


def check_unnoticed(step: CapturedStep, changed: Changed, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Of all that a step gives, what must be the same is."""
    place = logits_at(step)
    apart = distance(found[place][changed.same], wanted[place][changed.same], 0.0)
    assert apart <= EXACT, f"logits are off by {apart:.1e}"
    if changed.learns_the_same:
        check_learned(step, found, wanted)


def check_learned(step: CapturedStep, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Loss and gradients are the same; small gradients count as a share of the largest."""
    main = step.module.main
    learned = [i for i, value in enumerate(main.results) if main.result_role(i).kind == "grad" or not value.type.shape]
    floor = 1e-3 * max(wanted[i].abs().max().item() for i in learned)
    for i in learned:
        apart = distance(found[i], wanted[i], floor)
        assert apart <= EXACT, f"{main.result_role(i)} is off by {apart:.1e}"


def as_written(step: CapturedStep) -> list[Tensor]:
    return run_function(step.module, step.module.main.name, step.inputs)


def check_plans(step: CapturedStep, changed: Changed, configs: Sequence[Config]) -> int:
    """How many of the plans there are: in one program, and in two, none notices the change."""
    wanted, other, builder, done = as_written(step), given(step, changed.batch), Builder(step.module), 0
    for config in configs:
        try:
            programs = lower(builder.build(config).module, ())
        except Diagnostic:
            continue
        check_unnoticed(step, changed, in_one(other, programs), wanted)
        check_unnoticed(step, changed, in_halves(other, programs), wanted)
        done += 1
    return done


def step_on_loss(zoo: Zoo, name: str) -> CapturedStep:
    return with_tangent_of_loss_alone(zoo.proof(name).step)


@pytest.mark.parametrize(("change", "name"), FEW)
def test_some_plans_do_not_notice(zoo: Zoo, change: str, name: str) -> None:
    step = step_on_loss(zoo, name)
    assert check_plans(step, CHANGES[change][0](name), sampled(plans_of(step.module, 2), 1))


@pytest.mark.exact
@pytest.mark.parametrize(("change", "name"), CASES)
def test_no_kind_of_plan_notices(zoo: Zoo, change: str, name: str) -> None:
    step = step_on_loss(zoo, name)
    configs = [config for ranks in (1, 2, 4) for config in one_of_each_kind(plans_of(step.module, ranks))]
    assert check_plans(step, CHANGES[change][0](name), configs)


def captured(example: Example, batch: Batch) -> CapturedStep:
    torch.compiler.reset()
    there = {key: tensor.to("moai") for key, tensor in batch.items()}
    return with_tangent_of_loss_alone(step_of(take_call(example.model().to("moai"), there)))


@pytest.mark.exact
@pytest.mark.parametrize("name", [name for name in MODELS if name not in DROPPING] + [*FAINT])
def test_rows_may_come_in_any_order(name: str) -> None:
    example = {**MODELS, **FAINT}[name]
    batch = example.batch()
    step = captured(example, batch)
    other, wanted, builder = given(step, turned(batch)), as_written(step), Builder(step.module)
    for config in one_of_each_kind(plans_of(step.module, 2)):
        try:
            programs = lower(builder.build(config).module, ())
        except Diagnostic:
            continue
        found = in_one(other, programs)
        check_learned(step, found, wanted)
        place = logits_at(step)
        assert distance(found[place].flip(0), wanted[place], 0.0) <= EXACT


PADDED = [name for name in MODELS if name not in (*PICTURES, *DOCUMENTS, *WHOLE_LOSS, *DROPPING, *READS_PADDING)]


def short_text(batch: Batch, length: int) -> Batch:
    """Rows of which nothing is longer than five tokens, padded to `length`."""
    seen = (torch.arange(LENGTH) < 5) & batch["attention_mask"].bool()
    empty = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {key: batch[key].where(seen, value)[:, :length] for key, value in empty.items()}


@pytest.mark.exact
@pytest.mark.parametrize(
    "name", [*PADDED, *(name for name in FAINT if name not in (*PICTURES, *DOCUMENTS, *READS_PADDING))]
)
def test_padding_may_be_longer(name: str) -> None:
    example = {**MODELS, **FAINT}[name]
    steps = [captured(example, short_text(example.batch(), length)) for length in (6, LENGTH)]
    short, long = (as_written(step) for step in steps)
    check_learned(steps[0], long, short)


# Eagerly, on workers: like the CPU's, dropout draws from the generator that is seeded.


def eagerly(example: Example, batch: Batch, where: str) -> dict[str, Tensor]:
    """Logits, loss and gradients."""
    model = example.model().to(where)
    torch.manual_seed(7)
    answer = model(**{key: tensor.to(where) for key, tensor in batch.items()})
    answer.loss.backward()
    grads = {key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None}
    return {"logits": answer.logits.detach().cpu(), "loss": answer.loss.detach().cpu(), **grads}


def check_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    floor = 1e-3 * max(tensor.abs().max().item() for tensor in wanted.values())
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        apart = distance(found[key], tensor, floor)
        assert apart <= ROUNDED * 10, f"{key} is off by {apart:.1e}"


def check_eager(name: str) -> None:
    """Eager steps are those of plain PyTorch, and notice nothing either."""
    example = MODELS[name]
    wanted = eagerly(example, example.batch(), "cpu")
    check_close(eagerly(example, example.batch(), "moai"), wanted)
    for change, names in CHANGES.values():
        if name in names:
            changed = change(name)
            found = eagerly(example, changed.batch, "moai")
            apart = distance(found["logits"][changed.same], wanted["logits"][changed.same], 0.0)
            assert apart <= ROUNDED, f"logits are off by {apart:.1e}"
            if changed.learns_the_same:
                check_close({**found, "logits": wanted["logits"]}, wanted)


@pytest.mark.parametrize("name", ["bert_dropout", "mixtral"])
def test_an_eager_step_does_not_notice(name: str) -> None:
    check_eager(name)


@pytest.mark.exact
@pytest.mark.parametrize("name", MODELS)
def test_no_eager_step_notices(name: str) -> None:
    check_eager(name)
