"""How a person says yes and no: in an option, and in a variable of the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.ir.errors import Diagnostic

YES: Final = ("true", "1")
NO: Final = ("false", "0", "no", "none")

COMPILE_VARIABLE: Final = "MOAI_COMPILE"
GRAPHS_VARIABLE: Final = "MOAI_CUDA_GRAPHS"


def says_yes(name: str, value: object) -> bool:
    """Raises Diagnostic for a word that is neither."""
    word = str(value).lower()
    if word not in (*YES, *NO):
        raise Diagnostic(f"{name}={value} is not known", hint="choose True or False")
    return word in YES


def may_compile(environment: Mapping[str, str]) -> bool:
    """Whether programs are to be compiled where no option says otherwise; a word that is not known is left to those."""
    return environment.get(COMPILE_VARIABLE, "").lower() not in NO
