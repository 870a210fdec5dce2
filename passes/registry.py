"""Every pass that can be run by name on IR text: `moaic opt FILE -p outline,recompute=full,dp=2`."""

from __future__ import annotations

from collections.abc import Mapping

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import check_made, verify
from moaic.passes.chunk import ChunkLoss
from moaic.passes.context import SplitSequence
from moaic.passes.dead import DropDead
from moaic.passes.distribute import ShardParameters
from moaic.passes.experts import SplitExperts
from moaic.passes.follow import SplitInSpace, SplitInTime
from moaic.passes.hoist import HoistCasts
from moaic.passes.outline import Outline
from moaic.passes.pass_options import Pass, parse_pass
from moaic.passes.program import Lower
from moaic.passes.promote import Promote
from moaic.passes.recompute import ChooseSaved
from moaic.passes.stage import CutIntoStages
from moaic.passes.tensor import SplitTensors
from moaic.passes.weights import SplitBackward
from moaic.passes.zero import DropZeros

_IN_ORDER: tuple[type[Pass], ...] = (
    DropZeros,
    Outline,
    ChooseSaved,
    SplitInTime,
    SplitInSpace,
    SplitExperts,
    SplitSequence,
    SplitTensors,
    HoistCasts,
    ShardParameters,
    SplitBackward,
    CutIntoStages,
    ChunkLoss,
    DropDead,
    Promote,
    Lower,
)

PASSES: Mapping[str, type[Pass]] = {each.name: each for each in _IN_ORDER}
"""In the order in which a plan uses them."""


def run_passes(module: Module, names: str) -> Module:
    """`module` after the passes in `names`, verified before the first and after each."""
    verify(module)
    for word in filter(None, names.split(",")):
        name, _, options = word.partition("=")
        if name not in PASSES:
            raise Diagnostic(f"there is no pass `{name}`", hint=f"passes are {', '.join(PASSES)}")
        module = check_made(parse_pass(PASSES[name], options).apply(module), word)
    return module
