"""Training on two real workers equals training in plain PyTorch, in float32, under every plan."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from moaic.ir.errors import Diagnostic
from tests.exact.models import EXAMPLES, MIXTURE
from tests.exact.training import (
    PLANS,
    Reference,
    Trainee,
    batches,
    check_gradients,
    check_run,
    compiled,
    gradients,
    train,
)

MICRO_BATCHED = [name for name, plan in PLANS.items() if plan["micro_batches"] != 1]


@cache
def reference(name: str) -> Reference:
    return Reference(MODELS[name])


@pytest.fixture(scope="module")
def trainees() -> dict[str, Trainee]:
    """Each model is captured once."""
    torch.compiler.reset()
    return {}


def trainee_of(trainees: dict[str, Trainee], name: str, plan: str) -> Trainee:
    if name not in trainees:
        trainees[name] = Trainee(MODELS[name])
    trainees[name].use(plan)
    return trainees[name]


WITHOUT: dict[str, list[str]] = {"vit": ["cp2"], "resnet": ["cp2", *MICRO_BATCHED]}
"""Seventeen patches, and no sequence at all; batch norm."""

CASES = [
    *((name, plan) for name in EXAMPLES for plan in PLANS if plan not in ("ep2", *WITHOUT.get(name, ()))),
    ("mixtral", "ep2"),
]

OFTEN = {
    "llama": tuple(PLANS),
    "qwen2": ("use", "cp2"),
    "gpt2": ("tp2", "pp2"),
    "vit": ("dp2", "pp2"),
    "resnet": ("dp2", "tp2"),
    "mixtral": ("ep2",),
}
"""The plans under which each model is trained in CI; tests/models proves others of them all on virtual ranks."""

BY_ADAMW = [case if case[1] in OFTEN[case[0]] else pytest.param(*case, marks=pytest.mark.exact) for case in CASES]

ONCE = ("dp2", "step")
"""Whole and sharded state: otherwise a plan knows nothing of optimizers, and tests/loops tries many of them."""

BY_SGD = [
    case if case[0] == "llama" and case[1] in ONCE else pytest.param(*case, marks=pytest.mark.exact) for case in CASES
]

MODELS = {**EXAMPLES, "mixtral": MIXTURE}


@pytest.mark.parametrize(("name", "plan"), BY_ADAMW)
def test_a_plan_trains_as_one_device_does(trainees: dict[str, Trainee], name: str, plan: str) -> None:
    trainee = trainee_of(trainees, name, plan)
    check_gradients(trainee.gradients(), reference(name).gradients)
    check_run(trainee.run("adamw"), reference(name).run("adamw"))


@pytest.mark.parametrize(("name", "plan"), BY_SGD)
def test_it_does_by_sgd_too(trainees: dict[str, Trainee], name: str, plan: str) -> None:
    check_run(trainee_of(trainees, name, plan).run("sgd"), reference(name).run("sgd"))


@pytest.mark.parametrize("plan", MICRO_BATCHED)
def test_batch_norm_is_named_where_it_stands_in_the_way_of_micro_batches(
    trainees: dict[str, Trainee], plan: str
) -> None:
    trainee = trainee_of(trainees, "resnet", plan)
    with pytest.raises(Diagnostic, match=r"blocks\.0\.first_norm.*models\.py.*needs the whole batch"):
        trainee.gradients()


def test_the_comparison_notices_doubled_gradients(trainees: dict[str, Trainee]) -> None:
    trainee = trainee_of(trainees, "llama", "dp2")
    trainee.planted = lambda grads: [grad * 2 for grad in grads]
    try:
        doubled = trainee.gradients()
        run = trainee.run("sgd")
    finally:
        trainee.planted = lambda grads: grads
    with pytest.raises(AssertionError, match="is off by 1"):
        check_gradients(doubled, reference("llama").gradients)
    with pytest.raises(AssertionError, match="loss"):
        check_run(run, reference("llama").run("sgd"))


def test_the_comparison_notices_one_doubled_gradient() -> None:
    expected = reference("llama").gradients
    for name, gradient in expected.items():
        with pytest.raises(AssertionError, match=f"gradient of {name} is off by 1"):
            check_gradients({**expected, name: gradient * 2}, expected)


def test_the_models_learn() -> None:
    for name in EXAMPLES:
        losses = reference(name).run("adamw").losses
        assert losses[-1] < 0.9 * losses[0], name


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [("llama", "dp2_mb2"), ("resnet", "dp2")])
def test_compiled_programs_train_alike(name: str, plan: str) -> None:
    example = EXAMPLES[name]
    model = example.model().to("moai")
    call = compiled(model, PLANS[plan])
    check_gradients(gradients(model, call, example.batch()), reference(name).gradients)
    model.load_state_dict(example.model().state_dict())
    check_run(train(model, call, batches(example), "adamw"), reference(name).run("adamw"))
