"""Linear layers of Dynamo's graph replaced by eight-bit ones, as torchao computes them.

The model is not converted, and its parameters keep their type. No other file imports torchao.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.func import functional_call

from moaic.ir.errors import Diagnostic
from moaic.ir.ops import SCALED_BLOCK
from moaic.planner import log

_LINEAR: Final[Any] = nn.functional.linear


def in_float8(graph_module: fx.GraphModule, recipe: str) -> None:
    """Replace linear layers of Dynamo's graph by torchao's with `recipe`; they take effect where autocast is on.

    Three kinds stay: the last layer, which makes the logits, as torchao advises; layers whose weight is computed; and
    layers of sizes that eight-bit products of GPUs do not support. Raises Diagnostic if torchao is missing.
    """
    # Checkpointed parts are graph modules of their own.
    graphs = [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    layers = [node for each in reversed(graphs) for node in each.graph.nodes if node.target is _LINEAR]
    taken = [node for node in layers[:-1] if _fits(_weight(node))]
    for node in taken:
        out, width = _weight(node).meta["example_value"].shape
        # Made now and cached: later, while AOTAutograd traces the graph, its modes would be active.
        layer_of(recipe, int(out), int(width))
        given = _arguments(node)
        node.target, node.kwargs = float8_linear, {}
        node.args = (given["input"], given["weight"], given.get("bias"), recipe)
    for each in graphs:
        each.recompile()
    log.in_float8(len(taken), len(layers), recipe)


def _arguments(linear: fx.Node) -> dict[str, Any]:
    return dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | linear.kwargs


def _weight(linear: fx.Node) -> fx.Node:
    return _arguments(linear)["weight"]


def _fits(weight: fx.Node) -> bool:
    """Whether the weight is a parameter or a buffer of a size that eight-bit products support."""
    shape = weight.meta["example_value"].shape
    return weight.op in ("placeholder", "get_attr") and not any(size % SCALED_BLOCK for size in shape)


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    """`linear` in eight-bit floats if autocast is on, else as it is: a model may switch autocast off for a part."""
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return _LINEAR(x, weight, bias)
    narrow = torch.get_autocast_dtype(device)
    layer = layer_of(recipe, *weight.shape)
    y = functional_call(layer, {"weight": weight.to(narrow)}, (x.to(narrow),))
    return y if bias is None else y + bias.to(narrow)


@cache
def layer_of(recipe: str, out: int, width: int) -> nn.Module:
    """The layer of these sizes by torchao, without a weight of its own: each call passes the weight of a model."""
    try:
        from torchao.float8 import (  # pyright: ignore[reportMissingTypeStubs]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError as error:
        raise Diagnostic(
            f"layers in eight-bit floats are torchao's, which cannot be imported: {error}",
            hint="pip install 'moaic[float8]'",
        ) from error
    with unset_fake_temporarily():
        layer = nn.Linear(width, out, bias=False, device="meta")
        return convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(recipe))
