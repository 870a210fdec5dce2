"""A parallel configuration: the decisions that identify a plan, as users write and read them.

Each decision is declared here once, by a field of Config and its place in the orders below: its type and default, its
text, its row in docs/plans.md. `Request` has the same fields, which may be None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from moaic.passes.decision import DECLARED, YES_OR_NO, Decision, beyond_one, decision
from moaic.passes.schedules import SCHEDULES
from moaic.passes.stage_shares import EQUAL

Recompute = Literal["saved", "full"]
"""Values saved for the backward: `saved` keeps the cheapest sufficient set, `full` the inputs of each layer."""

Distribute = Literal["none", "optimizer", "step", "use"]
"""`none`: parameters, gradients and optimizer state replicated; `optimizer`: gradients and optimizer state sharded
(ZeRO-2); `step`: parameters too, gathered once per step; `use`: gathered for the forward and for the backward
(ZeRO-3)."""


GATHERING: tuple[Distribute, ...] = ("step", "use")
"""Levels at which parameters are sharded and gathered."""


@dataclass(frozen=True, slots=True, order=True)
class Config:
    """Every decision of a plan that a user may make."""

    dp: int = decision(1, "parts of the batch, one on each group of workers")
    tp: int = decision(1, "parts of the weights", logged=lambda parts: f"tp : {parts}" if parts > 1 else "No TP")
    micro_batches: int = decision(
        1, "parts of the batch, one after the other", logged=lambda parts: f"num_micro_batches : {parts}"
    )
    recompute: Recompute = decision(
        "saved",
        "the values saved for the backward: those that are cheapest to save, or only the inputs of each layer",
        values="`saved`, `full`",
        logged=lambda mode: f"recomputation : {spelled(mode == 'full')}",
        also={"true": "full", "false": "saved"},
    )
    distribute_param: Distribute = decision(
        "none",
        "sharding over `dp`: none; gradients and optimizer state; parameters, too, gathered once per step; or gathered "
        "for each use, with the gradients of each micro-batch scattered at once",
        values="`none`, `optimizer`, `step`, `use`",
        logged=lambda level: f"distribute_param : {'false' if level == 'none' else f'true ({level})'}",
        also={"true": "step", "false": "none"},
    )
    distribute_low_prec_param: bool = decision(
        False,
        "whether parameters are cast to low precision before they are gathered",
        values=YES_OR_NO,
        logged=lambda narrow: "distribute_low_prec_param : true" if narrow else "",
    )
    pp: int = decision(1, "stages of the model, one after the other", logged=lambda stages: f"num_stages : {stages}")
    schedule: str = decision(
        "1f1b",
        "the order of forwards and backwards on each stage",
        values="`1f1b`, `gpipe`, `interleaved`, `zero-bubble`, a file",
        logged=lambda schedule: f"schedule : {schedule}",
    )
    """Name or text of a pipeline's schedule; ignored without a pipeline."""
    stage_shares: str = decision(
        EQUAL,
        "shares of the layers that the workers along `pp` have, where these are not equally fast",
        values="`equal`, `5+2`, …",
        logged=lambda shares: "" if shares == EQUAL else f"stage_shares : {shares}",
    )
    cp: int = decision(1, "parts of the sequence", logged=beyond_one("cp"))
    ep: int = decision(1, "parts of the experts, and of the batch with them", logged=beyond_one("ep"))
    gather_keys: bool = decision(
        True,
        "whether `cp` may gather all keys and values of attention if that costs least; otherwise they are passed "
        "around the workers in a ring, or rows are exchanged for heads, which needs less memory",
        values=YES_OR_NO,
        logged=lambda gather: "" if gather else "gather_keys : false",
    )
    """Whether `cp` may gather keys and values of attention; if not, no rank holds all of them."""
    loss_chunks: int = decision(
        1,
        "parts of the tokens, one after the other, for which logits, the loss and their gradients are computed; "
        "nothing is computed twice",
        logged=beyond_one("loss_chunks"),
    )
    """Chunks of tokens for which logits and their gradients are computed, one after the other."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.ep * self.cp * self.tp

    @property
    def ranks_of_stages(self) -> list[range]:
        """The ranks of each worker along `pp`."""
        each = self.ranks // self.pp
        return [range(each * stage, each * (stage + 1)) for stage in range(self.pp)]

    @property
    def mesh(self) -> Config:
        """How many ranks each axis has, and nothing else decided."""
        return Config(pp=self.pp, dp=self.dp, ep=self.ep, cp=self.cp, tp=self.tp)

    def __str__(self) -> str:
        """`dp=2,micro_batches=4`: what differs from one device, in the form that MOAI_PLAN takes."""
        default = Config()
        parts = [
            f"{name}={spelled(value)}" for name in DECISIONS if (value := getattr(self, name)) != getattr(default, name)
        ]
        return ",".join(parts) or "dp=1"


DECISIONS: Mapping[str, Decision] = {each.name: each.metadata[DECLARED] for each in fields(Config)}
"""By name, in the order in which plans are written."""

FROM_SIMPLE = (
    *("pp", "stage_shares", "schedule", "micro_batches", "recompute", "distribute_param", "ep", "cp", "tp", "dp"),
    *("distribute_low_prec_param", "gather_keys", "loss_chunks"),
)
"""The simpler of two plans has the lower value in the first of these decisions that differs."""

KEPT = (
    *("ep", "tp", "cp", "dp", "micro_batches", "pp", "schedule", "stage_shares", "distribute_param"),
    *("distribute_low_prec_param", "loss_chunks", "gather_keys", "recompute"),
)
"""Decisions by priority: where two decisions of a request exclude each other, the first is kept."""

LOGGED = (
    *("pp", "micro_batches", "dp", "ep", "cp", "gather_keys", "tp", "recompute", "loss_chunks", "distribute_param"),
    *("schedule", "stage_shares", "distribute_low_prec_param"),
)
"""The order of the line that a plan is logged as."""


@cache
def _types() -> Mapping[str, Any]:
    return get_type_hints(Config)


def type_of(name: str) -> Any:
    """The type of the decision `name`: int, bool, str or a Literal of words."""
    return _types()[name]


def simplicity(config: Config) -> tuple[int, ...]:
    """Orders configurations: no pipeline, fewer micro-batches, no recomputing, less distribution, then fewer ranks."""
    return tuple(_rank(name, getattr(config, name)) for name in FROM_SIMPLE)


@cache
def _rank(name: str, value: Any) -> int:
    if name == "schedule":
        return [*SCHEDULES, value].index(value)
    if type_of(name) is bool or name == "stage_shares":
        return value != getattr(Config(), name)
    words = get_args(type_of(name))
    return words.index(value) if words else value


def spelled(value: object) -> str:
    """A decision's value as users write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Request:
    """The decisions that the user fixed; None leaves one to the planner."""

    dp: int | None = None
    tp: int | None = None
    micro_batches: int | None = None
    recompute: Recompute | None = None
    distribute_param: Distribute | None = None
    distribute_low_prec_param: bool | None = None
    pp: int | None = None
    schedule: str | None = None
    stage_shares: str | None = None
    cp: int | None = None
    ep: int | None = None
    gather_keys: bool | None = None
    loss_chunks: int | None = None

    def admits(self, config: Config) -> bool:
        """Whether `config` has every value that the user fixed."""
        wanted = ((getattr(self, field.name), getattr(config, field.name)) for field in fields(self))
        return all(asked is None or asked == given for asked, given in wanted)
