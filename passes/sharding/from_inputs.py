"""A step whose parameters already lie somewhere: it runs as they lie, and moves as little as it can.

That is how an optimizer's compiled step runs: its operands are parameters, gradients and states that a training plan
has placed, and there is no batch that could be split.
"""

from __future__ import annotations

from collections.abc import Sequence

from moaic.ir.graph import Function, Module, Role, Value
from moaic.ir.layout import FULLY_REPLICATED, PARTIAL, REPLICATED, Layout, Mesh, State
from moaic.ir.verify import check_made
from moaic.passes.sharding.data_parallel import cheapest_in_space
from moaic.passes.sharding.partitioner import Axis, partition


def follow_resting(step: Module, mesh: Mesh, layouts: Sequence[Layout | None]) -> Module:
    """`step` on `mesh`, its parameters in these layouts; one without lies as what it is computed with.

    Raises Barrier where an axis cannot pass.
    """
    module = check_made(step, "capture")
    found = _completed(step.main, layouts)
    for name, size in mesh.axes:
        if size > 1:
            states = [layout.state(name) for layout in found]
            module = partition(module, Axis(name, size), states, _as_made, cheapest_in_space).module
    return check_made(module, "resting")


def _completed(main: Function, layouts: Sequence[Layout | None]) -> list[Layout]:
    """A layout for each parameter: values of one shape that meet in an op are taken to lie alike."""
    groups: dict[Value, set[Value]] = {}
    for op in main.ops:
        for result in op.results:
            alike = {value for value in op.inputs() if value.type.shape == result.type.shape}
            members = {result}.union(*(groups.get(value, {value}) for value in alike))
            groups.update(dict.fromkeys(members, members))
    known = {param: layout for param, layout in zip(main.params, layouts, strict=True) if layout is not None}
    return [
        next((layout for other, layout in known.items() if other in groups.get(param, {param})), FULLY_REPLICATED)
        if param not in known
        else known[param]
        for param in main.params
    ]


def _as_made(role: Role, value: Value, state: State) -> State:
    """Nothing rests as a pending sum."""
    return REPLICATED if state == PARTIAL else state
