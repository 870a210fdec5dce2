"""Small functions whose results share memory, and the facts about it that a caller can observe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo import graph_break

Function = Callable[[Tensor, Tensor, int], Any]


def _broken_view(x: Tensor, y: Tensor, n: int) -> Any:
    h = x * 2
    v = h[:, :n]
    graph_break()
    v.add_(1)
    return h, v


def _broken_chain(x: Tensor, y: Tensor, n: int) -> Any:
    h = x @ y.t()
    a, b = h[:n], h.t()
    graph_break()
    a = a.add_(1)
    graph_break()
    b.mul_(3)
    return h, a, b


def _written(x: Tensor, y: Tensor, n: int) -> Any:
    z = y.clone()
    z[:, :n] += x[:, :n]
    return z, z[:, 1:n]


def _cache(x: Tensor, y: Tensor, n: int) -> Any:
    with torch.no_grad():
        y[:, :n].copy_(x[:, :n])
    return y[:, :n], y[:n, n:].sum()


def _in_place(x: Tensor, y: Tensor, n: int) -> Any:
    with torch.no_grad():
        y.mul_(2)
    return y.t(), x + y


def _same_value_twice(x: Tensor, y: Tensor, n: int) -> Any:
    z = x + 1
    with torch.no_grad():
        y.copy_(z)
    return z, y[:n]


def _with(h: Tensor, results: Callable[[Tensor], Any]) -> Any:
    return results(h)


FUNCTIONS: dict[str, Function] = {
    "prefix": lambda x, y, n: x[:, :n],
    "rest": lambda x, y, n: (x[:, n:], x[1]),
    "square": lambda x, y, n: (x[:n, :n], x * y),
    "transposed": lambda x, y, n: (x.t(), y[:, :n].t()[1:]),
    "input": lambda x, y, n: (x, x[:n], y + 1, y),
    "reshaped": lambda x, y, n: (x.unsqueeze(0), y[:, ::2], y[None, :n, 1]),
    "expanded": lambda x, y, n: (x[:, None].expand(-1, n, -1), x.sum(0, keepdim=True).expand(n, -1)),
    "diagonal": lambda x, y, n: (x.diagonal(), x.unfold(1, 2, 1), y[:n, :n].diagonal()),
    "parts": lambda x, y, n: (*x.split([n, x.shape[1] - n], 1), *(y * 2).chunk(2, 1)),
    "unbound": lambda x, y, n: (*(x + y).unbind(0), y.unbind(1)[0]),
    "detached": lambda x, y, n: (x.detach()[:, :n], (x * y).detach(), x * 2),
    "own": lambda x, y, n: (x + 1, x.t() + y.t(), (x * y)[:, :n].clone()),
    "own view": lambda x, y, n: (x * 2).t(),
    "own slice": lambda x, y, n: (x * 2)[1:, :n],
    "own column": lambda x, y, n: (x.exp()[:, n - 1], y.sum()),
    "base and view": lambda x, y, n: _with(x * y, lambda h: (h, h[:, :n], h.t())),
    "two views": lambda x, y, n: _with(x * y, lambda h: (h[:, :n], h[1:], h.t()[n:])),
    "views of a view": lambda x, y, n: _with((x + y).t(), lambda h: (h[1:, :n], h[1:].t())),
    "product": lambda x, y, n: (x @ y.t(), (x.t() @ y)[:n]),
    "twice": lambda x, y, n: _with(x + y, lambda h: (h, h, h[0])),
    "mixed": lambda x, y, n: (x[:, :n], x[:, :n] * 2, y.relu().reshape(-1)),
    "conjugated": lambda x, y, n: torch.complex(x, y).conj()[1:, :n],
    "imaginary": lambda x, y, n: torch.complex(x, y).mH.imag[1:],
    "long": lambda x, y, n: ((x[:, :n] > 0).t(), x.argmax(1), (y > 0)[:n]),
    "reordered": lambda x, y, n: x.view(x.shape[0], 2, -1).permute(2, 0, 1) * 2 if x.is_contiguous() else x * 2,
    "in place": _in_place,
    "written": _written,
    "cache": _cache,
    "same value twice": _same_value_twice,
    "broken view": _broken_view,
    "broken chain": _broken_chain,
}

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "row-major": lambda: _numbers(36).view(6, 6),
    "transposed": lambda: _numbers(36).view(6, 6).t(),
    "offset": lambda: _numbers(54).view(9, 6)[2:8],
    "strided": lambda: _numbers(72).view(6, 12)[:, 1::2],
}


def _numbers(count: int) -> Tensor:
    return torch.linspace(-1, 1, count, dtype=torch.float64)


def made(layout: str, device: str, *, trained: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and the two inputs that are seen through them."""
    leaf, x = _placed(LAYOUTS[layout], device)
    other, y = _placed(LAYOUTS[layout], device)
    return [leaf.requires_grad_(trained), other], [_seen(leaf, x), _seen(other, y)]


def _placed(make: Callable[[], Tensor], device: str) -> tuple[Tensor, Tensor]:
    seen = make()
    base = seen if seen._base is None else seen._base
    return base.detach().clone().to(device), seen


def _seen(base: Tensor, like: Tensor) -> Tensor:
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


def listed(returned: Any) -> list[Tensor]:
    return [returned] if isinstance(returned, Tensor) else list(returned)


def told(given: Sequence[Tensor], returned: Any) -> list[Any]:
    """Of each result: geometry, with whom it shares memory and whether as a view, and its numbers."""
    results = listed(returned)
    everyone = [*given, *results]
    homes = [tensor.untyped_storage().data_ptr() for tensor in everyone]
    numbers: list[Any] = [tensor.detach().cpu().tolist() for tensor in results]
    shared = [homes.count(home) > 1 and tensor._is_view() for tensor, home in zip(everyone, homes, strict=True)]
    return [
        (tuple(each.shape), each.stride(), each.storage_offset(), each.requires_grad, homes.index(home), view, number)
        for each, home, view, number in zip(results, homes[len(given) :], shared[len(given) :], numbers, strict=True)
    ]


def after_writes(given: Sequence[Tensor], returned: Any) -> list[Any]:
    """Everybody's numbers once every result has been written."""
    results = listed(returned)
    with torch.no_grad():
        for number, result in enumerate(results):
            if result.is_floating_point() and 0 not in result.stride():
                result.view_as(result).data.mul_(number + 2)
    return [tensor.detach().cpu().tolist() for tensor in (*given, *results)]


def gradient(leaf: Tensor, returned: Any) -> Any:
    results = listed(returned)
    trained = [result for result in results if result.requires_grad]
    if not trained:
        return None
    torch.stack([(result * result.conj()).real.sum() for result in trained]).sum().backward()
    return cast("Any", None if leaf.grad is None else leaf.grad.cpu().tolist())


def behaviour(function: Callable[..., Any], layout: str, device: str, *, trained: bool) -> list[Any]:
    """What calls with three lengths show, one after another."""
    shown: list[Any] = []
    for n in (3, 4, 2):
        leaves, given = made(layout, device, trained=trained)
        returned = function(*given, n)
        shown.append((told(given, returned), gradient(leaves[0], returned), after_writes(given, returned)))
    return shown
