"""One architecture under plans of every kind: `python -m tests.architectures.prove KIND FAMILY` prints the results.

Twice: without dropout, captured and interpreted beside plain PyTorch; with the dropouts that are published, each plan
on virtual ranks in float64 beside the plan for one device, which draws the same masks.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moaic.capture.aot import capture_backend
from moaic.capture.dynamo_patches import captures_whole
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.program import FxProgram
from moaic.capture.trace_only import CapturedCall
from moaic.check.proof import KEY, Proof, ProofOutcome, crashed, one_of_each_kind, plans_of, step_of
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import Request
from moaic.planner.request import parse_request
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.interpreter import run_function
from tests.architectures.tiny import Batch, made, model_of, without_dropout

PLANS: Mapping[str, tuple[str, int]] = {
    "auto": ("", 2),
    "micro_batches=2": ("micro_batches=2", 1),
    "dp=2": ("dp=2", 2),
    "tp=2": ("tp=2", 2),
    "cp=2": ("cp=2", 2),
    "pp=2": ("pp=2", 2),
}
"""Requests, and for how many devices."""

TRIED = 4
"""Candidates of a request that are tried until one is no refusal."""

CLOSE = 2e-3
"""How far float32 may be from float32 in another order, relative to the largest of all gradients."""


class Interpreted:
    """An engine that runs every graph through the reference interpreter, and keeps what was captured."""

    def __init__(self, program: FxProgram, taken: dict[int, CapturedCall]) -> None:
        self.program = program
        self.taken = taken

    def forward(self, instance: Instance, arguments: list[Tensor]) -> tuple[Sequence[Tensor], list[Tensor]]:
        captured = instance.closed
        given = [argument.detach().clone() for argument in arguments]
        if captured.function.results:
            self.taken.setdefault(id(captured), CapturedCall(captured, tuple(given)))
        zeros = [torch.zeros(value.type.shape, dtype=DTYPES[value.type.dtype]) for value in _tangents(captured)]
        return _run(captured, given, zeros)[: captured.forward_results], given

    def backward(self, instance: Instance, call: list[Tensor], tangents: list[Tensor]) -> Sequence[Tensor]:
        captured = instance.closed
        return _run(captured, call, tangents)[captured.forward_results :]

    def run_op_by_op(self, reason: Diagnostic) -> None:
        raise reason


def _tangents(captured: Captured) -> list[Any]:
    function = captured.function
    return [value for at, value in enumerate(function.params) if function.param_role(at).kind == "tangent"]


def _run(captured: Captured, arguments: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    wanted = [DTYPES[value.type.dtype] for value in _tangents(captured)]
    given = [tensor.to(dtype) for tensor, dtype in zip(tangents, wanted, strict=True)]
    key = [torch.tensor(KEY)] if captured.has_key else []
    found = run_function(Module((captured.function,)), "step", [*arguments, *given, *captured.constants, *key])
    return [tensor.clone() for tensor in found]


@dataclass(frozen=True)
class Trained:
    """The loss and all gradients of one step."""

    loss: Tensor
    gradients: Mapping[str, Tensor]


def trained(model: Any, call: Callable[..., Any], batch: Batch) -> Trained:
    model.zero_grad()
    torch.manual_seed(3)
    loss = call(**batch).loss
    loss.backward()
    named = model.named_parameters()
    return Trained(loss.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None})


def captured_by(model: Any, batch: Batch) -> tuple[Trained, list[CapturedCall]]:
    """What the captured graphs give, and the graphs."""
    taken: dict[int, CapturedCall] = {}

    def backend(graph: Any, examples: Sequence[Any], **options: object) -> Callable[..., Any]:
        return capture_backend(graph, examples, lambda program: Interpreted(program, taken))

    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend=captures_whole(backend), dynamic=False)
    return trained(model, compiled, batch), list(taken.values())


def apart(one: Trained, other: Trained) -> float:
    """The largest distance of the loss or a gradient, relative to the largest of all."""
    names = {*one.gradients, *other.gradients}
    none = torch.zeros(())
    largest = max([float(each.abs().max()) for each in other.gradients.values() if each.numel()], default=1.0)
    away = [float((one.loss - other.loss).abs()) / max(1.0, float(other.loss.abs()))]
    for name in names:
        difference = one.gradients.get(name, none) - other.gradients.get(name, none)
        away += [float(difference.abs().max()) / max(largest, 1e-30)] if difference.numel() else []
    return float("nan") if any(each != each for each in away) else max(away)


def found_of(kind: str, family: str) -> Iterator[tuple[str, str, str]]:
    """What was tried, its class, and why."""
    try:
        form = made(kind, family)
        published, batch = form.model, form.batch
        without_dropout(form.config)
        quiet = model_of(kind, form.config)
        plain = trained(quiet, quiet, batch)
    except Exception as error:
        yield "build", "not built", _short(error)
        return
    yield from _captured(quiet, batch, plain)
    try:
        _, graphs = captured_by(published, batch)
    except Exception as error:
        yield "dropout", _class_of(error), _short(error)
        return
    yield "graphs", "equal", str(len(graphs))
    proofs = [Proof(step_of(graph)) for graph in graphs]
    for name, (text, ranks) in PLANS.items():
        verdicts = [_under(proof, parse_request(text), ranks) for proof in proofs]
        yield name, *_of_all(verdicts)


def _captured(model: Any, batch: Batch, plain: Trained) -> Iterator[tuple[str, str, str]]:
    try:
        ours, _ = captured_by(model, batch)
    except Exception as error:
        yield "capture", _class_of(error), _short(error)
        return
    away = apart(ours, plain)
    if away != away and plain.loss.isnan():
        yield "capture", "unclear", "plain PyTorch's loss is no number"
        return
    yield "capture", "equal" if away <= CLOSE else "wrong", f"{away:.1e}"


def _under(proof: Proof, request: Request, ranks: int) -> tuple[str, str]:
    reasons: list[str] = []
    try:
        configs = one_of_each_kind(plans_of(proof.step.module, ranks, request))[:TRIED]
    except Diagnostic as reason:
        return "refused", reason.message
    except Exception as error:
        return "unclear", crashed(error)
    for config in configs:
        verdict = proof.verdict(config)
        if verdict.outcome is not ProofOutcome.DROPPED:
            return (
                ("equal", str(config))
                if verdict.outcome is ProofOutcome.PASS
                else (_failed(verdict.reason), verdict.reason)
            )
        reasons.append(verdict.reason)
    return "refused", reasons[0]


def _failed(reason: str) -> str:
    return "wrong" if " is off by " in reason else "unclear"


ORDER = ("equal", "refused", "unclear", "wrong")


def _of_all(verdicts: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Where a model breaks into graphs each takes of a plan what it can; one that refuses it runs as on one device."""
    worst = max(verdicts, key=lambda each: ORDER.index(each[0]), default=("equal", "no graph"))
    taken = sum(verdict == "equal" for verdict, _ in verdicts)
    if worst[0] == "refused" and taken:
        return "equal", f"{taken} of {len(verdicts)} graphs: {worst[1]}"
    return worst


def _class_of(error: BaseException) -> str:
    return "refused" if _diagnostic(error) is not None else "unclear"


def _diagnostic(error: BaseException) -> Diagnostic | None:
    inner = getattr(error, "inner_exception", None) or error
    return inner if isinstance(inner, Diagnostic) else None


def _short(error: BaseException) -> str:
    found = _diagnostic(error)
    return (found.message if found is not None else crashed(error) if isinstance(error, Exception) else "")[:300]


def main(kind: str, family: str) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name, verdict, why in found_of(kind, family):
        sys.stdout.write(json.dumps([name, verdict, why]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
