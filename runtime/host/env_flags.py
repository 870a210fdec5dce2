"""Values of options and environment variables that both the user's process and the workers know."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from moaic.ir.errors import Diagnostic

YES: Final = ("true", "1")
NO: Final = ("false", "0", "no", "none")

COMPILE_VARIABLE: Final = "MOAI_COMPILE"
GRAPHS_VARIABLE: Final = "MOAI_CUDA_GRAPHS"
STEPS_VARIABLE: Final = "MOAI_EXPECTED_STEPS"
AUTOTUNE_VARIABLE: Final = "MOAI_AUTOTUNE"

TRACEBACK_VARIABLE: Final = "MOAI_TRACEBACK"
FULL: Final = "full"
"""The value of MOAI_TRACEBACK with which errors are printed with their whole trace."""

WAIT: Final = "wait"


class CompileMode(Enum):
    """When the functions of programs are compiled, and how the first steps run."""

    NEVER = "false"
    BACKGROUND = "true"
    """While steps run op by op."""
    BEFOREHAND = WAIT
    """Before the first step."""


class GraphMode(Enum):
    """Which programs GPUs capture as CUDA graphs and replay."""

    NEVER = "false"
    ALONE = "alone"
    """Those in which GPUs do not communicate: the default, as capture of NCCL has not been tried on GPUs."""
    ALWAYS = "true"


def says_when(name: str, value: object) -> CompileMode:
    """The value of an option about compiling; raises Diagnostic for any other word."""
    word = str(value).lower()
    if word not in (*YES, *NO, WAIT):
        raise Diagnostic(f"invalid value `{value}` for {name}", hint="choose True, False or wait")
    return CompileMode.BEFOREHAND if word == WAIT else CompileMode.BACKGROUND if word in YES else CompileMode.NEVER


def says_yes(name: str, value: object) -> bool:
    """The value as a bool; raises Diagnostic for any other word."""
    word = str(value).lower()
    if word not in (*YES, *NO):
        raise Diagnostic(f"invalid value `{value}` for {name}", hint="choose True or False")
    return word in YES


def says_count(name: str, value: object) -> int:
    """The value as a positive number; raises Diagnostic for anything else."""
    text = str(value)
    if not text.isdecimal() or int(text) < 1:
        raise Diagnostic(f"{name}={value} is not a positive whole number")
    return int(text)


def may_compile(environment: Mapping[str, str]) -> bool:
    """Whether MOAI_COMPILE lets programs be compiled; an invalid word passes here and is reported by `says_when`."""
    return environment.get(COMPILE_VARIABLE, "").lower() not in NO


def awaits_compiler(environment: Mapping[str, str]) -> bool:
    """Whether MOAI_COMPILE makes the first step wait for the compiler."""
    return environment.get(COMPILE_VARIABLE, "").lower() == WAIT
