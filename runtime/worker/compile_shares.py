"""Shares of a program's functions: each rank compiles one, and loads those of the others from the cache on disk."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moaic.ir.graph import Function, Module
from moaic.ir.localize import localize
from moaic.ir.parser import parse
from moaic.ir.specialize import symbols_of
from moaic.runtime.codegen.compile import prepare_functions


def called_functions(program: Module) -> dict[str, Function]:
    """The functions that a program calls, by name, with local types."""
    called = {op.callee for op in program.main.ops if op.name == "call"}
    return {each.name: localize(each, program.mesh) for each in program.functions if each.name in called}


def shares(functions: Mapping[str, Function], ranks: int) -> list[list[str]]:
    """The names of the functions that each rank compiles: shares with about the same number of ops."""
    made: list[list[str]] = [[] for _ in range(ranks)]
    ops = [0] * ranks
    for name in sorted(functions, key=lambda name: -len(functions[name].ops)):
        rank = ops.index(min(ops))
        made[rank].append(name)
        ops[rank] += len(functions[name].ops)
    return made


def compile_share(text: str, rank: int, device: torch.device) -> list[str]:
    """Compiles the share of `rank` of a program for `device` into the cache on disk; returns its functions' names."""
    program = parse(text)
    functions = called_functions(program)
    mine = shares(functions, program.mesh.ranks)[rank]
    if mine:
        prepare_functions([functions[name] for name in mine], symbols_of(program), compiled=True, device=device)
    return mine
