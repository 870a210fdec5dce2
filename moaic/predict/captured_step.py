"""The step of a model that is only planned, captured from few of its layers where these show what the others do."""

from __future__ import annotations

from collections.abc import Sequence

from moaic.capture.short_stacks import Cut
from moaic.capture.trace_only import CapturedCall, ModelSource, Sample, take_model, take_short_model
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Role
from moaic.passes.perf.structural_hash import key_of
from moaic.passes.registry import run_passes
from moaic.passes.transforms.deepen import deepened

UNITS = 4
"""Units of a stack of layers that are captured: the lowest may read something else, the highest be read by others."""


def captured_step(source: ModelSource, sample: Sample) -> Module:
    """The training step of a loop that reads the loss and nothing else.

    Of a deep model few layers are captured, and the step is made deep. Where that cannot be, all are.
    """
    return _from_few_layers(source, sample) or _step_of(take_model(source, sample))


def _from_few_layers(source: ModelSource, sample: Sample) -> Module | None:
    """The step made from few layers; None where these do not show what the others do.

    Two numbers of layers are captured: the step of fewer has to become that of more by the same means.
    """
    try:
        taken, cuts = take_short_model(source, sample, UNITS)
        if not cuts:
            return _step_of(taken)
        more, less_cut = take_short_model(source, sample, UNITS + 1)
    except Diagnostic:
        return None  # The whole model is captured, or says why it cannot be.
    added = [Cut(cut.container, cut.layers - left.layers) for cut, left in zip(cuts, less_cut, strict=True)]
    step = _step_of(more)
    if not _are_equal(_deepened(_step_of(taken), added), step):
        return None
    return _deepened(step, less_cut)


def _deepened(step: Module, cuts: Sequence[Cut]) -> Module | None:
    """The step with the layers that were left out; None where it does not show what they do."""
    for cut in cuts:
        deeper = deepened(step, cut.container, cut.layers)
        if deeper is None:
            return None
        step = deeper
    return step


def _are_equal(made: Module | None, captured: Module) -> bool:
    """Whether a step that was made deeper is one that was captured."""
    if made is None:
        return False
    return _names(made.main) == _names(captured.main) and key_of(made.main) == key_of(captured.main)


def _names(main: Function) -> list[Role]:
    """What is named by the model, in order: outputs that have no name Dynamo numbers by how much stands before them."""
    return [role for role in (*main.param_roles, *main.result_roles) if role.kind in ("param", "buffer", "grad")]


def _step_of(taken: CapturedCall) -> Module:
    return run_passes(Module((taken.captured.function,)), "zero")
