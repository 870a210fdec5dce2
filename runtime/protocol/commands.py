"""What the controller tells workers, and what they answer: the vocabulary of the wire.

A message's body is [sequence, commands]; a command is [code, line, ...] with the arguments below, `line` a number that
`location.Lines` gave. Workers run commands in order. Ranks are worker numbers; a worker whose rank is not below the
`ranks` of something takes no part in it. An answer's body is [request, kind, ...].
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Code(IntEnum):
    PUT = 0
    """id, dtype, local shape, block: the block's bytes become the buffer; an absent block means no part here."""
    FILL = 1
    """id, dtype, local shape, the ranks that get it, value or None for anything."""
    DEFINE = 2
    """number, operation: what OPERATE with that number does (`operation.Operation`)."""
    OPERATE = 3
    """number, operand ids, scalars, ids of the results."""
    PATH = 4
    """number, conversion: what MOVE with that number does (`moves.Conversion`)."""
    MOVE = 5
    """number, source id, id of the result, which may be the same."""
    LOAD = 6
    """program, text, compiled, recorded, ranks."""
    RUN = 7
    """program, ids of the inputs, ids of the outputs (None: not wanted), key (two i64) or None."""
    FREE = 8
    """ids."""
    FETCH = 9
    """request, id, geometry (base strides, shape, strides, offset) or None, ranks that answer with a block."""
    SYNCHRONIZE = 10
    """request: every worker answers."""
    REPORT = 11
    """request, forget_peak: every worker answers with its statistics."""
    LIST = 12
    """request: every worker answers with [id, dtype, shape, digest] of each buffer."""
    FORGET = 13
    """Nothing: what DEFINE said is no longer needed."""
    STORE = 14
    """request, per worker a path and [id, local starts, sizes] of boxes: answered with where in the file they are."""
    RESTORE = 15
    """id, dtype, local shape, per worker its boxes or None, sources (`files.read`)."""
    TRACE = 16
    """request, whether to note what is done from now on: every worker answers with what it noted (`trace.Span`)."""
    SETTLE = 17
    """request: every worker answers with the writes that it withholds and the ids that it has (`trouble.Trouble`)."""
    TOLD = 18
    """number of the failed command that the person has been told of, ids of which the workers hold different values."""


REQUESTS: Final = frozenset({Code.FETCH, Code.SYNCHRONIZE, Code.REPORT, Code.LIST, Code.STORE, Code.TRACE, Code.SETTLE})
"""Commands that are answered and change nothing."""


class AnswerCode(IntEnum):
    HELLO = 0
    """pid: the worker is ready."""
    VALUE = 1
    """dtype, shape, and a block."""
    DONE = 2
    """whatever the request asks for."""
    FAILED = 3
    """The worker is of no more use: line, what was done, the error's kind and text, the worker's traceback, whether a
    peer's failure caused it, and where memory was short the bytes asked for, free and held, else None."""
    RAISED = 4
    """number of the command, then as for FAILED: the command failed, and the worker goes on."""
    SPOILT = 5
    """number of the failed command for which there is no other answer."""


NO_REQUEST: Final = -1
"""Request number of an answer that nobody asked for."""
