"""Masks that are equal to a flag become the flag: masks of common models, and masks drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

from moaic.capture import masks
from moaic.capture.masks import with_flags
from moaic.ir.attention import ATTENTION
from moaic.ir.graph import Function, Op
from moaic.ir.symbols import Symbols
from moaic.ir.verify import load
from moaic.runtime.interpreter import run_function
from tests.exact.example import Batch, Example
from tests.exact.graphs import captured_step
from tests.exact.models import LENGTH, gpt2, llama, sizes, text


def whole(seed: int, rows: int) -> Batch:
    """Rows without padding."""
    ids = text(seed, rows)["input_ids"]
    return {"input_ids": ids, "labels": ids}


def mistral(window: int) -> Callable[[], nn.Module]:
    return lambda: MistralForCausalLM(MistralConfig(**sizes(), sliding_window=window))


def attention(function: Function) -> list[Op]:
    return [op for op in function.ops if op.name in ATTENTION]


def flags(function: Function) -> list[tuple[bool, bool]]:
    """Of attention: whether it is causal, and whether it has a mask."""
    return [(op.attrs.get("is_causal") is True, op.operands[-1] is not None) for op in attention(function)]


@pytest.mark.parametrize(
    ("make", "limit"),
    [(llama, masks.LIMIT), (llama, LENGTH**2 - 1), (gpt2, masks.LIMIT), (mistral(LENGTH), LENGTH**2 - 1)],
    ids=["llama", "long llama", "gpt2", "long mistral"],
)
def test_what_a_model_spells_out_becomes_a_flag(
    make: Callable[[], nn.Module], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that are computed, and those that are too large for it."""
    monkeypatch.setattr(masks, "LIMIT", limit)
    example = Example(make, whole)
    step = captured_step(example)
    assert set(flags(step.module.main)) == {(True, False)}
    found, *_ = run_function(step.module, step.module.main.name, step.inputs)
    torch.testing.assert_close(found.float(), example.model()(**example.batch()).loss)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_masks_of_many_rows_become_flags(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are alike, so that what is made of all of them is computed for one."""
    monkeypatch.setattr(masks, "LIMIT", LENGTH**2)
    step = captured_step(Example(make, lambda seed, _: whole(seed, 2 * LENGTH)))
    assert set(flags(step.module.main)) == {(True, False)}


def test_another_usual_device_changes_nothing() -> None:
    with torch.device("meta"):
        assert flags(with_flags(load(Spelled(4, 4, (("le", True, 0),), added=True).text).main, {}, Symbols())) == [
            (True, False)
        ]


def test_what_says_more_stays() -> None:
    assert set(flags(captured_step(Example(llama, text)).module.main)) == {(False, True)}
    assert set(flags(captured_step(Example(mistral(LENGTH - 1), whole)).module.main)) == {(False, True)}


@dataclass(frozen=True)
class Spelled:
    """Attention under a mask that compares positions, and perhaps compares them once more."""

    rows: int
    keys: int
    comparisons: tuple[tuple[str, bool, int], ...]
    """Name, whether keys stand first, and where rows begin."""
    added: bool

    @property
    def text(self) -> str:
        rows, keys = self.rows, self.keys
        q, k, last = f"f64[2, 2, {rows}, 4]", f"f64[2, 2, {keys}, 4]", len(self.comparisons) - 1
        lines = [
            f'%c = aten.arange.start_step {{start = 0, end = {keys}, dtype = "i64"}} : i64[{keys}]',
            f'%r = aten.arange.start_step {{start = 0, end = {rows}, dtype = "i64"}} : i64[{rows}]',
            f"%columns = aten.view %c {{size = [1, {keys}]}} : i64[1, {keys}]",
            '%zero = aten.full {size = [], fill_value = 0.0, dtype = "f64"} : f64[]',
            '%low = aten.full {size = [], fill_value = -inf, dtype = "f64"} : f64[]',
        ]
        for at, (name, keys_first, start) in enumerate(self.comparisons):
            operands = ("%columns", f"%rows{at}") if keys_first else (f"%rows{at}", "%columns")
            lines += [
                f"%r{at} = aten.add.Tensor %r, _ {{other = {start}}} : i64[{rows}]",
                f"%rows{at} = aten.view %r{at} {{size = [{rows}, 1]}} : i64[{rows}, 1]",
                f"%m{at} = aten.{name}.Tensor {', '.join(operands)} : bool[{rows}, {keys}]",
            ]
        both = f"%m = aten.bitwise_and.Tensor %m0, %m{last} : bool[{rows}, {keys}]"
        mask = f"[2, 1, {rows}, {keys}]"
        lines += [
            both,
            f"%e = aten.expand %m {{size = {mask}}} : bool{mask}",
            f"%a = aten.where.self %e, %zero, %low : f64{mask}",
            f"%y, %l = moai.sdpa %q, %k, %k, {'%a' if self.added else '%e'} {{scale = 0.5}} : {q}, f64[2, 2, {rows}]",
        ]
        body = "\n  ".join(lines)
        head = f"// moai 1\nfunc @main(%q: {q}, %k: {k}) -> ({q}, bool[{rows}, {keys}])"
        return f"{head} {{\n  {body}\n  return %y, %m\n}}\n"


COMPARISON = st.tuples(st.sampled_from(["le", "lt", "ge", "gt"]), st.booleans(), st.integers(-5, 5))
SPELLED = st.builds(
    Spelled,
    rows=st.integers(1, 5),
    keys=st.integers(1, 5),
    comparisons=st.lists(COMPARISON, min_size=1, max_size=2).map(tuple),
    added=st.booleans(),
)


@given(SPELLED, st.booleans())
@example(Spelled(4, 4, (("le", True, 0),), added=True), True)
@example(Spelled(4, 4, (("gt", False, 1), ("gt", True, -4)), added=False), True)
def test_a_flag_says_what_the_mask_said(spelled: Spelled, too_large: bool) -> None:
    module = load(spelled.text)
    inputs = [torch.randn(value.type.shape, dtype=torch.float64) for value in module.main.params]
    expected, mask = run_function(module, "main", inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "LIMIT", max(spelled.rows, spelled.keys) if too_large else masks.LIMIT)
        made = with_flags(module.main, {}, Symbols())
    ((is_causal, has_mask),) = flags(made)
    hides_later = spelled.rows == spelled.keys and bool(torch.equal(mask, torch.ones_like(mask).tril()))
    assert has_mask or hides_later or bool(mask.all())
    assert not is_causal or hides_later
    if not too_large:
        assert has_mask == (not hides_later and not bool(mask.all()))
    found, _ = run_function(replace(module, functions=(made,)), "main", inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_long_mask_becomes_a_flag_without_being_computed() -> None:
    text = Spelled(2**15, 2**15, (("le", True, 0), ("gt", True, -(2**15))), added=True).text
    assert flags(with_flags(load(text).main, {}, Symbols())) == [(True, False)]
