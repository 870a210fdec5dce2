"""Partition a step by the layouts that its parameters already have, resharding as few bytes as possible.

The compiled step of an optimizer runs so: its operands are parameters, gradients and states that a training plan has
placed, and it has no batch that could be sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

from moaic.ir.graph import Function, Module, Role, Value
from moaic.ir.layout import FULLY_REPLICATED, PARTIAL, REPLICATED, Layout, Mesh, State
from moaic.ir.verify import check_made
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.data_parallel import cheapest_in_space
from moaic.passes.sharding.partitioner import partition


def partition_as_inputs(step: Module, mesh: Mesh, layouts: Sequence[Layout | None]) -> Module:
    """`step` on `mesh`, its parameters in these layouts; one without takes the layout of what it is computed with.

    Raises UnshardableOp.
    """
    module = check_made(step, "capture")
    complete = _completed(step.main, layouts)
    for name, size in mesh.axes:
        if size > 1:
            states = {param: layout.state(name) for param, layout in zip(module.main.params, complete, strict=True)}
            module = partition(module, Axis(name, size), states, _complete, cheapest_in_space).module
    return check_made(module, "resting")


def _completed(main: Function, layouts: Sequence[Layout | None]) -> list[Layout]:
    """A layout for each parameter: values of one shape that meet in an op are taken to have one layout."""
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


def _complete(role: Role, value: Value, state: State) -> State:
    """No result stays partial."""
    return REPLICATED if state == PARTIAL else state
