"""`torch.autocast("moai")`: the same ops in low precision, float32 and widest type as torch's autocast for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch

from moaic.device import torch_private
from moaic.ir.recurrent import MODES

SUPPORTED: Final = (torch.bfloat16, torch.float16)

LOW: Final = (
    "_convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    *(f"{mode}.{form}" for mode in MODES for form in ("input", "data")),
    "scaled_dot_product_attention",
)
"""Ops whose floating operands are cast to the autocast type."""

FULL: Final = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "frobenius_norm.dim",
    "nuclear_norm",
    "nuclear_norm.dim",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "nll_loss2d",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "pdist",
    "cdist",
    "renorm",
    "logsumexp",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
)
"""Ops whose low-precision operands are cast to float32."""

FULL_RESULT: Final = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "sum",
    "sum.dim_IntList",
)
"""Ops that compute in float32 unless the call gives a dtype."""

WIDEST: Final = (
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
    "scatter_add",
)
"""Ops whose operands are cast to the widest floating type among them."""

_KEY: Final = "AutocastPrivateUse1"


def _cast(value: Any, wanted: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        casts = value.is_floating_point() and value.dtype != torch.float64 and value.device.type == torch_private.NAME
        return value.to(wanted) if casts and value.dtype != wanted else value
    if isinstance(value, list | tuple):
        return [_cast(item, wanted) for item in cast("list[Any]", value)]
    return value


def _casting(overload: Any, wanted: Callable[[tuple[Any, ...]], torch.dtype | None]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch_private.without_key(_KEY):
            dtype = wanted(args)
            if dtype is None:
                return overload(*args, **kwargs)
            named = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return overload(*(_cast(value, dtype) for value in args), **named)

    return kernel


def _low(args: tuple[Any, ...]) -> torch.dtype:
    return torch.get_autocast_dtype(torch_private.NAME)


def _full(args: tuple[Any, ...]) -> torch.dtype:
    return torch.float32


def _widest(args: tuple[Any, ...]) -> torch.dtype | None:
    """The widest floating type; None if the operands have one type."""
    types = {value.dtype for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()}
    if len(types) < 2:
        return None
    return torch.float32 if torch.float32 in types else _low(args)


def _full_result(overload: Any) -> Callable[..., Any]:
    def kernel(operand: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch_private.without_key(_KEY):
            low = operand.dtype in SUPPORTED and kwargs.get("dtype") is None and not _has_dtype(args)
            return overload(operand.float() if low else operand, *args, **kwargs)

    return kernel


def _has_dtype(args: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.dtype) for value in args)


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: combine the sigmoid "
        "with the loss, torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss"
    )


def install() -> None:
    """Register the casts; other ops fall through to the next dispatch key."""
    registry = torch_private.Registry("aten", _KEY)
    for names, wanted in ((LOW, _low), (FULL, _full), (WIDEST, _widest)):
        for name in names:
            overload = torch_private.overload_of(f"aten::{name}")
            if overload is not None:
                registry.add(f"aten::{name}", _casting(overload, wanted))
    for name in FULL_RESULT:
        registry.add(f"aten::{name}", _full_result(torch_private.overload_of(f"aten::{name}")))
    registry.add("aten::binary_cross_entropy", _refuse)
    torch_private.Registry("_", _KEY).fall_through()
