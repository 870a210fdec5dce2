"""Common code of training loops has the effect that it has in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from tests.exact.training import Call, Trainee
from tests.loops.compare import PLANS, Behaviour, Found, same
from tests.loops.loop_behaviours import (
    average,
    interrupt,
    loss_outside,
    put_the_average_in,
    read_everything,
    save_and_load,
)
from tests.loops.step_behaviours import (
    accumulate,
    by_hand,
    clip_norms,
    clip_values,
    freeze,
    groups,
    hook_gradients,
    one_cycle,
    scale,
    scale_fused,
    schedule,
    search_a_line,
    sharpness_aware,
    step_in_backward,
    two_optimizers,
)
from tests.loops.tiny import TINY

BEHAVIOURS: Mapping[str, Behaviour] = {
    behaviour.__name__: behaviour
    for behaviour in (
        accumulate,
        scale,
        scale_fused,
        clip_norms,
        clip_values,
        schedule,
        one_cycle,
        groups,
        freeze,
        average,
        put_the_average_in,
        hook_gradients,
        step_in_backward,
        two_optimizers,
        loss_outside,
        by_hand,
        read_everything,
        search_a_line,
        sharpness_aware,
        interrupt,
        save_and_load,
    )
}


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.compiler.reset()
    return Trainee(TINY)


@pytest.fixture(scope="module")
def expected() -> dict[str, Found]:
    return {}


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("plan", PLANS)
def test_it_does_what_pytorch_does(trainee: Trainee, behaviour: str, plan: str, expected: dict[str, Found]) -> None:
    if behaviour not in expected:
        host = TINY.model()
        expected[behaviour] = BEHAVIOURS[behaviour](host, host_call(host))
    trainee.use(plan)
    trainee.model.zero_grad()
    same(BEHAVIOURS[behaviour](trainee.model, trainee.call), expected[behaviour], 1e-4)


def host_call(model: nn.Module) -> Call:
    return model
