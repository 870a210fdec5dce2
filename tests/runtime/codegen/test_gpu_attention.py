"""Attention by PyTorch's kernels; stand-ins replace those for GPUs, as strict about operands and as odd in results."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from math import e, inf, log, log2
from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.ir.graph import Op, Value
from moaic.ir.types import TensorType
from moaic.runtime.codegen import gpu_attention
from moaic.runtime.codegen.gpu_attention import EFFICIENT, FLASH, Attention, library_for
from moaic.runtime.codegen.lower_to_fx import run_op
from moaic.runtime.dtypes import DTYPE_NAMES

GPU = torch.device("cuda")
LOWEST = float(torch.finfo(torch.float32).min)


def loads(*tensors: Tensor) -> bool:
    """Whether kernels that load 16 bytes at once can read the rows."""
    return all(
        each.stride(-1) == 1
        and not any(start * each.itemsize % 16 for start in (each.storage_offset(), *each.stride()[:-1]))
        for each in tensors
    )


def weights_of(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """As the kernels compute them: powers of 2, in float32."""
    return torch.exp2(scores - logsumexp.unsqueeze(-1) * log2(e))


def scores_of(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, hidden: Tensor | None) -> Tensor:
    scores = (query.float() @ key.float().mT) * scale
    scores = (scores if bias is None else scores + bias.float()) * log2(e)
    return scores if hidden is None else scores.masked_fill(hidden, -inf)


def gradients(grad: Tensor, operands: tuple[Tensor, ...], out: Tensor, weights: Tensor, scale: float) -> Any:
    query, key, value = (each.float() for each in operands)
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    slopes = weights * (grad.float() @ value.mT - delta) * scale
    found = (slopes @ key, slopes.mT @ query, weights.mT @ grad.float())
    return tuple(each.to(operands[0].dtype) for each in found)


def flash_hidden(query: Tensor, key: Tensor, causal: bool) -> Tensor | None:
    """The causal mask ends at the last row and column."""
    rows, columns = query.shape[2], key.shape[2]
    return torch.ones(rows, columns, dtype=torch.bool).triu(columns - rows + 1) if causal else None


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    assert scale is not None
    assert query.dtype in gpu_attention.SHORT
    assert query.shape[3] % 8 == 0
    assert loads(query, key, value)
    scores = scores_of(query, key, None, scale, flash_hidden(query, key, is_causal))
    logsumexp = scores.mul(log(2)).logsumexp(-1)
    out = (weights_of(scores, logsumexp) @ value.float()).to(query.dtype)
    seed = torch.empty(2, dtype=torch.uint64)
    return out, logsumexp, None, None, query.shape[2], key.shape[2], seed, seed, query.new_empty(0)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> Any:
    cum_q, cum_k, rows, columns, dropout, causal, _, _ = rest
    assert (cum_q, cum_k, rows, columns, dropout) == (None, None, query.shape[2], key.shape[2], 0.0)
    assert scale is not None
    assert loads(query, key, value)
    assert logsumexp.is_contiguous()
    weights = weights_of(scores_of(query, key, None, scale, flash_hidden(query, key, causal)), logsumexp)
    return gradients(grad, (query, key, value), out, weights, scale)


def efficient_scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Its causal mask begins at the first row and column."""
    assert loads(query, key)
    rows, columns = query.shape[2], key.shape[2]
    if bias is not None:
        assert bias.shape == (*query.shape[:3], columns)
        assert bias.dtype == query.dtype
        assert loads(bias)
    return scores_of(query, key, bias, scale, torch.ones(rows, columns).triu(1) > 0 if causal else None)


def efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    assert compute_log_sumexp
    assert scale is not None
    assert loads(value)
    scores = efficient_scores(query, key, attn_bias, is_causal, scale)
    total = scores.mul(log(2)).logsumexp(-1)
    blind = total == -inf
    logsumexp = total.masked_fill(blind, 0.0)
    out = (weights_of(scores, logsumexp) @ value.float()).to(query.dtype)
    padded = torch.nn.functional.pad(logsumexp, (0, -query.shape[2] % 32), value=inf)
    seed = torch.empty((), dtype=torch.int64)
    return out.transpose(1, 2).contiguous().transpose(1, 2), padded, seed, seed


def efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    *rest: Any,
    scale: float | None = None,
) -> Any:
    _, _, dropout, wanted, *causal = rest
    assert (dropout, wanted) == (0.0, [True, True, True, False])
    assert scale is not None
    assert loads(value)
    assert out.transpose(1, 2).is_contiguous()
    assert grad.transpose(1, 2).is_contiguous()
    rows = query.shape[2]
    assert logsumexp.is_contiguous()
    assert logsumexp.shape[2] == rows + -rows % 32
    assert bool((logsumexp[..., rows:] == inf).all())
    scores = efficient_scores(query, key, attn_bias, any(causal), scale)
    weights = weights_of(scores, logsumexp[..., :rows])
    return *gradients(grad, (query, key, value), out, weights, scale), None


def capability(of: tuple[int, int], _: torch.device) -> tuple[int, int]:
    return of


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU's operators, on the CPU's tensors."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", partial(capability, (9, 0)))
    scoped: Any = importlib.import_module("torch.library")._scoped_library
    with scoped("aten", "IMPL") as found:
        for name, stand_in in (
            ("_scaled_dot_product_flash_attention", flash),
            ("_scaled_dot_product_flash_attention_backward", flash_backward),
            ("_scaled_dot_product_efficient_attention", efficient),
            ("_scaled_dot_product_efficient_attention_backward", efficient_backward),
        ):
            found.impl(name, stand_in, "CPU")
        yield


def value_of(tensor: Tensor) -> Value:
    return Value(TensorType(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))


def formula(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * 0.3
    scores = scores if added is None else scores + added
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -inf)
    logsumexp = scores.logsumexp(-1)
    finite = logsumexp.detach().masked_fill(logsumexp == -inf, 0.0)
    weights = (scores - finite.unsqueeze(-1)).exp()
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-30) @ value, logsumexp


def sees(*shape: int) -> Tensor:
    """Truth values with a row that sees nothing."""
    found = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4
    found[..., -1, :] = False
    return found


def numbers(*shape: int) -> Tensor:
    """Numbers with rows that see nothing, of the two kinds that there are, and a key that one row does not see."""
    found = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    found[..., -1, :] = -inf
    found[..., 0, :] = LOWEST
    found[..., 1, 0] = LOWEST
    return found


MASKS = {
    "none": None,
    "causal": None,
    "seen": sees(2, 1, 33, 21),
    "keys": sees(2, 1, 1, 21),
    "rows": sees(1, 3, 33, 1),
    "added": numbers(1, 1, 33, 21),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [21, 24, 33])
@pytest.mark.parametrize("mask", MASKS)
def test_the_library_gives_what_the_op_says(mask: str, columns: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    # Heads lie within rows, as projections leave them; the values in a matrix of their own, at an odd place.
    query = torch.randn(2, 33, 3, 16, generator=random).to(dtype).transpose(1, 2)
    key = torch.randn(2, columns, 3, 16, generator=random).to(dtype).transpose(1, 2)
    value = torch.randn(2, 3, columns, 19, generator=random).to(dtype)[..., 1:17]
    grad = torch.randn(2, 3, 33, 16, generator=random).to(dtype)
    given = MASKS[mask]
    if given is not None and given.shape[-1] > 1:
        given = torch.cat([given, given[..., : columns - 21]], -1)
    added = None if given is None else given.to(dtype) if mask == "added" else torch.where(given, 0.0, -inf)
    tensors = [query, key, value]
    if given is not None:
        tensors.append(given.to(dtype) if mask == "added" else given)
    attrs = {"is_causal": mask == "causal", "scale": 0.3}

    wide = [each.double().requires_grad_() for each in (query, key, value)]
    told = None if added is None else added.double().masked_fill(added <= torch.finfo(added.dtype).min, -inf)
    want, total = formula(wide[0], wide[1], wide[2], told, mask == "causal")
    wanted = torch.autograd.grad(want, wide, grad.double())

    out_value = value_of(want.to(dtype))
    forward = Op("moai.sdpa", tuple(map(value_of, tensors)), (out_value, value_of(total.float())), attrs)
    out, logsumexp = run_op(forward, tensors, GPU)
    near = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out.double(), want.detach(), rtol=near, atol=near)
    torch.testing.assert_close(logsumexp.double(), total.detach(), rtol=1e-4, atol=1e-4)

    operands = [grad, *tensors[:3], out.contiguous(), logsumexp.mT.contiguous().mT, *tensors[3:]]
    backward = Op("moai.sdpa_backward", tuple(map(value_of, operands)), tuple(map(value_of, tensors[:3])), attrs)
    for found, its in zip(run_op(backward, operands, GPU), wanted, strict=True):
        torch.testing.assert_close(found.double(), its, rtol=near, atol=near)


@pytest.mark.parametrize("turned", ["query", "key", "value", "out", "grad"])
def test_operands_may_lie_in_columns(turned: str) -> None:
    """On CPUs, whose kernel reads rows without asking how its operands lie."""
    random = torch.Generator().manual_seed(3)
    given = {name: torch.randn(2, 3, 5, 16, generator=random) for name in ("grad", "query", "key", "value")}
    given["out"], logsumexp = formula(given["query"], given["key"], given["value"], None, causal=False)
    turning = {**given, turned: given[turned].mT.contiguous().mT}
    for one, other in zip(both_ways(turning, logsumexp), both_ways(given, logsumexp), strict=True):
        torch.testing.assert_close(one, other)


def both_ways(given: dict[str, Tensor], logsumexp: Tensor) -> list[Tensor]:
    """The op's results and those of its backward, on a CPU."""
    attrs = {"is_causal": False, "scale": 0.3}
    three, five = [given[name] for name in ("query", "key", "value")], list(given.values())
    results = tuple(map(value_of, (given["out"], logsumexp)))
    forward = Op("moai.sdpa", tuple(map(value_of, three)), results, attrs)
    backward = Op("moai.sdpa_backward", tuple(map(value_of, (*five, logsumexp))), tuple(map(value_of, three)), attrs)
    return [*run_op(forward, three), *run_op(backward, [*five, logsumexp])]


def asked(
    rows: int = 8,
    columns: int = 8,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool = True,
    added: Tensor | None = None,
) -> Attention:
    query, key = (torch.empty(1, 1, length, width, dtype=dtype) for length in (rows, columns))
    return Attention(query, key, key, added, causal, 0.125)


@pytest.mark.parametrize(
    ("operands", "library"),
    [
        (asked(), FLASH),
        (asked(columns=9), EFFICIENT),
        (asked(columns=9, causal=False), FLASH),
        (asked(width=200), EFFICIENT),
        (asked(width=256), FLASH),
        (asked(width=20), None),
        (asked(width=20, dtype=torch.float32), EFFICIENT),
        (asked(dtype=torch.float64), None),
        (asked(rows=0), None),
        (asked(causal=False, added=torch.zeros(8, 8, dtype=torch.bfloat16)), EFFICIENT),
        (asked(causal=False, added=torch.zeros(8, 8)), None),
        (asked(added=torch.zeros(8, 8, dtype=torch.bfloat16)), None),
    ],
)
def test_a_kernel_is_asked_for_what_it_takes(
    operands: Attention, library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", partial(capability, (8, 0)))
    assert library_for(operands, GPU) is library
    assert library_for(operands, torch.device("cpu")) is None


def test_gpus_before_ampere_have_no_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", partial(capability, (7, 5)))
    assert library_for(asked(dtype=torch.float16), GPU) is EFFICIENT
    assert library_for(asked(), GPU) is None
