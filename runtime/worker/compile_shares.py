"""Shares of a program's functions: each rank of a host compiles one, and loads the others from the cache of that host.

Hosts do not share caches: each compiles all that its ranks call, at the same time as the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from moaic.ir.graph import Function, Module
from moaic.ir.localize import localize
from moaic.ir.ops import takes_part
from moaic.ir.parser import parse
from moaic.ir.specialize import symbols_of
from moaic.runtime.codegen.compile import prepare_functions


def called_functions(program: Module) -> dict[str, Function]:
    """The functions that a program calls, by name, with local types."""
    called = {op.callee for op in program.main.ops if op.name == "call"}
    return {each.name: localize(each, program.mesh) for each in program.functions if each.name in called}


def host_shares(program: Module, functions: Mapping[str, Function], local: Collection[int]) -> dict[int, list[str]]:
    """The names of the functions that each rank of a host compiles; `local` are the host's workers.

    The ranks of a pipeline's stages call other functions than those of other stages, which may be on other hosts.
    """
    ranks = [rank for rank in range(program.mesh.ranks) if rank in local]
    places = [program.mesh.coordinates(rank) for rank in ranks]
    calls = [op for op in program.main.ops if op.name == "call"]
    called = {op.callee for op in calls if any(takes_part(op, at) for at in places)}
    mine = {name: function for name, function in functions.items() if name in called}
    return dict(zip(ranks, shares(mine, len(ranks)), strict=True))


def shares(functions: Mapping[str, Function], count: int) -> list[list[str]]:
    """The names of functions in `count` shares with about the same number of ops."""
    made: list[list[str]] = [[] for _ in range(count)]
    ops = [0] * count
    for name in sorted(functions, key=lambda name: -len(functions[name].ops)):
        least = ops.index(min(ops))
        made[least].append(name)
        ops[least] += len(functions[name].ops)
    return made


def compile_share(text: str, rank: int, local: Sequence[int], device: torch.device) -> list[str]:
    """Compiles the share of `rank` of a program for `device` into the cache on disk; returns its functions' names."""
    program = parse(text)
    functions = called_functions(program)
    mine = host_shares(program, functions, local)[rank]
    if mine:
        prepare_functions([functions[name] for name in mine], symbols_of(program), compiled=True, device=device)
    return mine
