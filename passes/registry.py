"""Every pass that can be run by name on IR text: `moaic opt FILE -p outline,recompute=full,dp=2`."""

from __future__ import annotations

from collections.abc import Mapping

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import check_made, verify
from moaic.passes.lowering.programs import Lower
from moaic.passes.pass_options import Pass, parse_pass
from moaic.passes.pipeline.assign_stages import AssignStages
from moaic.passes.pipeline.split_backward import SplitBackward
from moaic.passes.sharding.context_parallel import ContextParallel
from moaic.passes.sharding.data_parallel import DataParallel, MicroBatches
from moaic.passes.sharding.expert_parallel import ExpertParallel
from moaic.passes.sharding.fsdp import FullyShardedDataParallel
from moaic.passes.sharding.loss_chunks import LossChunks
from moaic.passes.sharding.pad_batch import PadBatch
from moaic.passes.sharding.tensor_parallel import TensorParallel
from moaic.passes.transforms.dce import DeadCodeElimination
from moaic.passes.transforms.hoist_casts import HoistCasts
from moaic.passes.transforms.outline import Outline
from moaic.passes.transforms.recompute import Recomputation
from moaic.passes.transforms.symbolic_zeros import SymbolicZeros
from moaic.passes.transforms.to_float64 import ToFloat64

_IN_ORDER: tuple[type[Pass], ...] = (
    SymbolicZeros,
    PadBatch,
    Outline,
    Recomputation,
    MicroBatches,
    DataParallel,
    ExpertParallel,
    ContextParallel,
    TensorParallel,
    HoistCasts,
    FullyShardedDataParallel,
    SplitBackward,
    AssignStages,
    LossChunks,
    DeadCodeElimination,
    ToFloat64,
    Lower,
)

PASSES: Mapping[str, type[Pass]] = {each.name: each for each in _IN_ORDER}
"""In the order in which a plan uses them."""


def run_passes(module: Module, names: str) -> Module:
    """`module` after the passes in `names`, verified before the first and after each."""
    verify(module)
    words = [word for word in names.split(",") if word.strip()]
    if names and not words:
        raise Diagnostic(f"`{names}` names no pass", hint=f"passes are {', '.join(PASSES)}")
    for word in words:
        name, _, options = word.partition("=")
        if name not in PASSES:
            raise Diagnostic(f"there is no pass `{name}`", hint=f"passes are {', '.join(PASSES)}")
        module = check_made(parse_pass(PASSES[name], options).apply(module), word)
    return module
