"""Pooling, gradients of padding, and sampling at points: the image dims are whole, batch and channels split."""

from __future__ import annotations

from moaic.ir.graph import Op
from moaic.ir.ops.declaration import OpDecl, RuleMaker, each
from moaic.ir.ops.rule_building import rule_of_factors, wanted_gradients, whole_dims
from moaic.ir.rules import Rule

_PIXELS = ["x!", "y!", "z!"]
_POINTS = ["p", "q", "r"]


def _pool(*linear: tuple[int, ...], dims: int = 2) -> RuleMaker:
    """The last dims are windowed, those before them free."""
    return lambda op: whole_dims(op, range(-dims, 0), *linear)


def _grid_sampler(dims: int) -> RuleMaker:
    """Sampled points, each with its coordinates in the image."""

    def make(op: Op) -> Rule:
        points = _POINTS[:dims]
        operands = [["b", "c", *_PIXELS[:dims]], ["b", *points, "at!"]]
        return rule_of_factors(op, operands, [["b", "c", *points]], (0,))

    return make


def _grid_sampler_backward(dims: int) -> RuleMaker:
    """The image's gradient sums over points, the grid's over channels; the grid's is always given."""

    def make(op: Op) -> Rule:
        points = _POINTS[:dims]
        image, grid = ["b", "c", *_PIXELS[:dims]], ["b", *points, "at!"]
        gradients = [image, grid] if wanted_gradients(op)[0] else [grid]
        return rule_of_factors(op, [["b", "c", *points], image, grid], gradients, (0,))

    return make


OPS = (
    OpDecl("aten.max_pool2d_with_indices", _pool(), exact=True),
    OpDecl("aten.adaptive_max_pool2d", _pool(), exact=True),
    *each(
        "max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward adaptive_max_pool2d_backward "
        "_adaptive_avg_pool2d _adaptive_avg_pool2d_backward replication_pad2d_backward reflection_pad2d_backward",
        OpDecl("aten.*", _pool((0,))),
    ),
    *each("max_pool3d_with_indices adaptive_max_pool3d", OpDecl("aten.*", _pool(dims=3), exact=True)),
    *each(
        "max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward adaptive_max_pool3d_backward "
        "_adaptive_avg_pool3d _adaptive_avg_pool3d_backward replication_pad3d_backward reflection_pad3d_backward",
        OpDecl("aten.*", _pool((0,), dims=3)),
    ),
    *each("replication_pad1d_backward reflection_pad1d_backward", OpDecl("aten.*", _pool((0,), dims=1))),
    OpDecl("aten.grid_sampler_2d", _grid_sampler(2)),
    OpDecl("aten.grid_sampler_3d", _grid_sampler(3)),
    OpDecl("aten.grid_sampler_2d_backward", _grid_sampler_backward(2)),
    OpDecl("aten.grid_sampler_3d_backward", _grid_sampler_backward(3)),
)
