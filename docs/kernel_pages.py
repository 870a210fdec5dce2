"""Writes the tables of `docs/kernels.md`: how far the kernels that plans expect are from those that are made.

`python docs/kernel_pages.py`. Nothing in the tables is typed: kernels are made for a GPU that need not be here, and
counted beside those that `passes/perf/fusion.py` expects of the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moaic.capture.trace_only import ModelSource, Sample, take_model
from moaic.ir.graph import Function, Module
from moaic.passes.perf.fusion import Fused, fuse
from moaic.passes.registry import run_passes
from moaic.predict.kernel_report import called_in, program_of
from moaic.runtime.codegen.cross_compile import Generated, generated
from moaic.runtime.host.gpu_specs import TARGETS, Target
from moaic.text.units import amount

PAGE = Path(__file__).with_name("kernels.md")

SMALL_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}

SAMPLES = (Sample(batch=8, sequence=128), Sample(batch=8, sequence=1024))

TARGET = TARGETS["sm_90"]

PASSES = "zero,outline,dp=2"

BEGIN, END = "<!-- made by python docs/kernel_pages.py -->\n", "<!-- as far as here -->\n"
"""The lines around the generated part of the page."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One function, as `runs` runs of it are expected to be and as they are."""

    name: str
    runs: int
    kernels: tuple[int, int]
    """Expected, and made, in one run."""
    products: tuple[float, float]
    """Bytes that products of matrices and attention move."""
    rest: tuple[float, float]
    """Bytes that all other kernels move."""

    @property
    def nbytes(self) -> tuple[float, float]:
        return self.products[0] + self.rest[0], self.products[1] + self.rest[1]


def main() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}", encoding="utf-8")


def tables() -> str:
    """The generated part of the page."""
    return "".join(map(section, SAMPLES)) + "\n"


def section(sample: Sample) -> str:
    """The table of one batch, under its heading."""
    title = f"### {sample.batch} rows of {sample.sequence} tokens, {TARGET.name}"
    return "\n".join(["", title, "", *table(found(sample, TARGET)), ""])


def small_llama(sample: Sample) -> Module:
    """The program of the small Llama's data-parallel plan."""
    captured = take_model(ModelSource("llama", SMALL_LLAMA), sample).captured
    return program_of(run_passes(Module((captured.function,)), PASSES))


def found(sample: Sample, target: Target) -> list[Beside]:
    """The functions of the small Llama's plan."""
    return [_beside(function, runs, target) for function, runs in called_in(small_llama(sample))]


def _beside(function: Function, runs: int, target: Target) -> Beside:
    expected, made = fuse(function), generated(function, target)
    counts = len(expected.kernels), sum(kernel.calls for kernel in made)
    products, rest = ((_expected(expected, heavy=heavy), _made(made, heavy=heavy)) for heavy in (True, False))
    return Beside(function.name, runs, counts, products, rest)


def _expected(fused: Fused, *, heavy: bool) -> float:
    return float(sum(kernel.nbytes for kernel in fused.kernels if (kernel.heavy is not None) == heavy))


def _made(kernels: Sequence[Generated], *, heavy: bool) -> float:
    return sum(kernel.calls * kernel.nbytes for kernel in kernels if (kernel.heavy is not None) == heavy)


COLUMNS = (
    *("function", "runs", "kernels expected", "made", "bytes expected", "made"),
    *("expected / made", "of products", "of the rest"),
)


def table(rows: Sequence[Beside]) -> Iterator[str]:
    """A line per function, and one for the step."""
    yield _line(COLUMNS)
    yield _line(["---"] * len(COLUMNS))
    yield from (_line(_cells(row)) for row in (*rows, _step(rows)))


def _step(rows: Sequence[Beside]) -> Beside:
    def total(of: str) -> tuple[float, float]:
        ends = [(row.runs, getattr(row, of)) for row in rows]
        return sum(runs * pair[0] for runs, pair in ends), sum(runs * pair[1] for runs, pair in ends)

    kernels = total("kernels")
    return Beside("the step", 1, (int(kernels[0]), int(kernels[1])), total("products"), total("rest"))


def _cells(row: Beside) -> list[str]:
    kernels, nbytes = map(str, row.kernels), (f"{amount(each)}B" for each in row.nbytes)
    return [row.name, str(row.runs), *kernels, *nbytes, *map(_ratio, (row.nbytes, row.products, row.rest))]


def _ratio(pair: tuple[float, float]) -> str:
    return f"{pair[0] / pair[1]:.2f}" if pair[1] else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
