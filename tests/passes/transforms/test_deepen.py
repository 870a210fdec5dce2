"""A deeper copy of a step is the step of a deeper model, or there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moaic.ir.graph import Module, Value
from moaic.ir.printer import render
from moaic.ir.verify import check_made, load
from moaic.passes.transforms.deepen import deepened

SCALED = '%h{n} = aten.mul.Tensor %h{below}, %m.{n}.w : f32[4] in "m.{n}" forward'
ADDED = '%h{n} = aten.add.Tensor %h{below}, %m.{n}.w : f32[4] in "m.{n}" forward'
ADDED_TO_INPUT = '%h{n} = aten.add.Tensor %h0, %h{below} : f32[4] in "m.{n}" forward'
SCALED_BY_NUMBER = '%h{n} = aten.mul.Scalar %h{below} {{other = {n}.0}} : f32[4] in "m.{n}" forward'
SCALED_BY_FIRST = '%h{n} = aten.mul.Tensor %h{below}, %m.1.w : f32[4] in "m.{n}" forward'
SKIPPING = '%h{n} = aten.add.Tensor %h{below}, %h{further} : f32[4] in "m.{n}" forward'
DROPPED = """%k{n} = moai.fold_key %key {{instance = {below}}} : i64[2] forward
  %r{n} = moai.rand %k{n} : f32[4] in "m.{n}" forward
  %h{n} = aten.mul.Tensor %h{below}, %r{n} : f32[4] in "m.{n}" forward"""

DROPPED_TWICE = DROPPED.replace("%r{n} = ", '%q{n} = moai.rand %k{n} : f32[4] in "m.{n}" forward\n  %r{n} = ')


def step(layers: list[str], results: str = "") -> Module:
    """A step of these layers, which begin with number 1; it gives the value of the last one, and more `results`."""
    numbers = range(1, len(layers) + 1)
    weights = "".join(f', %m.{n}.w: f32[4] param "m.{n}.w"' for n in numbers)
    ops = "".join(
        f"  {layer.format(n=n, below=n - 1, further=max(0, n - 2))}\n" for n, layer in zip(numbers, layers, strict=True)
    )
    more = "".join(", f32[4]" for each in results.split(",") if each)
    return load(
        f'// moai 1\nfunc @step(%h0: f32[4] input "x"{weights}, %key: i64[2] key) -> (f32[4]{more}) {{\n{ops}'
        f"  return %h{len(layers)}{results}\n}}\n"
    )


def text(module: Module | None) -> str | None:
    """The module with its values numbered in order."""
    if module is None:
        return None
    main = check_made(module, "deepen").main
    numbered = {result: Value(result.type) for op in main.ops for result in op.results}
    ops = [
        replace(op.with_operands(numbered), results=tuple(numbered[result] for result in op.results)) for op in main.ops
    ]
    results = tuple(numbered[result] for result in main.results)
    return render(Module((replace(main, ops=tuple(ops), results=results),)))


@pytest.mark.parametrize(
    "layer",
    [SCALED, ADDED_TO_INPUT, DROPPED, DROPPED_TWICE],
    ids=["own parameters", "the input", "keys", "a key twice"],
)
def test_a_deeper_step_is_that_of_a_deeper_model(layer: str) -> None:
    assert text(deepened(step(4 * [layer]), "m", 4)) == text(step(8 * [layer]))


def test_a_pattern_of_layers_goes_on() -> None:
    pairs = step(3 * [SCALED, ADDED])
    assert text(deepened(pairs, "m", 4)) == text(step(5 * [SCALED, ADDED]))
    assert deepened(pairs, "m", 3) is None


def test_equal_layers_stand_among_others() -> None:
    others = 2 * [ADDED]
    found = deepened(step([*others, *3 * [SCALED], *others]), "m", 2)
    assert text(found) == text(step([*others, *5 * [SCALED], *others]))


@pytest.mark.parametrize(
    "layer",
    [SCALED_BY_NUMBER, SCALED_BY_FIRST, SKIPPING],
    ids=["constants of each", "parameters of one", "values of two below"],
)
def test_layers_that_differ_or_read_others_are_not_deepened(layer: str) -> None:
    assert deepened(step(5 * [layer]), "m", 1) is None


def test_two_equal_layers_do_not_show_what_three_would_do() -> None:
    assert deepened(step(2 * [SCALED]), "m", 1) is None
    assert deepened(step(3 * [SCALED]), "another", 1) is None


@pytest.mark.parametrize("amid", ["%h2", "%h3"])
def test_a_step_in_which_something_reads_a_layer_amid_others_is_not_deepened(amid: str) -> None:
    """It may read all layers, or count them from below or from above."""
    assert deepened(step(4 * [SCALED], results=f", {amid}"), "m", 1) is None
    collecting = f"%s = aten.add.Tensor %h{{below}}, {amid} : f32[4] forward\n  " + SCALED
    assert deepened(step([*4 * [SCALED], collecting]), "m", 1) is None
