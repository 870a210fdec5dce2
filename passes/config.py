"""A parallel configuration: the decisions that name a plan, as people write and read them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from moaic.ir.errors import Diagnostic
from moaic.passes.schedule import SCHEDULES, is_schedule_name, is_schedule_text, parse_schedule

Recompute = Literal["saved", "full"]
"""What the backward finds: `saved` keeps the cheapest sufficient set of values, `full` the inputs of each layer."""

Distribute = Literal["none", "optimizer", "step", "use"]
"""`none`: parameters, gradients and optimizer state whole on every rank; `optimizer`: gradients and optimizer state
sharded; `step`: parameters too, gathered once per step; `use`: gathered anew for forward and for backward."""


@dataclass(frozen=True, slots=True, order=True)
class Config:
    """Every decision of a plan that a person may make."""

    dp: int = 1
    tp: int = 1
    micro_batches: int = 1
    recompute: Recompute = "saved"
    distribute_param: Distribute = "none"
    distribute_low_prec_param: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    """Name or text of a pipeline's schedule; without a pipeline it says nothing."""
    cp: int = 1
    ep: int = 1
    gather_keys: bool = True
    """Whether `cp` may gather keys and values of attention; where not, no rank ever holds all of them."""
    loss_chunks: int = 1
    """Parts in which logits and their gradients are computed, one after another."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.ep * self.cp * self.tp

    def __str__(self) -> str:
        """`dp=2,micro_batches=4`: what differs from one device, in the form that MOAI_PLAN takes."""
        default = Config()
        parts = [
            f"{field.name}={spelled(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return ",".join(parts) or "dp=1"


def spelled(value: object) -> str:
    """A decision's value as people write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Request:
    """What a person fixed; None leaves a decision to the planner."""

    dp: int | None = None
    tp: int | None = None
    micro_batches: int | None = None
    recompute: Recompute | None = None
    distribute_param: Distribute | None = None
    distribute_low_prec_param: bool | None = None
    pp: int | None = None
    schedule: str | None = None
    cp: int | None = None
    ep: int | None = None
    gather_keys: bool | None = None
    loss_chunks: int | None = None

    def admits(self, config: Config) -> bool:
        """Whether `config` keeps to everything that was asked for."""
        wanted = ((getattr(self, field.name), getattr(config, field.name)) for field in fields(self))
        return all(asked is None or asked == given for asked, given in wanted)


def parse_request(text: str) -> Request:
    """`dp=2,micro_batches=4` as a Request; raises Diagnostic for a word or value that no plan has."""
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, value = part.partition("=")
        if not sign:
            raise Diagnostic(
                f"plan option `{part}` is not of the form name=value", hint="for example dp=2,micro_batches=4"
            )
        given[name.strip()] = value.strip()
    return request_from(dict(given))


def request_from(options: dict[str, object]) -> Request:
    """A Request from option names and values ("auto", None, numbers, booleans or their text)."""
    known = {field.name for field in fields(Request)}
    for name in options:
        if name not in known:
            raise Diagnostic(f"there is no plan option `{name}`", hint=f"options are {', '.join(sorted(known))}")
    return Request(**{name: _value(name, value) for name, value in options.items()})  # pyright: ignore[reportArgumentType]


def _value(name: str, value: object) -> object:
    if value is None or value == "auto":
        return None
    if name == "schedule":
        return _schedule(str(value))
    if name in ("dp", "ep", "cp", "tp", "pp", "micro_batches", "loss_chunks"):
        text = str(value)
        if not text.isdigit() or int(text) < 1:
            raise Diagnostic(f"{name}={value} is not a positive whole number")
        return int(text)
    if name in ("distribute_low_prec_param", "gather_keys"):
        return _choice(name, str(value).lower(), {"true": True, "1": True, "false": False, "0": False})
    if name == "recompute":
        words = {word: word for word in get_args(Recompute)}
        return _choice(name, str(value).lower(), {**words, "true": "full", "false": "saved"})
    words = {word: word for word in get_args(Distribute)}
    return _choice(name, str(value).lower(), {**words, "true": "step", "false": "none"})


def _schedule(value: str) -> str:
    """The name of a schedule, or the lists of actions that a file of this name holds, or these themselves."""
    if is_schedule_name(value):
        return value
    if is_schedule_text(value):
        return str(parse_schedule(value))
    path = Path(value)
    if not path.is_file():
        names = ", ".join(SCHEDULES)
        raise Diagnostic(f"there is no schedule `{value}`", hint=f"choose one of {names}, or name a file with lists")
    return str(parse_schedule(path.read_text(encoding="utf-8")))


def _choice(name: str, value: str, choices: dict[str, object]) -> object:
    if value not in choices:
        raise Diagnostic(f"{name}={value} is not known", hint=f"choose one of {', '.join(choices)}")
    return choices[value]
