"""Boolean values of options and environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.ir.errors import Diagnostic

YES: Final = ("true", "1")
NO: Final = ("false", "0", "no", "none")

COMPILE_VARIABLE: Final = "MOAI_COMPILE"
GRAPHS_VARIABLE: Final = "MOAI_CUDA_GRAPHS"


def says_yes(name: str, value: object) -> bool:
    """The value as a bool; raises Diagnostic for any other word."""
    word = str(value).lower()
    if word not in (*YES, *NO):
        raise Diagnostic(f"invalid value `{value}` for {name}", hint="choose True or False")
    return word in YES


def may_compile(environment: Mapping[str, str]) -> bool:
    """Whether MOAI_COMPILE lets programs be compiled; an invalid word passes here and is reported by `says_yes`."""
    return environment.get(COMPILE_VARIABLE, "").lower() not in NO
