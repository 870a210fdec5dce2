"""The calls that become something else than one op of the same name, by that name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moaic.capture.fx.attention_rewrites import ATTENTION_REWRITES
from moaic.capture.fx.index_rewrites import INDEX_REWRITES
from moaic.capture.fx.op_call import OpCall, Rewrite, each_of
from moaic.capture.fx.random_rewrites import RANDOM_REWRITES
from moaic.capture.fx.shape_rewrites import SHAPE_REWRITES
from moaic.capture.fx.value_rewrites import VALUE_REWRITES
from moaic.capture.provenance import described
from moaic.ir.errors import Diagnostic


def _refuse(call: OpCall) -> Any:
    raise Diagnostic(
        f"`{call.name}` gives a result whose size depends on values{described(call.builder.loc)}",
        hint="keep this part out of the compiled model, for example with torch.compiler.disable",
    )


def _refuse_sparse(call: OpCall) -> Any:
    raise Diagnostic(
        f"a gradient is sparse, by sparse=True or sparse_grad=True, and a plan holds dense tensors only"
        f"{described(call.builder.loc)}",
        hint="leave this argument of nn.Embedding or torch.gather out",
    )


REWRITES: Final[Mapping[str, Rewrite]] = {
    **SHAPE_REWRITES,
    **VALUE_REWRITES,
    **ATTENTION_REWRITES,
    **INDEX_REWRITES,
    **RANDOM_REWRITES,
    **each_of("aten.nonzero aten.masked_select aten._unique2 aten._local_scalar_dense aten.unique_dim", _refuse),
    **each_of("aten._sparse_coo_tensor_with_dims_and_tensors aten._sparse_coo_tensor_unsafe", _refuse_sparse),
}
