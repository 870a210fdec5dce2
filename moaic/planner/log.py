"""The lines that the planner logs, and the list of all log lines that are kept for compatibility.

The lines below have the words of the reference platform (MoAI Platform), whose users read logs with scripts; N is a
number. They name things that moaic does not have: "the server" is this host, "SelectBestGraphFromCandidates" is the
selection of the fastest candidate. All other lines are moaic's own.

While workers start (`runtime/controller/startup_log.py`), in this order:

    Requesting resources for MoAI Accelerator from the server...
    Initializing the worker daemon for MoAI Accelerator
    [N/N] Connecting to resources on the server (...)...      one line per worker; in brackets an address or a process
    Establishing links to the resources...
    MoAI Accelerator is ready to use.
    Moai Version: N                                           there "Moreh Version: N"
    Moai Job ID: N                                            there "Moreh Job ID: N"

While a step is planned (this file), in this order:

    The number of candidates is N.
    Parallel Graph Compile start...
    Elapsed Time to compile all candidates = N [ms]
    Parallel Graph Compile finished.
    The number of possible candidates is N.
    SelectBestGraphFromCandidates start...
    Elapsed Time to compute cost for survived candidates = N [ms]
    SelectBestGraphFromCandidates finished.
    Configuration for parallelism is selected.
    num_stages : N, num_micro_batches : N, batch_per_device : N, No TP, recomputation : false, distribute_param : true
    train: true

The line before the last is that of `configuration`: it adds entries of moaic's own, and has "num_stages : 1" where the
reference platform writes "No PP". Two lines of that platform have no counterpart: "Got DBs from backend for auto
config." and "A newer version of Moreh AI Framework is available. ...".

For a later graph of a model (`of_model`) two lines replace all of these, which are still logged at level debug; if they
were said of another graph, none.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Final

from moaic.ir.graph import Module
from moaic.ir.ops import OPS
from moaic.passes.config import DECISIONS, LOGGED, Config
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf import optimizer
from moaic.passes.perf.numbers import MeasureSource
from moaic.passes.sharding.data_parallel import batch_size, padded_rows
from moaic.text.units import MIB

LOGGER = logging.getLogger("moaic")

PARTS: Final = {
    "heavy": "products and attention",
    "light": "elementwise kernels and reductions",
    "launch": "kernel launches",
    "collective": "collectives",
    "send": "sends between stages",
    "move": "local moves",
    "overhead": "calls of functions",
    "bubble": "waiting for other stages",
    "optimizer": "optimizer",
}
"""The parts of a predicted step, in words."""

SOURCES: Final[Mapping[MeasureSource, str]] = {
    MeasureSource.MEASURED: "from measured rates",
    MeasureSource.INTERPOLATED: "some rates are estimated from measured ones",
    MeasureSource.PUBLISHED: "some rates are peaks of data sheets",
    MeasureSource.ASSUMED: "some rates are assumed",
}
"""What a prediction is based on, in words."""

SMALL: Final = 0.03
"""Share of a step below which a part is not logged."""

_PHASES: ContextVar[int] = ContextVar("level of the phases of planning", default=logging.INFO)

_SELECTIONS: ContextVar[int] = ContextVar("highest level of what is said of a selection", default=logging.WARNING)


_SAID: ContextVar[set[str] | None] = ContextVar("what was said of the model", default=None)


@contextmanager
def of_model(said: set[str], *, is_first: bool) -> Generator[None]:
    """Log of selections in this block only what is not in `said`, and add it; phases for the first graph only."""
    before = _SAID.set(said)
    try:
        with nullcontext() if is_first else _brief():
            yield
    finally:
        _SAID.reset(before)


@contextmanager
def _brief() -> Generator[None]:
    before = _PHASES.set(logging.DEBUG)
    try:
        yield
    finally:
        _PHASES.reset(before)


@contextmanager
def silent() -> Generator[None]:
    """Log what is planned in this block at level debug."""
    before = _SELECTIONS.set(logging.DEBUG)
    try:
        with _brief():
            yield
    finally:
        _SELECTIONS.reset(before)


def _selection(level: int, text: str, *numbers: object) -> None:
    LOGGER.log(min(level, _SELECTIONS.get()), text, *numbers)


def _once(level: int, text: str, *numbers: object) -> bool:
    """Log a line unless it was said of the model before; returns whether it was not."""
    line, said = text % numbers, _SAID.get()
    if said is not None and line in said:
        LOGGER.debug("%s", line)
        return False
    if said is not None and level <= _SELECTIONS.get():
        said.add(line)
    _selection(level, "%s", line)
    return True


def _phase(text: str, *numbers: object) -> None:
    LOGGER.log(_PHASES.get(), text, *numbers)


def in_float8(count: int, layers: int, recipe: str) -> None:
    LOGGER.info("Linear layers in eight-bit floats: %d of %d (%s)", count, layers, recipe)


def candidates_counted(count: int) -> None:
    _phase("The number of candidates is %d.", count)


def compiling() -> None:
    _phase("Parallel Graph Compile start...")


def compiled(seconds: float, possible: int) -> None:
    _phase("Elapsed Time to compile all candidates = %d [ms]", milliseconds(seconds))
    _phase("Parallel Graph Compile finished.")
    _phase("The number of possible candidates is %d.", possible)


def ended_early(count: int, faster: float) -> None:
    text = "%d candidates were not priced, which may be faster than the best plan by %.0f %% at most."
    _phase(text, count, 100 * faster)


def dropped(told: str, reason: str) -> None:
    LOGGER.debug("dropped %s: %s", told, reason)


def crashed(configs: Sequence[Config], trace: str) -> None:
    names = "; ".join(map(str, configs))
    LOGGER.warning("Compiling failed, which is a bug of moaic. Left out: %s\n%s", names, trace)


def unbounded(trace: str) -> None:
    LOGGER.warning("Bounding pipelines failed, which is a bug of moaic. They are compiled instead.\n%s", trace)


def selecting() -> None:
    _phase("SelectBestGraphFromCandidates start...")


def costed(seconds: float) -> None:
    _phase("Elapsed Time to compute cost for survived candidates = %d [ms]", milliseconds(seconds))
    _phase("SelectBestGraphFromCandidates finished.")


def interrupted() -> None:
    LOGGER.warning("Planning was interrupted. Nothing of it is kept; the next run plans anew.")


def autotuning(count: int) -> None:
    _phase("Autotune: the best %d candidates run for a few steps.", count)


def ran(config: Config, seconds: float, predicted: float) -> None:
    _phase("Autotune: %s takes %s [ms] a step, and %s were predicted.", config, *map(_ms, (seconds, predicted)))


def cannot_run(config: Config, reason: str) -> None:
    _phase("Autotune: %s cannot run here: %s", config, reason)


def _ms(seconds: float) -> str:
    return _short(1000 * seconds)


def found_again() -> None:
    _phase("This step was planned before for this machine: its plan is taken from the cache.")


def selected(step: Module, config: Config, memory: Memory, prediction: Prediction) -> None:
    is_new = True
    if _PHASES.get() == logging.DEBUG:
        said = "Another graph of this model (train: %s) is planned: %s"
        is_new = _once(logging.INFO, said, _train(step), configuration(step, config))
    _phase("Configuration for parallelism is selected.")
    _phase("%s", configuration(step, config))
    _phase("train: %s", _train(step))
    LOGGER.debug("predicted: %s", ", ".join(f"{part} {number}" for part, number in prediction.parts.items()))
    _selection(
        logging.INFO if is_new else logging.DEBUG,
        "Predicted for a step: %s [ms], %s [MiB] per worker (%s).",
        _short(1000 * prediction.seconds.value),
        _short(memory.peak / MIB),
        SOURCES[prediction.seconds.source],
    )
    if memory.optimizer:
        _phase(
            "Optimizer state is assumed: %d values per trainable parameter element, of its type, %s [MiB] per worker.",
            optimizer.STATES,
            _short(memory.optimizer / MIB),
        )


def measured(seconds: float, predicted: float) -> None:
    LOGGER.info(
        "Measured: a step takes %s [ms] without the optimizer, %.2f x the %s [ms] that were predicted.",
        _ms(seconds),
        seconds / predicted,
        _ms(predicted),
    )


def measured_anew() -> None:
    LOGGER.warning("The measurements of this machine are older than a week; the next program takes them anew.")


def _train(step: Module) -> str:
    return "true" if step.main.gradients else "false"


def spent(prediction: Prediction) -> None:
    """What a step of the selected plan is predicted to spend its time on, the most first."""
    whole = prediction.seconds.value
    shares = {PARTS[part]: number.value / whole for part, number in prediction.parts.items() if whole}
    large = sorted(((share, part) for part, share in shares.items() if share >= SMALL), reverse=True)
    _phase("It spends: %s.", ", ".join(f"{share:.0%} on {part}" for share, part in large))


def next_best(best: Prediction, other: Config, theirs: Prediction, ratio: float | None) -> None:
    """Why the second of the possible candidates is not selected: `ratio` of prices, None for equal ones."""
    if ratio is None:
        _phase("Next best: %s, equal within the error of the prediction, and less simple.", other)
    else:
        _phase("Next best: %s, %.2f x as long: %s.", other, ratio, _difference(best, theirs))


def fastest(seconds: float) -> None:
    _phase("It took %s [ms] a step when the best plans ran.", _ms(seconds))


def next_fastest(other: Config, ratio: float) -> None:
    _phase("Next best: %s, which took %.2f x as long.", other, ratio)


def _difference(best: Prediction, theirs: Prediction) -> str:
    """The parts of a step that take longer in the prediction `theirs`, the most first; else the time to compile."""
    more = [(_seconds(theirs, part) - _seconds(best, part), words) for part, words in PARTS.items()]
    large = sorted((each for each in more if each[0] > SMALL * best.seconds.value), reverse=True)
    named = [f"{_short(1000 * seconds)} [ms] more on {words}" for seconds, words in large]
    return ", ".join(named) or f"{theirs.compiling:.0f} [s] to compile instead of {best.compiling:.0f}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def _seconds(prediction: Prediction, part: str) -> float:
    return prediction.parts[part].value if part in prediction.parts else 0.0


def moved_on(config: Config, peak: int, shortage: str, other: Config, others_peak: int) -> None:
    """A worker ran out of memory, and the step runs again under another plan."""
    LOGGER.warning(
        "The plan %s ran out of memory on a worker: %s. It was predicted to need %d [MiB] per worker. This step runs "
        "again under %s, predicted to need %d [MiB], and so do all later ones.",
        config,
        shortage,
        peak / MIB,
        other,
        others_peak / MIB,
    )


def not_op_by_op(shortage: str) -> None:
    LOGGER.warning(
        "A worker ran out of memory while functions are not compiled: %s. This step runs again once they are.", shortage
    )


def split_does_not_fit(nbytes: int, limit: int) -> None:
    _once(
        logging.WARNING,
        "The selected plan fits while forward and backward run as one. Reading the loss before backward() would need "
        "%d [MiB] per worker, and there are %d.",
        nbytes / MIB,
        limit / MIB,
    )


def outputs_do_not_fit(nbytes: int, limit: int) -> None:
    _once(
        logging.WARNING,
        "The selected plan fits if of a model's outputs only the loss is still held when backward() comes. Holding all "
        "of them would need %d [MiB] per worker, and there are %d.",
        nbytes / MIB,
        limit / MIB,
    )


def batch_split_otherwise(step: Module) -> None:
    _once(
        logging.WARNING,
        "A batch of %d cannot be split as was asked for: it is split otherwise, with the same result.",
        batch_size(step.main),
    )


def another_program(sizes: Mapping[str, int], broken: str) -> None:
    """Logs why sizes need a program of their own: a condition of an earlier one, or that it would not fit."""
    names: dict[int, list[str]] = {}
    for name, number in sizes.items():
        names.setdefault(number, []).append(name)
    named = ", ".join(" = ".join((*equal, str(number))) for number, equal in names.items())
    text = "Sizes %s get a program of their own: the last one is for sizes where %s."
    _once(logging.INFO, text, named, broken or "it fits")


def plan_relaxed(dropped: str, config: Config, reason: str, place: str) -> None:
    """A later step of a model, or a graph of a model in pieces at `place`, runs without the decisions in `dropped`."""
    which = f"The graph at {place}" if place else "A later batch"
    LOGGER.warning("%s cannot follow %s and runs under %s, with the same result: %s", which, dropped, config, reason)


def without_rule(step: Module) -> None:
    """Warns of ops that are replicated on every worker because they have no sharding rule."""
    unknown: dict[str, list[int]] = {}
    for op in (op for function in step.functions for op in function.ops):
        if op.name not in OPS:
            unknown.setdefault(op.name, []).append(sum(value.type.nbytes() for value in (*op.inputs(), *op.results)))
    for name, sizes in unknown.items():
        _once(
            logging.WARNING,
            "`%s` has no sharding rule: every worker runs it whole (%d uses, %d [MiB] read and written per step).",
            name,
            len(sizes),
            sum(sizes) / MIB,
        )


def narrow_is_slower(dtype: str, factor: float) -> None:
    LOGGER.warning(
        "Mixed precision saves no time here: products in %s take %.1f x as long as those in f32 on this machine.",
        dtype,
        factor,
    )


def op_by_op(reason: str) -> None:
    LOGGER.warning("A graph of this model runs op by op, without a plan: %s.", reason)


@cache
def data_assigned(place: str) -> None:
    """Once for each place: every function that leads there is captured first."""
    LOGGER.warning(
        "%s assigns the `.data` of a tensor: the function runs op by op, without a plan; modules that it calls have"
        " their own. For one plan write in place: `tensor.copy_(value)` under `torch.no_grad()`.",
        place,
    )


def nested() -> None:
    LOGGER.info("A function that is given nested tensors runs op by op: plans know plain tensors.")


def configuration(step: Module, config: Config) -> str:
    """The decisions of a plan in one line: `num_stages : 1, num_micro_batches : 4, …`."""
    said = {name: decision.logged(getattr(config, name)) for name, decision in DECISIONS.items()}
    parts = config.dp * config.micro_batches
    said["dp"] = f"batch_per_device : {padded_rows(batch_size(step.main), parts) // parts}"
    if config.pp == 1:
        said["schedule"] = ""
    return ", ".join(filter(None, (said[name] for name in LOGGED)))


def milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
