"""Options of `enable_advanced_parallelization` and their other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.passes.config import Request
from moaic.planner.request import request_from
from moaic.precision import PRECISION, precision_of
from moaic.runtime.host.env_flags import says_count, says_when, says_yes

AUTOTUNE: Final = "autotune"
COMPILE: Final = "compile"
CUDA_GRAPHS: Final = "cuda_graphs"
EXPECTED_STEPS: Final = "expected_steps"
PIPELINE: Final = "pipeline_parallel"

NO_DECISIONS: Final = (AUTOTUNE, COMPILE, CUDA_GRAPHS, EXPECTED_STEPS, PRECISION)
"""Options of the backend that are no decisions of the plan."""

OTHER_NAMES: Final[Mapping[str, str]] = {
    "num_stages": "pp",
    "num_micro_batches": "micro_batches",
    "activation_recomputation": "recompute",
    "distribute_parameter": "distribute_param",
    "mixed_precision": PRECISION,
}
"""Other names of options, with the backend's name."""

_OWN: Final = tuple(decision.name for decision in fields(Request))
KNOWN: Final = (*_OWN, *NO_DECISIONS, PIPELINE, *OTHER_NAMES)


@dataclass(frozen=True, slots=True)
class Choices:
    """The options that the user fixed for all modules that are compiled."""

    backend: Mapping[str, object] = field(default_factory=dict[str, object])
    """Options of the backend, by name."""


def choices_from(options: Mapping[str, object]) -> Choices:
    """Options by either name. Raises Diagnostic for an unknown name or value, and for a contradiction."""
    backend: dict[str, object] = {}
    for name, value in options.items():
        _check_name(name)
        if name == PIPELINE:
            continue
        own = OTHER_NAMES.get(name, name)
        if own in backend:
            raise Diagnostic(f"`{name}` is another name for `{own}`, and both are given", hint="leave one of them out")
        if own == PRECISION:
            precision_of(value, name)
        backend[own] = value
    _apply_pipeline(backend, options.get(PIPELINE))
    check_backend_options(backend)
    return Choices(backend)


def check_backend_options(options: Mapping[str, object]) -> None:
    """Raises Diagnostic for an unknown name or value among options of the backend."""
    request_from({name: value for name, value in options.items() if name not in NO_DECISIONS})
    for name in (AUTOTUNE, EXPECTED_STEPS):
        says_count(name, 1 if options.get(name) is None else options[name])
    says_when(COMPILE, options.get(COMPILE, True))
    says_yes(CUDA_GRAPHS, options.get(CUDA_GRAPHS, False))
    precision_of(options.get(PRECISION))


def _check_name(name: str) -> None:
    if name in KNOWN:
        return
    near = get_close_matches(name, KNOWN, n=1)
    meant = f"did you mean `{near[0]}`? " if near else ""
    raise Diagnostic(f"there is no option `{name}`", hint=f"{meant}options are {', '.join(sorted(KNOWN))}")


def _apply_pipeline(backend: dict[str, object], wanted: object) -> None:
    """Sets pp=1 for `pipeline_parallel=False`; True is the default and permits a pipeline."""
    if wanted is None or says_yes(PIPELINE, wanted):
        return
    if str(backend.setdefault("pp", 1)) != "1":
        raise Diagnostic(
            f"pipeline_parallel={wanted} rules out the pipeline of {backend['pp']} stages that is asked for",
            hint="leave one of them out",
        )
