"""Training over process groups equals training in plain PyTorch: here between two CPU workers, by gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.launch import launch
from moaic.runtime.protocol.carrier import Carrier
from tests.exact.models import EXAMPLES
from tests.exact.training import Reference, Trainee, check_gradients, check_run


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(EXAMPLES["llama"])


@pytest.fixture(scope="module")
def trainee() -> Iterator[Trainee]:
    torch.compiler.reset()
    accelerator = Accelerator(launch(2, {"MOAI_COMPILE": "0"}, carrier=Carrier.GLOO))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moaic.runtime.controller.session.accelerator", lambda: accelerator)
        yield Trainee(EXAMPLES["llama"])
    accelerator.close()


@pytest.mark.exact
@pytest.mark.parametrize("plan", ["dp2", "tp2", "pp2", "use", "cp2", "dp2_mb2"])
def test_a_plan_trains_as_one_device_does(trainee: Trainee, reference: Reference, plan: str) -> None:
    trainee.use(plan)
    check_gradients(trainee.gradients(), reference.gradients)
    check_run(trainee.run("sgd"), reference.run("sgd"))
