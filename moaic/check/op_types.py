"""Whether PyTorch takes the ops of a text as they stand: what to blame where nothing else explains an error.

The verifier knows layouts and the ops of moaic; how many operands an op of PyTorch takes, and what it makes of them, is
PyTorch's to say. It is asked only after something failed, as most texts were written by moaic itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Op, Value
from moaic.ir.parser import Parsed
from moaic.ir.specialize import in_example
from moaic.runtime.codegen.lower_to_fx import operand_of, run_op
from moaic.runtime.dtypes import DTYPE_NAMES, DTYPES

META: Final = torch.device("meta")


def wrong_ops(parsed: Parsed) -> Iterator[Diagnostic]:
    """What is wrong with ops of PyTorch in the text, each at its place; sizes that are open are the example's."""
    for function, closed in zip(parsed.module.functions, in_example(parsed.module).functions, strict=True):
        for written, op in zip(function.ops, closed.ops, strict=True):
            complaint = _complaint(op) if op.name.startswith("aten.") else ""
            if complaint:
                yield Diagnostic(f"in function `@{function.name}`: `{op.name}`: {complaint}", parsed.place(written))


def _complaint(op: Op) -> str:
    try:
        values = {value: _like(value) for value in op.inputs()}
        results = run_op(op, [operand_of(operand, values) for operand in op.operands], META)
    except NotImplementedError:
        return ""
    except Exception as error:
        return f"PyTorch does not take this: {str(error).partition(chr(10))[0]}"
    found = ", ".join(_spelled(DTYPE_NAMES[result.dtype], result.shape) for result in results)
    said = ", ".join(_spelled(result.type.dtype, result.type.shape) for result in op.results)
    return "" if found == said else f"it makes {found or 'nothing'}, and its results are {said}"


def _like(value: Value) -> Tensor:
    return torch.empty(value.type.shape, dtype=DTYPES[value.type.dtype], device=META)


def _spelled(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"
