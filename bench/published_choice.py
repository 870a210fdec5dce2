"""Where the best plans that others found by trying all stand among the same plans as the planner prices them.

`python bench/published_choice.py [ROW…] [--rows FILE.csv] [--most GPUS] [--json FILE]` takes the rows of sweeps, as
nanotron's: every number of `dp`, `tp`, `pp` and rows of a micro-batch, the optimizer sharded or not. It prints how
many plans fit in memory, what share of them is predicted to be faster than the published one, and the time of the
fastest relative to its time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

from published_pricing import Step
from published_rows import NAMED, Cells, Row, Skipped, command_line, is_accepted, row_of, wanted_rows

from moaic.ir.errors import Diagnostic
from moaic.passes.config import Config

SWEPT: Final = "BEST of an exhaustive"
"""What the note of a row says whose plan is the best of a sweep."""

MOST_TP: Final = 16


@dataclass(frozen=True, slots=True)
class Standing:
    """A published plan among all plans of its sweep that fit."""

    row: str
    workers: int
    plan: str
    plans: int
    faster: int
    """How many of them are predicted to be faster."""
    best: str
    ratio: float
    """Seconds of the best one relative to those of the published one."""


def standing(row: Row | Skipped) -> Standing | Skipped:
    if isinstance(row, Skipped):
        return row
    step = Step(row)
    seconds = {config: found for config in swept(row) if (found := _fastest(step, config)) is not None}
    plan = row.plans[0]
    published = _fastest(step, plan)
    if published is None:
        return Skipped(row.name, "the published plan is predicted not to fit")
    best = min(seconds, key=lambda each: seconds[each])
    faster = sum(each < published for each in seconds.values())
    return Standing(row.name, row.workers, str(plan), len(seconds), faster, str(best), seconds[best] / published)


def swept(row: Row) -> Iterator[Config]:
    """The plans of a sweep, without recomputation."""
    for tp in _powers(min(MOST_TP, row.workers)):
        for pp in _powers(min(row.layers, row.workers // tp)):
            dp = row.workers // (tp * pp)
            for rows_of in _powers(row.batch // dp):
                mesh = Config(dp=dp, tp=tp, pp=pp, micro_batches=row.batch // dp // rows_of)
                yield mesh
                if dp > 1:
                    yield replace(mesh, distribute_param="step", distribute_low_prec_param=True)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _fastest(step: Step, config: Config) -> float | None:
    """Seconds of a plan, recomputing if it does not fit otherwise; None where it never fits or there is none."""
    try:
        for each in (config, replace(config, recompute="full")):
            price = step.priced(each)
            if step.fits(price):
                return price.seconds
    except Diagnostic:
        pass
    return None


def _is_swept(cells: Cells, most: int) -> bool:
    return is_accepted(cells) and SWEPT in cells["notes"] and cells["id"] not in NAMED and int(cells["gpus"]) <= most


def _line(found: Standing) -> str:
    share = f"{found.faster / found.plans:.1%}"
    return (
        f"| {found.row} | {found.workers} | {found.plan} | {found.plans} | {share} | {found.best} | {found.ratio:.1%} |"
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--most", type=int, default=256, metavar="GPUS", help="rows on more GPUs are left out")
    chosen = parser.parse_args()
    print("| row | GPUs | published plan | plans that fit | predicted faster | best | its time relative |")
    print("| --- | ---: | --- | ---: | ---: | --- | ---: |")
    found: list[Standing] = []
    for cells in wanted_rows(chosen):
        if _is_swept(cells, chosen.most):
            each = standing(row_of(cells))
            if isinstance(each, Skipped):
                print(f"{each.name} cannot be simulated: {each.reason}", flush=True)
            else:
                found.append(each)
                print(_line(each), flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
