"""Every pass that can be run by name on IR text: `moaic opt FILE -p outline,recompute=full,dp=2`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import check_made, verify
from moaic.passes.annotate import Axis
from moaic.passes.chunk import in_chunks
from moaic.passes.config import Distribute, Recompute
from moaic.passes.context import follow_context
from moaic.passes.dead import without_dead_ops
from moaic.passes.distribute import distribute
from moaic.passes.experts import follow_experts
from moaic.passes.follow import follow_space, follow_time
from moaic.passes.hoist import hoist_casts
from moaic.passes.outline import outline
from moaic.passes.program import lower
from moaic.passes.promote import promote
from moaic.passes.recompute import recompute
from moaic.passes.schedule import SCHEDULES, is_schedule_name, schedule_of
from moaic.passes.stage import in_stages
from moaic.passes.tensor import follow_tensor
from moaic.passes.timed import CHUNKS, MICRO_BATCHES
from moaic.passes.weights import split_weights
from moaic.passes.zero import drop_zeros


@dataclass(frozen=True, slots=True)
class Pass:
    """A transformation of modules with at most one option, written `name` or `name=option`."""

    name: str
    summary: str
    run: Callable[[Module, str], Module]
    """Takes the module and the option's text."""
    default: str = ""


def run_passes(module: Module, names: str) -> Module:
    """`module` after the passes in `names`, verified before the first and after each."""
    verify(module)
    for word in filter(None, names.split(",")):
        name, _, option = word.partition("=")
        if name not in PASSES:
            raise Diagnostic(f"there is no pass `{name}`", hint=f"passes are {', '.join(PASSES)}")
        chosen = PASSES[name]
        module = check_made(chosen.run(module, option or chosen.default), word)
    return module


def _number(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 2:
        raise Diagnostic(f"pass {name} needs a number of ranks, not `{text}`", hint=f"for example {name}=2")
    return int(text)


def _word(name: str, text: str, words: Sequence[str]) -> str:
    if text not in words:
        raise Diagnostic(f"{name}={text} is not known", hint=f"choose one of {', '.join(words)}")
    return text


def _zeros(module: Module, labels: str) -> Module:
    """Tangents with these labels (joined by +), or all but those of scalars, are zero."""
    main = module.main
    tangents = {i: main.param_role(i).label for i in range(len(main.params)) if main.param_role(i).kind == "tangent"}
    wanted = set(labels.split("+"))
    zero = [i for i, label in tangents.items() if (label in wanted if labels else main.params[i].type.shape != ())]
    return drop_zeros(module, zero)


def _pipeline(module: Module, text: str) -> Module:
    workers, _, name = text.partition(":")
    wanted = name or "1f1b"
    if not is_schedule_name(wanted):
        raise Diagnostic(f"there is no schedule `{wanted}`", hint=f"choose one of {', '.join(SCHEDULES)}")
    return in_stages(module, schedule_of(wanted, _number("pp", workers), module.mesh.size(MICRO_BATCHES)))


PASSES: dict[str, Pass] = {
    each.name: each
    for each in (
        Pass("zero", "drop tangents that are zero: all but scalars', or those named", _zeros),
        Pass("outline", "call repeated layers instead of spelling them out", lambda m, _: outline(m)),
        Pass(
            "recompute",
            "choose what a layer's backward finds saved",
            lambda m, text: recompute(m, cast("Recompute", _word("recompute", text, get_args(Recompute)))),
            "saved",
        ),
        Pass(
            MICRO_BATCHES,
            "split the batch in time",
            lambda m, t: follow_time(m, Axis(MICRO_BATCHES, _number(MICRO_BATCHES, t), True)).module,
            "2",
        ),
        Pass("dp", "split the batch in space", lambda m, t: follow_space(m, Axis("dp", _number("dp", t))).module, "2"),
        Pass(
            "ep",
            "split experts and the batch",
            lambda m, t: follow_experts(m, Axis("ep", _number("ep", t))).module,
            "2",
        ),
        Pass("cp", "split the sequence", lambda m, t: follow_context(m, Axis("cp", _number("cp", t))).module, "2"),
        Pass(
            "tp",
            "split tensors, by the solver",
            lambda m, t: follow_tensor(m, Axis("tp", _number("tp", t))).module,
            "2",
        ),
        Pass("hoist", "cast parameters where they enter, not inside functions", lambda m, _: hoist_casts(m)),
        Pass(
            "distribute",
            "shard gradients and parameters over dp",
            lambda m, text: distribute(m, cast("Distribute", _word("distribute", text, get_args(Distribute)))),
            "optimizer",
        ),
        Pass("weights", "split gradients of parameters off each layer's backward", lambda m, _: split_weights(m)),
        Pass("pp", "cut into pipeline stages: a number of workers, then perhaps `:` and a schedule", _pipeline, "2"),
        Pass(CHUNKS, "compute the loss in chunks of tokens", lambda m, t: in_chunks(m, _number(CHUNKS, t)), "2"),
        Pass("dead", "drop what nobody reads", lambda m, _: without_dead_ops(m)),
        Pass("promote", "every floating value in float64", lambda m, _: promote(m)),
        Pass(
            "lower",
            "the joint program: segments, instructions, micro-batches written out",
            lambda m, _: lower(m, ()).joint,
        ),
    )
}
"""In the order in which a plan uses them."""
