"""Proof of a plan on real workers: forward and backward run as in training and give the results of one device."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from moaic.check.proof import KEY, CapturedStep, ProofOutcome, Verdict, compared, crashed, loss_at
from moaic.compile.step import Step as Running
from moaic.device.host_tensor_cache import uploaded
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.lowering.plan import Plan
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import whole
from moaic.runtime.controller.launch import launch
from moaic.runtime.host.env_flags import CompileMode
from moaic.runtime.host.gpus import CPU
from moaic.runtime.host.worker_kinds import asked_device
from moaic.runtime.interpreter import run_function

TOLERANCE = 1e-4
"""Largest distance from the step's result in float64: rounding of float32, summed in another order."""


@contextmanager
def workers(count: int, device: str | None = None) -> Generator[Accelerator]:
    """An accelerator of `count` workers on this machine, closed at the end of the block.

    Each is on `device`, by default the kind that MOAI_WORKERS names, or the CPU. Raises Diagnostic for an invalid one.
    """
    device = device or asked_device(os.environ) or CPU
    accelerator = Accelerator(launch(count, devices=(device,) * count))
    try:
        yield accelerator
    finally:
        accelerator.close()


class WorkerProof:
    """One step in float32 and what it computes; if it has a loss, all tangents but that of the loss are zero."""

    def __init__(self, step: CapturedStep, *, compiled: bool) -> None:
        self._exact = with_tangent_of_loss_alone(step)
        self._step = self._exact.cast("f32")
        self._compiling = CompileMode.BEFOREHAND if compiled else CompileMode.NEVER
        self._expected = run_function(self._exact.module, self._exact.module.main.name, self._exact.inputs)
        self._builders: dict[str, Builder] = {}

    def verdict(self, config: Config, accelerator: Accelerator, runs: int = 1) -> Verdict:
        """Runs one training step under a plan so many times, up to the first failure.

        A Diagnostic drops the plan, any other exception is a failure.
        """
        main = self._step.module.main

        def plan(step: Module) -> Plan:
            return self._builder(step).build(config)

        try:
            running = Running(main, accelerator, plan, compiling=self._compiling)
            for _ in range(runs - 1):
                verdict = compared(config, main, self._results(running, accelerator), self._expected, TOLERANCE)
                if verdict.outcome is not ProofOutcome.PASS:
                    return verdict
            results = self._results(running, accelerator)
        except Diagnostic as reason:
            return Verdict(config, ProofOutcome.DROPPED, reason=reason.message)
        except Exception as error:
            return Verdict(config, ProofOutcome.FAIL, reason=crashed(error))
        return compared(config, main, results, self._expected, TOLERANCE)

    def _builder(self, step: Module) -> Builder:
        """The builder of one variant of the step; all plans of the variant share its passes."""
        text = render(step)
        if text not in self._builders:
            self._builders[text] = Builder(step)
        return self._builders[text]

    def _results(self, running: Running, accelerator: Accelerator) -> list[Tensor]:
        main = self._step.module.main
        given = [uploaded(accelerator, self._step.inputs[i]) for i in running.given]
        outputs, call = running.forward(given, KEY)
        tangents = [self._step.inputs[i] for i in running.tangents]
        set_ones = [uploaded(accelerator, tensor) if tensor.any() else None for tensor in tangents]
        grads = running.backward(call, set_ones) if running.grads else []
        made = dict(zip((*running.outputs, *running.grads), (*outputs, *grads), strict=True))
        return [accelerator.download(whole(made[i])) for i in range(len(main.results))]


def with_tangent_of_loss_alone(step: CapturedStep) -> CapturedStep:
    """The step with the tangents that `loss.backward()` gives."""
    main = step.module.main
    loss = loss_at(main)
    if loss is None:
        return step
    label, inputs = main.result_role(loss).label, list(step.inputs)
    for index, tensor in enumerate(step.inputs):
        role = main.param_role(index)
        if role.kind == "tangent":
            inputs[index] = torch.ones_like(tensor) if role.label == label else torch.zeros_like(tensor)
    return CapturedStep(step.module, tuple(inputs))
